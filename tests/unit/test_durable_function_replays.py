"""What a durable function sees while several things of it go on: the same at each replay, and what did happen."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from actors import DurableContext, ExecutionHandle, Rejected, RetryPolicy, executions
from actors.errors import InvalidOption, TurnOver
from actors.testing import LocalRuntime
from tests.support.workflows import Flow, World, Wrong

HOUR_MS = 3_600_000
THREE_TRIES = RetryPolicy(max_attempts=3, base_ms=1_000, factor=1, cap_ms=1_000, jitter=0)


class Declined(Rejected):
    pass


@pytest.fixture
def world() -> World:
    Flow.world = World()
    return Flow.world


@pytest.fixture
async def runtime(world: World) -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        yield runtime


async def run(runtime: LocalRuntime, code: Callable[..., Any], **advance: float) -> ExecutionHandle:
    Flow.world.functions["code"] = code
    handle: ExecutionHandle = await runtime.namespace(Flow).get("f").run.start("code", execution_id="x")
    await runtime.advance(**advance)
    return handle


async def test_time_has_passed_once_all_that_was_gathered_has_ended(runtime: LocalRuntime, world: World) -> None:
    seen: list[int] = []

    async def later(flow: Flow, ctx: DurableContext) -> str:
        await ctx.sleep("3h")
        return await ctx.step("last", flow.do, "last")

    async def code(flow: Flow, ctx: DurableContext) -> Any:
        began_ms = ctx.now_ms
        results = await ctx.gather(ctx.sleep("1h"), later(flow, ctx), ctx.step("a", flow.do, "a"))
        seen.append(ctx.now_ms - began_ms)
        await ctx.sleep("1h")
        return results, await ctx.gather()

    handle = await run(runtime, code, hours=3, minutes=30)
    await runtime.crash()
    await runtime.advance(hours=1)
    assert await handle.result() == ([None, "last", "a"], [])
    assert seen == [3 * HOUR_MS] * len(seen)
    assert len(seen) > 1, "it was replayed"
    assert world.did == ["a", "last"]


async def test_which_of_several_errors_a_gather_raises_is_the_same_at_each_replay(
    runtime: LocalRuntime, world: World
) -> None:
    async def fails(ctx: DurableContext, what: str, after: str) -> None:
        await ctx.sleep(after)
        raise Wrong(what)

    async def code(flow: Flow, ctx: DurableContext) -> None:
        try:
            await ctx.gather(fails(ctx, "slow", "2h"), fails(ctx, "fast", "1h"))
        except Wrong as error:
            await ctx.step("tell", flow.do, str(error))
        await ctx.sleep("3h")
        await ctx.step("end", flow.do, "end")

    handle = await run(runtime, code, minutes=61)
    await runtime.crash()
    await runtime.advance(hours=8)
    await handle.result()
    assert world.did == ["slow", "end"]


async def test_what_a_branch_that_is_given_up_has_gathered_is_given_up_too(runtime: LocalRuntime, world: World) -> None:
    async def works(flow: Flow, ctx: DurableContext, what: str) -> None:
        await ctx.sleep("1h")
        await ctx.step(what, flow.do, what)

    async def code(flow: Flow, ctx: DurableContext) -> int:
        # all are due in the same segment, in which the first is decided: none of the others may still do something
        place, _ = await ctx.first(
            ctx.sleep("1h"),
            ctx.gather(works(flow, ctx, "a"), works(flow, ctx, "b")),
            ctx.first(works(flow, ctx, "c"), works(flow, ctx, "d")),
        )
        await ctx.gather(works(flow, ctx, "e"), works(flow, ctx, "f"))
        return place

    handle = await run(runtime, code, hours=1, minutes=30)
    await runtime.crash()
    await runtime.advance(hours=3)
    assert await handle.result() == 0
    assert sorted(world.did) == ["e", "f"]


@pytest.mark.parametrize("how", ["first", "gather"])
async def test_tasks_which_a_replay_could_not_give_up_are_refused(
    runtime: LocalRuntime, world: World, how: str
) -> None:
    async def works(flow: Flow, ctx: DurableContext, what: str) -> None:
        for number in range(3):
            await ctx.sleep("1h")
            await ctx.step(what, flow.do, f"{what}{number}")

    async def code(flow: Flow, ctx: DurableContext) -> None:
        await getattr(ctx, how)(asyncio.gather(works(flow, ctx, "a"), works(flow, ctx, "b")), ctx.sleep("90m"))

    handle = await run(runtime, code, days=1)
    with pytest.raises(InvalidOption, match=r"ctx\.gather"):
        await handle.result()
    assert world.did == []


async def test_the_turn_tells_a_function_what_its_context_does(runtime: LocalRuntime, world: World) -> None:
    seen: list[Any] = []

    async def code(flow: Flow, ctx: DurableContext) -> Any:
        def in_step() -> bool:
            return flow.turn.now_ms >= seen[0][0] + HOUR_MS and 0 <= flow.turn.random.random() < 1

        seen.append((flow.turn.now_ms, flow.turn.random.random(), ctx.random.random()))
        await ctx.sleep("1h")
        assert (flow.turn.now_ms, flow.turn.now) == (ctx.now_ms, ctx.now)
        return await ctx.step("in a step", in_step)

    handle = await run(runtime, code, minutes=30)
    await runtime.crash()
    await runtime.advance(hours=1)
    assert await handle.result() is True
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert seen[0][1] != seen[0][2], "one source of random numbers, drawn from twice"


@pytest.mark.parametrize("error", [Declined, Wrong])
async def test_a_no_of_the_application_is_not_asked_for_again(
    runtime: LocalRuntime, world: World, error: type[Exception]
) -> None:
    async def code(flow: Flow, ctx: DurableContext) -> str:
        def pay() -> None:
            flow.do("pay")
            raise error("no")

        try:
            await ctx.step("pay", pay, retry=THREE_TRIES)
        except error as no:
            return str(no)
        return "paid"

    handle = await run(runtime, code, minutes=1)
    assert await handle.result() == "no"
    assert world.did == ["pay"] * (1 if error is Declined else 3)
    assert await runtime.namespace(Flow).get("f").state() == {}, "undone"


async def test_handles_of_one_execution_are_equal_and_can_be_pickled(runtime: LocalRuntime, world: World) -> None:
    async def code(flow: Flow, ctx: DurableContext) -> str:
        return await ctx.step("a", flow.do, "a")

    handle = await run(runtime, code, seconds=1)
    flow = runtime.namespace(Flow).get("f").with_options(timeout="5s")
    same = flow.run.execution("x")
    assert same == handle
    assert hash(same) == hash(handle)
    assert same not in (flow.run.execution("y"), runtime.namespace(Flow).get("g").run.execution("x"), "x")
    arrived = pickle.loads(pickle.dumps(same))
    assert arrived == handle
    assert repr(arrived) == "<ExecutionHandle 'x' of Flow('f')>"


async def test_a_segment_that_is_thrown_away_after_its_turn_was_over_ends_without_a_word() -> None:
    class Thrown:
        """A run whose turn is over."""

        is_over = False

        @property
        def turn(self) -> Any:
            raise TurnOver("this turn has been superseded")

        async def drive(self) -> None:
            await asyncio.Event().wait()

    segment = executions._drive(Thrown())  # type: ignore[arg-type]
    segment.send(None)
    segment.close()  # as it is when its loop has ended before the task could: must not raise
