"""The timer that removes leases which nobody renewed. It acts with the coordinator only.

An expired lease is kept for as long as messages of its holder are on their way: what was sent under it has not taken
effect everywhere. (It can be granted to another all the same: the epoch is what protects.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Protocol

from timers.batch import Batch, Delete, Equals, Put
from timers.firing import Done, DueTimer, Fired, PartitionRole, Reschedule, Retry, TimerCtx
from timers.leases import Holder, LeaseRow, lease_name
from timers.registry import TimerKind

__all__ = ["KEEP_MS", "LAG_WARNING_MS", "HolderBacklog", "HolderBacklogs", "LeaseSweep"]

_log = logging.getLogger(__name__)

#: How soon a lease that was kept is looked at again: its holder's messages are retried in seconds to minutes.
KEEP_MS: Final = 10_000

#: A lease that is kept for longer than this past its expiry is worth an operator's look: messages are stuck.
LAG_WARNING_MS: Final = 60_000


@dataclass(frozen=True)
class HolderBacklog:
    """What an object has sent and has not arrived: how many, and since when (epoch ms; before then all has)."""

    messages: int
    watermark_ms: int


class HolderBacklogs(Protocol):
    """Asks objects what they have sent and has not arrived."""

    async def backlog(self, holder: Holder) -> HolderBacklog:
        """Raises whatever keeps it from knowing; the lease is kept then."""
        ...


def _ignore(row: LeaseRow, late_ms: int) -> None:
    return None


class LeaseSweep:
    """Serves `LEASE_SWEEP`. `lagging` is told of each lease that is kept for too long, each time."""

    kind = int(TimerKind.LEASE_SWEEP)

    def __init__(self, backlogs: HolderBacklogs | None, lagging: Callable[[LeaseRow, int], None] = _ignore) -> None:
        self._backlogs = backlogs
        self._lagging = lagging

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        """Delete the lease, or look again when it may be over. See `TimerHandler`."""
        if ctx.partition.role is not PartitionRole.COORDINATOR:
            return Retry()
        name = lease_name(timer.reference)
        if name is None:
            _log.warning("a lease timer refers to %r, which is no lease's name; it was dropped", timer.reference)
            return Done()
        row = await ctx.store.get(LeaseRow, (name,))
        if row is None:
            return Done()
        row.check()
        if timer.due_at_ms != row.sweep_due_ms:
            return Done()  # of an earlier life: the lease has a timer of its own
        if not row.is_expired(ctx.now_ms):
            return self._look_again(row, replace(row, sweep_due_ms=row.expires_ms))
        if self._backlogs is None:
            return Retry()
        backlog = await self._backlogs.backlog(row.holder)
        if not backlog.messages:
            return Done(Batch((Equals(row),), (Delete(row.table, row.key()),)))
        return self._keep(row, backlog, ctx.now_ms)

    def _keep(self, row: LeaseRow, backlog: HolderBacklog, now_ms: int) -> Fired:
        late_ms = now_ms - row.expires_ms
        if late_ms > LAG_WARNING_MS:
            _log.warning(
                "lease %r of %s expired %d ms ago and is kept: %d of its holder's messages have not arrived",
                row.name,
                row.holder,
                late_ms,
                backlog.messages,
            )
            self._lagging(row, late_ms)
        due_ms = max(now_ms + KEEP_MS, row.sweep_due_ms + 1)
        watermark_ms = max(row.watermark_ms, backlog.watermark_ms)
        return self._look_again(row, replace(row, sweep_due_ms=due_ms, watermark_ms=watermark_ms))

    @staticmethod
    def _look_again(row: LeaseRow, moved: LeaseRow) -> Reschedule:
        return Reschedule(moved.sweep_due_ms, b"", Batch((Equals(row),), (Put(moved),)))
