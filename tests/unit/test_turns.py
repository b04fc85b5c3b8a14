"""Turns: one at a time and in order, all or nothing, what cuts them short, what they may use, and who may call what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from actors import testing
from actors.address import ClassRef
from actors.durable_object import DurableObject, shared
from actors.errors import (
    ClassNotImportable,
    DuplicateTypeName,
    InvalidArguments,
    InvalidClassOption,
    InvalidKey,
    MethodNotCallable,
    NoSuchMethod,
    Overloaded,
    ReadOnlyTurn,
    ReentrantCall,
    Rejected,
    RemoteError,
    ReservedName,
    TurnOver,
    TurnTimeout,
    UnknownClass,
    UnstorableValue,
    ValueTooLarge,
    WrongThread,
)
from actors.settings import Settings
from actors.testing import LocalRuntime
from tests.support.crash_points import CommitControl, finish, runtime_with


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that are held wait for the test and for nothing else: virtual time need not wait for them."""
    monkeypatch.setattr(testing, "_PATIENCE_S", 0.0)


@pytest.fixture
async def rt() -> AsyncIterator[LocalRuntime]:
    Worker.reset()
    async with LocalRuntime(memory=True, partitions=2) as runtime:
        yield runtime
        Worker.open_all()


class Declined(Rejected):
    """An application's own no."""


class Harmless(Exception):
    """Listed by the class as harmless."""


class Worker(DurableObject):
    """Does what it is told; `events` and `gates` are how the test sees it and holds it."""

    events: ClassVar[list[str]] = []
    gates: ClassVar[dict[str, asyncio.Event]] = {}
    instances: ClassVar[int] = 0
    stopped: ClassVar[list[str]] = []
    harmless_errors = (Rejected, Harmless)

    def __init__(self) -> None:
        type(self).instances += 1
        self.memory: list[Any] = []

    @classmethod
    def reset(cls) -> None:
        cls.events, cls.gates, cls.instances, cls.stopped = [], {}, 0, []  # type: ignore[misc]

    @classmethod
    def gate(cls, name: str) -> asyncio.Event:
        return cls.gates.setdefault(name, asyncio.Event())

    @classmethod
    def open_all(cls) -> None:
        for gate in cls.gates.values():
            gate.set()

    def on_stop(self) -> None:
        self.stopped.append(self.key)

    # serial turns

    async def run(self, name: str) -> str:
        self.events.append(f"{name} begins")
        await self.gate(name).wait()
        self.events.append(f"{name} ends")
        return name

    async def write_around(self, name: str, value: int) -> None:
        self.storage.put("before", value)
        self.events.append(f"{name} begins")
        await self.gate(name).wait()
        self.storage.put("after", value)

    def append(self, value: int) -> list[int]:
        values = [*self.storage.get("values", []), value]
        self.storage.put("values", values)
        return values

    async def append_slowly(self, value: int) -> list[int]:
        values = self.storage.get("values", [])
        await asyncio.sleep(0)
        self.storage.put("values", [*values, value])
        return [*values, value]

    def write_and_raise(self, error: str) -> None:
        self.memory.append(error)
        self.storage.put("before", 666)
        self.timers.set("t", after="1m", method="on_timer")
        raise {"value": ValueError, "declined": Declined, "harmless": Harmless}[error]("as told")

    def on_timer(self, info: Any) -> None:
        self.storage.put("timer", info.fired_ms)

    def remember(self, value: Any) -> None:
        self.memory.append(value)

    def recall(self) -> list[Any]:
        return self.memory

    def state(self) -> dict[str, Any]:
        return self.storage.list()

    def timer_names(self) -> list[str]:
        return [timer.name for timer in self.timers.list()]

    # shared turns

    @shared
    def peek(self) -> dict[str, Any]:
        return self.storage.list()

    @shared
    async def peek_slowly(self, name: str) -> list[Any]:
        self.events.append(f"{name} begins")
        await self.gate(name).wait()
        self.events.append(f"{name} ends")
        return self.memory

    @shared
    def write_though_shared(self, how: str) -> None:
        if how == "put":
            self.storage.put("x", 1)
        elif how == "delete":
            self.storage.delete("x")
        elif how == "delete_all":
            self.storage.delete_all()
        elif how == "timer":
            self.timers.set("t", after="1m", method="on_timer")
        elif how == "cancel":
            self.timers.cancel("t")

    # misuse

    async def swallow_cancellation(self) -> None:
        self.storage.put("before", 1)
        while not self.gate("give up").is_set():
            try:
                await self.gate("give up").wait()
            except asyncio.CancelledError:
                self.events.append("swallowed")

    async def swallow_and_write(self) -> str:
        try:
            await self.gate("never").wait()
        except asyncio.CancelledError:
            pass
        try:
            self.storage.put("late", 1)
        except TurnOver:
            self.events.append("TurnOver")
        return "as if nothing had happened"

    async def use_storage_in_a_thread(self) -> None:
        await asyncio.to_thread(lambda: self.storage.get("x"))

    async def call_from_a_thread(self) -> None:
        await asyncio.to_thread(lambda: self.namespace(Worker).get("other").state())

    async def thread_result(self) -> int:
        value = await asyncio.to_thread(lambda: 21 * 2)
        self.storage.put("x", value)
        return value

    def leave_a_task(self, what: str) -> None:
        async def later() -> None:
            await self.gate("later").wait()
            try:
                if what == "storage":
                    self.storage.put("x", 1)
                elif what == "timers":
                    self.timers.set("t", after="1m", method="on_timer")
                elif what == "turn":
                    _ = self.turn.now_ms
                else:
                    await self.namespace(Worker).get("other").append(1)
            except Exception as error:
                self.events.append(type(error).__name__)

        task = asyncio.ensure_future(later())
        task.add_done_callback(lambda _: self.events.append("task ended"))

    async def write_and_cancel_itself(self) -> None:
        self.storage.put("before", 1)
        raise asyncio.CancelledError

    # calls

    async def call(self, path: list[str], method: str = "append") -> Any:
        """Call along the path of keys; the last one gets `method`."""
        head, *rest = path
        stub = self.namespace(Worker).get(head)
        if rest:
            return await stub.call(rest, method)
        return await (stub.append(1) if method == "append" else stub.peek())

    async def call_and_catch(self, path: list[str]) -> str:
        try:
            await self.call(path)
        except ReentrantCall as error:
            return str(error)
        return "no error"

    async def descend(self, depth: int) -> int:
        if depth == 0:
            return 1
        return 1 + int(await self.namespace(Worker).get(f"{self.key}x").descend(depth - 1))

    # arguments

    def take(self, a: int, b: int = 2, *, c: int = 3) -> tuple[int, int, int]:
        return a, b, c

    def raise_type_error(self) -> None:
        "".join([1])  # type: ignore[list-item]

    def store(self, value: Any) -> None:
        self.storage.put("value", value)

    def unstorable(self, what: str) -> Any:
        value = {"list": [1, {"a": [object()]}], "set": {"k": {frozenset()}}, "key": {("t",): object()}}[what]
        self.storage.put("value", value)

    def return_unstorable(self) -> Any:
        self.storage.put("x", 1)
        return {"deep": [object()]}

    def return_large(self, size: int) -> bytes:
        return b"x" * size

    def _private(self) -> None:
        raise AssertionError

    not_a_method = 5


@pytest.fixture
async def worker(rt: LocalRuntime) -> Any:
    return rt.namespace(Worker).get("w")


# --- one at a time, in order ------------------------------------------------------------------------


async def test_calls_through_one_stub_keep_their_order(worker: Any) -> None:
    calls = [worker.append_slowly(n) if n % 2 else worker.append(n) for n in range(20)]
    assert (await asyncio.gather(*calls))[-1] == list(range(20))


async def test_a_serial_turn_starts_only_when_the_one_before_has_ended(rt: LocalRuntime, worker: Any) -> None:
    calls = [worker.run(name) for name in ("a", "b", "c")]
    await rt.run_until_idle()
    assert Worker.events == ["a begins"]
    Worker.gate("c").set()
    Worker.gate("b").set()
    Worker.gate("a").set()
    assert await asyncio.gather(*calls) == ["a", "b", "c"]
    assert Worker.events == ["a begins", "a ends", "b begins", "b ends", "c begins", "c ends"]


async def test_objects_do_not_wait_for_each_other(rt: LocalRuntime, worker: Any) -> None:
    held = asyncio.ensure_future(worker.run("held"))
    assert await rt.namespace(Worker).get("other").append(1) == [1]
    Worker.gate("held").set()
    await held


async def test_a_turn_is_one_commit(rt: LocalRuntime, worker: Any) -> None:
    await worker.append(0)
    before = sum(status["commits"] for status in rt.status())
    call = asyncio.ensure_future(worker.write_around("w", 1))
    await rt.run_until_idle()
    assert sum(status["commits"] for status in rt.status()) == before
    Worker.gate("w").set()
    await call
    assert sum(status["commits"] for status in rt.status()) == before + 1


async def test_turns_of_one_loop_turn_share_a_commit(rt: LocalRuntime) -> None:
    workers = [rt.namespace(Worker).get(f"w{n}") for n in range(50)]
    await asyncio.gather(*(each.append(0) for each in workers))
    before = sum(status["commits"] for status in rt.status())
    await asyncio.gather(*(each.append(1) for each in workers))
    assert sum(status["commits"] for status in rt.status()) <= before + 2 * rt.partition_count


# --- all or nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["value", "declined", "harmless"])
async def test_a_turn_that_raises_keeps_neither_storage_nor_timers(rt: LocalRuntime, worker: Any, error: str) -> None:
    await worker.store(1)
    with pytest.raises((ValueError, Declined, Harmless, RemoteError)):
        await worker.write_and_raise(error)
    assert await worker.state() == {"value": 1}
    assert await worker.timer_names() == []
    await rt.advance(hours=1)
    assert await worker.state() == {"value": 1}


@pytest.mark.parametrize(("error", "kept"), [("value", False), ("declined", True), ("harmless", True)])
async def test_the_instance_is_discarded_after_an_exception_unless_it_is_harmless(
    worker: Any, error: str, kept: bool
) -> None:
    await worker.remember("old")
    with pytest.raises((ValueError, Declined, Harmless, RemoteError)):
        await worker.write_and_raise(error)
    assert await worker.recall() == (["old", error] if kept else [])
    assert Worker.instances == (1 if kept else 2)


async def test_the_exception_arrives_as_it_was_raised(worker: Any) -> None:
    with pytest.raises(ValueError, match="as told"):
        await worker.write_and_raise("value")
    with pytest.raises(Declined, match="as told"):
        await worker.write_and_raise("declined")


async def test_a_turn_whose_code_raises_cancelled_error_is_rolled_back_and_answered(worker: Any) -> None:
    with pytest.raises(RemoteError, match="CancelledError"):
        await worker.write_and_cancel_itself()
    assert await worker.state() == {}


async def test_a_reply_that_cannot_travel_fails_the_turn_and_rolls_it_back(worker: Any) -> None:
    with pytest.raises(UnstorableValue, match="deep"):
        await worker.return_unstorable()
    assert await worker.state() == {}


async def test_a_reply_that_is_too_large_fails_the_turn(rt: LocalRuntime, worker: Any) -> None:
    with pytest.raises(ValueTooLarge, match="return less"):
        await worker.return_large(rt.settings.max_args_bytes)


# --- shared turns -------------------------------------------------------------------------------------


async def test_a_shared_turn_runs_while_a_serial_turn_awaits_and_sees_none_of_it(rt: LocalRuntime, worker: Any) -> None:
    await worker.store("old")
    writing = asyncio.ensure_future(worker.write_around("w", 1))
    await rt.run_until_idle()
    assert await worker.peek() == {"value": "old"}
    Worker.gate("w").set()
    await writing
    assert await worker.peek() == {"value": "old", "before": 1, "after": 1}


@pytest.mark.parametrize("how", ["put", "delete", "delete_all", "timer", "cancel"])
async def test_a_shared_turn_that_writes_raises(worker: Any, how: str) -> None:
    await worker.store("old")
    with pytest.raises(ReadOnlyTurn):
        await worker.write_though_shared(how)
    assert await worker.state() == {"value": "old"}


async def test_a_shared_turn_does_not_overtake_a_serial_turn_that_came_before_it(rt: LocalRuntime, worker: Any) -> None:
    first, second = worker.run("first"), worker.run("second")
    peek = worker.peek_slowly("peek")
    await rt.run_until_idle()
    assert Worker.events == ["first begins"]
    Worker.gate("first").set()
    await rt.run_until_idle()
    assert Worker.events == ["first begins", "first ends", "second begins", "peek begins"]
    Worker.open_all()
    Worker.gate("peek").set()
    await asyncio.gather(first, second, peek)


async def test_shared_turns_run_beside_each_other_and_a_serial_turn_does_not_wait_for_them(
    rt: LocalRuntime, worker: Any
) -> None:
    peeks = [worker.peek_slowly("one"), worker.peek_slowly("two")]
    assert await worker.append(1) == [1]
    assert Worker.events == ["one begins", "two begins"]
    Worker.gate("one").set()
    Worker.gate("two").set()
    await asyncio.gather(*peeks)


async def test_shared_turns_run_again_in_their_order_when_the_instance_is_discarded(
    rt: LocalRuntime, worker: Any
) -> None:
    await worker.remember("old")
    names = ["one", "two", "three", "four", "five"]
    peeks = [worker.peek_slowly(name) for name in names]
    await rt.run_until_idle()
    with pytest.raises(ValueError):
        await worker.write_and_raise("value")
    await rt.run_until_idle()
    begins = [f"{name} begins" for name in names]
    assert Worker.events == begins + begins
    for name in names:
        Worker.gate(name).set()
    assert await asyncio.gather(*peeks) == [[]] * len(names)


# --- reentrancy and chains ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", [["w"], ["a", "w"], ["a", "b", "c", "w"], ["a", "b", "a"]])
async def test_a_call_that_would_re_enter_its_own_chain_raises_at_once(worker: Any, path: list[str]) -> None:
    with pytest.raises(ReentrantCall, match="Worker/w -> "):
        await worker.call(path)


async def test_the_caller_may_catch_a_reentrant_call_and_go_on(worker: Any) -> None:
    assert "Worker/w -> Worker/a -> Worker/w" in await worker.call_and_catch(["a", "w"])


async def test_shared_methods_are_exempt_from_the_reentrancy_rule(worker: Any) -> None:
    await worker.store(7)
    assert await worker.call(["a", "w"], "peek") == {"value": 7}
    assert await worker.call(["w"], "peek") == {"value": 7}


async def test_a_chain_may_be_as_deep_as_the_limit_and_no_deeper() -> None:
    Worker.reset()
    settings = Settings(durability="off", max_chain_depth=5)
    async with LocalRuntime(memory=True, settings=settings) as rt:
        assert await rt.namespace(Worker).get("d").descend(5) == 6
        with pytest.raises(Overloaded, match="nested calls"):
            await rt.namespace(Worker).get("e").descend(6)


# --- timeouts -----------------------------------------------------------------------------------------


async def test_a_turn_past_its_timeout_is_cancelled_and_rolled_back(rt: LocalRuntime, worker: Any) -> None:
    call = asyncio.ensure_future(worker.write_around("w", 1))
    await rt.advance(seconds=29.999)
    assert not call.done()
    await rt.advance(ms=1)
    with pytest.raises(TurnTimeout, match="30,000 ms"):
        await call
    assert await worker.state() == {}
    assert Worker.instances == 2


async def test_the_timeout_counts_running_and_not_queueing(rt: LocalRuntime, worker: Any) -> None:
    first, second = worker.run("first"), worker.run("second")
    await rt.advance(seconds=20)
    Worker.gate("first").set()
    await rt.advance(seconds=20)
    Worker.gate("second").set()
    assert await asyncio.gather(first, second) == ["first", "second"]


async def test_a_turn_that_swallows_its_cancellation_is_abandoned_and_the_object_rebuilt(
    rt: LocalRuntime, worker: Any
) -> None:
    call, behind = asyncio.ensure_future(worker.swallow_cancellation()), asyncio.ensure_future(worker.append(1))
    await rt.advance(seconds=30)
    assert not call.done()
    await rt.advance(ms=rt.settings.cancel_grace_ms)
    with pytest.raises(TurnTimeout):
        await call
    assert await behind == [1]
    assert await worker.state() == {"values": [1]}
    assert Worker.instances == 2
    Worker.gate("give up").set()


async def test_a_turn_that_timed_out_can_write_nothing_whatever_it_swallows(rt: LocalRuntime, worker: Any) -> None:
    call = asyncio.ensure_future(worker.swallow_and_write())
    await rt.advance(seconds=31)
    with pytest.raises(TurnTimeout):
        await call
    assert Worker.events == ["TurnOver"]
    assert await worker.state() == {}


async def test_a_class_may_set_its_own_timeout(rt: LocalRuntime) -> None:
    stub = rt.namespace(Hasty).get("h")
    call = asyncio.ensure_future(stub.wait())
    await rt.advance(ms=50)
    with pytest.raises(TurnTimeout):
        await call


class Hasty(DurableObject):
    """Short of time, room and patience."""

    turn_timeout_ms = 50
    max_queued_turns = 2
    idle_timeout_ms = 100

    async def wait(self) -> None:
        await asyncio.Event().wait()

    async def hold(self) -> int:
        await Worker.gate("hasty").wait()
        return 1

    def write(self) -> None:
        self.storage.put("x", 1)

    def read(self) -> Any:
        return self.storage.get("x")


async def test_timers_have_fifteen_minutes(rt: LocalRuntime) -> None:
    stub = rt.namespace(SlowTimer).get("s")
    await stub.arm()
    await rt.advance(minutes=16, seconds=-1)
    assert SlowTimer.cancelled == 0
    await rt.advance(seconds=1)
    assert SlowTimer.cancelled == 1


class SlowTimer(DurableObject):
    """A timer that never ends."""

    cancelled = 0

    def arm(self) -> None:
        self.timers.set("t", after="1m", method="fire")

    async def fire(self, info: Any) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            SlowTimer.cancelled += 1
            raise


async def test_a_call_that_waits_for_a_timed_out_object_gets_its_error(rt: LocalRuntime, worker: Any) -> None:
    call = asyncio.ensure_future(worker.call(["a", "b"]))
    held = asyncio.ensure_future(rt.namespace(Worker).get("b").run("held"))
    await asyncio.gather(call, return_exceptions=True) if held.done() else None
    await rt.advance(seconds=61)
    with pytest.raises(TurnTimeout):
        await held
    assert (await asyncio.gather(call, return_exceptions=True))[0] is not None


# --- after the turn, and other threads ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["storage", "timers", "turn", "stub"])
async def test_what_runs_after_the_turn_can_not_use_its_object(rt: LocalRuntime, worker: Any, what: str) -> None:
    await worker.leave_a_task(what)
    running = asyncio.ensure_future(worker.run("next"))
    await rt.run_until_idle()
    Worker.gate("later").set()
    await rt.run_until_idle()
    assert Worker.events == ["next begins", "TurnOver", "task ended"]
    Worker.gate("next").set()
    await running
    assert await worker.state() == {}
    assert await rt.namespace(Worker).get("other").state() == {}


async def test_storage_and_stubs_in_another_thread_raise_wrong_thread(worker: Any) -> None:
    with pytest.raises(WrongThread):
        await worker.use_storage_in_a_thread()
    with pytest.raises(WrongThread):
        await worker.call_from_a_thread()


async def test_what_a_thread_returns_is_used_in_the_turn(worker: Any) -> None:
    assert await worker.thread_result() == 42
    assert await worker.state() == {"x": 42}


async def test_storage_outside_any_turn_raises_turn_over(rt: LocalRuntime, worker: Any) -> None:
    await worker.append(1)
    host = rt._partition_of(worker).find_host("Worker", "w")
    assert host is not None
    assert host.instance is not None
    with pytest.raises(TurnOver):
        host.instance.storage.get("values")


# --- bounds -------------------------------------------------------------------------------------------


async def test_a_full_queue_of_an_object_says_which_limit_it_met(rt: LocalRuntime) -> None:
    stub = rt.namespace(Hasty).get("h")
    calls = [asyncio.ensure_future(stub.hold()) for _ in range(5)]
    await rt.run_until_idle()
    errors = await asyncio.gather(*calls[3:], return_exceptions=True)
    assert all(isinstance(error, Overloaded) and "max_queued_turns" in str(error) for error in errors)
    Worker.gate("hasty").set()
    assert await asyncio.gather(*calls[:3]) == [1, 1, 1]


async def test_a_partition_that_holds_too_many_calls_says_so() -> None:
    Worker.reset()
    settings = Settings(durability="off", max_partition_calls=3)
    async with LocalRuntime(memory=True, settings=settings) as rt:
        calls = [asyncio.ensure_future(rt.namespace(Worker).get(f"w{n}").run("r")) for n in range(3)]
        await rt.run_until_idle()
        with pytest.raises(Overloaded, match="max_partition_calls"):
            await rt.namespace(Worker).get("one more").append(1)
        Worker.gate("r").set()
        await asyncio.gather(*calls)
        assert await rt.namespace(Worker).get("one more").append(1) == [1]


async def test_nested_calls_are_admitted_when_the_partition_is_full_of_outside_calls() -> None:
    Worker.reset()
    settings = Settings(durability="off", max_partition_calls=1)
    async with LocalRuntime(memory=True, settings=settings) as rt:
        assert await rt.namespace(Worker).get("w").call(["a", "b", "c"]) == [1]


# --- coming and going -----------------------------------------------------------------------------------


async def test_an_idle_object_leaves_memory_and_its_rows_stay(rt: LocalRuntime, worker: Any) -> None:
    await worker.append(1)
    await worker.remember("x")
    await rt.advance(seconds=11)
    assert sum(status["active_objects"] for status in rt.status()) == 0
    assert Worker.stopped == ["w"]
    assert await worker.append(2) == [1, 2]
    assert await worker.recall() == []


async def test_an_object_that_is_used_stays(rt: LocalRuntime, worker: Any) -> None:
    await worker.remember("x")
    for _ in range(5):
        await rt.advance(seconds=9)
        assert await worker.recall() == ["x"]
    assert Worker.stopped == []


async def test_more_objects_than_the_limit_push_idle_ones_out() -> None:
    Worker.reset()
    settings = Settings(durability="off", max_active_objects=10)
    async with LocalRuntime(memory=True, settings=settings) as rt:
        for number in range(30):
            await rt.namespace(Worker).get(f"w{number}").append(number)
        assert rt.status()[0]["active_objects"] <= 10
        for number in range(30):
            assert await rt.namespace(Worker).get(f"w{number}").state() == {"values": [number]}


async def test_on_stop_can_not_use_the_objects_storage_and_its_errors_harm_nobody(rt: LocalRuntime) -> None:
    stub = rt.namespace(WritesOnStop).get("s")
    await stub.write()
    assert await rt.evict(stub)
    assert WritesOnStop.errors == ["TurnOver"]
    assert await stub.read() == 1


class WritesOnStop(DurableObject):
    """Tries to use its storage when it leaves."""

    errors: ClassVar[list[str]] = []

    def on_stop(self) -> None:
        try:
            self.storage.put("x", 2)
        except Exception as error:
            self.errors.append(type(error).__name__)
        raise RuntimeError("harms nobody")

    def write(self) -> None:
        type(self).errors = []
        self.storage.put("x", 1)

    def read(self) -> Any:
        return self.storage.get("x")


class Starts(DurableObject):
    """Prepares its storage when it comes into memory."""

    failures: ClassVar[int] = 0
    order: ClassVar[list[str]] = []

    async def on_start(self) -> None:
        self.order.append("start begins")
        self.storage.put("started", self.storage.get("started", 0) + 1)
        await asyncio.sleep(0)
        if Starts.failures:
            Starts.failures -= 1
            raise RuntimeError("not yet")
        self.order.append("start ends")

    def started(self) -> int:
        self.order.append("turn")
        count: int = self.storage.get("started", 0)
        return count

    def raise_after_writing(self) -> None:
        self.storage.put("started", 99)
        raise ValueError("no")

    async def call_out(self, key: str) -> Any:
        self.storage.put("called", 1)
        return await self.namespace(Worker).get(key).append(1)


async def test_on_start_ends_and_commits_before_the_first_turn(rt: LocalRuntime) -> None:
    Starts.failures, Starts.order = 0, []  # type: ignore[misc]
    stub = rt.namespace(Starts).get("s")
    assert await asyncio.gather(stub.started(), stub.started()) == [1, 1]
    assert Starts.order == ["start begins", "start ends", "turn", "turn"]
    with pytest.raises(ValueError):
        await stub.raise_after_writing()
    assert await stub.started() == 2  # what on_start wrote is not the turn's, so it is not rolled back with it


async def test_a_start_that_raises_fails_one_call_and_the_next_tries_again(rt: LocalRuntime) -> None:
    Starts.failures, Starts.order = 2, []  # type: ignore[misc]
    stub = rt.namespace(Starts).get("s")
    first, second, third = await asyncio.gather(stub.started(), stub.started(), stub.started(), return_exceptions=True)
    assert str(first) == str(second) == "not yet"
    assert third == 1  # what the failed starts wrote is gone


async def test_a_start_that_fails_when_a_turn_is_run_again_leaves_no_intent_behind() -> None:
    """The turn had called out when its process died; its caller is told, and that is its outcome for ever."""
    Worker.reset()
    control = CommitControl()
    async with runtime_with(control) as rt:
        Starts.failures, Starts.order = 0, []  # type: ignore[misc]
        stub = rt.namespace(Starts).get("s")
        await stub.started()
        await rt.namespace(Worker).get("a").state()
        call = asyncio.ensure_future(stub.call_out("a"))
        control.crash_at = control.commits + 2  # the intent is durable, and so is the callee's turn
        await control.wait_stopped()
        Starts.failures = 1  # type: ignore[misc]
        await rt.crash()
        with pytest.raises(RuntimeError, match="not yet"):
            await finish(rt, call)
        await rt.run_until_idle()
        partition = rt.partitions[0]
        assert partition is not None
        assert partition.store.scan("intents") == []
        await rt.crash()
        await rt.run_until_idle()
        assert await stub.started() == 2  # the start that failed was rolled back
        assert await rt.namespace(Worker).get("a").state() == {"values": [1]}


# --- names, keys and arguments ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("_private", MethodNotCallable),
        ("__init__", MethodNotCallable),
        ("alarm", ReservedName),
        ("on_start", ReservedName),
        ("on_stop", ReservedName),
        ("on_alarm_exhausted", ReservedName),
        ("storage", ReservedName),
        ("timers", ReservedName),
        ("namespace", ReservedName),
        ("nothing", NoSuchMethod),
        ("not_a_method", MethodNotCallable),
    ],
)
async def test_only_the_applications_own_methods_can_be_called(
    rt: LocalRuntime, worker: Any, name: str, error: type[Exception]
) -> None:
    if name != "__init__":
        with pytest.raises(error):
            getattr(worker, name)
    with pytest.raises(error):  # also when a client asks for it that does not know the class
        await rt.client().call(ClassRef("Worker", Worker.__module__, "Worker"), "w", name, (), {})
    assert Worker.instances == 0


@pytest.mark.parametrize("key", ["", "a\0b", "x" * 1_025, "ä" * 513, 5, None, "\ud800"])
async def test_a_key_is_1_to_1024_utf8_bytes_without_nul(rt: LocalRuntime, key: Any) -> None:
    with pytest.raises(InvalidKey):
        rt.namespace(Worker).get(key)


@pytest.mark.parametrize("key", ["x", "x" * 1_024, "ä" * 512, "\u2028", "a/b c"])
async def test_any_other_text_is_a_key(rt: LocalRuntime, key: str) -> None:
    assert await rt.namespace(Worker).get(key).append(1) == [1]
    assert [entry.key for entry in await rt.namespace(Worker).list()] == [key]


@pytest.mark.parametrize(
    ("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"d": 4}), ((1,), {"a": 1}), ((), {"b": 2})]
)
async def test_arguments_that_do_not_fit_are_refused_and_nothing_runs(
    worker: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArguments, match="take"):
        await worker.take(*args, **kwargs)


async def test_arguments_arrive_as_they_were_given(worker: Any) -> None:
    assert await worker.take(1, c=5) == (1, 2, 5)
    assert await worker.take(a=1, b=7) == (1, 7, 3)


async def test_a_type_error_of_the_body_is_the_applications_own(worker: Any) -> None:
    with pytest.raises(TypeError, match="expected str") as caught:
        await worker.raise_type_error()
    assert not isinstance(caught.value, InvalidArguments)


class Order(BaseModel):
    """An argument with a model."""

    sku: str
    count: int


class Validated(DurableObject):
    """Checks its arguments."""

    validate = True

    def add(self, count: int, tags: list[str] | None = None) -> tuple[int, list[str]]:
        return count, tags or []

    async def place(self, order: Order) -> str:
        return f"{order.count} x {order.sku}"


class Lenient(DurableObject):
    """Checks only what is a pydantic model."""

    def add(self, count: int) -> Any:
        return count

    def place(self, order: Order) -> str:
        return f"{order.count} x {order.sku}"


@pytest.mark.parametrize("args", [("many",), (1, "not a list"), (None,)])
async def test_a_class_that_validates_refuses_what_does_not_fit_its_hints(
    rt: LocalRuntime, args: tuple[Any, ...]
) -> None:
    with pytest.raises(InvalidArguments):
        await rt.namespace(Validated).get("v").add(*args)


async def test_a_class_that_validates_converts_as_pydantic_does(rt: LocalRuntime) -> None:
    stub = rt.namespace(Validated).get("v")
    assert await stub.add("5", ["a"]) == (5, ["a"])
    assert await stub.place({"sku": "apple", "count": "2"}) == "2 x apple"
    assert await stub.place(Order(sku="apple", count=3)) == "3 x apple"


async def test_parameters_that_are_models_are_always_validated(rt: LocalRuntime) -> None:
    stub = rt.namespace(Lenient).get("l")
    assert await stub.add("as it is") == "as it is"
    assert await stub.place({"sku": "apple", "count": 2}) == "2 x apple"
    with pytest.raises(InvalidArguments):
        await stub.place({"sku": "apple"})


# --- values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("what", "path"), [("list", r"\[1\].*a.*\[0\]"), ("key", "t")])
async def test_an_unstorable_value_names_its_place_in_the_value(worker: Any, what: str, path: str) -> None:
    with pytest.raises(UnstorableValue, match=path):
        await worker.unstorable(what)
    assert await worker.state() == {}


async def test_a_value_over_two_mebibytes_is_refused(rt: LocalRuntime, worker: Any) -> None:
    with pytest.raises(ValueTooLarge, match="2,097,152"):
        await worker.store(b"x" * rt.settings.max_value_bytes)
    assert await worker.state() == {}


# --- classes ------------------------------------------------------------------------------------------


async def test_a_class_that_was_never_announced_is_unknown(rt: LocalRuntime) -> None:
    from tests.support.peer import Peer

    peer = Peer(rt, Worker, "w")
    peer._type_name = "Nobody"
    await peer.call(1, "run")
    with pytest.raises(UnknownClass, match="Nobody"):
        await peer.result()


async def test_a_class_that_can_not_be_imported_says_why(rt: LocalRuntime) -> None:
    for ref in (
        ClassRef("Gone", "no_such_module_anywhere", "Gone"),
        ClassRef("Gone2", Worker.__module__, "NoSuchClass"),
        ClassRef("Gone3", "json", "JSONDecoder"),
    ):
        with pytest.raises((ClassNotImportable, InvalidClassOption), match=r"Gone|JSONDecoder"):
            await finish(rt, rt.client().call(ref, "k", "run", (), {}))


async def test_two_classes_of_one_name_are_refused(rt: LocalRuntime) -> None:
    rt.namespace(Worker)

    class Impostor(DurableObject):
        type_name = "Worker"

    with pytest.raises(DuplicateTypeName, match="Worker"):
        rt.namespace(Impostor)


def test_a_base_class_and_what_is_no_durable_class_make_no_namespace() -> None:
    from actors.durable_object import class_info

    for wrong in (DurableObject, int, "Worker"):
        with pytest.raises(InvalidClassOption):
            class_info(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options",
    [
        {"turns": "parallel"},
        {"storage_engine": "cloud"},
        {"idle_timeout_ms": 0},
        {"max_queued_turns": -1},
        {"turn_timeout_ms": 1.5},
        {"turn_timeout_ms": True},
        {"alarm_retry": 7},
        {"harmless_errors": ValueError},
        {"harmless_errors": (1,)},
        {"validate": 1},
        {"type_name": ""},
        {"type_name": "a\0b"},
        {"key": "mine"},
        {"storage": {}},
        {"alarm": 5},
        {"idle_timeout": 5},
        {"validates": True},
    ],
)
def test_wrong_class_options_are_refused_at_definition(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidClassOption, match=next(iter(options))):
        type("Wrong", (DurableObject,), options)


def test_a_class_option_in_the_wrong_place_is_refused_with_the_right_one() -> None:
    with pytest.raises(InvalidClassOption, match="turns = "):
        type("Wrong", (DurableObject,), {}, turns="interleaved")


def test_methods_and_attributes_of_ones_own_are_no_misspelled_options() -> None:
    type("Right", (DurableObject,), {"validates": lambda self: True, "colour": "red", "_turn": 1})


# --- the turn's own facts ---------------------------------------------------------------------------


async def test_time_and_randomness_of_a_turn_do_not_change_while_it_runs(rt: LocalRuntime) -> None:
    stub = rt.namespace(Facts).get("f")
    start = rt.clock.wall_ms()
    call = asyncio.ensure_future(stub.facts())
    await rt.advance(seconds=3)
    Worker.gate("facts").set()
    before, after, attempt = await call
    assert before == after == start
    assert attempt == 1
    assert await stub.draw() != await stub.draw()  # another turn, other numbers


class Facts(DurableObject):
    """Tells what a turn knows about itself."""

    async def facts(self) -> tuple[int, int, int]:
        before = self.turn.now_ms
        assert self.turn.now.tzinfo is not None
        await Worker.gate("facts").wait()
        return before, self.turn.now_ms, self.turn.attempt

    def draw(self) -> float:
        first, second = self.turn.random.random(), self.turn.random.random()
        assert first != second
        return first


async def test_sync_commits_what_there_is_and_a_later_exception_takes_only_the_rest_back(rt: LocalRuntime) -> None:
    stub = rt.namespace(Syncs).get("s")
    with pytest.raises(ValueError):
        await stub.sync_then_raise()
    assert await stub.state() == {"synced": 1}
    await rt.crash()
    assert await stub.state() == {"synced": 1}


async def test_a_synced_turn_that_raised_is_not_run_again_after_a_crash(rt: LocalRuntime) -> None:
    stub = rt.namespace(Syncs).get("s")
    Syncs.runs = 0
    with pytest.raises(ValueError):
        await stub.sync_then_raise()
    await rt.crash()
    await rt.run_until_idle()
    assert Syncs.runs == 1


class Syncs(DurableObject):
    """Commits in parts."""

    runs = 0

    async def sync_then_raise(self) -> None:
        type(self).runs += 1
        self.storage.put("synced", 1)
        await self.storage.sync()
        self.storage.put("lost", 1)
        raise ValueError("after the sync")

    def state(self) -> dict[str, Any]:
        return self.storage.list()
