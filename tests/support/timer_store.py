"""The stores that the engine's tests run on, and a wrapper that watches and disturbs any of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

from drivers.executor import InlineExecutor
from drivers.group_commit import GroupCommitter
from drivers.tables import TableSpec
from drivers.timer_store import CommittingTimerStore
from tests.support.manual_clock import ManualClock
from tests.support.stores import PLACES, extra_table
from tests.support.timer_memory import MemoryTimerStore
from timers.batch import Batch, Outcome, Put
from timers.engine import TimerStore
from timers.rows import MalformedTimer, Row, TimerKey, TimerRow

R = TypeVar("R", bound=Row)
NOTES = TableSpec("notes", ("name",), ("count",))


@dataclass(frozen=True)
class Note:
    """Ordinary state beside the timers: what handlers read, guard and write in these tests."""

    table: ClassVar[str] = "notes"

    name: str
    count: int = 0

    def key(self) -> tuple[str]:
        return (self.name,)

    def values(self) -> tuple[int]:
        return (self.count,)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> Note:
        return cls(*key, *values)


def make_timer_store(clock: ManualClock) -> TimerStore:
    """An empty store whose own clock is `clock`: the plainest one."""
    return MemoryTimerStore(clock.wall_ms)


@contextmanager
def _plain_store(clock: ManualClock) -> Iterator[TimerStore]:
    yield make_timer_store(clock)


@contextmanager
def _real_store(kind: str, clock: ManualClock) -> Iterator[TimerStore]:
    """A partition's store as its ticker sees it, through the group commit, with a table for the notes."""

    def fatal(error: BaseException) -> None:
        raise AssertionError("the committer ended") from error

    with extra_table(NOTES):
        place = PLACES[kind]()
        place.add_table(NOTES)
        store = place.open()
        committer = GroupCommitter(store, InlineExecutor(), wall_ms=clock.wall_ms, on_fatal=fatal)
        committer.start()
        try:
            yield CommittingTimerStore(store, committer)
        finally:
            committer.abandon()
            store.close()
            place.remove()


#: Every store that must keep the engine's rules, by name: the parameters of the `inner_store` fixture.
TIMER_STORES: dict[str, Callable[[ManualClock], AbstractContextManager[TimerStore]]] = {
    "plain": _plain_store,
    "memory": partial(_real_store, "memory"),
    "sqlite": partial(_real_store, "sqlite"),
}


class StoreBroke(Exception):
    """The error that disturbed stores raise."""


class WatchedStore:
    """Passes everything on to `inner`, keeps a record, and disturbs on request."""

    def __init__(self, inner: TimerStore) -> None:
        self.inner = inner
        self.scan_limits: list[int] = []
        self.scanned_lanes: list[int] = []
        self.future_lookups = 0
        self.applied: list[list[Batch]] = []
        self.malformed: list[MalformedTimer] = []
        self.broken_reads: set[str] = set()
        self.refuse: Callable[[Batch], bool] = lambda batch: False
        self.before_apply: Callable[[], Awaitable[None]] | None = None

    async def get(self, row_type: type[R], key: tuple[Any, ...]) -> R | None:
        return await self.inner.get(row_type, key)

    async def scan(
        self, row_type: type[R], prefix: tuple[Any, ...], *, after: tuple[Any, ...] | None = None, limit: int
    ) -> Sequence[R]:
        return await self.inner.scan(row_type, prefix, after=after, limit=limit)

    async def lanes(self) -> Sequence[int]:
        self._break("lanes")
        return sorted({*await self.inner.lanes(), *(row.lane for row in self.malformed)})

    async def scan_due(
        self, lane: int, now_ms: int, after: TimerKey | None, limit: int
    ) -> Sequence[TimerRow | MalformedTimer]:
        self._break("scan_due")
        self.scan_limits.append(limit)
        self.scanned_lanes.append(lane)
        rows: list[tuple[Any, TimerRow | MalformedTimer]] = [
            (row.key(), row)
            for row in await self.inner.scan_due(lane, now_ms, after, limit)
            if isinstance(row, TimerRow)
        ]
        for row in self.malformed:
            if row.lane == lane and row.due_ms <= now_ms and (after is None or row.raw_key > after):
                rows.append((row.raw_key, row))
        return [row for _key, row in sorted(rows, key=lambda pair: pair[0])][:limit]

    async def next_due_ms(self, lane: int, after_ms: int) -> int | None:
        self._break("next_due_ms")
        self.future_lookups += 1
        return await self.inner.next_due_ms(lane, after_ms)

    async def apply(self, batches: Sequence[Batch]) -> Sequence[Outcome]:
        if self.before_apply is not None:
            hook, self.before_apply = self.before_apply, None
            await hook()
        self.applied.append(list(batches))
        if any(self.refuse(batch) for batch in batches):
            raise StoreBroke("the store can't apply this")
        return await self.inner.apply(batches)

    async def put(self, *rows: Row) -> None:
        """Store rows directly, past the record and the disturbances."""
        for row in rows:
            await self.inner.apply([Batch(writes=(Put(row),))])

    async def timers(self) -> list[TimerRow]:
        """Every timer outside the user lane, in key order."""
        found: list[TimerRow] = []
        for lane in await self.inner.lanes():
            rows = await self.inner.scan_due(lane, 2**63 - 1, None, 1_000_000)
            found += [row for row in rows if isinstance(row, TimerRow)]
        return found

    async def note(self, name: str) -> int | None:
        note = await self.inner.get(Note, (name,))
        return None if note is None else note.count

    def _break(self, read: str) -> None:
        if read in self.broken_reads:
            raise StoreBroke(f"{read} failed")
