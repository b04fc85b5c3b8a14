"""Commits that a test lets go one by one, or makes fail: what stands between a turn's end and its durability."""

from __future__ import annotations

import asyncio
import enum
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from actors.settings import Settings
from actors.testing import LocalRuntime, VirtualClock
from drivers.executor import Done, Executor, InlineExecutor
from drivers.native import NativeDriver

__all__ = ["CommitFailure", "HeldCommits", "held_runtime", "turn_loop"]

#: Loop turns in which anything that can go on by itself has gone on: a call crosses the loop in fewer than ten.
_QUIET_TURNS = 60
#: A commit that was not asked for by then will not come.
_GIVE_UP_S = 20.0


class CommitFailure(enum.Enum):
    """How a commit fails."""

    DISK_FULL = "database or disk is full"  #: certain: nothing was applied
    UNKNOWN_LOST = "disk I/O error"  #: the error tells nothing; the rows are not there
    UNKNOWN_APPLIED = "disk I/O error after the commit"  #: the error tells nothing; the rows are there


async def turn_loop(turns: int = _QUIET_TURNS) -> None:
    """Let everything that needs no commit and no time go on."""
    for _ in range(turns):
        await asyncio.sleep(0)


class HeldCommits:
    """What all partitions of a `held_runtime` commit through. Commits pass at once until `hold()`."""

    def __init__(self) -> None:
        self._held: deque[tuple[Callable[[], Any], Done]] = deque()
        self._failures: deque[CommitFailure] = deque()
        self._holding = False
        self._came = asyncio.Event()

    def __len__(self) -> int:
        """Commits that are held."""
        return len(self._held)

    def hold(self) -> None:
        """Keep every commit from now on until it is released."""
        self._holding = True

    async def arrived(self) -> None:
        """Wait until a commit is held, and until everything that goes on without it has gone on."""
        while not self._held:
            self._came.clear()
            # opening a partition takes a thread's time; the bound only ends a test that would wait for ever
            await asyncio.wait_for(self._came.wait(), _GIVE_UP_S)
        await turn_loop()

    async def is_held(self) -> bool:
        """Whether a commit is held once everything that goes on without it has gone on."""
        await turn_loop()
        return bool(self._held)

    async def release(self, commits: int = 1) -> None:
        """Make that many commits durable, one after the other."""
        for _ in range(commits):
            await self.arrived()
            self._run(*self._held.popleft())
            await turn_loop()

    async def fail(self, failure: CommitFailure) -> None:
        """Let the next held commit fail."""
        await self.arrived()
        self._fail(failure, *self._held.popleft())
        await turn_loop()

    def fail_next(self, failure: CommitFailure, times: int = 1) -> None:
        """Let the next commits fail that are asked for while nothing is held."""
        self._failures.extend([failure] * times)

    def let_go(self) -> None:
        """Hold nothing any more, and make durable what was held."""
        self._holding = False
        self._failures.clear()
        while self._held:
            self._run(*self._held.popleft())

    # --- the executor's side ----------------------------------------------------------------------

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        if self._holding:
            self._held.append((job, done))
            self._came.set()
        elif self._failures:
            self._fail(self._failures.popleft(), job, done)
        else:
            self._run(job, done)

    def forget(self) -> None:
        """The process that asked for the held commits is gone: they never happen."""
        self._held.clear()

    def _run(self, job: Callable[[], Any], done: Done) -> None:
        InlineExecutor().submit(job, done)

    def _fail(self, failure: CommitFailure, job: Callable[[], Any], done: Done) -> None:
        if failure is CommitFailure.UNKNOWN_APPLIED:
            job()
        text = "database or disk is full" if failure is CommitFailure.DISK_FULL else "disk I/O error"
        done(None, sqlite3.OperationalError(text))


class _HeldExecutor:
    def __init__(self, commits: HeldCommits) -> None:
        self._commits = commits

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self._commits.submit(job, done)

    def close(self) -> None:
        self._commits.forget()


class _HeldDriver(NativeDriver):
    def __init__(self, clock: VirtualClock, commits: HeldCommits) -> None:
        super().__init__(clock=clock, inline=True, durability="off", poll_ms=None)
        self._commits = commits

    def executor(self, partition: int) -> Executor:
        return _HeldExecutor(self._commits)


@asynccontextmanager
async def held_runtime(settings: Settings | None = None) -> AsyncIterator[tuple[LocalRuntime, HeldCommits]]:
    """A runtime of one partition in virtual time, and the commits that it makes."""
    clock = VirtualClock()
    commits = HeldCommits()
    settings = settings or Settings(durability="off")
    async with LocalRuntime(clock=clock, settings=settings, driver=_HeldDriver(clock, commits)) as runtime:
        try:
            yield runtime, commits
        finally:
            commits.let_go()
