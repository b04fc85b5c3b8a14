"""The timer that ends reservations at their deadline, when nobody else has, and forgets them some time later."""

from __future__ import annotations

from timers.errors import CorruptRow
from timers.firing import Done, DueTimer, Fired, Reschedule, TimerCtx
from timers.outcomes import queued_with
from timers.registry import TimerKind
from timers.reservations import (
    ABANDONED,
    ALL_RESERVATIONS,
    PRUNE,
    ReservationRow,
    ReservationState,
    end_reservation,
    forget_reservation,
    outcome_of,
)
from timers.rows import oid_of
from timers.tallies import Tally

__all__ = ["ReservationReconcile"]


class ReservationReconcile:
    """Serves kind `RESERVATION_RECONCILE`; a reference is the object's number and the reservation's id.

    `memory_ms` is how long an ended reservation is remembered.
    """

    kind = int(TimerKind.RESERVATION_RECONCILE)

    def __init__(self, memory_ms: int) -> None:
        self._memory_ms = memory_ms

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        row = await ctx.store.get(ReservationRow, _key_of(timer))
        if timer.value == PRUNE:
            return await self._forget(ctx, timer, row)
        if timer.value:
            raise CorruptRow(f"the payload {timer.value.hex()} of a reservation's timer can't be read")
        if row is None or row.state != ReservationState.PENDING.value:
            return Done()
        if ctx.now_ms < row.deadline_ms:
            return Reschedule(row.deadline_ms, timer.value)
        state = ReservationState.ABORTED
        batch = end_reservation(row, state, ctx.now_ms, self._memory_ms, reason=ABANDONED)
        new = outcome_of(row, state, reason=ABANDONED)
        return Done(batch if new is None else await queued_with(ctx, row.oid, batch, new))

    async def _forget(self, ctx: TimerCtx, timer: DueTimer, row: ReservationRow | None) -> Fired:
        if row is None or not row.ended_ms:
            return Done()
        until_ms = row.ended_ms + self._memory_ms
        if ctx.now_ms < until_ms:  # it is remembered longer now than when it ended
            return Reschedule(until_ms, timer.value)
        tally = await ctx.store.get(Tally, (row.oid, ALL_RESERVATIONS))
        return Done(forget_reservation(row, tally))


def _key_of(timer: DueTimer) -> tuple[int, str]:
    owner = oid_of(timer.reference)
    if owner is None:
        raise CorruptRow(f"the reference {timer.reference.hex()} of a reservation's timer names no object")
    try:
        return owner[0], owner[1].decode()
    except UnicodeDecodeError as error:
        raise CorruptRow(f"the reference of a reservation's timer is no text: {error}") from None
