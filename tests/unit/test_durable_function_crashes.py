"""Durable functions on a process that dies at every commit, on a disk that fails at every commit, and on the move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors import DurableContext, ExecutionHandle, RetryPolicy
from actors.errors import CommitFailed, ObjectReset
from actors.settings import Settings
from actors.testing import LocalRuntime
from tests.support.crash_points import (
    RECONNECT_S,
    CommitControl,
    crash_when_stopped,
    finish,
    key_in,
    runtime_with,
    until_forgotten,
)
from tests.support.workflows import Flow, Till, World

RETRY = RetryPolicy(max_attempts=5, base_ms=1_000, factor=1, jitter=0)
PARTITIONS = 2
#: More commits than the execution below makes with all its calls.
MOST_COMMITS = 60


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    fresh = World()
    monkeypatch.setattr(Flow, "world", fresh)
    return fresh


async def everything(self: Flow, ctx: DurableContext, till: str) -> list[Any]:
    """Charges another object twice, sleeps, fails once, asks and gets an answer, and pays with a guard."""

    async def charge(amount: int) -> int:
        self.storage.put("charged", self.storage.get("charged", 0) + amount)
        charged: int = await self.namespace(Till).get(till).charge(amount)
        return charged

    charges = [await ctx.step("charge", charge, 5, retry=RETRY)]
    approval = ctx.promise("approval", timeout="7d")
    await ctx.step("send", self.send_token, "approval", approval.token)
    await ctx.sleep("1m")
    charges.append(await ctx.step("charge", charge, 7, retry=RETRY))
    await ctx.step("fail", self.fail, "f", 1, retry=RETRY)
    paid = await ctx.step("pay", self.do, "paid", effect="guarded", ambiguous="skip")
    return [charges, await approval, paid]


async def _run(control: CommitControl, runtime: LocalRuntime, world: World) -> ExecutionHandle:
    """One execution from its start to its end, with whatever `control` does to it."""
    till, flow = key_in("Till", 1, PARTITIONS), key_in("Flow", 0, PARTITIONS)
    world.functions["everything"] = everything
    handle: ExecutionHandle = await finish(
        runtime, runtime.namespace(Flow).get(flow).run.start("everything", till, execution_id="x")
    )
    while "approval" not in world.tokens:
        await finish(runtime, asyncio.sleep(0))
        await runtime.advance(seconds=1)
    await finish(runtime, runtime.namespace(Flow).resolve_promise(world.tokens["approval"], "yes"))
    while (await finish(runtime, handle.status())).status == "running":
        await asyncio.sleep(RECONNECT_S)  # or virtual time would leave behind what reconnects in real time
        await runtime.advance(seconds=20)
    return handle


async def _check(runtime: LocalRuntime, handle: ExecutionHandle, world: World) -> None:
    charges, answer, paid = await finish(runtime, handle.result())
    assert (charges, answer) == ([5, 12], "yes")
    assert paid in ("paid", None)  # None: it died between intent and result, and is taken to have happened
    assert await runtime.namespace(Till).get(key_in("Till", 1, PARTITIONS)).total() == (12, 2)
    state = await runtime.namespace(Flow).get(key_in("Flow", 0, PARTITIONS)).state()
    assert state == {"charged": 12, "f": 1, **({"paid": 1} if paid else {})}
    assert world.did.count("paid") == 1 if paid else world.did.count("paid") <= 1
    assert await runtime.dead_letters() == []


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "not_applied"])
@pytest.mark.parametrize(
    "all_partitions",
    [pytest.param(True, marks=pytest.mark.soak), False],
    ids=["all_partitions", "the_committing_partition"],
)
async def test_state_and_calls_of_an_execution_happen_once_whichever_commit_the_crash_is_at(
    world: World, applied: bool, all_partitions: bool
) -> None:
    crashes = 0
    for number in range(1, MOST_COMMITS):
        world.did.clear()
        world.tokens.clear()
        control = CommitControl(number, applied=applied)
        async with runtime_with(control, partitions=PARTITIONS) as runtime:
            async with crash_when_stopped(runtime, control, all_partitions=all_partitions):
                handle = await _run(control, runtime, world)
            if not control.stopped:
                break
            crashes += 1
            await _check(runtime, handle, world)
            await until_forgotten(runtime)
    else:
        raise AssertionError("the execution makes more commits than expected")
    assert crashes > 15


async def test_a_commit_that_fails_is_not_applied_and_the_execution_goes_on_at_every_commit(world: World) -> None:
    failures = 0
    for number in range(1, MOST_COMMITS):
        world.did.clear()
        world.tokens.clear()
        control = CommitControl()
        control.fail_at(number)
        async with runtime_with(control, partitions=PARTITIONS) as runtime:
            try:
                handle = await _run(control, runtime, world)
            except (CommitFailed, ObjectReset):
                handle = await _run(control, runtime, world)  # a call from outside was told that nothing was applied
            if control.commits < number:
                break
            failures += 1
            await _check(runtime, handle, world)
    assert failures > 15


async def test_executions_move_with_their_slots(world: World) -> None:
    world.functions["everything"] = everything
    async with LocalRuntime(memory=True, partitions=1) as runtime:
        handles = [
            await runtime.namespace(Flow).get(f"f{number}").run.start("everything", f"t{number}", execution_id="x")
            for number in range(8)
        ]
        await runtime.run_until_idle()
        tokens = dict(world.tokens)
        await runtime.scale(3)
        await runtime.advance(hours=2)
        assert [(await handle.status()).waits_for for handle in handles] == ["promise 'approval'"] * 8
        await runtime.namespace(Flow).resolve_promise(tokens["approval"], "yes")
        await runtime.scale(1)
        await runtime.advance(days=6, hours=23)
        statuses = [(await handle.status()).status for handle in handles]
        assert sorted(statuses) == ["completed", *["failed"] * 7]
        for number in range(8):
            assert await runtime.namespace(Till).get(f"t{number}").total() == (12, 2)


@pytest.fixture
async def rt() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime(memory=True, settings=Settings(durability="off")) as runtime:
        yield runtime


async def test_a_process_that_dies_while_executions_are_parked_loses_and_repeats_nothing(
    rt: LocalRuntime, world: World
) -> None:
    async def sleepy(self: Flow, ctx: DurableContext) -> int:
        for number in range(5):
            await ctx.sleep("1d")
            await ctx.step("do", self.do, f"{number}")
        return ctx.now_ms

    world.functions["sleepy"] = sleepy
    handle = await rt.namespace(Flow).get("flow").run.start("sleepy", execution_id="x")
    for _ in range(50):
        await rt.advance(hours=2.5)
        await rt.crash()
    await handle.result()
    assert world.did == ["0", "1", "2", "3", "4"]
