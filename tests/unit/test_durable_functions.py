"""Durable functions: steps once in effect, sleeps and promises that hold no turn, replays that run nothing twice."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from actors import DurableContext, DurableObject, Rejected, RetryPolicy, durable
from actors.errors import (
    AmbiguousEffect,
    ExecutionCanceled,
    ExecutionDiverged,
    ExecutionExists,
    ExecutionUnfinished,
    InvalidClassOption,
    InvalidOption,
    InvalidPromiseToken,
    MethodNotCallable,
    PromiseTimeout,
    TooManyExecutions,
    TooManySteps,
    UnknownExecution,
    WriteOutsideStep,
)
from actors.settings import Settings
from actors.testing import LocalRuntime

DAY_MS = 86_400_000


class Busy(Exception):
    pass


class Refused(Rejected):
    pass


class Account(DurableObject):
    """What other objects are called for."""

    def charge(self, amount: int) -> int:
        self.storage["charged"] = self.storage.get("charged", 0) + amount
        return int(self.storage["charged"])

    def charged(self) -> int:
        return int(self.storage.get("charged", 0))


class Order(DurableObject):
    """Runs the functions of these tests. `log` is what really ran, in this process and for all time."""

    log: ClassVar[list[str]] = []
    tokens: ClassVar[list[str]] = []
    failing: ClassVar[int] = 0
    order: ClassVar[list[str]] = ["a", "b"]
    gate: ClassVar[asyncio.Event | None] = None

    def note(self, what: str) -> str:
        Order.log.append(what)
        self.storage[what] = self.storage.get(what, 0) + 1
        return what.upper()

    def noted(self, what: str) -> int:
        return int(self.storage.get(what, 0))

    @durable
    async def plain(self, ctx: DurableContext, start: str) -> list[Any]:
        first = await ctx.step("first", self.note, start)
        await ctx.sleep("30d")
        second = await ctx.step("second", self.note, "second")
        return [first, second, ctx.now_ms]

    async def pay(self, amount: int) -> int:
        Order.log.append("pay")
        self.storage["paid"] = self.storage.get("paid", 0) + amount
        total: int = await self.namespace(Account).get("bank").charge(amount)
        return total

    @durable
    async def charged(self, ctx: DurableContext) -> int:
        await ctx.step("before", self.note, "before")
        total: int = await ctx.step("pay", self.pay, 5)
        await ctx.step("after", self.note, "after")
        return total

    def flaky(self) -> str:
        Order.log.append("flaky")
        self.storage["tries"] = self.storage.get("tries", 0) + 1
        if Order.failing > 0:
            Order.failing -= 1
            raise Busy("not yet")
        return "done"

    @durable
    async def retried(self, ctx: DurableContext) -> Any:
        policy = RetryPolicy(max_attempts=4, base_ms=60_000, factor=2, cap_ms=600_000, jitter=0)
        try:
            return await ctx.step("flaky", self.flaky, retry=policy)
        except Busy as error:
            return await ctx.step("give up", self.note, f"gave up: {error}")

    def hand_out(self, token: str) -> None:
        Order.tokens.append(token)

    @durable
    async def approved(self, ctx: DurableContext) -> Any:
        approval = ctx.promise("approval", timeout="7d")
        await ctx.step("ask", self.hand_out, approval.token)
        try:
            return await approval
        except PromiseTimeout:
            return await ctx.step("late", self.note, "late")

    @durable
    async def in_order(self, ctx: DurableContext) -> None:
        for name in Order.order:
            await ctx.step(name, self.note, name)
            await ctx.sleep("1h")

    @durable
    async def writes(self, ctx: DurableContext, how: str) -> None:
        if how == "storage":
            self.storage["x"] = 1
        elif how == "timer":
            self.timers.set("x", after="1s", method="note")
        elif how == "send":
            self.send(Account, "bank").charge(1)
        elif how == "call":
            await self.namespace(Account).get("bank").charge(1)

    @durable
    async def fails(self, ctx: DurableContext) -> None:
        await ctx.step("a", self.note, "a")
        raise Refused("no")

    async def waits(self) -> str:
        Order.log.append("effect")
        if Order.gate is not None:
            await Order.gate.wait()
        return "effect"

    @durable
    async def guarded(self, ctx: DurableContext, ambiguous: Any) -> Any:
        return await ctx.step("effect", self.waits, effect="guarded", ambiguous=ambiguous)

    @durable
    async def many(self, ctx: DurableContext, count: int) -> int:
        for number in range(count):
            await ctx.step("one", self.note, f"n{number}")
        return count

    @durable
    async def together(self, ctx: DurableContext) -> list[Any]:
        return list(await asyncio.gather(*(ctx.step(name, self.note, name) for name in ("x", "y", "z"))))

    @durable
    async def drawn(self, ctx: DurableContext) -> list[Any]:
        before = [ctx.random.random(), str(ctx.uuid()), ctx.now_ms]
        await ctx.step("a", self.note, repr(before))
        await ctx.sleep("1d")
        return before

    @durable
    async def too_early(self, ctx: DurableContext, how: str) -> None:
        await ctx.step("x", self.note, "x", effect=how)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def fresh() -> None:
    Order.log, Order.tokens, Order.failing, Order.order, Order.gate = [], [], 0, ["a", "b"], None


@pytest.fixture
async def runtime() -> Any:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        yield runtime


async def test_steps_run_once_and_a_sleep_of_a_month_survives_restarts(runtime: LocalRuntime) -> None:
    order = runtime.namespace(Order).get("o")
    began_ms = runtime.clock.wall_ms()
    handle = await order.plain.start("hello")
    await runtime.advance(days=29)
    status = await handle.status()
    assert (status.status, status.waits_for, status.wake_ms) == ("running", "a sleep", began_ms + 30 * DAY_MS)
    await runtime.crash()
    await runtime.advance(days=1)
    assert await handle.result() == ["HELLO", "SECOND", began_ms + 30 * DAY_MS]
    assert Order.log == ["hello", "second"]
    assert (await handle.status()).status == "completed"


async def test_an_execution_that_sleeps_holds_no_turn_and_no_memory(runtime: LocalRuntime) -> None:
    order = runtime.namespace(Order).get("o")
    await order.plain.start("a")
    await runtime.advance(seconds=1)
    assert await order.noted("a") == 1
    assert await runtime.evict(order)


async def test_the_timers_of_executions_are_not_the_applications_and_survive_delete_all(runtime: LocalRuntime) -> None:
    class Keeper(DurableObject):
        def timers_set(self) -> int:
            return len(self.timers.list())

        def wipe(self) -> None:
            self.storage.delete_all()

        def done(self) -> str:
            return "done"

        @durable
        async def sleeps(self, ctx: DurableContext) -> Any:
            await ctx.sleep("1d")
            return await ctx.step("done", self.done)

    keeper = runtime.namespace(Keeper).get("k")
    handle = await keeper.sleeps.start()
    await runtime.advance(seconds=1)
    assert await keeper.timers_set() == 0
    await keeper.wipe()
    await runtime.advance(days=1)
    assert await handle.result() == "done"


async def test_starting_the_same_execution_again_finds_it_and_another_one_is_refused(runtime: LocalRuntime) -> None:
    order = runtime.namespace(Order).get("o")
    for _ in range(3):
        handle = await order.plain.start("a", execution_id="one")
        await runtime.advance(days=11)
    assert Order.log == ["a", "second"]
    with pytest.raises(ExecutionExists):
        await order.plain.start("b", execution_id="one")
    with pytest.raises(ExecutionExists):
        await order.charged.start(execution_id="one")
    assert (await order.plain.execution("one").result()) == await handle.result()
    with pytest.raises(UnknownExecution):
        await order.plain.execution("two").status()
    for wrong in ("", "a\0b", "x" * 201):
        with pytest.raises(InvalidOption):
            await order.plain.start("a", execution_id=wrong)


async def test_a_durable_function_can_not_be_called(runtime: LocalRuntime) -> None:
    with pytest.raises(MethodNotCallable, match="start"):
        await runtime.namespace(Order).get("o").plain("a")


async def test_a_step_and_what_it_calls_happen_once_whichever_commit_the_crash_is_at() -> None:
    for crash_at in range(1, 14):
        Order.log = []
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            order, bank = runtime.namespace(Order).get("o"), runtime.namespace(Account).get("bank")
            handle = await order.charged.start()
            commits = sum(each["commits"] for each in runtime.status())
            for _ in range(2_000):
                await asyncio.sleep(0)
                runtime.clock.run_due()  # type: ignore[attr-defined]  # a virtual clock
                if sum(each["commits"] for each in runtime.status()) >= commits + crash_at - 1:
                    break
            await runtime.crash()
            await runtime.advance(seconds=30)
            assert await handle.result() == 5
            assert await bank.charged() == 5
            assert [await order.noted(what) for what in ("before", "paid", "after")] == [1, 5, 1]


async def test_a_step_that_fails_is_undone_tried_again_and_in_the_end_raised(runtime: LocalRuntime) -> None:
    order = runtime.namespace(Order).get("o")
    Order.failing = 2
    handle = await order.retried.start()
    await runtime.advance(seconds=59)
    assert Order.log == ["flaky"]
    assert "tried again" in (await handle.status()).waits_for
    await runtime.crash()
    await runtime.advance(minutes=3)
    assert await handle.result() == "done"
    assert Order.log == ["flaky"] * 3
    assert await order.noted("tries") == 1, "what a failed try wrote was undone"
    Order.failing = 100
    other = await order.retried.start()
    await runtime.advance(hours=1)
    assert await other.result() == "GAVE UP: NOT YET"
    assert Order.log.count("flaky") == 3 + 4


async def test_a_promise_is_resolved_by_its_token_from_outside(runtime: LocalRuntime) -> None:
    orders = runtime.namespace(Order)
    handle = await orders.get("o").approved.start()
    await runtime.advance(days=1)
    (token,) = Order.tokens
    await runtime.crash()
    for wrong in (token[:-1] + ("A" if token[-1] != "A" else "B"), "x", "", None, token.replace("msp1", "msp2")):
        with pytest.raises(InvalidPromiseToken):
            await orders.resolve_promise(wrong, True)  # type: ignore[arg-type]
    with pytest.raises(InvalidPromiseToken):
        await runtime.namespace(Account).resolve_promise(token)
    assert await orders.resolve_promise(token, {"ok": True})
    assert not await orders.resolve_promise(token, "again")
    await runtime.run_until_idle()
    assert await handle.result() == {"ok": True}
    assert len(Order.tokens) == 1


async def test_a_promise_times_out_and_is_not_resolved_any_more(runtime: LocalRuntime) -> None:
    orders = runtime.namespace(Order)
    handle = await orders.get("o").approved.start()
    await runtime.advance(days=6, hours=23)
    with pytest.raises(ExecutionUnfinished):
        await handle.result(timeout="1ms")
    await runtime.advance(hours=2)
    assert await handle.result() == "LATE"
    assert not await orders.resolve_promise(Order.tokens[0], True)


async def test_code_that_changed_under_an_execution_is_found_out_and_the_execution_aborted(
    runtime: LocalRuntime,
) -> None:
    order = runtime.namespace(Order).get("o")
    handle = await order.in_order.start()
    await runtime.advance(minutes=5)
    Order.order = ["b", "a"]
    await runtime.advance(hours=1)
    with pytest.raises(ExecutionDiverged, match="step 0"):
        await handle.result()
    assert (await handle.status()).status == "aborted"
    assert Order.log == ["a"]


@pytest.mark.parametrize("how", ["storage", "timer", "send", "call"])
async def test_what_a_replay_would_repeat_is_refused_outside_a_step(runtime: LocalRuntime, how: str) -> None:
    handle = await runtime.namespace(Order).get("o").writes.start(how)
    await runtime.advance(seconds=1)
    with pytest.raises(WriteOutsideStep):
        await handle.result()
    assert await runtime.namespace(Account).get("bank").charged() == 0


async def test_what_the_function_raises_is_the_outcome(runtime: LocalRuntime) -> None:
    handle = await runtime.namespace(Order).get("o").fails.start()
    await runtime.advance(seconds=1)
    with pytest.raises(Refused, match="no"):
        await handle.result()
    assert (await handle.status()).status == "failed"


@pytest.mark.parametrize("ambiguous", ["fail", "rerun", "skip"])
async def test_the_ambiguous_window_of_a_guarded_step_has_the_declared_end(
    runtime: LocalRuntime, ambiguous: str
) -> None:
    order = runtime.namespace(Order).get("o")
    Order.gate = asyncio.Event()
    handle = await order.guarded.start(ambiguous)
    await runtime.run_until_idle()
    assert Order.log == ["effect"]
    await runtime.crash()
    Order.gate.set()
    await runtime.advance(seconds=5)
    if ambiguous == "fail":
        with pytest.raises(AmbiguousEffect):
            await handle.result()
    else:
        assert await handle.result() == ("effect" if ambiguous == "rerun" else None)
    assert len(Order.log) == (2 if ambiguous == "rerun" else 1)


async def test_a_guarded_step_without_a_policy_is_refused(runtime: LocalRuntime) -> None:
    order = runtime.namespace(Order).get("o")
    for how in ("guarded", "sometimes"):
        handle = await order.too_early.start(how)
        await runtime.advance(seconds=1)
        with pytest.raises(InvalidOption, match="effect"):
            await handle.result()
    assert Order.log == []


async def test_a_canceled_execution_does_nothing_more(runtime: LocalRuntime) -> None:
    order = runtime.namespace(Order).get("o")
    handle = await order.plain.start("a")
    await runtime.advance(days=1)
    assert await handle.cancel()
    assert not await handle.cancel()
    await runtime.advance(days=6)
    with pytest.raises(ExecutionCanceled):
        await handle.result()
    await runtime.advance(days=40)
    assert Order.log == ["a"]


async def test_steps_that_are_awaited_together_run_one_after_the_other_in_their_order(runtime: LocalRuntime) -> None:
    handle = await runtime.namespace(Order).get("o").together.start()
    await runtime.advance(seconds=1)
    assert await handle.result() == ["X", "Y", "Z"]
    assert Order.log == ["x", "y", "z"]


async def test_time_and_randomness_are_the_same_at_each_replay(runtime: LocalRuntime) -> None:
    handle = await runtime.namespace(Order).get("o").drawn.start()
    await runtime.advance(hours=1)
    await runtime.crash()
    await runtime.advance(days=2)
    assert repr(await handle.result()) == Order.log[0]


async def test_limits_have_their_errors() -> None:
    settings = Settings(max_journal_steps=3, max_executions_per_object=2)
    async with LocalRuntime(memory=True, settings=settings) as runtime:
        order = runtime.namespace(Order).get("o")
        handle = await order.many.start(4)
        await runtime.advance(seconds=1)
        with pytest.raises(TooManySteps):
            await handle.result()
        assert Order.log == ["n0", "n1", "n2"]
        await order.many.start(1)
        with pytest.raises(TooManyExecutions):
            await order.many.start(1)


async def test_ended_executions_are_kept_for_their_time_and_then_forgotten(runtime: LocalRuntime) -> None:
    order = runtime.namespace(Order).get("o")
    completed, failed = await order.many.start(20), await order.fails.start()
    await runtime.advance(days=6)
    assert await completed.result() == 20
    await runtime.advance(days=2)
    with pytest.raises(UnknownExecution):
        await completed.status()
    assert (await failed.status()).status == "failed"
    await runtime.advance(days=30)
    with pytest.raises(UnknownExecution):
        await failed.status()
    for partition in runtime.partitions:
        assert partition is not None
        assert partition.store.scan("journal") == partition.store.scan("executions") == []
        assert partition.store.scan("timers") == []


async def test_deleting_the_object_removes_its_executions(runtime: LocalRuntime) -> None:
    orders = runtime.namespace(Order)
    handle = await orders.get("o").plain.start("a")
    await runtime.advance(days=1)
    assert await orders.delete("o")
    await runtime.advance(days=60)
    assert Order.log == ["a"]
    with pytest.raises(UnknownExecution):
        await handle.status()


async def test_executions_move_with_their_object(runtime: LocalRuntime) -> None:
    order = runtime.namespace(Order).get("o")
    handle = await order.plain.start("a")
    await runtime.advance(days=1)
    for partitions in (3, 1, 2):
        await runtime.scale(partitions)
    await runtime.advance(days=30)
    assert (await handle.result())[:2] == ["A", "SECOND"]
    assert Order.log == ["a", "second"]


def test_interleaved_classes_have_no_durable_functions() -> None:
    class Loose(DurableObject):
        turns = "interleaved"

        @durable
        async def flow(self, ctx: DurableContext) -> None:
            return None

    from actors.durable_object import class_info

    with pytest.raises(InvalidClassOption, match="serial"):
        class_info(Loose)
    with pytest.raises(InvalidOption, match="async def"):
        durable(lambda self, ctx: None)


async def test_an_execution_whose_segments_keep_failing_is_a_dead_letter_and_goes_on_when_that_is_redriven(
    runtime: LocalRuntime,
) -> None:
    order = runtime.namespace(Order).get("o")
    handle = await order.plain.start("a")
    await runtime.advance(days=1)
    from actors.durable_object import class_info

    functions = class_info(Order).durable
    gone = functions.pop("plain")  # as when a newer version of the code lacks it
    try:
        await runtime.advance(days=31)
    finally:
        functions["plain"] = gone
    (letter,) = await runtime.dead_letters()
    assert (letter.name, letter.key) == (handle.execution_id, "o")
    assert "no durable function any more" in letter.error
    assert (await handle.status()).status == "buried"
    assert await runtime.redrive(letter)
    await runtime.advance(seconds=1)
    assert (await handle.result())[:2] == ["A", "SECOND"]
