"""Durable functions whose users depend on them: what goes wrong around an execution, and what must not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from typing import Any, ClassVar

import pytest

from actors import DurableContext, DurableObject, ExecutionHandle, Rejected, RetryPolicy, durable
from actors.errors import (
    AmbiguousEffect,
    ExecutionBuried,
    ExecutionDiverged,
    ExecutionExists,
    InvalidArguments,
    InvalidOption,
    InvalidPromiseToken,
    JournalFull,
    NestedStep,
    ReentrantCall,
    StepNotAwaited,
    TooManyTimers,
    TransactionClosed,
    TurnOver,
    TurnTimeout,
    WriteOutsideStep,
    WriteSetTooLarge,
    WrongThread,
)
from actors.promise_token import PromiseAddress
from actors.settings import Settings
from actors.testing import LocalRuntime
from timers.backoff import NAMED_TIMER_RETRY
from timers.errors import InvalidSchedule

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
#: Tries at once, so that a test need not wait for them.
THREE_TRIES = RetryPolicy(max_attempts=3, base_ms=1_000, factor=1, cap_ms=1_000, jitter=0)


class No(Rejected):
    pass


class Busy(Exception):
    pass


class Bank(DurableObject):
    def charge(self, amount: int) -> int:
        total: int = self.storage.get("charged", 0) + amount
        self.storage["charged"] = total
        return total

    def charged(self) -> int:
        return int(self.storage.get("charged", 0))


class Desk(DurableObject):
    """`log` is what really ran. `code` is the function that `flow` runs now: code that changes under an execution."""

    log: ClassVar[list[Any]] = []
    code: ClassVar[Any] = None
    kept: ClassVar[Any] = None
    gate: ClassVar[asyncio.Event | None] = None

    def note(self, what: Any) -> Any:
        Desk.log.append(what)
        self.storage[str(what)] = self.storage.get(str(what), 0) + 1
        return what

    def noted(self, what: Any) -> int:
        return int(self.storage.get(str(what), 0))

    async def slow(self, what: str) -> str:
        Desk.log.append(f"{what} begins")
        assert Desk.gate is not None
        await Desk.gate.wait()
        return str(self.note(what))

    async def charge(self, amount: int) -> int:
        total: int = await self.namespace(Bank).get("bank").charge(amount)
        return total

    def set_timer(self, name: str) -> None:
        self.timers.set(name, after="1d", method="note")

    async def start_other(self, key: str) -> str:
        handle = await self.namespace(Desk).get(key).flow.start()
        return handle.execution_id

    async def own_result(self) -> Any:
        return await self.namespace(Desk).get(self.key).flow.execution("x").result()

    @durable
    async def flow(self, ctx: DurableContext) -> Any:
        return await Desk.code(self, ctx)

    @durable
    async def pays(self, ctx: DurableContext, amount: int, *, note: str = "") -> int:
        total: int = await ctx.step("charge", self.charge, amount)
        return total


@pytest.fixture(autouse=True)
def fresh() -> None:
    Desk.log, Desk.code, Desk.kept, Desk.gate = [], None, None, None


@pytest.fixture
async def runtime() -> Any:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        yield runtime


async def run(runtime: LocalRuntime, code: Any, key: str = "d", **advance: float) -> ExecutionHandle:
    Desk.code = code
    handle: ExecutionHandle = await runtime.namespace(Desk).get(key).flow.start(execution_id="x")
    await runtime.advance(**(advance or {"seconds": 5}))
    return handle


# --- divergence -------------------------------------------------------------------------------------------


async def test_code_that_ends_before_its_journal_is_found_out(runtime: LocalRuntime) -> None:
    async def long(self: Desk, ctx: DurableContext) -> str:
        await ctx.step("a", self.note, "a")
        await ctx.step("b", self.note, "b")
        await ctx.sleep("1d")
        return "long"

    async def short(self: Desk, ctx: DurableContext) -> str:
        await ctx.step("a", self.note, "a")
        return "short"

    handle = await run(runtime, long)
    await runtime.crash()
    Desk.code = short
    await runtime.advance(days=2)
    with pytest.raises(ExecutionDiverged, match="ended"):
        await handle.result()
    assert (await handle.status()).status == "aborted"


async def test_code_that_raises_before_its_journal_has_ended_is_aborted_and_not_failed(runtime: LocalRuntime) -> None:
    async def good(self: Desk, ctx: DurableContext) -> str:
        await ctx.step("a", self.note, "a")
        await ctx.sleep("1d")
        return "good"

    async def broken(self: Desk, ctx: DurableContext) -> str:
        raise KeyError("typo")

    handle = await run(runtime, good)
    await runtime.crash()
    Desk.code = broken
    await runtime.advance(days=2)
    with pytest.raises(ExecutionDiverged, match="typo"):
        await handle.result()


async def test_a_function_can_not_catch_its_divergence_and_go_on(runtime: LocalRuntime) -> None:
    async def before(self: Desk, ctx: DurableContext) -> None:
        await ctx.step("pay", self.note, "pay")
        await ctx.sleep("1d")

    async def after(self: Desk, ctx: DurableContext) -> None:
        try:
            await ctx.step("pay more", self.note, "pay more")
        except Exception:
            await ctx.step("refund", self.note, "refund")

    handle = await run(runtime, before)
    await runtime.crash()
    Desk.code = after
    await runtime.advance(days=2)
    with pytest.raises(ExecutionDiverged):
        await handle.result()
    assert Desk.log == ["pay"]


async def test_an_aborted_execution_goes_on_where_it_was_once_its_code_is_back(runtime: LocalRuntime) -> None:
    async def good(self: Desk, ctx: DurableContext) -> str:
        await ctx.step("a", self.note, "a")
        await ctx.sleep("1d")
        await ctx.step("b", self.note, "b")
        return "good"

    async def bad(self: Desk, ctx: DurableContext) -> None:
        await ctx.sleep("3d")
        await ctx.step("other", self.note, "other")

    handle = await run(runtime, good)
    await runtime.crash()
    Desk.code = bad
    await runtime.advance(days=2)
    assert (await handle.status()).status == "aborted"
    Desk.code = good
    assert await handle.resume()
    await runtime.advance(seconds=1)
    assert await handle.result() == "good"
    assert not await handle.resume()
    assert Desk.log == ["a", "b"]


async def test_a_result_that_can_not_be_read_any_more_stops_the_execution_and_is_not_the_functions_error(
    runtime: LocalRuntime,
) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        try:
            await ctx.step("a", self.note, "a")
        except Exception:
            await ctx.step("refund", self.note, "refund")
        await ctx.sleep("1d")
        return "done"

    handle = await run(runtime, code)
    await runtime.crash()
    for partition in runtime.partitions:
        assert partition is not None
        for row in partition.store.scan("journal"):
            if row[2] == 0:
                partition.persist([("journal", row[:3], (*row[3:-1], b"\xc1"))])
    await runtime.advance(days=2)
    assert (await handle.status()).status == "buried"
    with pytest.raises(ExecutionBuried, match="resume"):
        await handle.result()
    assert Desk.log == ["a"]


# --- steps ------------------------------------------------------------------------------------------------


async def test_a_step_that_is_never_awaited_is_found_out(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> str:
        Desk.kept = ctx.step("charge", self.note, "charge")
        return "paid"

    handle = await run(runtime, code)
    with pytest.raises(StepNotAwaited, match="charge"):
        await handle.result()
    Desk.kept.close()


@pytest.mark.parametrize("how", ["step", "sleep", "promise", "await promise"])
async def test_what_needs_the_context_inside_a_step_is_refused_and_does_not_hang(
    runtime: LocalRuntime, how: str
) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        promise = ctx.promise("p")

        async def inside() -> Any:
            if how == "await promise":
                return await promise
            return await {
                "step": lambda: ctx.step("b", self.note, "b"),
                "sleep": lambda: ctx.sleep("1s"),
                "promise": lambda: ctx.promise("q"),
            }[how]()

        return await ctx.step("a", inside)

    handle = await run(runtime, code)
    with pytest.raises(NestedStep):
        await handle.result()


async def test_the_context_is_of_no_use_outside_its_function(runtime: LocalRuntime) -> None:
    class Leaky(DurableObject):
        @durable
        async def flow(self, ctx: DurableContext) -> None:
            Desk.kept = ctx
            await ctx.sleep("1d")

        async def abuse(self) -> None:
            await Desk.kept.step("x", Desk.log.append, "x")

    leaky = runtime.namespace(Leaky).get("l")
    await leaky.flow.start()
    await runtime.advance(seconds=1)
    with pytest.raises(TurnOver, match="context"):
        await leaky.abuse()
    with pytest.raises(TurnOver):
        Desk.kept.sleep("1s")
    assert Desk.log == []


async def test_a_step_that_runs_into_the_time_limit_has_failed_and_is_not_repeated_behind_its_policy() -> None:
    async with LocalRuntime(memory=True, settings=Settings(timer_turn_timeout_ms=60_000)) as runtime:

        async def code(self: Desk, ctx: DurableContext) -> Any:
            async def charge_and_hang() -> None:
                Desk.log.append("charge")
                await self.charge(5)
                await asyncio.Event().wait()

            try:
                await ctx.step("charge", charge_and_hang)
            except TurnTimeout:
                return await ctx.step("give up", self.note, "gave up")

        handle = await run(runtime, code, hours=5)
        assert await handle.result() == "gave up"
        assert Desk.log == ["charge", "gave up"]
        assert await runtime.namespace(Bank).get("bank").charged() == 5


async def test_a_step_that_runs_into_the_time_limit_is_tried_again_as_its_policy_says() -> None:
    async with LocalRuntime(memory=True, settings=Settings(timer_turn_timeout_ms=60_000)) as runtime:

        async def code(self: Desk, ctx: DurableContext) -> Any:
            async def hang() -> None:
                Desk.log.append("try")
                await asyncio.Event().wait()

            await ctx.step("hang", hang, retry=THREE_TRIES)

        handle = await run(runtime, code, hours=5)
        with pytest.raises(TurnTimeout):
            await handle.result()
        assert Desk.log == ["try"] * 3


@pytest.mark.parametrize("ambiguous", ["fail", "skip", "rerun"])
async def test_a_guarded_step_that_runs_into_the_time_limit_ends_as_declared(ambiguous: Any) -> None:
    async with LocalRuntime(memory=True, settings=Settings(timer_turn_timeout_ms=60_000)) as runtime:

        async def code(self: Desk, ctx: DurableContext) -> Any:
            async def hang() -> None:
                Desk.log.append("try")
                await asyncio.Event().wait()

            return await ctx.step("hang", hang, effect="guarded", ambiguous=ambiguous)

        handle = await run(runtime, code, hours=5)
        if ambiguous == "skip":
            assert await handle.result() is None
        else:
            with pytest.raises(AmbiguousEffect if ambiguous == "fail" else TurnTimeout):
                await handle.result()
        assert Desk.log == ["try"]


async def test_a_step_that_writes_too_much_or_leaves_a_transaction_open_has_failed_once(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> list[str]:
        def much() -> None:
            Desk.log.append("much")
            for number in range(20_000):
                self.storage[f"k{number}"] = 1

        def left_open() -> None:
            Desk.log.append("open")
            Desk.kept = self.storage.transaction()  # or it would end with the garbage
            Desk.kept.__enter__()
            self.storage["x"] = 1

        found = []
        for step in (much, left_open):
            try:
                await ctx.step(step.__name__, step)
            except (WriteSetTooLarge, TransactionClosed) as error:
                found.append(type(error).__name__)
        return found

    handle = await run(runtime, code, hours=5)
    assert await handle.result() == ["WriteSetTooLarge", "TransactionClosed"]
    assert Desk.log == ["much", "open"]
    assert await runtime.namespace(Desk).get("d").noted("x") == 0


async def test_a_step_that_is_cancelled_by_its_own_code_or_exits_has_failed(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> list[str]:
        async def cancels() -> None:
            self.storage["cancelled"] = 1
            raise asyncio.CancelledError("by itself")

        def exits() -> None:
            raise SystemExit(3)

        found = []
        for step in (cancels, exits):
            try:
                await ctx.step(step.__name__, step)
            except Exception as error:
                found.append(str(error))
        return found

    handle = await run(runtime, code, hours=5)
    first, second = await handle.result()
    assert "CancelledError" in first
    assert "sys.exit" in second
    assert await runtime.namespace(Desk).get("d").noted("cancelled") == 0


async def test_an_exception_that_can_not_be_carried_arrives_in_words(runtime: LocalRuntime) -> None:
    class Odd(Exception):
        def __init__(self, what: Any) -> None:
            super().__init__(what)
            self.lock = asyncio.Lock()

    async def code(self: Desk, ctx: DurableContext) -> str:
        def raises() -> None:
            raise Odd(object())

        try:
            await ctx.step("odd", raises)
        except Exception as error:
            return f"{error}"
        return "nothing"

    handle = await run(runtime, code)
    assert "object" in await handle.result()


async def test_attempts_and_delays_count_from_the_end_of_the_failed_run_and_survive_crashes(
    runtime: LocalRuntime,
) -> None:
    policy = RetryPolicy(max_attempts=3, base_ms=HOUR_MS, factor=1, cap_ms=HOUR_MS, jitter=0)
    ran_ms: list[int] = []

    async def code(self: Desk, ctx: DurableContext) -> Any:
        async def fails() -> None:
            ran_ms.append(runtime.clock.wall_ms())
            assert Desk.gate is not None
            await Desk.gate.wait()
            raise Busy("no")

        await ctx.step("fails", fails, retry=policy)

    Desk.gate = asyncio.Event()
    handle = await run(runtime, code)
    await runtime.advance(minutes=10)
    Desk.gate.set()
    await runtime.run_until_idle()
    failed_ms = runtime.clock.wall_ms()
    for _ in range(4):
        await runtime.crash()
        await runtime.advance(minutes=30)
    assert len(ran_ms) == 3
    assert ran_ms[1] == failed_ms + HOUR_MS
    with pytest.raises(Busy):
        await handle.result()


async def test_random_numbers_and_ids_drawn_in_steps_change_nothing_for_the_rest(runtime: LocalRuntime) -> None:
    seen: list[Any] = []

    async def code(self: Desk, ctx: DurableContext) -> list[Any]:
        drawn = [ctx.random.random()]
        inside = await ctx.step("in a step", lambda: str(ctx.uuid()))
        drawn.append(ctx.random.random())
        seen.append((*drawn, inside))
        await ctx.sleep("1d")
        drawn.append(ctx.random.random())
        return [*drawn, inside]

    handle = await run(runtime, code)
    await runtime.crash()
    await runtime.advance(days=2)
    result = await handle.result()
    assert len(set(seen)) == 1
    assert result[:2] == list(seen[0][:2])


# --- branches ---------------------------------------------------------------------------------------------


async def test_sleeps_that_are_awaited_together_end_together(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> int:
        began_ms = ctx.now_ms
        await asyncio.gather(ctx.sleep("1d"), ctx.sleep("3d"), ctx.sleep("2d"))
        await ctx.step("after", self.note, "after")
        return ctx.now_ms - began_ms

    handle = await run(runtime, code)
    await runtime.advance(hours=71)
    assert Desk.log == []
    await runtime.advance(hours=1)
    assert await handle.result() == 3 * DAY_MS


async def test_a_branch_that_waits_for_long_holds_up_no_other(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        promise = ctx.promise("slow")

        async def waits() -> Any:
            value = await promise
            return await ctx.step("resolved", self.note, f"resolved {value}")

        async def works() -> int:
            for number in range(3):
                await ctx.step("works", self.note, number)
                await ctx.sleep("1h")
            return ctx.now_ms

        Desk.kept = promise.token
        return await asyncio.gather(waits(), works())

    handle = await run(runtime, code)
    await runtime.advance(hours=1)
    await runtime.crash()
    await runtime.advance(hours=3)
    assert Desk.log == [0, 1, 2]
    assert await runtime.namespace(Desk).resolve_promise(Desk.kept, "late")
    await runtime.advance(seconds=1)
    assert (await handle.result())[0] == "resolved late"


async def test_branches_with_several_steps_replay_whatever_order_they_ran_in(runtime: LocalRuntime) -> None:
    """Each branch numbers its own steps: a replay runs through them in another order than the first run did."""
    seen: dict[str, set[Any]] = {}

    async def code(self: Desk, ctx: DurableContext) -> list[Any]:
        async def branch(name: str, pauses: list[str]) -> list[Any]:
            told: list[Any] = []
            for number, pause in enumerate(pauses):
                await ctx.sleep(pause)
                told.append((ctx.now_ms, ctx.random.random()))
                seen.setdefault(f"{name}{number}", set()).add(told[-1])
                await ctx.step("note", self.note, f"{name}{number}")
            return told

        return await asyncio.gather(branch("a", ["3h", "1h"]), branch("b", ["1h", "4h"]), branch("c", ["2h", "2h"]))

    handle = await run(runtime, code)
    for _ in range(12):
        await runtime.advance(minutes=30)
        await runtime.crash()
    await handle.result()
    assert Desk.log == ["b0", "c0", "a0", "a1", "c1", "b1"] or sorted(Desk.log) == ["a0", "a1", "b0", "b1", "c0", "c1"]
    assert len(Desk.log) == 6
    assert all(len(values) == 1 for values in seen.values()), seen


async def test_a_branch_beside_a_running_step_can_not_write_into_it(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        async def writes() -> None:
            await asyncio.sleep(0)
            self.storage["sneaked"] = 1

        Desk.gate = asyncio.Event()
        step = asyncio.ensure_future(ctx.step("slow", self.slow, "slow"))
        try:
            await writes()
        finally:
            Desk.gate.set()
        return await step

    handle = await run(runtime, code)
    with pytest.raises(WriteOutsideStep):
        await handle.result()
    assert await runtime.namespace(Desk).get("d").noted("sneaked") == 0


async def test_a_sleep_that_begins_beside_a_step_that_fails_is_not_undone_with_it(runtime: LocalRuntime) -> None:
    began = runtime.clock.wall_ms()

    async def code(self: Desk, ctx: DurableContext) -> Any:
        async def fails() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            raise Busy("no")

        async def sleeps() -> int:
            await ctx.sleep("1d")
            return ctx.now_ms

        told = await asyncio.gather(ctx.step("fails", fails, retry=THREE_TRIES), sleeps(), return_exceptions=True)
        return [repr(told[0]), told[1]]

    handle = await run(runtime, code)
    await runtime.advance(days=1)
    error, woke_ms = await handle.result()
    assert error == "Busy('no')"
    assert woke_ms == began + DAY_MS


async def test_a_hundred_steps_awaited_together_run_once_each(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        return await asyncio.gather(*(ctx.step("one", self.note, number) for number in range(100)))

    handle = await run(runtime, code)
    assert await handle.result() == list(range(100))
    assert Desk.log == list(range(100))


async def test_the_first_of_two_branches_decides_and_the_other_is_given_up(runtime: LocalRuntime) -> None:
    tokens: dict[str, str] = {}

    async def code(self: Desk, ctx: DurableContext) -> Any:
        promise = ctx.promise("answer")
        tokens[self.key] = promise.token

        async def answered() -> str:
            return f"answered {await promise}"

        async def reminded() -> str:
            try:
                for day in range(1, 4):
                    await ctx.sleep("1d")
                    await ctx.step("remind", self.note, f"{self.key}: reminder {day}")
            except asyncio.CancelledError:
                await ctx.step("given up", self.note, "a branch that is given up does nothing more")
            return "never answered"

        place, first = await ctx.first(answered(), reminded())
        assert place == ["answered yes", "never answered"].index(first)
        await ctx.step("end", self.note, f"{self.key}: {first}")
        await ctx.sleep("10d")
        return first

    first, second = await run(runtime, code, "d"), await run(runtime, code, "e")
    await runtime.advance(days=2)
    await runtime.crash()
    assert await runtime.namespace(Desk).resolve_promise(tokens["d"], "yes")
    await runtime.advance(days=12)
    assert [await first.result(), await second.result()] == ["answered yes", "never answered"]
    assert sorted(Desk.log) == [
        "d: answered yes",
        "d: reminder 1",
        "d: reminder 2",
        "e: never answered",
        "e: reminder 1",
        "e: reminder 2",
        "e: reminder 3",
    ]


async def test_the_first_decides_also_by_raising_and_steps_that_were_given_up_count_as_awaited(
    runtime: LocalRuntime,
) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        def refuse() -> None:
            raise No("no")

        try:
            await ctx.first(ctx.sleep("1d"), ctx.step("refuse", refuse), ctx.step("never", self.note, "never"))
        except No:
            await ctx.step("refused", self.note, "refused")
        await ctx.sleep("2d")
        place, _ = await ctx.first(ctx.sleep("2h"), ctx.sleep("1h"), ctx.sleep("3h"))
        return place

    handle = await run(runtime, code)
    await runtime.crash()
    await runtime.advance(days=3)
    assert await handle.result() == 1
    assert Desk.log == ["refused"]


async def test_a_function_that_has_had_branches_stays_in_memory_again(runtime: LocalRuntime) -> None:
    entered: list[int] = []

    async def code(self: Desk, ctx: DurableContext) -> int:
        entered.append(1)
        await asyncio.gather(ctx.sleep("1s"), ctx.sleep("2s"))
        begun = len(entered)
        for number in range(20):
            await ctx.step("one", self.note, number)
        return len(entered) - begun

    handle = await run(runtime, code)
    assert await handle.result() == 0


@pytest.mark.parametrize("first", [1, 6, 11, 16, 21])
async def test_branches_that_call_others_happen_once_whichever_commit_the_crash_is_at(first: int) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        async def branch(number: int) -> int:
            await ctx.step("note", self.noted, number)
            total: int = await ctx.step("charge", self.charge, 10**number)
            await ctx.sleep("1s")
            await ctx.step("again", self.charge, 10 ** (number + 3))
            return total

        return len(await asyncio.gather(branch(0), branch(1), branch(2)))

    Desk.code = code
    for crash_at in range(first, first + 5):
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            handle = await runtime.namespace(Desk).get("d").flow.start()
            commits = sum(each["commits"] for each in runtime.status())
            for _ in range(3_000):
                await asyncio.sleep(0)
                runtime.clock.run_due()  # type: ignore[attr-defined]  # a virtual clock
                if sum(each["commits"] for each in runtime.status()) >= commits + crash_at - 1:
                    break
            await runtime.crash()
            await runtime.advance(seconds=60)
            assert await handle.result() == 3
            assert await runtime.namespace(Bank).get("bank").charged() == 111_111


async def test_clean_up_in_steps_happens_once_at_the_end_and_not_when_the_function_leaves_memory(
    runtime: LocalRuntime,
) -> None:
    async def code(self: Desk, ctx: DurableContext) -> str:
        try:
            await ctx.step("work", self.note, "work")
            await ctx.sleep("1d")
        finally:
            await ctx.step("clean up", self.note, "clean up")
        return "done"

    handle = await run(runtime, code)
    assert await runtime.evict(runtime.namespace(Desk).get("d"))
    await runtime.advance(hours=1)
    await runtime.crash()
    assert Desk.log == ["work"]
    await runtime.advance(days=1)
    assert await handle.result() == "done"
    assert Desk.log == ["work", "clean up"]


async def test_what_a_function_does_when_it_is_unwound_is_not_written_into_the_turn_that_runs_then(
    runtime: LocalRuntime,
) -> None:
    async def code(self: Desk, ctx: DurableContext) -> str:
        try:
            await ctx.sleep("1d")
        finally:
            Desk.log.append("unwound")
            self.storage["unwound"] = 1
        return "done"

    class Failing(Desk):
        type_name = "Failing"

        def fail(self) -> None:
            raise ValueError("the instance goes, and the functions that it keeps with it")

        @durable
        async def fails(self, ctx: DurableContext) -> None:
            await ctx.step("fail", self.fail)

    Desk.code = code
    failing = runtime.namespace(Failing).get("f")
    await failing.flow.start()
    await runtime.advance(seconds=1)
    other = await failing.fails.start()
    await runtime.advance(seconds=1)
    with pytest.raises(ValueError, match="instance"):
        await other.result()
    assert Desk.log == ["unwound"]
    assert await failing.noted("unwound") == 0


async def test_a_clean_up_step_does_not_run_in_a_turn_that_has_timed_out() -> None:
    async with LocalRuntime(memory=True, settings=Settings(timer_turn_timeout_ms=60_000)) as runtime:

        async def code(self: Desk, ctx: DurableContext) -> Any:
            async def hang() -> None:
                await asyncio.Event().wait()

            try:
                await ctx.step("hang", hang)
            finally:
                await ctx.step("refund", self.note, "refund")

        handle = await run(runtime, code, hours=1)
        with pytest.raises(TurnTimeout):
            await handle.result()
        assert Desk.log == ["refund"]


async def test_a_thread_can_not_use_the_context(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> str:
        try:
            await asyncio.to_thread(lambda: ctx.step("x", self.note, "x"))
        except WrongThread:
            return "refused"
        return "allowed"

    Desk.code = code
    handle = await runtime.namespace(Desk).get("d").flow.start(execution_id="x")
    while (await handle.status()).status == "running":
        await runtime.advance(seconds=1)
    assert await handle.result() == "refused"


@pytest.mark.parametrize("name", ["\ud800", "x" * 201, 5])
async def test_names_that_can_not_be_kept_are_refused(runtime: LocalRuntime, name: Any) -> None:
    async def code(self: Desk, ctx: DurableContext) -> None:
        await ctx.step(name, self.note, "x")

    handle = await run(runtime, code)
    with pytest.raises(InvalidOption, match="name"):
        await handle.result()


async def test_a_sleep_for_ages_is_refused(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> str:
        await ctx.sleep("99999999999999999999d")
        return "slept"

    handle = await run(runtime, code)
    with pytest.raises(InvalidSchedule):
        await handle.result()


# --- promises ---------------------------------------------------------------------------------------------


async def test_a_promise_resolved_before_the_step_that_told_its_token_is_durable_is_resolved(
    runtime: LocalRuntime,
) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        promise = ctx.promise("answer", timeout="1d")

        async def ask() -> None:
            Desk.kept = promise.token
            assert Desk.gate is not None
            await Desk.gate.wait()

        await ctx.step("ask", ask)
        return await promise

    Desk.gate = asyncio.Event()
    handle = await run(runtime, code)
    token = Desk.kept
    await runtime.crash()  # the token is out, and nothing of that step is durable
    namespace = runtime.namespace(Desk)
    resolving = asyncio.ensure_future(namespace.resolve_promise(token, "yes"))
    Desk.gate.set()
    await runtime.advance(seconds=5)
    assert await resolving
    assert not await namespace.resolve_promise(token, "again")
    assert await handle.result() == "yes"


async def test_a_promise_of_a_buried_execution_can_be_resolved_and_it_goes_on_with_that(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        promise = ctx.promise("answer")
        Desk.kept = promise.token
        await ctx.sleep("1d")
        return await promise

    handle = await run(runtime, code)
    from actors.durable_object import class_info

    functions = class_info(Desk).durable
    gone = functions.pop("flow")
    try:
        await runtime.advance(days=3)
        (letter,) = await runtime.dead_letters()
        assert (await handle.status()).status == "buried"
        assert await runtime.namespace(Desk).resolve_promise(Desk.kept, "kept")
        assert await runtime.discard(letter)
    finally:
        functions["flow"] = gone
    assert await handle.resume()  # also after its dead letter was thrown away
    await runtime.advance(seconds=1)
    assert await handle.result() == "kept"


async def test_a_buried_execution_can_be_canceled(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        await ctx.sleep("1d")

    handle = await run(runtime, code)
    from actors.durable_object import class_info

    functions = class_info(Desk).durable
    gone = functions.pop("flow")
    try:
        await runtime.advance(days=3)
        assert await handle.cancel()
    finally:
        functions["flow"] = gone
    (letter,) = await runtime.dead_letters()
    assert await runtime.redrive(letter)
    await runtime.advance(seconds=1)
    assert (await handle.status()).status == "canceled"


async def test_a_promise_may_be_resolved_while_the_execution_sleeps_and_the_sleep_goes_on(
    runtime: LocalRuntime,
) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        promise = ctx.promise("answer", timeout="1h")
        Desk.kept = promise.token
        await ctx.sleep("1d")
        return [await promise, await promise, ctx.now_ms]

    began_ms = runtime.clock.wall_ms()
    handle = await run(runtime, code)
    assert await runtime.namespace(Desk).resolve_promise(Desk.kept, 1)
    await runtime.advance(hours=23)
    assert (await handle.status()).status == "running"
    await runtime.advance(hours=2)
    assert await handle.result() == [1, 1, began_ms + DAY_MS]


async def test_a_token_is_good_for_its_own_promise_alone(runtime: LocalRuntime) -> None:
    tokens: dict[str, str] = {}

    async def code(self: Desk, ctx: DurableContext) -> Any:
        first, second = ctx.promise("first"), ctx.promise("second")
        tokens.update({f"{self.key} first": first.token, f"{self.key} second": second.token})
        return await first

    await run(runtime, code, "d")
    other = await run(runtime, code, "e")
    heads = {name: token.rpartition(".") for name, token in tokens.items()}
    namespace = runtime.namespace(Desk)
    for name, (address, _dot, _secret) in heads.items():
        for stranger, (_address, _dot, secret) in heads.items():
            if name != stranger:
                with pytest.raises(InvalidPromiseToken):
                    await namespace.resolve_promise(f"{address}.{secret}", "forged")
    assert (await other.status()).status == "running"


def test_a_promise_has_one_token_and_no_other_text_is_taken_for_it() -> None:
    token = PromiseAddress("Desk", "k", "x", 7).token(bytes(range(32)))
    assert PromiseAddress.parse(token) == (PromiseAddress("Desk", "k", "x", 7), bytes(range(32)))
    for last in set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=.") - {token[-1]}:
        with contextlib.suppress(InvalidPromiseToken):
            assert PromiseAddress.parse(token[:-1] + last)[1] != bytes(range(32))


# --- starting, canceling, the end -------------------------------------------------------------------------


async def test_arguments_that_do_not_fit_are_refused_at_the_start(runtime: LocalRuntime) -> None:
    desk = runtime.namespace(Desk).get("d")
    for args, kwargs in (((), {}), ((1, 2), {}), ((1,), {"other": 1})):
        with pytest.raises(InvalidArguments, match="pays"):
            await desk.pays.start(*args, **kwargs)
    handle = await desk.pays.start(5, execution_id="one", note="x")
    assert (await desk.pays.start(5, execution_id="one", note="x")).execution_id == handle.execution_id
    with pytest.raises(ExecutionExists):
        await desk.pays.start(5, execution_id="one", note="y")


async def test_starting_from_a_turn_that_is_run_again_starts_one_execution(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> str:
        return await ctx.step("run", self.note, "run")  # type: ignore[no-any-return]

    for crash_at in range(1, 8):
        Desk.log, Desk.code = [], code
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            starter = runtime.namespace(Desk).get("starter")
            starting = asyncio.ensure_future(starter.start_other("target"))
            for _ in range(2_000):
                await asyncio.sleep(0)
                if sum(each["commits"] for each in runtime.status()) >= crash_at:
                    break
            await runtime.crash()
            while not starting.done():
                await runtime.advance(seconds=1)
                await asyncio.sleep(0.001)
            execution_id = await starting
            await runtime.advance(seconds=1)
            assert await runtime.namespace(Desk).get("target").flow.execution(execution_id).result() == "run"
            rows = [row for each in runtime.partitions if each is not None for row in each.store.scan("executions")]
            assert len(rows) == 1, crash_at


async def test_a_cancel_waits_for_the_step_that_runs_and_nothing_runs_after_it(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        await ctx.step("slow", self.slow, "slow")
        await ctx.step("after", self.note, "after")
        return "done"

    Desk.gate = asyncio.Event()
    handle = await run(runtime, code)
    canceling = asyncio.ensure_future(handle.cancel())
    await runtime.run_until_idle()
    Desk.gate.set()
    await runtime.advance(seconds=1)
    assert await canceling
    assert Desk.log == ["slow begins", "slow"]
    assert (await handle.status()).status == "canceled"


async def test_a_cancel_that_comes_after_the_end_changes_nothing(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> Any:
        return await ctx.step("slow", self.slow, "slow")

    Desk.gate = asyncio.Event()
    Desk.gate.set()
    handle = await run(runtime, code)
    assert not await handle.cancel()
    assert await handle.result() == "slow"


async def test_result_waits_in_the_partition_and_is_told_at_once(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> str:
        await ctx.sleep("1d")
        return "slept"

    handle = await run(runtime, code)
    waiting = [asyncio.ensure_future(handle.result()) for _ in range(3)]
    await runtime.advance(hours=12)
    assert not any(each.done() for each in waiting)
    await runtime.advance(hours=13)
    assert await asyncio.gather(*waiting) == ["slept"] * 3


async def test_result_goes_on_waiting_through_crashes_and_moves(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> str:
        await ctx.sleep("1d")
        return "slept"

    handle = await run(runtime, code)
    waiting = asyncio.ensure_future(handle.result())
    await runtime.advance(hours=1)
    await runtime.crash()
    await runtime.advance(hours=1)
    await runtime.scale(3)
    await runtime.scale(1)
    await runtime.advance(days=1)
    assert await waiting == "slept"


async def test_a_turn_does_not_wait_for_an_execution_of_its_own_object(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> None:
        await ctx.sleep("1d")

    await run(runtime, code)
    with pytest.raises(ReentrantCall, match="own"):
        await runtime.namespace(Desk).get("d").own_result()


async def test_a_function_that_runs_too_long_outside_its_steps_has_failed() -> None:
    async with LocalRuntime(memory=True, settings=Settings(timer_turn_timeout_ms=60_000)) as runtime:

        async def code(self: Desk, ctx: DurableContext) -> None:
            Desk.log.append("began")
            await asyncio.Event().wait()

        handle = await run(runtime, code, hours=5)
        with pytest.raises(TurnTimeout):
            await handle.result()
        assert Desk.log == ["began"]


async def test_the_timers_of_executions_use_up_none_of_the_applications() -> None:
    async with LocalRuntime(memory=True, settings=Settings(max_timers_per_object=2)) as runtime:

        async def code(self: Desk, ctx: DurableContext) -> None:
            await ctx.sleep("1d")

        Desk.code = code
        desk = runtime.namespace(Desk).get("d")
        for _ in range(5):
            await desk.flow.start()
        await runtime.advance(seconds=1)
        await desk.set_timer("a")
        await desk.set_timer("b")
        with pytest.raises(TooManyTimers):
            await desk.set_timer("c")


async def test_an_execution_outlives_what_keeps_its_segments_from_running_for_an_hour(runtime: LocalRuntime) -> None:
    async def code(self: Desk, ctx: DurableContext) -> str:
        await ctx.sleep("1s")
        return "done"

    from actors.durable_object import class_info

    functions = class_info(Desk).durable
    Desk.code = code
    handle = await runtime.namespace(Desk).get("d").flow.start()
    gone = functions.pop("flow")
    try:
        await runtime.advance(hours=1)  # a rolling deployment, say
    finally:
        functions["flow"] = gone
    assert NAMED_TIMER_RETRY.max_attempts * NAMED_TIMER_RETRY.base_ms < HOUR_MS
    await runtime.advance(minutes=20)
    assert await handle.result() == "done"


async def test_an_execution_that_ends_its_process_three_times_alone_is_buried_and_shown_so() -> None:
    async with LocalRuntime(memory=True, settings=Settings(careful_solo_ms=HOUR_MS)) as runtime:

        async def code(self: Desk, ctx: DurableContext) -> str:
            return await ctx.step("slow", self.slow, "slow")  # type: ignore[no-any-return]

        Desk.gate = asyncio.Event()
        handle = await run(runtime, code)
        for _ in range(6):
            await runtime.crash()
            await runtime.advance(seconds=5)
        assert len(Desk.log) <= 5, "at first beside others, then three times alone"
        assert (await handle.status()).status == "buried"
        with pytest.raises(ExecutionBuried):
            await handle.result()
        (letter,) = await runtime.dead_letters()
        assert letter.crashes == 3
        Desk.gate.set()
        assert await runtime.redrive(letter)
        await runtime.advance(seconds=30)
        assert await handle.result() == "slow"


# --- limits -----------------------------------------------------------------------------------------------


async def test_a_journal_has_a_limit_in_bytes() -> None:
    async with LocalRuntime(memory=True, settings=Settings(max_journal_bytes=10_000)) as runtime:

        async def code(self: Desk, ctx: DurableContext) -> int:
            for number in range(100):
                try:
                    await ctx.step("big", lambda: b"x" * 3_000)
                except JournalFull:
                    return number
            return 100

        handle = await run(runtime, code)
        assert await handle.result() == 3


async def test_an_execution_that_starts_over_goes_on_for_ever() -> None:
    async with LocalRuntime(memory=True, settings=Settings(max_journal_steps=20)) as runtime:

        class Loop(DurableObject):
            tokens: ClassVar[list[str]] = []

            def add(self) -> int:
                total: int = self.storage.get("total", 0) + 1
                self.storage["total"] = total
                return total

            @durable
            async def flow(self, ctx: DurableContext, count: int, drawn: list[str]) -> Any:
                while count:
                    if ctx.steps_left < 4:
                        ctx.start_over(count, [*drawn, str(ctx.uuid())])
                    Loop.tokens.append(ctx.promise("p").token)
                    count -= 1
                    await ctx.step("add", self.add)
                    await ctx.sleep("1m")
                return [self.storage["total"], len(set(drawn))]

        loop = runtime.namespace(Loop).get("l")
        handle = await loop.flow.start(40, [], execution_id="x")
        for _ in range(10):
            await runtime.advance(minutes=5)
            await runtime.crash()
        again = await loop.flow.start(40, [], execution_id="x")
        assert again.execution_id == handle.execution_id
        with pytest.raises(InvalidPromiseToken):
            await runtime.namespace(Loop).resolve_promise(Loop.tokens[0])
        await runtime.advance(minutes=5)
        assert await handle.result() == [40, 6]
        for partition in runtime.partitions:
            assert partition is not None
            assert len(partition.store.scan("journal")) < 25


async def test_a_long_execution_is_not_replayed_for_each_of_its_steps(runtime: LocalRuntime) -> None:
    entered: list[int] = []

    async def code(self: Desk, ctx: DurableContext) -> int:
        entered.append(1)
        for number in range(300):
            await ctx.step("one", self.note, number)
        return len(entered)

    handle = await run(runtime, code)
    assert await handle.result() == 1
    assert Desk.log == list(range(300))


@pytest.mark.parametrize("objects", [1, 500])
async def test_parked_executions_keep_nothing_in_memory(objects: int) -> None:
    async with LocalRuntime(memory=True, settings=Settings(max_executions_per_object=10_000)) as runtime:
        contexts: weakref.WeakSet[DurableContext] = weakref.WeakSet()

        async def code(self: Desk, ctx: DurableContext) -> str:
            contexts.add(ctx)
            await ctx.step("a", self.noted, "a")
            await ctx.sleep("30d")
            return "slept"

        Desk.code = code
        namespace = runtime.namespace(Desk)
        handles = []
        for number in range(500):
            handles.append(await namespace.get(f"d{number % objects}").flow.start())
        await runtime.advance(seconds=5)
        (partition,) = runtime.partitions
        assert partition is not None
        gc.collect()
        assert len(contexts) <= 16 * objects
        await runtime.advance(minutes=1)
        gc.collect()
        assert len(contexts) == 0
        assert partition.status()["active_objects"] == 0
        await runtime.advance(days=30)
        assert [await handle.result() for handle in handles] == ["slept"] * 500


async def test_moving_parked_executions_changes_none_of_their_due_times(runtime: LocalRuntime) -> None:
    woke: dict[str, int] = {}

    async def code(self: Desk, ctx: DurableContext) -> str:
        await ctx.sleep(f"{int(self.key)}h")
        woke[self.key] = ctx.now_ms
        return self.key

    Desk.code = code
    began_ms = runtime.clock.wall_ms()
    namespace = runtime.namespace(Desk)
    handles = {number: await namespace.get(str(number)).flow.start() for number in range(1, 25)}
    await runtime.advance(minutes=30)
    due_ms = {number: (await handle.status()).wake_ms for number, handle in handles.items()}
    for partitions in (4, 1, 3, 2):
        await runtime.scale(partitions)
        assert {number: (await handle.status()).wake_ms for number, handle in handles.items()} == due_ms
    await runtime.advance(days=1)
    assert woke == {str(number): began_ms + number * HOUR_MS for number in handles}
    assert [await handle.result() for handle in handles.values()] == [str(number) for number in handles]
