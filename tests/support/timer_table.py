"""One timer table with its engine, as the engine's tests use it: arm rows, run ticks, look at what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.manual_clock import ManualClock
from tests.support.timer_store import Note, WatchedStore
from timers.batch import Absent, Batch, Equals, Put
from timers.budget import TickBudget, TickState
from timers.engine import RunReport, TimerFault, TimerStore, run_due, run_due_with_state
from timers.firing import Done, DueTimer, Fired, PartitionName, PartitionRole, TimerCtx
from timers.registry import TimerHandler, TimerRegistry
from timers.rows import Row, TimerRow

NOW = 1_000_000
A, B, C = 0xF0, 0xF1, 0xF2
PARTITION = PartitionName(PartitionRole.PARTITION, 7)


def timer(
    due_ms: int, *, kind: int = A, ref: bytes = b"r", generation: int = 0, lane: int | None = None, **more: Any
) -> TimerRow:
    """A timer row in its kind's lane, armed for `due_ms`."""
    first = {"first_due_ms": due_ms, **more}
    return TimerRow(kind if lane is None else lane, due_ms, kind, ref, generation, **first)


class Handler:
    """Decides by a function, synchronous or not, and keeps what it was called with."""

    def __init__(
        self,
        decide: Callable[[TimerCtx, DueTimer], Any] = lambda ctx, timer: Done(),
        *,
        kind: int = A,
        max_per_tick: int | None = None,
    ) -> None:
        self.kind = kind
        self.max_per_tick = max_per_tick
        self.calls: list[DueTimer] = []
        self._decide = decide

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        self.calls.append(timer)
        decided: Any = self._decide(ctx, timer)
        return await decided if hasattr(decided, "__await__") else decided  # type: ignore[no-any-return]


class Table:
    """A watched store, a clock, and what the last runs reported."""

    def __init__(self, inner: TimerStore, clock: ManualClock) -> None:
        self.store = WatchedStore(inner)
        self.clock = clock
        self.faults: list[TimerFault] = []

    async def put(self, *rows: Row) -> None:
        await self.store.put(*rows)

    async def timers(self) -> list[TimerRow]:
        return await self.store.timers()

    async def run(
        self, *handlers: TimerHandler, now_ms: int = NOW, budget: TickBudget | None = None, rotation: int = 0
    ) -> RunReport:
        return await run_due(
            self.store,
            TimerRegistry(handlers),
            now_ms,
            budget,
            monotonic_ms=self.clock.monotonic_ms,
            partition=PARTITION,
            rotation=rotation,
            warn=self.faults.append,
        )

    async def run_shared(self, state: TickState, *handlers: TimerHandler, now_ms: int = NOW) -> RunReport:
        return await run_due_with_state(
            self.store, TimerRegistry(handlers), now_ms, state, partition=PARTITION, warn=self.faults.append
        )

    def state(self, budget: TickBudget | None = None, rotation: int = 0) -> TickState:
        return TickState.new(budget or TickBudget(), self.clock.monotonic_ms, rotation)


async def count_up(ctx: TimerCtx, timer: DueTimer) -> Fired:
    """A handler's decision: one more in the note "count", guarded on what was read."""
    old = await ctx.store.get(Note, ("count",))
    if old is None:
        return Done(Batch((Absent(Note.table, ("count",)),), (Put(Note("count", 1)),)))
    return Done(Batch((Equals(old),), (Put(Note("count", old.count + 1)),)))


def done_after(action: Callable[[TimerCtx], Any]) -> Callable[[TimerCtx, DueTimer], Fired]:
    """A handler's decision: do something, then be done."""

    def decide(ctx: TimerCtx, timer: DueTimer) -> Fired:
        action(ctx)
        return Done()

    return decide


def write_note(name: str) -> Callable[[TimerCtx, DueTimer], Fired]:
    """A handler's decision: write a note."""
    return lambda ctx, timer: Done(Batch(writes=(Put(Note(name, 1)),)))


def fail(ctx: TimerCtx, timer: DueTimer) -> Fired:
    """A handler's decision: raise."""
    raise RuntimeError("handler failed")
