"""Stops a runtime at the k-th commit: before it is applied, or after it but before anybody is told.

A partition whose commit was stopped commits nothing more and tells nobody, as a process that was killed there; the
test then calls `LocalRuntime.crash()`. Commits of all partitions are counted together, in the order in which they
happen, which is always the same: everything runs inline on virtual time.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from actors.address import SLOTS, slot_of
from actors.settings import Settings
from actors.testing import LocalRuntime, VirtualClock
from drivers.executor import Executor
from drivers.native import NativeDriver

__all__ = [
    "CommitControl",
    "ControlledDriver",
    "crash_when_stopped",
    "disk_full",
    "finish",
    "kept",
    "key_in",
    "runtime_with",
    "until_forgotten",
]

T = TypeVar("T")
Done = Callable[[Any, BaseException | None], None]
#: Virtual seconds that a call gets to end by: far more than every pause of the platform together.
PATIENCE_S = 100
#: How long (real time) a client is given to reconnect before virtual time moves on; it waits 10 to 20 ms at first.
RECONNECT_S = 0.03


def disk_full() -> sqlite3.OperationalError:
    """What SQLite raises for certain before anything was applied."""
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = 13  # type: ignore[misc]
    return error


class CommitControl:
    """Decides what happens to each commit. `crash_at` counts from 1; 0 never crashes."""

    def __init__(self, crash_at: int = 0, *, applied: bool = True) -> None:
        self.crash_at = crash_at
        self.applied = applied
        #: commits that were begun so far
        self.commits = 0
        #: the partition whose commit was stopped
        self.stopped_partition: int | None = None
        self._stopped = asyncio.Event()
        self._awaited: dict[int, asyncio.Event] = {}
        self._failures = 0
        self._fail_at = 0
        self._held: list[Callable[[], None]] | None = None

    @property
    def stopped(self) -> bool:
        return self.stopped_partition is not None

    async def wait_stopped(self) -> None:
        """Until the commit to stop at is reached."""
        await self._stopped.wait()

    async def begun(self, number: int) -> None:
        """Until that commit has begun, counted from 1; it goes on."""
        if self.commits < number:
            await self._awaited.setdefault(number, asyncio.Event()).wait()

    def fail_next(self, count: int = 1) -> None:
        """Let the next commits fail for certain (a full disk)."""
        self._failures += count

    def calm(self) -> None:
        """No more faults."""
        self._failures = self._fail_at = self.crash_at = 0

    def fail_at(self, number: int) -> None:
        """Let one later commit fail for certain, counted from 1 since the beginning."""
        self._fail_at = number

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Commits that are begun inside the block end when it is left: a disk that is slow."""
        self._held = []
        try:
            yield
        finally:
            held, self._held = self._held, None
            for commit in held:
                commit()

    def submit(self, executor: ControlledExecutor, job: Callable[[], Any], done: Done) -> None:
        if executor.stopped:
            return
        if self._held is not None:
            self._held.append(lambda: self.submit(executor, job, done))
            return
        self.commits += 1
        if self.commits in self._awaited:
            self._awaited[self.commits].set()
        if self.commits == self.crash_at:
            executor.stopped = True
            if self.applied:
                job()
            self.stopped_partition = executor.partition
            self._stopped.set()
            return
        if self._failures or self.commits == self._fail_at:
            self._failures = max(0, self._failures - 1)
            done(None, disk_full())
            return
        try:
            result = job()
        except Exception as error:
            done(None, error)
        else:
            done(result, None)


class ControlledExecutor:
    """The executor of one incarnation of a partition."""

    def __init__(self, control: CommitControl, partition: int) -> None:
        self._control = control
        self.partition = partition
        self.stopped = False

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self._control.submit(self, job, done)

    def close(self) -> None:
        self.stopped = True


class ControlledDriver(NativeDriver):
    """The native driver with commits under control."""

    def __init__(self, control: CommitControl, clock: VirtualClock, *, memory: bool) -> None:
        super().__init__(
            clock=clock, inline=True, durability="off", poll_ms=None, memory={} if memory else None, lock_wait_ms=1_000
        )
        self._control = control

    def executor(self, partition: int) -> Executor:
        return ControlledExecutor(self._control, partition)


def runtime_with(
    control: CommitControl,
    *,
    partitions: int = 1,
    memory: bool = True,
    clock: VirtualClock | None = None,
    settings: Settings | None = None,
) -> LocalRuntime:
    """A runtime on virtual time whose commits `control` decides about."""
    clock = clock or VirtualClock()
    return LocalRuntime(
        clock=clock,
        partitions=partitions,
        memory=memory,
        settings=settings or Settings(durability="off", ack_delay_ms=1),
        driver=ControlledDriver(control, clock, memory=memory),
    )


def key_in(type_name: str, partition: int, partitions: int, prefix: str = "k") -> str:
    """A key of the class that lives in this partition of a `LocalRuntime`."""
    number = 0
    while slot_of(type_name, f"{prefix}{number}") * partitions // SLOTS != partition:
        number += 1
    return f"{prefix}{number}"


async def finish(runtime: LocalRuntime, call: Awaitable[T]) -> T:
    """The call's result. Clients reconnect in real time and partitions wait in virtual time: both may pass."""
    future = asyncio.ensure_future(call)
    for _ in range(PATIENCE_S):
        await asyncio.wait([future], timeout=RECONNECT_S)
        if future.done():
            break
        await runtime.advance(seconds=1)
    assert future.done(), "the call did not end"
    return await future


@asynccontextmanager
async def crash_when_stopped(
    runtime: LocalRuntime, control: CommitControl, *, all_partitions: bool
) -> AsyncIterator[None]:
    """Inside the block: when the commit to stop at is reached, its partition (or all) crashes and starts again."""

    async def watch() -> None:
        await control.wait_stopped()
        await runtime.crash(None if all_partitions else control.stopped_partition)

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        control.crash_at = 0
        if not control.stopped:
            watcher.cancel()
        await asyncio.wait([watcher])


def kept(runtime: LocalRuntime) -> int:
    """Recorded outcomes that the partitions still keep."""
    return sum(status["inbox"] for status in runtime.status())


async def until_forgotten(runtime: LocalRuntime) -> None:
    """Until every outcome is released: acknowledgements travel in real time, the sweep in virtual time."""
    for look in range(400):
        if not kept(runtime):
            return
        await asyncio.sleep(0.001)
        if look > 20:
            await runtime.advance(seconds=1)
    raise AssertionError(f"{kept(runtime)} outcomes are kept for ever")
