"""A partition's store as the timer engine wants to see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from drivers.group_commit import GroupCommitter
from drivers.store import Store
from drivers.tables import TABLES, TIMERS, Key
from timers.batch import Batch, Outcome
from timers.firing import MAX_TIME_MS
from timers.rows import USER_LANE, MalformedTimer, Row, TimerKey, TimerRow

__all__ = ["CommittingTimerStore", "Gate", "read_timer"]

R = TypeVar("R", bound=Row)
_LARGEST_KIND = 255


def read_timer(columns: Key) -> TimerRow | MalformedTimer:
    """The row, or why it is none."""
    lane, due_ms, kind, ref, generation, first_due_ms, attempt, payload = columns
    reason = None
    if not isinstance(due_ms, int) or due_ms < 0:
        reason = f"due_ms is {due_ms!r}"
    elif not isinstance(kind, int) or not 0 < kind < _LARGEST_KIND:
        reason = f"kind is {kind!r}"
    elif not isinstance(ref, bytes) or not isinstance(payload, bytes):
        reason = "reference or payload are not bytes"
    elif not isinstance(generation, int) or not isinstance(attempt, int) or attempt < 0:
        reason = f"generation is {generation!r}, attempt is {attempt!r}"
    elif not isinstance(first_due_ms, int):
        reason = f"first_due_ms is {first_due_ms!r}"
    if reason is not None:
        return MalformedTimer(lane, due_ms if isinstance(due_ms, int) else 0, tuple(columns[:5]), reason)
    return TimerRow(lane, due_ms, kind, ref, generation, first_due_ms, attempt, payload)


class Gate(Protocol):
    """Keeps the engine's batches and the turns of objects apart."""

    def is_away(self, timer: TimerRow | MalformedTimer) -> bool:
        """Whether the timer serves an object that this partition does not run, so that it must be left alone."""
        ...

    def admit(self, batch: Batch) -> Sequence[int] | None:
        """The objects that the batch changes, which start no turn until they are let go; None when one of them is in a
        turn that may have read what the batch changes."""
        ...

    def let_go(self, oids: Sequence[int]) -> None:
        """The batch that was admitted is durable, or was not applied."""
        ...


class CommittingTimerStore:
    """Reads what is durable; applies batches through the partition's one group committer.

    A batch that the gate does not admit counts as having lost a guard: nothing of it is applied, and it is tried again.
    """

    def __init__(self, store: Store, committer: GroupCommitter, gate: Gate | None = None) -> None:
        self._store = store
        self._committer = committer
        self._gate = gate

    async def lanes(self) -> Sequence[int]:
        return [lane for lane in self._store.lanes() if lane != USER_LANE]

    async def scan_due(
        self, lane: int, now_ms: int, after: TimerKey | None, limit: int
    ) -> Sequence[TimerRow | MalformedTimer]:
        end = (now_ms + 1,) if now_ms < MAX_TIME_MS else None  # the columns can't hold more
        start_after = None if after is None else after[1:]
        found: list[TimerRow | MalformedTimer] = []
        while True:
            rows = self._store.scan(TIMERS, (lane,), start_after=start_after, end=end, limit=limit)
            timers = [read_timer(row) for row in rows]
            if self._gate is not None:
                timers = [timer for timer in timers if not self._gate.is_away(timer)]
            found += timers
            if len(rows) < limit or len(found) >= limit:
                return found[:limit]
            start_after = rows[-1][1:5]

    async def next_due_ms(self, lane: int, after_ms: int) -> int | None:
        return self._store.next_due_ms(lane, after_ms)

    async def apply(self, batches: Sequence[Batch]) -> Sequence[Outcome]:
        if self._gate is None:
            return await self._committer.apply(batches)
        held = [self._gate.admit(batch) for batch in batches]
        try:
            admitted = [batch for batch, oids in zip(batches, held, strict=True) if oids is not None]
            outcomes = iter(await self._committer.apply(admitted) if admitted else ())
            return [Outcome.PRECONDITION_FAILED if oids is None else next(outcomes) for oids in held]
        finally:
            for oids in held:
                if oids:
                    self._gate.let_go(oids)

    async def get(self, row_type: type[R], key: Key) -> R | None:
        values = self._store.get(row_type.table, key)
        return None if values is None else row_type.from_columns(key, values)

    async def scan(self, row_type: type[R], prefix: Key, *, after: Key | None = None, limit: int) -> Sequence[R]:
        size = len(TABLES[row_type.table].key)
        rows = self._store.scan(row_type.table, prefix, start_after=after, limit=limit)
        return [row_type.from_columns(columns[:size], columns[size:]) for columns in rows]
