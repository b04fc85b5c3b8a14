"""Timer kind 3, the outbox relay: a delayed message that has come due joins those on their way.

It gets its number then and not when it was sent, so that it stands behind everything that was sent before its time.
What is on its way needs no timers: the partition's relay holds it in memory and reads the table when it opens.
"""

from __future__ import annotations

from typing import Protocol

from timers.batch import Batch, Delete, Equals, Put
from timers.firing import Done, DueTimer, Fired, TimerCtx
from timers.message_rows import DelayedRow, SlotNumber, message_ref, read_message_ref
from timers.registry import TimerKind
from timers.rows import TimerRow

__all__ = ["Departures", "OutboxRelayHandler", "delayed_timer"]


class Departures(Protocol):
    """What the kind needs of the process."""

    def draw(self, slot: int) -> int:
        """The next number of the slot. Numbers of one slot must be committed in the order in which they were drawn."""
        ...


def delayed_timer(row: DelayedRow) -> TimerRow:
    """The timer that is put with the row."""
    ref = message_ref(row.slot, row.ident)
    return TimerRow(TimerKind.OUTBOX_RELAY, row.due_ms, TimerKind.OUTBOX_RELAY, ref, 0, row.due_ms)


class OutboxRelayHandler:
    """Moves a delayed message into the outbox, in one batch with the number that it gets."""

    kind = TimerKind.OUTBOX_RELAY

    def __init__(self, departures: Departures) -> None:
        self._departures = departures

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        key = read_message_ref(timer.reference)
        row = await ctx.store.get(DelayedRow, key)
        if row is None:
            return Done()
        number = self._departures.draw(row.slot)
        departed = row.departed(number, ctx.now_ms)
        writes = (Delete(row.table, row.key()), Put(departed), Put(SlotNumber(row.slot, number)))
        return Done(Batch((Equals(row),), writes))
