"""Timer kind 3: delayed messages join those on their way, with the number of that moment."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.message_numbers import MessageNumbers
from tests.support.stores import PLACES
from tests.support.timer_table import NOW, Table
from timers.backoff import MESSAGE_RETRY, RetryPolicy
from timers.batch import Absent, Batch, Present, Put
from timers.errors import CorruptRow
from timers.message_rows import (
    DelayedRow,
    OutboxRow,
    SlotNumber,
    message_ref,
    pack_policy,
    pair_id,
    read_message_ref,
    read_policy,
)
from timers.outbox_relay import OutboxRelayHandler, delayed_timer
from timers.registry import TimerKind
from timers.rows import TimerRow

SLOT = 7


class Numbers:
    """Draws from one counter."""

    def __init__(self, last: int = 0) -> None:
        self.last = last

    def draw(self, slot: int) -> int:
        assert slot == SLOT
        self.last += 1
        return self.last


def delayed(ident: int, due_ms: int = NOW) -> DelayedRow:
    return DelayedRow(SLOT, ident, "Post", "p", "Box", "b", "put", b"args", b"", due_ms)


def departed(row: DelayedRow, number: int) -> OutboxRow:
    return row.departed(number, NOW)


async def holds(table: Table, *preconditions: Absent | Present) -> bool:
    (outcome,) = await table.store.apply([Batch(tuple(preconditions))])
    return outcome.value == "committed"


async def test_a_due_message_moves_into_the_outbox_with_the_next_number(table: Table) -> None:
    row = delayed(3)
    await table.put(row, delayed_timer(row), SlotNumber(SLOT, 5))
    report = await table.run(OutboxRelayHandler(Numbers(5)))
    assert report.fired == 1
    assert await table.store.get(DelayedRow, row.key()) is None
    assert await table.store.get(OutboxRow, (SLOT, 6)) == departed(row, 6)
    assert await table.store.get(SlotNumber, (SLOT,)) == SlotNumber(SLOT, 6)
    assert await table.timers() == []


async def test_one_that_is_not_due_stays(table: Table) -> None:
    row = delayed(3, NOW + 1)
    await table.put(row, delayed_timer(row))
    assert (await table.run(OutboxRelayHandler(Numbers()))).fired == 0
    assert await table.store.get(DelayedRow, row.key()) == row


async def test_messages_that_come_due_together_keep_the_order_of_their_due_times_and_then_of_sending(
    table: Table,
) -> None:
    rows = [delayed(9, NOW - 1), delayed(4), delayed(5)]
    for row in reversed(rows):
        await table.put(row, delayed_timer(row))
    await table.run(OutboxRelayHandler(Numbers()))
    for number, row in enumerate(rows, start=1):
        assert await table.store.get(OutboxRow, (SLOT, number)) == departed(row, number)


async def test_a_timer_without_its_message_ends(table: Table) -> None:
    await table.put(delayed_timer(delayed(3)))
    await table.run(OutboxRelayHandler(Numbers()))
    assert await table.timers() == []


async def test_a_reference_that_makes_no_sense_is_a_failure_and_is_tried_again(table: Table) -> None:
    kind = TimerKind.OUTBOX_RELAY
    await table.put(TimerRow(kind, NOW, kind, b"odd", 0, NOW))
    report = await table.run(OutboxRelayHandler(Numbers()))
    assert report.failed == 1
    (row,) = await table.timers()
    assert (row.attempt, row.due_ms > NOW) == (1, True)


# --- rows ---------------------------------------------------------------------------------------------


def test_references_and_policies_are_read_as_they_were_written() -> None:
    assert read_message_ref(message_ref(4_095, 2**40)) == (4_095, 2**40)
    assert message_ref(1, 2) < message_ref(1, 256)  # they sort as their numbers do
    assert read_policy(pack_policy(MESSAGE_RETRY)) == MESSAGE_RETRY
    assert pack_policy(MESSAGE_RETRY) == b""
    other = RetryPolicy(3, 100, 1.5, 1_000, 0.5)
    assert read_policy(pack_policy(other)) == other


@pytest.mark.parametrize("packed", [b"\xff", b"\x91\x00", b"\x01", b"\xc1"])
def test_a_damaged_policy_is_a_corrupt_row(packed: bytes) -> None:
    with pytest.raises(CorruptRow):
        read_policy(packed)


def test_a_failed_try_moves_the_message_by_its_policy_and_the_last_one_ends_it() -> None:
    retry = pack_policy(RetryPolicy(2, 1_000, 2.0, 1_000, 0.0))
    row = replace(departed(delayed(1), 1), retry=retry)
    again = row.after_raise(NOW)
    assert again == replace(row, attempt=1, next_ms=NOW + 1_000)
    assert again.after_raise(NOW) is None


def test_the_names_of_a_pair_never_change() -> None:
    assert pair_id("Post", "p", "Box", "b").hex() == "de1c53355cf258d8d490f3af696ce0ed"
    assert len({pair_id("A", "bc", "D", "e"), pair_id("Ab", "c", "D", "e"), pair_id("D", "e", "A", "bc")}) == 3


# --- numbers ------------------------------------------------------------------------------------------


def numbers_of(last: int) -> MessageNumbers:
    store = PLACES["memory"]().open()
    store.begin()
    store.write([("slot_numbers", (SLOT,), (last,))])
    store.commit()
    return MessageNumbers(store)


def engine_batch(number: int) -> Batch:
    return Batch((), (Put(departed(delayed(1), number)), Put(SlotNumber(SLOT, number))))


def test_numbers_go_on_from_what_is_stored_and_each_slot_has_its_own() -> None:
    numbers = numbers_of(41)
    assert [numbers.take(SLOT), numbers.draw(SLOT), numbers.take(SLOT)] == [42, 43, 44]
    assert numbers.take(SLOT + 1) == 1


def test_a_batch_that_was_overtaken_by_a_turn_is_not_in_order() -> None:
    numbers = numbers_of(0)
    first, second = numbers.draw(SLOT), numbers.draw(SLOT)
    assert numbers.in_order(engine_batch(first))
    taken = numbers.take(SLOT)
    assert not numbers.in_order(engine_batch(second))
    assert numbers.in_order(engine_batch(taken + 1))
    assert numbers.in_order(Batch())
