"""The timer kind that ends reservations: its rules, one by one (A.9), on every timer store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.kinds import OID, PLACE, ObjectTable
from tests.support.timer_table import NOW, Table
from timers.batch import Batch, Delete, Outcome
from timers.engine import RunReport
from timers.errors import CorruptRow
from timers.outcomes import Backlog, ObjectPlace, queue_outcome
from timers.registry import TimerKind
from timers.reservation_reconcile import ReservationReconcile
from timers.reservations import (
    ALL_RESERVATIONS,
    ReservationKind,
    ReservationRow,
    ReservationState,
    attach_ticket,
    end_reservation,
    hold,
    is_legal,
    outcome_of,
)
from timers.rows import TimerRow, owned_ref
from timers.tallies import Tally
from timers.tickets import TicketRow

KIND = int(TimerKind.RESERVATION_RECONCILE)
MEMORY_MS = 10_000
STATES = list(ReservationState)
WRITE_MS, READ_MS = 41_000, 70_000


class Reservations(ObjectTable):
    """Reservations of one object, and the kind that serves them."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.handler = ReservationReconcile(MEMORY_MS)

    async def hold(self, name: str = "r", *, after_ms: int = 0, kind: str = "write") -> ReservationRow:
        await self.table.put(PLACE)
        pending = ReservationState.PENDING.value
        row = ReservationRow(OID, name, f"serial-{name}", kind, pending, NOW + after_ms, NOW - 9, "sink", b"payload")
        await self.must(hold(row, await self.get(Tally, ALL_RESERVATIONS)))
        return row

    def ending(self, row: ReservationRow, state: ReservationState, backlog: Backlog | None = None) -> Batch:
        """What the application's turn commits."""
        batch = end_reservation(row, state, NOW, MEMORY_MS, reason="requested")
        new = outcome_of(row, state, reason="requested")
        assert new is not None
        queued = queue_outcome(backlog, PLACE, new, NOW)
        return batch.plus(queued.preconditions, queued.writes)

    async def run(self, now_ms: int = NOW) -> RunReport:
        return await self.table.run(self.handler, now_ms=now_ms)


@pytest.fixture
def reservations(table: Table) -> Reservations:
    return Reservations(table)


async def test_a_9_01_row_timer_and_count_are_one_batch(reservations: Reservations) -> None:
    row = await reservations.hold(after_ms=41)
    assert await reservations.rows(ReservationRow) == [row]
    assert await reservations.timers(KIND) == [41]
    assert await reservations.rows(Tally) == [Tally(OID, ALL_RESERVATIONS, 1, 1)]
    again = hold(replace(row, deadline_ms=NOW + 50), await reservations.get(Tally, ALL_RESERVATIONS))
    assert await reservations.commit(again) is Outcome.PRECONDITION_FAILED
    assert await reservations.timers(KIND) == [41]
    assert await reservations.rows(Tally) == [Tally(OID, ALL_RESERVATIONS, 1, 1)]


@pytest.mark.parametrize("reference", [b"short", owned_ref(OID, b"\xff")])
async def test_a_9_02_a_reference_that_is_no_text_is_corrupt(reservations: Reservations, reference: bytes) -> None:
    await reservations.table.put(TimerRow(KIND, NOW, KIND, reference, 0, NOW))
    report = await reservations.run()
    assert (report.fired, report.failed) == (0, 1)
    assert await reservations.timers(KIND) == [5_000]  # the engine's ladder
    assert isinstance(reservations.table.faults[0].error, CorruptRow)


async def test_a_9_02_a_payload_of_another_kind_is_corrupt(reservations: Reservations) -> None:
    await reservations.table.put(TimerRow(KIND, NOW, KIND, owned_ref(OID, b"r"), 0, NOW, 0, b"x"))
    assert (await reservations.run()).failed == 1


async def test_a_9_03_a_timer_without_its_row_ends(reservations: Reservations) -> None:
    row = await reservations.hold()
    await reservations.must(Batch((), (Delete(row.table, row.key()),)))
    assert (await reservations.run()).fired == 1
    assert await reservations.timers(KIND) == []


@pytest.mark.parametrize("state", [state for state in STATES if state is not ReservationState.PENDING])
async def test_a_9_04_what_is_not_pending_any_more_is_left_alone(
    reservations: Reservations, state: ReservationState
) -> None:
    row = replace(await reservations.hold(), state=state.value)
    await reservations.table.put(row)
    assert (await reservations.run()).fired == 1
    assert await reservations.rows(ReservationRow) == [row]
    assert await reservations.queued() == 0
    assert await reservations.timers(KIND) == []


async def test_a_9_05_before_the_recorded_deadline_the_timer_moves_there(reservations: Reservations) -> None:
    row = await reservations.hold()
    await reservations.table.put(replace(row, deadline_ms=NOW + 7))
    await reservations.run()
    assert await reservations.timers(KIND) == [7]
    assert await reservations.queued() == 0


async def test_a_9_06_at_the_deadline_it_is_aborted_as_abandoned(reservations: Reservations) -> None:
    row = await reservations.hold()
    await reservations.run(NOW + 13)
    (ended,) = await reservations.rows(ReservationRow)
    assert ended == replace(row, state="aborted", ended_ms=NOW + 13, reason="abandoned")
    (outcome,) = await reservations.outcomes()
    assert (outcome.kind, outcome.reason, outcome.detail) == ("reservation.aborted", "abandoned", "")
    assert (outcome.created_ms, outcome.subject, outcome.payload) == (NOW + 13, "r", b"payload")


async def test_a_9_07_any_change_of_the_pending_row_makes_the_timer_lose(reservations: Reservations) -> None:
    row = await reservations.hold()

    async def change() -> None:
        await reservations.table.put(replace(row, payload=b"other"))

    reservations.table.store.before_apply = change
    report = await reservations.run()
    assert (report.fired, report.raced) == (0, 1)
    assert await reservations.queued() == 0


async def test_a_9_08_a_late_commit_fails(reservations: Reservations) -> None:
    row = await reservations.hold()
    await reservations.run()
    late = reservations.ending(row, ReservationState.COMMITTED, await reservations.get(Backlog))
    assert await reservations.commit(late) is Outcome.PRECONDITION_FAILED
    assert await reservations.queued() == 1


async def test_a_9_09_a_commit_that_was_first_makes_the_timer_race_and_then_do_nothing(
    reservations: Reservations,
) -> None:
    row = await reservations.hold()

    async def commit() -> None:
        await reservations.must(reservations.ending(row, ReservationState.COMMITTED))

    reservations.table.store.before_apply = commit
    report = await reservations.run()
    assert (report.fired, report.raced) == (0, 1)
    assert (await reservations.run()).fired == 1
    (ended,) = await reservations.rows(ReservationRow)
    assert ended.state == "committed"
    assert [outcome.kind for outcome in await reservations.outcomes()] == ["reservation.committed"]


async def test_a_9_10_exactly_one_outcome_is_queued(reservations: Reservations) -> None:
    await reservations.hold()
    for _ in range(3):
        await reservations.run()
    assert await reservations.queued() == 1
    assert [outcome.outcome_id for outcome in await reservations.outcomes()] == ["serial-r"]


async def test_a_9_10_many_at_once_queue_one_each(reservations: Reservations) -> None:
    for number in range(20):
        await reservations.hold(f"r{number}")
    await reservations.run()
    assert {outcome.subject for outcome in await reservations.outcomes()} == {f"r{number}" for number in range(20)}
    assert await reservations.queued() == 20


async def test_a_9_10_without_a_sink_it_ends_all_the_same(reservations: Reservations) -> None:
    row = await reservations.hold()
    await reservations.table.put(replace(row, sink=""))
    await reservations.run()
    assert [row.state for row in await reservations.rows(ReservationRow)] == ["aborted"]
    assert await reservations.queued() == 0


async def test_a_9_10_an_outcome_of_an_object_that_is_not_there_is_corrupt(reservations: Reservations) -> None:
    await reservations.hold()
    await reservations.must(Batch((), (Delete(ObjectPlace.table, (OID,)),)))
    assert (await reservations.run()).failed == 1


@pytest.mark.parametrize(("kind", "deadline_ms"), [("write", WRITE_MS), ("read", READ_MS)])
async def test_a_9_11_and_12_reads_and_writes_end_at_their_deadline_and_not_a_millisecond_earlier(
    reservations: Reservations, kind: str, deadline_ms: int
) -> None:
    await reservations.hold(after_ms=deadline_ms, kind=kind)
    assert (await reservations.run(NOW + deadline_ms - 1)).fired == 0
    assert (await reservations.run(NOW + deadline_ms)).fired == 1
    assert [row.state for row in await reservations.rows(ReservationRow)] == ["aborted"]


async def test_a_9_13_a_duplicate_is_refused_also_after_the_end(reservations: Reservations) -> None:
    row = await reservations.hold()
    await reservations.run()
    again = hold(row, await reservations.get(Tally, ALL_RESERVATIONS))
    assert await reservations.commit(again) is Outcome.PRECONDITION_FAILED


LEGAL = {
    ("write", "pending"): {"ticketed", "committed", "aborted"},
    ("write", "ticketed"): {"committed", "aborted", "expired"},
    ("read", "pending"): {"read_served", "aborted"},
}


@pytest.mark.parametrize("kind", [kind.value for kind in ReservationKind])
@pytest.mark.parametrize("state", STATES)
def test_a_9_14_only_the_legal_transitions_are_made(kind: str, state: ReservationState) -> None:
    row = ReservationRow(OID, "r", "serial", kind, state.value, NOW, NOW, "", b"")
    ticket = TicketRow(OID, "0" * 32, "n", "h", 1, NOW, NOW + 1, "", "", b"")
    for target in STATES:
        assert is_legal(row, target) is (target.value in LEGAL.get((kind, state.value), ()))
        make = (
            (lambda: attach_ticket(row, ticket))
            if target is ReservationState.TICKETED
            else (lambda target=target: end_reservation(row, target, NOW, MEMORY_MS, reason=""))  # type: ignore[misc]
        )
        if is_legal(row, target):
            assert len(make()) == 4 if target is ReservationState.TICKETED else 3
        else:
            with pytest.raises(CorruptRow):
                make()
    assert not state.is_final or not any(is_legal(row, target) for target in STATES)


async def test_an_ended_reservation_is_forgotten_when_its_memory_ends_and_not_before(
    reservations: Reservations,
) -> None:
    await reservations.hold()
    await reservations.run()
    assert await reservations.timers(KIND) == [MEMORY_MS]
    await reservations.run(NOW + MEMORY_MS - 1)
    assert len(await reservations.rows(ReservationRow)) == 1
    await reservations.run(NOW + MEMORY_MS)
    assert await reservations.rows(ReservationRow) == []
    assert await reservations.rows(Tally) == []
    assert await reservations.timers(KIND) == []
    assert await reservations.queued() == 1


async def test_a_longer_memory_counts_for_those_that_have_ended(reservations: Reservations) -> None:
    await reservations.hold()
    await reservations.run()
    reservations.handler = ReservationReconcile(2 * MEMORY_MS)
    await reservations.run(NOW + MEMORY_MS)
    assert await reservations.timers(KIND) == [2 * MEMORY_MS]


async def test_what_is_held_again_under_the_id_is_not_forgotten_by_an_old_timer(reservations: Reservations) -> None:
    await reservations.hold()
    await reservations.run()
    (ended,) = await reservations.rows(ReservationRow)
    await reservations.must(Batch((), (Delete(ended.table, ended.key()), Delete(Tally.table, (OID, ALL_RESERVATIONS)))))
    row = await reservations.hold(after_ms=3 * MEMORY_MS)
    await reservations.run(NOW + MEMORY_MS)
    assert await reservations.rows(ReservationRow) == [row]


async def test_the_end_and_the_beginning_of_forgetting_may_share_a_millisecond(reservations: Reservations) -> None:
    row = await reservations.hold(after_ms=MEMORY_MS)
    await reservations.must(reservations.ending(row, ReservationState.COMMITTED))
    assert await reservations.timers(KIND) == [MEMORY_MS, MEMORY_MS]
    await reservations.run(NOW + MEMORY_MS)
    assert await reservations.rows(ReservationRow) == []
    assert await reservations.timers(KIND) == []
