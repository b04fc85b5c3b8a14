"""The timer that carries what objects have charged to the coordinator, and ends windows that are over.

With the object it pushes the counts first and keeps what comes back; should it die in between, the next push adds
nothing. With the coordinator it only waits for the end of the window: the totals there are exact.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

from timers.batch import Batch, Delete, Equals, Precondition, Present, Put, Write
from timers.errors import CorruptRow
from timers.firing import Done, DueTimer, Fired, PartitionRole, Reschedule, Retry, TimerCtx
from timers.quotas import ROLLUP_MS, CounterRow, QuotaPush, QuotaWindow, SourceRow, TotalRow, Usage, ViewRow, read_ref
from timers.registry import TimerKind

__all__ = ["PRUNED_ROWS", "SOURCE_PAGE", "QuotaRollup", "QuotaTotals"]

_log = logging.getLogger(__name__)

#: Rows of older windows, of each kind, that are removed along with a window: what timers that were lost left behind.
PRUNED_ROWS: Final = 8

#: Sources that one fire forgets when a window ends with the coordinator: each is two operations of at most a hundred.
SOURCE_PAGE: Final = 24

W = TypeVar("W", CounterRow, ViewRow, TotalRow, SourceRow)
_Row = CounterRow | ViewRow | TotalRow | SourceRow


class QuotaTotals(Protocol):
    """The coordinator's side. Both may be repeated; what they did is durable when they return."""

    async def apply_quota(self, push: QuotaPush) -> Usage:
        """Take the counts of a source in; the total with them. Raises `CorruptRow` when they have become less."""
        ...

    async def drop_quota_source(self, window: QuotaWindow, source: str) -> None:
        """The source tells nothing more of this window."""
        ...


class QuotaRollup:
    """Serves `QUOTA_ROLLUP`. `totals` is where an object's counts go, every `rollup_ms`; the coordinator needs none."""

    kind = int(TimerKind.QUOTA_ROLLUP)

    def __init__(self, totals: QuotaTotals | None = None, rollup_ms: int = ROLLUP_MS) -> None:
        self._totals = totals
        self._rollup_ms = rollup_ms

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        """Push, or end the window. See `TimerHandler`."""
        if ctx.partition.role is PartitionRole.OBJECT:
            return Retry()
        place = read_ref(timer.reference)
        if place is None:
            _log.warning("a quota timer refers to %r, which is no window; it was dropped", timer.reference)
            return Done()
        oid, window = place
        if ctx.partition.role is PartitionRole.COORDINATOR:
            return await _end_total(ctx, timer, window)
        return Retry() if self._totals is None else await self._roll_up(ctx, timer, oid, window, self._totals)

    async def _roll_up(
        self, ctx: TimerCtx, timer: DueTimer, oid: int, window: QuotaWindow, totals: QuotaTotals
    ) -> Fired:
        key = (oid, *window.key())
        counter = await ctx.store.get(CounterRow, key)
        if counter is None:
            return Done(Batch(writes=(Delete(ViewRow.table, key),)))
        counter.usage.check(f"quota {window.name!r} of object {oid}")
        push = QuotaPush(window, counter.source, counter.usage)
        if ctx.now_ms < window.expiry_ms:
            total = await totals.apply_quota(push)
            view = ViewRow(oid, window, total, counter.usage, ctx.now_ms)
            # Only that there is a counter: one that has grown meanwhile is told the next time, and a busy object would
            # never get a view if each charge got in its way.
            batch = Batch((Present(counter.table, key),), (Put(view),))
            return Reschedule(max(ctx.now_ms + self._rollup_ms, timer.due_at_ms + 1), b"", batch)
        try:
            await totals.apply_quota(push)
        except CorruptRow as error:  # nobody decides by this window any more: it ends all the same
            _log.warning("the last push of quota %r was refused: %s", window.name, error)
        await totals.drop_quota_source(window, counter.source)
        older = (oid, window.name, window.window_ms)
        rows: list[_Row] = [
            *await _older(ctx, CounterRow, older, window),
            *await _older(ctx, ViewRow, older, window),
        ]
        guards, writes = _deletions(rows)
        ending: tuple[Write, ...] = (Delete(counter.table, key), Delete(ViewRow.table, key))
        return Done(Batch((Equals(counter), *guards), (*ending, *writes)))


async def _end_total(ctx: TimerCtx, timer: DueTimer, window: QuotaWindow) -> Fired:
    if ctx.now_ms < window.expiry_ms:
        return Reschedule(window.expiry_ms, b"")
    sources = await ctx.store.scan(SourceRow, window.key(), limit=SOURCE_PAGE)
    if len(sources) == SOURCE_PAGE:  # there may be more: objects that were deleted, or whose partition is away
        return Reschedule(max(ctx.now_ms, timer.due_at_ms + 1), b"", Batch(*_deletions(sources)))
    total = await ctx.store.get(TotalRow, window.key())
    prefix = (window.name, window.window_ms)
    rows: list[_Row] = [
        *sources,
        *([] if total is None else [total]),
        *await _older(ctx, TotalRow, prefix, window),
        *await _older(ctx, SourceRow, prefix, window),
    ]
    return Done(Batch(*_deletions(rows)))


async def _older(ctx: TimerCtx, row_type: type[W], prefix: tuple[Any, ...], window: QuotaWindow) -> Sequence[W]:
    """Some rows of windows before this one, which are over as this one is."""
    rows = await ctx.store.scan(row_type, prefix, limit=PRUNED_ROWS)
    return [row for row in rows if row.window.number < window.number]


def _deletions(rows: Sequence[_Row]) -> tuple[tuple[Precondition, ...], tuple[Write, ...]]:
    """Guards and writes that delete the rows if they are still what they were."""
    return tuple(Equals(row) for row in rows), tuple(Delete(row.table, row.key()) for row in rows)
