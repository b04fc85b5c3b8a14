"""What a page is about to commit: a batch per timer, and a view of the rows as those batches will leave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from timers.backoff import retry_delay_ms
from timers.batch import Absent, Batch, Delete, Equals, Put
from timers.errors import InvalidSchedule
from timers.firing import MAX_TIME_MS, NO_EFFECTS, Done, Fired, Reschedule, Retry, TimerReads
from timers.rows import Row, TimerKey, TimerRow

__all__ = ["PageView", "Plan", "ending", "retry_plan"]

R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Plan:
    """A batch that ends, moves or retries one row, waiting for its page's commit."""

    row: TimerRow
    batch: Batch
    is_retry: bool


class PageView:
    """Reads under the writes of the batches that wait for the page's commit.

    One of those batches may yet lose a guard, and then what was read here was never true. So every row that a
    handler saw through a waiting batch becomes a guard of the handler's own batch.
    """

    def __init__(self, store: TimerReads) -> None:
        self._store = store
        self._waiting: dict[tuple[str, tuple[Any, ...]], Row | None] = {}
        self._seen: dict[tuple[str, tuple[Any, ...]], Row | None] = {}

    async def get(self, row_type: type[R], key: tuple[Any, ...]) -> R | None:
        place = (row_type.table, key)
        if place not in self._waiting:
            return await self._store.get(row_type, key)
        self._seen[place] = row = self._waiting[place]
        return cast("R | None", row)

    async def scan(
        self, row_type: type[R], prefix: tuple[Any, ...], *, after: tuple[Any, ...] | None = None, limit: int
    ) -> Sequence[R]:
        first = prefix if after is None else prefix + after
        waiting = {
            key: row
            for (table, key), row in self._waiting.items()
            if table == row_type.table and key[: len(prefix)] == prefix and (after is None or key[: len(first)] > first)
        }
        # every waiting batch may hide one stored row, so that many more are fetched
        stored = await self._store.scan(row_type, prefix, after=after, limit=limit + len(waiting))
        rows: dict[tuple[Any, ...], R] = {row.key(): row for row in stored}
        for key, row in waiting.items():
            self._seen[row_type.table, key] = row
            if row is None:
                rows.pop(key, None)
            else:
                rows[key] = cast("R", row)
        return [rows[key] for key in sorted(rows)][:limit]

    def forget_seen(self) -> None:
        """The next handler begins to read."""
        self._seen.clear()

    def guarded(self, batch: Batch) -> Batch:
        """The batch, with a guard on everything seen through waiting batches that it does not guard itself."""
        guards = [Equals(row) if row is not None else Absent(table, key) for (table, key), row in self._seen.items()]
        return batch.plus([guard for guard in guards if guard not in batch.preconditions])

    def add(self, batch: Batch) -> None:
        """This batch waits too."""
        for write in batch.writes:
            if isinstance(write, Put):
                self._waiting[write.row.table, write.row.key()] = write.row
            else:
                self._waiting[write.table, write.key] = None

    def clear(self) -> None:
        """Nothing waits any more: the batches were committed or discarded."""
        self._waiting.clear()


def ending(row: TimerRow, fired: Fired) -> Batch | None:
    """The handler's batch with the engine's guard on the observed row, and the row's end or move."""
    if isinstance(fired, Retry):
        return None
    if not isinstance(fired, (Done, Reschedule)):
        raise TypeError(f"a timer handler returned {fired!r}; it must return Done, Reschedule or Retry")
    old_key = row.key()
    if isinstance(fired, Done):
        _refuse_writes_to(fired.batch, old_key)
        return fired.batch.plus([Equals(row)], [Delete(row.table, old_key)])
    if fired.due_at_ms in (row.due_ms, row.first_due_ms):
        raise InvalidSchedule(f"a timer can't be moved to {fired.due_at_ms}, the time that it is due at already")
    moved = replace(row, due_ms=fired.due_at_ms, first_due_ms=fired.due_at_ms, attempt=0, payload=fired.value)
    _refuse_writes_to(fired.batch, old_key, moved.key())
    return _move(row, moved, fired.batch)


def retry_plan(row: TimerRow, now_ms: int) -> Plan:
    """The row one step up the retry ladder. Its original due time and its payload stay as they are."""
    attempt = row.attempt + 1
    due_ms = min(now_ms + retry_delay_ms(attempt), MAX_TIME_MS)
    return Plan(row, _move(row, replace(row, due_ms=due_ms, attempt=attempt), NO_EFFECTS), is_retry=True)


def _move(row: TimerRow, moved: TimerRow, effects: Batch) -> Batch:
    return effects.plus(
        [Equals(row), Absent(moved.table, moved.key())],
        [Delete(row.table, row.key()), Put(moved)],
    )


def _refuse_writes_to(batch: Batch, *keys: TimerKey) -> None:
    """A handler that writes its own timer row would have that write overwritten by the engine: a lost timer."""
    for write in batch.writes:
        table, key = (write.row.table, write.row.key()) if isinstance(write, Put) else (write.table, write.key)
        if table == TimerRow.table and key in keys:
            raise InvalidSchedule("a handler's batch writes its own timer; return Reschedule to move it")
