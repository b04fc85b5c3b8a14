"""Timer kind 35: how far a sender's messages were applied is forgotten once nothing of them can come."""

from __future__ import annotations

import pytest

from tests.support.timer_table import NOW, Table
from timers.inbox_sweep import FORGET_MS, InboxSweepHandler, received_timer
from timers.message_rows import ReceivedRow, pair_id, pair_ref, read_pair_ref
from timers.registry import TimerKind
from timers.rows import TimerRow

PAIR = pair_id("Post", "p", "Box", "b")


class Sources:
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self, *answers: bool | None) -> None:
        self.answers = list(answers)
        self.asked: list[ReceivedRow] = []

    async def anything_left(self, row: ReceivedRow) -> bool | None:
        self.asked.append(row)
        return self.answers.pop(0)


def received(number: int = 1, applied_ms: int = NOW) -> ReceivedRow:
    return ReceivedRow(7, PAIR, number, "Post", "p", applied_ms)


async def due_ms(table: Table) -> int:
    (row,) = await table.timers()
    return row.due_ms


async def stored(table: Table) -> ReceivedRow | None:
    return await table.store.get(ReceivedRow, received().key())


async def armed(table: Table) -> None:
    await table.put(received(), received_timer(received()))


async def test_the_source_is_asked_ten_minutes_after_the_last_message(table: Table) -> None:
    await armed(table)
    assert await due_ms(table) == NOW + 600_000
    sources = Sources(True)
    await table.run(InboxSweepHandler(sources), now_ms=NOW + FORGET_MS)
    assert sources.asked == [received()]


async def test_the_row_goes_ten_minutes_after_the_source_has_said_that_nothing_is_left(table: Table) -> None:
    await armed(table)
    handler = InboxSweepHandler(Sources(False))
    now_ms = NOW + FORGET_MS
    await table.run(handler, now_ms=now_ms)
    assert (await stored(table), await due_ms(table)) == (received(), now_ms + FORGET_MS)
    await table.run(handler, now_ms=now_ms + FORGET_MS)
    assert await stored(table) is None
    assert await table.timers() == []


async def test_while_something_is_left_it_is_asked_again_and_again(table: Table) -> None:
    await armed(table)
    sources = Sources(True, True, False)
    handler = InboxSweepHandler(sources)
    for times in range(1, 5):
        assert await stored(table) == received()
        await table.run(handler, now_ms=NOW + times * FORGET_MS)
    assert len(sources.asked) == 3
    assert await stored(table) is None


async def test_what_was_applied_since_the_last_look_starts_over(table: Table) -> None:
    await armed(table)
    sources = Sources(False, False)
    handler = InboxSweepHandler(sources)
    await table.run(handler, now_ms=NOW + FORGET_MS)
    later = received(2, NOW + FORGET_MS + 5)
    await table.put(later)
    await table.run(handler, now_ms=NOW + 2 * FORGET_MS)
    assert len(sources.asked) == 1
    assert await due_ms(table) == later.applied_ms + FORGET_MS
    await table.run(handler, now_ms=later.applied_ms + FORGET_MS)
    assert sources.asked == [received(), later]
    assert await stored(table) == later


async def test_a_source_that_does_not_answer_is_asked_again_soon_and_nothing_is_dropped(table: Table) -> None:
    await armed(table)
    handler = InboxSweepHandler(Sources(None, None))
    now_ms = NOW + FORGET_MS
    for _ in range(2):
        await table.run(handler, now_ms=now_ms)
        assert await stored(table) == received()
        assert now_ms < await due_ms(table) < now_ms + FORGET_MS
        now_ms = await due_ms(table)


async def test_a_timer_without_its_row_ends(table: Table) -> None:
    await table.put(received_timer(received()))
    await table.run(InboxSweepHandler(Sources()), now_ms=NOW + FORGET_MS)
    assert await table.timers() == []


@pytest.mark.parametrize(("ref", "value"), [(b"odd", b""), (pair_ref(7, PAIR), b"\xc1"), (pair_ref(7, PAIR), b"\x90")])
async def test_what_makes_no_sense_is_a_failure_and_drops_nothing(table: Table, ref: bytes, value: bytes) -> None:
    kind = TimerKind.INBOX_SWEEP
    await table.put(received(), TimerRow(kind, NOW, kind, ref, 0, NOW, payload=value))
    report = await table.run(InboxSweepHandler(Sources()), now_ms=NOW + FORGET_MS)
    assert report.failed == 1
    assert await stored(table) == received()


def test_references_are_read_as_they_were_written() -> None:
    assert read_pair_ref(pair_ref(4_095, PAIR)) == (4_095, PAIR)
