"""The timer that ends tickets: a ticket that nobody has consumed expires once, and says so once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from timers.errors import CorruptRow
from timers.firing import Done, DueTimer, Fired, Reschedule, TimerCtx
from timers.outcomes import NewOutcome, queued_with, tagged_id
from timers.registry import TimerKind
from timers.reservations import ReservationRow, ReservationState, end_reservation, outcome_of
from timers.rows import oid_of
from timers.tallies import Tally
from timers.tickets import (
    ALL_TICKETS,
    TICKET_ID_BYTES,
    TicketName,
    TicketRow,
    TicketTallies,
    close_ticket,
    holder_scope,
)

__all__ = ["CORRUPT_DELAY_MS", "EXPIRED", "MAX_PER_TICK", "TicketExpiry"]

#: Expiries in one tick: each is up to twenty rows, and nobody waits for one.
MAX_PER_TICK: Final = 8

#: A ticket whose rows make no sense is looked at again after this. It is never lost.
CORRUPT_DELAY_MS: Final = 60_000

#: Why the timer ends a ticket.
EXPIRED: Final = "expired"


class TicketExpiry:
    """Serves kind `TICKET_EXPIRY`; a reference is the object's number and the ticket's id.

    `memory_ms` is how long ended reservations are remembered; `warn` hears of rows that make no sense.
    """

    kind = int(TimerKind.TICKET_EXPIRY)
    max_per_tick: int | None = MAX_PER_TICK

    def __init__(self, memory_ms: int, warn: Callable[[DueTimer, CorruptRow], None]) -> None:
        self._memory_ms = memory_ms
        self._warn = warn

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        try:
            return await self._expire(ctx, timer)
        except CorruptRow as error:
            self._warn(timer, error)
            return Reschedule(ctx.now_ms + CORRUPT_DELAY_MS, timer.value)

    async def _expire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        owner = oid_of(timer.reference)
        if owner is None or len(owner[1]) != TICKET_ID_BYTES:
            raise CorruptRow(f"the reference {timer.reference.hex()} of a ticket's timer names no ticket")
        oid, ticket_id = owner[0], owner[1].hex()
        ticket = await ctx.store.get(TicketRow, (oid, ticket_id))
        if ticket is None:
            return Done()  # consumed: that leaves the timer to find nothing
        if ticket.expires_ms > ctx.now_ms:
            return Reschedule(ticket.expires_ms, timer.value)
        tallies = TicketTallies(
            await ctx.store.get(Tally, (oid, ALL_TICKETS)),
            await ctx.store.get(Tally, (oid, holder_scope(ticket.holder))),
        )
        batch = close_ticket(ticket, await ctx.store.get(TicketName, (oid, ticket.name)), tallies)
        new: NewOutcome | None
        if ticket.reservation:
            reservation = await _reservation_of(ctx, ticket)
            ended = end_reservation(reservation, ReservationState.EXPIRED, ctx.now_ms, self._memory_ms, reason=EXPIRED)
            batch = batch.plus(ended.preconditions, ended.writes)
            new = outcome_of(reservation, ReservationState.EXPIRED, reason=EXPIRED)
        else:
            new = _outcome_of(ticket)
        return Done(batch if new is None else await queued_with(ctx, oid, batch, new))


async def _reservation_of(ctx: TimerCtx, ticket: TicketRow) -> ReservationRow:
    reservation = await ctx.store.get(ReservationRow, (ticket.oid, ticket.reservation))
    if reservation is None or reservation.ticket_id != ticket.ticket_id:
        raise CorruptRow(f"{ticket} belongs to a reservation that knows nothing of it: {reservation}")
    return reservation


def _outcome_of(ticket: TicketRow) -> NewOutcome | None:
    if not ticket.sink:
        return None
    outcome_id = tagged_id("ticket expired", ticket.ticket_id)
    return NewOutcome(outcome_id, "ticket.expired", ticket.sink, ticket.payload, ticket.ticket_id, EXPIRED, ticket.name)
