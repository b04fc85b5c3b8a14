"""A timer store in one dictionary: the plainest reading of the contract, to hold the real ones against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from timers.batch import Absent, Batch, Equals, NotAfter, Outcome, Present, Put
from timers.rows import USER_LANE, MalformedTimer, Row, TimerKey, TimerRow

R = TypeVar("R", bound=Row)
Place = tuple[str, tuple[Any, ...]]


class MemoryTimerStore:
    """Rows by (table, key). `wall_ms` is the store's own clock, which `NotAfter` is judged by."""

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self._rows: dict[Place, Row] = {}

    async def get(self, row_type: type[R], key: tuple[Any, ...]) -> R | None:
        return cast("R | None", self._rows.get((row_type.table, key)))

    async def scan(
        self, row_type: type[R], prefix: tuple[Any, ...], *, after: tuple[Any, ...] | None = None, limit: int
    ) -> Sequence[R]:
        size, first = len(prefix), prefix + (after or ())
        found = sorted(
            (key, row)
            for (table, key), row in self._rows.items()
            if table == row_type.table and key[:size] == prefix and (after is None or key[: len(first)] > first)
        )
        return [cast("R", row) for _, row in found[:limit]]

    async def lanes(self) -> Sequence[int]:
        return sorted({row.lane for row in self._timers() if row.lane != USER_LANE})

    async def scan_due(
        self, lane: int, now_ms: int, after: TimerKey | None, limit: int
    ) -> Sequence[TimerRow | MalformedTimer]:
        due = (row for row in self._timers() if row.lane == lane and row.due_ms <= now_ms)
        return [row for row in due if after is None or row.key() > after][:limit]

    async def next_due_ms(self, lane: int, after_ms: int) -> int | None:
        return min((row.due_ms for row in self._timers() if row.lane == lane and row.due_ms > after_ms), default=None)

    async def apply(self, batches: Sequence[Batch]) -> Sequence[Outcome]:
        before = dict(self._rows)
        try:
            return [self._apply_one(batch) for batch in batches]
        except BaseException:
            self._rows = before
            raise

    def _apply_one(self, batch: Batch) -> Outcome:
        for precondition in batch.preconditions:
            if isinstance(precondition, NotAfter):
                if self._wall_ms() > precondition.deadline_ms:
                    return Outcome.DEADLINE_PASSED
            elif isinstance(precondition, Equals):
                if self._rows.get((precondition.row.table, precondition.row.key())) != precondition.row:
                    return Outcome.PRECONDITION_FAILED
            elif isinstance(precondition, Absent):
                if (precondition.table, precondition.key) in self._rows:
                    return Outcome.PRECONDITION_FAILED
            elif isinstance(precondition, Present) and (precondition.table, precondition.key) not in self._rows:
                return Outcome.PRECONDITION_FAILED
        for write in batch.writes:
            if isinstance(write, Put):
                self._rows[write.row.table, write.row.key()] = write.row
            else:
                self._rows.pop((write.table, write.key), None)
        return Outcome.COMMITTED

    def _timers(self) -> list[TimerRow]:
        return sorted((row for row in self._rows.values() if isinstance(row, TimerRow)), key=TimerRow.key)
