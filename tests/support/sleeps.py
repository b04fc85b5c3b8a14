"""A place for durable sleeps in memory that remembers what was asked of it, and virtual time to sleep in."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from drivers.clock import VirtualClock
from drivers.loop_event import LoopEvent
from timers.durable_sleep import DurableTimerService, Sleep, Waiter, Waits, sleep_until

__all__ = ["Process", "SleepTable", "pass_time"]

#: Loop turns in which everything that can go on without time has gone on.
_SETTLE_TURNS = 10


async def pass_time(clock: VirtualClock, ms: int) -> None:
    """Move time on; everything due on the way happens at its own instant."""
    target = clock.wall_ms() + ms
    while True:
        for _ in range(_SETTLE_TURNS):
            await asyncio.sleep(0)
        next_ms = clock.next_ms()
        if next_ms is None or next_ms > target:
            break
        clock.move_to(next_ms)
        clock.run_due()
    clock.move_to(max(target, clock.wall_ms()))
    for _ in range(_SETTLE_TURNS):
        await asyncio.sleep(0)


class SleepTable:
    """What survives a crash. `calls` names what was asked; `before` runs before each call and may raise."""

    def __init__(self) -> None:
        self.rows: dict[uuid.UUID, Sleep] = {}
        self.calls: list[str] = []
        self.marked: list[uuid.UUID] = []
        self.before: Callable[[str, uuid.UUID | None], None] = lambda call, timer_id: None

    def _asked(self, call: str, timer_id: uuid.UUID | None = None) -> None:
        self.calls.append(call)
        self.before(call, timer_id)

    async def state(self, timer_id: uuid.UUID) -> Sleep | None:
        self._asked("state", timer_id)
        return self.rows.get(timer_id)

    async def arm(self, sleep: Sleep) -> None:
        self._asked("arm", sleep.timer_id)
        self.rows.setdefault(sleep.timer_id, sleep)

    async def mark_fired(self, timer_id: uuid.UUID) -> bool:
        self._asked("mark", timer_id)
        row = self.rows[timer_id]
        if row.fired:
            return False
        self.rows[timer_id] = replace(row, fired=True)
        self.marked.append(timer_id)
        return True

    async def due(self, now_ms: int) -> Sequence[Sleep]:
        self._asked("due")
        found = [row for row in self.rows.values() if not row.fired and row.due_ms <= now_ms]
        return sorted(found, key=lambda row: row.due_ms)


class Process:
    """One process at the table: its sleepers, and the service if it is started."""

    def __init__(self, table: SleepTable, clock: VirtualClock, *, poll_ms: int = 2_000) -> None:
        self.table = table
        self.clock = clock
        self.poll_ms = poll_ms
        self.waits = Waits(lambda: LoopEvent(clock))
        #: how long each wait was asked to be at most
        self.waited: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    def sleep(self, sleep: Sleep) -> asyncio.Task[None]:
        """A program that sleeps."""
        return self._start(
            sleep_until(self.table, sleep, now_ms=self.clock.wall_ms, register=self._register, poll_ms=self.poll_ms)
        )

    def _register(self, timer_id: uuid.UUID) -> Waiter:
        self.table.calls.append("register")
        return _Watched(self, self.waits.timer(timer_id))

    def service(self, *, interval_ms: int = 2_000) -> DurableTimerService:
        return DurableTimerService(
            self.table,
            now_ms=self.clock.wall_ms,
            monotonic_ms=lambda: self.clock.monotonic_ns() // 1_000_000,
            sleep=lambda ms: LoopEvent(self.clock).wait(ms),
            notify=self.waits.notify,
            interval_ms=interval_ms,
        )

    def run(self, service: DurableTimerService) -> asyncio.Task[None]:
        return self._start(service.run())

    def _start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self.tasks.append(task)
        return task

    async def crash(self) -> None:
        """Everything in memory is gone; the table stays."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.waits = Waits(lambda: LoopEvent(self.clock))


class _Watched:
    def __init__(self, process: Process, inner: Waiter) -> None:
        self._process = process
        self._inner = inner

    async def wait(self, timeout_ms: int) -> None:
        self._process.waited.append(timeout_ms)
        await self._inner.wait(timeout_ms)

    def close(self) -> None:
        self._inner.close()
