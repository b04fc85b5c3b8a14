"""An execution that has lost its timer is found by the `DurableTimerService` of its partition, and goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from actors import DurableContext, DurableObject, Settings, durable
from actors.execution_rows import ExecutionRow, timer_name
from actors.partition import Partition
from actors.testing import LocalRuntime, SystemClock
from drivers.tables import DIRECTORY, EXECUTIONS, TIMERS, Op
from drivers.write_set import WriteSet


class Sleeper(DurableObject):
    """Sleeps, and counts what it did then."""

    @durable
    async def nap(self, ctx: DurableContext, duration: str) -> int:
        await ctx.sleep(duration)
        count: int = await ctx.step("count", self.count)
        return count

    def count(self) -> int:
        self.storage["naps"] = self.storage.get("naps", 0) + 1
        return int(self.storage["naps"])


def partition_of(runtime: LocalRuntime) -> Partition:
    (partition,) = runtime.partitions
    assert partition is not None
    return partition


async def lose_timer(runtime: LocalRuntime, execution_id: str, due_ms: int | None = None) -> None:
    """Both rows of the timer are gone from the file, and nothing in memory knows better. The execution should have
    been woken at `due_ms`."""
    partition = partition_of(runtime)
    (row,) = [row for row in partition.store.scan(DIRECTORY) if row[1] == timer_name(execution_id)]
    (pointer,) = [timer for timer in partition.store.scan(TIMERS) if timer[3].endswith(row[1].encode())]
    durable_ = asyncio.get_running_loop().create_future()
    ops: list[Op] = [(DIRECTORY, row[:2], None), (TIMERS, pointer[:5], None)]
    if due_ms is not None:
        (stored,) = partition.store.scan(EXECUTIONS)
        execution = replace(ExecutionRow.from_columns(stored[:2], stored[2:]), wake_ms=due_ms)
        ops.append((EXECUTIONS, execution.key(), execution.values()))
    write_set = WriteSet(ops)
    write_set.when_done(durable_.set_result)
    partition.submit(write_set)
    assert await durable_ is None
    await runtime.crash()


@pytest.mark.parametrize("memory", [False, True])
async def test_an_execution_without_a_timer_is_woken_once_it_is_due_and_never_before(
    memory: bool, tmp_path: Path
) -> None:
    async with LocalRuntime(data_dir=None if memory else tmp_path, memory=memory) as runtime:
        sleeper = runtime.namespace(Sleeper).get("a")
        handle = await sleeper.nap.start("1h", execution_id="n")
        await runtime.run_until_idle()
        await lose_timer(runtime, "n")
        await runtime.advance(minutes=59)
        assert await partition_of(runtime).sleeps.service.poll() == 0
        await runtime.advance(hours=2)
        assert (await handle.status()).status == "running", "nothing has woken it"
        assert await partition_of(runtime).sleeps.service.poll() == 1
        assert await partition_of(runtime).sleeps.service.poll() == 0, "it has a timer again, on its way to disk"
        await runtime.run_until_idle()
        assert await handle.result() == 1
        assert runtime.status()[0]["sleeps_rescued"] == 1


async def test_executions_that_have_their_timer_are_left_alone() -> None:
    async with LocalRuntime(memory=True) as runtime:
        sleepers = runtime.namespace(Sleeper)
        handles = [await sleepers.get(f"s{number}").nap.start("1h") for number in range(5)]
        await runtime.advance(minutes=30)
        assert await partition_of(runtime).sleeps.service.poll() == 0
        await runtime.advance(minutes=31)
        assert [await handle.result() for handle in handles] == [1] * 5
        assert await partition_of(runtime).sleeps.service.poll() == 0


async def test_the_service_runs_by_itself_where_time_is_real(tmp_path: Path) -> None:
    settings = Settings(durability="off")
    async with LocalRuntime(clock=SystemClock(), data_dir=tmp_path, settings=settings) as runtime:
        handle = await runtime.namespace(Sleeper).get("a").nap.start("1h", execution_id="n")
        while (status := await handle.status()).waits_for != "a sleep":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert status.wake_ms is not None
        await lose_timer(runtime, "n", due_ms=status.began_ms)
        while (await handle.status()).wake_ms != status.wake_ms:  # noqa: ASYNC110 - it looks, and sleeps on
            await asyncio.sleep(0.05)
        assert runtime.status()[0]["sleeps_rescued"] == 1
