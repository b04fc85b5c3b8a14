"""Executions of durable functions, and a process that carries them out until it is killed (`child`). It prints a line
when all executions have been started, and one when all have ended."""

from __future__ import annotations

import asyncio

from actors import DurableContext, DurableObject, durable, shared
from actors.settings import Settings
from actors.testing import LocalRuntime, SystemClock

__all__ = ["EXECUTIONS", "NAP_MS", "STEPS", "Ledger", "Worker", "child", "runtime_in", "start_all"]

EXECUTIONS = 12
STEPS = 40
#: Sleeps between steps: all together they take longer than a child lives, so that each is killed in the middle.
NAP_MS = 25


class Ledger(DurableObject):
    """Counts what it is told, by name."""

    def count(self, name: str) -> None:
        self.storage[name] = self.storage.get(name, 0) + 1

    @shared
    def counts(self) -> dict[str, int]:
        return self.storage.list()


class Worker(DurableObject):
    """Takes many small steps, each of which writes, calls another object, and is followed by a short sleep."""

    @durable
    async def work(self, ctx: DurableContext, name: str) -> list[int]:
        done = []
        for number in range(STEPS):
            done.append(await ctx.step("one", self.one, name, number))
            await ctx.sleep(f"{NAP_MS}ms")
        return done

    async def one(self, name: str, number: int) -> int:
        self.storage["taken"] = self.storage.get("taken", 0) + 1
        await self.namespace(Ledger).get(f"ledger-{number % 3}").count(f"{name}-{number}")
        return number

    @shared
    def taken(self) -> int:
        return int(self.storage.get("taken", 0))


def runtime_in(directory: str) -> LocalRuntime:
    """The runtime that the child and the test use."""
    settings = Settings(lock_wait_ms=5_000)
    return LocalRuntime(clock=SystemClock(), partitions=2, data_dir=directory, settings=settings)


async def start_all(runtime: LocalRuntime) -> list[str]:
    """Start every execution, or find it, and wait for their ends; the names of the workers."""
    workers = runtime.namespace(Worker)
    names = [f"w{number}" for number in range(EXECUTIONS)]
    handles = [await workers.get(name).work.start(name, execution_id="work") for name in names]
    print("started", flush=True)
    for handle in handles:
        assert await handle.result() == list(range(STEPS))
    return names


def child(directory: str) -> None:
    """Carry out the executions in this directory."""

    async def run() -> None:
        async with runtime_in(directory) as runtime:
            await start_all(runtime)
        print("ended", flush=True)

    asyncio.run(run())
