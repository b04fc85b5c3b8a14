"""Timer kind 35, the inbox sweep: forgets how far a sender's messages were applied, once nothing of them can come.

The number may go when nothing of the pair is left at its source and nothing can still be on its way. So the source is
asked, and the row is dropped a while after it has said so, if nothing was applied meanwhile. It stays as long as
nobody answers.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgpack

from timers.batch import Batch, Delete, Equals
from timers.errors import CorruptRow
from timers.firing import Done, DueTimer, Fired, Reschedule, Retry, TimerCtx
from timers.message_rows import ReceivedRow, pair_ref, read_pair_ref
from timers.registry import TimerKind
from timers.rows import TimerRow

__all__ = ["FORGET_MS", "InboxSweepHandler", "Sources", "received_timer"]

#: How long a frame could be under way at the very most, and the pause between two questions.
FORGET_MS: Final = 600_000


class Sources(Protocol):
    """The partitions of the senders."""

    async def anything_left(self, row: ReceivedRow) -> bool | None:
        """Whether the source still has messages of this pair; None when it gives no answer."""
        ...


def received_timer(row: ReceivedRow) -> TimerRow:
    """The timer that is put with the first row of a pair."""
    due_ms = row.applied_ms + FORGET_MS
    return TimerRow(TimerKind.INBOX_SWEEP, due_ms, TimerKind.INBOX_SWEEP, pair_ref(row.slot, row.pair), 0, due_ms)


class InboxSweepHandler:
    """Looks at one pair. The timer's value is the number that was the last one when the source said that it is done."""

    kind = TimerKind.INBOX_SWEEP

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        row = await ctx.store.get(ReceivedRow, read_pair_ref(timer.reference))
        if row is None:
            return Done()
        if row.applied_ms + FORGET_MS > ctx.now_ms:
            return Reschedule(row.applied_ms + FORGET_MS, b"")
        if timer.value and _read_number(timer.value) == row.number:
            return Done(Batch((Equals(row),), (Delete(row.table, row.key()),)))
        left = await self._sources.anything_left(row)
        if left is None:
            return Retry()
        return Reschedule(ctx.now_ms + FORGET_MS, b"" if left else msgpack.packb(row.number))


def _read_number(value: bytes) -> int:
    try:
        number = msgpack.unpackb(value)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise CorruptRow(f"{value!r} is no message number") from error
    if not isinstance(number, int):
        raise CorruptRow(f"{number!r} is no message number")
    return number
