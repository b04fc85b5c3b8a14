"""The timer kind that ends tickets: its rules, one by one (A.10), on every timer store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.kinds import OID, PLACE, ObjectTable
from tests.support.timer_table import NOW, Table
from timers.batch import Batch, Delete, Outcome, Put
from timers.engine import RunReport
from timers.errors import CorruptRow
from timers.firing import DueTimer
from timers.outcomes import ObjectPlace, OutcomeRow
from timers.registry import TimerKind
from timers.reservations import (
    ALL_RESERVATIONS,
    ReservationRow,
    ReservationState,
    attach_ticket,
    hold,
)
from timers.rows import TimerRow, owned_ref
from timers.tallies import Tally, count_one, discount_one
from timers.ticket_expiry import CORRUPT_DELAY_MS, MAX_PER_TICK, TicketExpiry
from timers.tickets import ALL_TICKETS, TicketName, TicketRow, TicketTallies, close_ticket, holder_scope, open_ticket

KIND = int(TimerKind.TICKET_EXPIRY)
MEMORY_MS = 1_000


def ticket_id(number: int) -> str:
    return f"{number:032x}"


class Tickets(ObjectTable):
    """Tickets of one object, and the kind that serves them."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.warned: list[str] = []
        self.handler = TicketExpiry(MEMORY_MS, self._warn)

    def _warn(self, timer: DueTimer, error: CorruptRow) -> None:
        self.warned.append(str(error))

    async def open(self, number: int = 1, *, name: str = "n", after_ms: int = 0, holder: str = "h") -> TicketRow:
        if await self.table.store.get(ObjectPlace, (OID,)) is None:
            await self.table.put(PLACE)
        ticket = TicketRow(
            OID, ticket_id(number), name, holder, number, NOW - 5, NOW + after_ms, "", "sink", b"payload"
        )
        await self.must(open_ticket(ticket, await self.get(TicketName, name), await self.tallies(holder)))
        return ticket

    async def tallies(self, holder: str = "h") -> TicketTallies:
        return TicketTallies(await self.get(Tally, ALL_TICKETS), await self.get(Tally, holder_scope(holder)))

    async def close(self, ticket: TicketRow) -> Outcome:
        named = await self.get(TicketName, ticket.name)
        return await self.commit(close_ticket(ticket, named, await self.tallies(ticket.holder)))

    async def run(self, now_ms: int = NOW) -> RunReport:
        return await self.table.run(self.handler, now_ms=now_ms)

    async def assert_kept(self, message: str) -> None:
        """The timer was moved by a minute, and there was a warning."""
        report = await self.run()
        assert (report.fired, report.failed) == (1, 0)
        assert await self.timers(KIND) == [CORRUPT_DELAY_MS]
        assert message in self.warned[-1]


@pytest.fixture
def tickets(table: Table) -> Tickets:
    return Tickets(table)


@pytest.mark.parametrize(
    "reference", [b"", b"short", owned_ref(OID), owned_ref(OID, b"x" * 15), owned_ref(OID, b"x" * 17)]
)
async def test_a_10_01_a_reference_of_another_length_is_corrupt(tickets: Tickets, reference: bytes) -> None:
    await tickets.table.put(TimerRow(KIND, NOW, KIND, reference, 0, NOW))
    await tickets.assert_kept("names no ticket")


async def test_a_10_02_the_timer_of_a_consumed_ticket_finds_nothing(tickets: Tickets) -> None:
    ticket = await tickets.open()
    assert await tickets.close(ticket) is Outcome.COMMITTED
    assert await tickets.timers(KIND) == [0]
    assert (await tickets.run()).fired == 1
    assert await tickets.queued() == 0
    assert await tickets.timers(KIND) == []


async def test_a_10_03_a_ticket_that_expires_later_waits_and_one_that_expires_now_is_due(tickets: Tickets) -> None:
    ticket = await tickets.open(after_ms=3)
    (timer,) = await tickets.table.timers()
    early = replace(timer, due_ms=NOW, first_due_ms=NOW)
    await tickets.must(Batch((), (Delete(timer.table, timer.key()), Put(early))))
    await tickets.run(NOW + 2)
    assert await tickets.timers(KIND) == [3]
    assert await tickets.rows(TicketRow) == [ticket]
    await tickets.run(NOW + 3)
    assert await tickets.rows(TicketRow) == []


async def test_a_10_04_a_reservation_that_is_missing_or_has_another_ticket_is_corrupt(tickets: Tickets) -> None:
    ticket = await tickets.open()
    await tickets.table.put(replace(ticket, reservation="r"))
    await tickets.assert_kept("knows nothing of it")
    row = reservation(ticket_id=ticket_id(2), state=ReservationState.TICKETED.value)
    await tickets.table.put(row)
    await tickets.run(NOW + CORRUPT_DELAY_MS)
    assert len(tickets.warned) == 2
    assert await tickets.rows(ReservationRow) == [row]


async def test_a_10_04_a_ticket_and_its_reservation_expire_together_with_one_outcome(tickets: Tickets) -> None:
    ticket = await tickets.open()
    row = reservation()
    await tickets.must(hold(row, await tickets.get(Tally, ALL_RESERVATIONS)))
    await tickets.must(attach_ticket(row, ticket))
    await tickets.run()
    (ended,) = await tickets.rows(ReservationRow)
    assert (ended.state, ended.ended_ms, ended.reason) == ("expired", NOW, "expired")
    (outcome,) = await tickets.outcomes()
    assert (outcome.outcome_id, outcome.kind, outcome.subject) == (row.serial, "reservation.expired", "r")
    assert await tickets.rows(TicketRow) == []
    assert await tickets.timers(int(TimerKind.RESERVATION_RECONCILE)) == [MEMORY_MS, 9_000]


@pytest.mark.parametrize("state", [ReservationState.COMMITTED, ReservationState.ABORTED, ReservationState.PENDING])
async def test_a_10_04_a_reservation_in_another_state_is_corrupt(tickets: Tickets, state: ReservationState) -> None:
    ticket = await tickets.open()
    await tickets.table.put(
        replace(ticket, reservation="r"), reservation(ticket_id=ticket.ticket_id, state=state.value)
    )
    await tickets.assert_kept("can't become expired")


async def test_a_10_05_closing_removes_ticket_name_and_both_counts(tickets: Tickets) -> None:
    await tickets.open()
    assert await tickets.rows(Tally) == [Tally(OID, "tickets", 1, 1), Tally(OID, "tickets/h", 1, 1)]
    await tickets.run()
    for row_type in (TicketRow, TicketName, Tally):
        assert await tickets.rows(row_type) == []


async def test_a_10_05_counts_of_others_stay_and_counts_are_deleted_at_zero(tickets: Tickets) -> None:
    await tickets.open(1, name="a")
    await tickets.open(2, name="b", holder="g", after_ms=1)
    await tickets.run()
    assert await tickets.rows(Tally) == [Tally(OID, "tickets", 1, 2), Tally(OID, "tickets/g", 1, 2)]


async def test_a_10_05_a_name_that_names_a_newer_ticket_stays(tickets: Tickets) -> None:
    await tickets.open(1)
    newer = await tickets.open(2, after_ms=10)
    await tickets.run()
    assert await tickets.rows(TicketRow) == [newer]
    assert await tickets.rows(TicketName) == [TicketName(OID, "n", newer.ticket_id)]


async def test_a_10_05_a_ticket_that_is_consumed_meanwhile_does_not_expire(tickets: Tickets) -> None:
    ticket = await tickets.open()

    async def consume() -> None:
        assert await tickets.close(ticket) is Outcome.COMMITTED

    tickets.table.store.before_apply = consume
    report = await tickets.run()
    assert (report.fired, report.raced) == (0, 1)
    assert await tickets.queued() == 0


async def test_a_10_05_consuming_an_expired_ticket_loses_its_guard(tickets: Tickets) -> None:
    ticket = await tickets.open()
    await tickets.open(2, name="other", after_ms=9)
    late = close_ticket(ticket, await tickets.get(TicketName, "n"), await tickets.tallies())
    await tickets.run()
    assert await tickets.commit(late) is Outcome.PRECONDITION_FAILED


async def test_a_10_05_a_stored_count_of_zero_is_corrupt_and_so_is_a_missing_one(tickets: Tickets) -> None:
    await tickets.open()
    await tickets.table.put(Tally(OID, ALL_TICKETS, 0, 0))
    await tickets.assert_kept("counts nothing")
    await tickets.must(Batch((), (Delete(Tally.table, (OID, ALL_TICKETS)),)))
    await tickets.run(NOW + CORRUPT_DELAY_MS)
    assert "has no count" in tickets.warned[-1]
    await tickets.table.put(Tally(OID, ALL_TICKETS, 1, 1))
    await tickets.run(NOW + 2 * CORRUPT_DELAY_MS)
    assert await tickets.rows(TicketRow) == []


@pytest.mark.parametrize("tally", [Tally(OID, "s", 0, 1), Tally(OID, "s", 1, 0), Tally(OID, "s", -1, 1)])
def test_a_10_05_counts_that_make_no_sense_are_neither_raised_nor_lowered(tally: Tally) -> None:
    for change in (count_one, discount_one):
        with pytest.raises(CorruptRow):
            change(tally, OID, "s", 1)


@pytest.mark.parametrize("tally", [Tally(OID, "s", 1, 3), Tally(OID, "s", 2, 2), Tally(OID, "s", 2, 1)])
def test_a_10_05_a_count_that_does_not_fit_what_is_taken_off_is_corrupt(tally: Tally) -> None:
    with pytest.raises(CorruptRow):
        discount_one(tally, OID, "s", 2)


async def test_a_10_06_one_expired_outcome_is_queued_with_the_time_of_the_tick(tickets: Tickets) -> None:
    ticket = await tickets.open()
    await tickets.run(NOW + 77)
    (outcome,) = await tickets.outcomes()
    assert outcome == OutcomeRow(
        OID,
        1,
        outcome.outcome_id,
        "ticket.expired",
        ticket.ticket_id,
        "expired",
        "n",
        "sink",
        b"payload",
        NOW + 77,
    )
    assert await tickets.timers(int(TimerKind.OUTCOME_DELIVERY)) == [77]


async def test_a_10_06_without_a_sink_nobody_is_told(tickets: Tickets) -> None:
    ticket = await tickets.open()
    await tickets.table.put(replace(ticket, sink=""))
    await tickets.run()
    assert await tickets.rows(TicketRow) == []
    assert await tickets.queued() == 0


async def test_a_10_07_a_ticket_of_an_object_that_is_not_there_is_corrupt(tickets: Tickets) -> None:
    await tickets.open()
    await tickets.must(Batch((), (Delete(ObjectPlace.table, (OID,)),)))
    await tickets.assert_kept("no object")


async def test_a_10_12_whatever_is_corrupt_is_tried_again_in_a_minute_and_never_lost(tickets: Tickets) -> None:
    await tickets.open()
    await tickets.table.put(Tally(OID, ALL_TICKETS, 0, 0))
    for minute in range(3):
        await tickets.run(NOW + minute * CORRUPT_DELAY_MS)
        assert await tickets.timers(KIND) == [(minute + 1) * CORRUPT_DELAY_MS]
    assert len(tickets.warned) == 3
    assert await tickets.queued() == 0


async def test_a_10_13_a_second_tick_fires_nothing_more(tickets: Tickets) -> None:
    await tickets.open()
    await tickets.run()
    report = await tickets.run()
    assert report.fired == 0
    assert await tickets.queued() == 1


async def test_a_10_14_the_ninth_ticket_that_is_due_waits_for_the_next_tick(tickets: Tickets) -> None:
    for number in range(1, MAX_PER_TICK + 2):
        await tickets.open(number, name=f"n{number}")
    report = await tickets.run()
    assert (report.fired, report.deferred, report.next_wake_ms) == (MAX_PER_TICK, 1, NOW)
    assert await tickets.queued() == MAX_PER_TICK
    await tickets.run()
    assert await tickets.queued() == MAX_PER_TICK + 1
    assert await tickets.rows(Tally) == []
    assert len({outcome.outcome_id for outcome in await tickets.outcomes()}) == MAX_PER_TICK + 1


def reservation(**columns: str) -> ReservationRow:
    pending = ReservationState.PENDING.value
    row = ReservationRow(OID, "r", "serial", "write", pending, NOW + 9_000, NOW - 5, "sink", b"payload")
    return replace(row, **columns)  # type: ignore[arg-type]
