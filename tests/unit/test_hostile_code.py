"""What an application's code may do wrong without taking its object, its timers or its neighbours along."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import pytest
import pytest_asyncio

from actors import durable_object, testing
from actors.durable_object import DurableObject, class_info
from actors.errors import MethodNotCallable, RemoteError
from actors.object_timers import TimerInfo
from actors.partition import Partition
from actors.testing import LocalRuntime, VirtualClock
from tests.support.held_commits import CommitFailure, held_runtime


class Unspeakable(Exception):
    """An exception that can't be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


RAISED: dict[str, type[BaseException]] = {
    "cancelled": asyncio.CancelledError,
    "generator_exit": GeneratorExit,
    "system_exit": SystemExit,
    "unspeakable": Unspeakable,
}


def only_partition(rt: LocalRuntime) -> Partition:
    (partition,) = rt.partitions
    assert partition is not None
    return partition


def raise_it(kind: str) -> NoReturn:
    raise RAISED[kind]()


class Hostile(DurableObject):
    """Raises what nobody expects of a method."""

    armed = False

    def on_start(self) -> None:
        if self.key.startswith("start-"):
            raise_it(self.key.removeprefix("start-"))

    def plain(self, kind: str) -> None:
        self.storage["lost"] = 1
        raise_it(kind)

    async def waiting(self, kind: str) -> None:
        self.storage["lost"] = 1
        await asyncio.sleep(0)
        raise_it(kind)

    def arm(self, kind: str) -> None:
        self.timers.set("hostile", after="1s", method="fire", payload=kind)

    def fire(self, info: TimerInfo) -> None:
        if info.attempt == 0 or info.attempt == 1:
            raise_it(info.payload)
        self.storage["fired"] = info.attempt

    def state(self) -> dict[str, Any]:
        return self.storage.list()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_PATIENCE_S", 0.0)


@pytest_asyncio.fixture
async def rt() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime() as runtime:
        yield runtime


@pytest.mark.parametrize("method", ["plain", "waiting"])
@pytest.mark.parametrize("kind", RAISED)
async def test_whatever_a_method_raises_is_answered_and_undone(rt: LocalRuntime, method: str, kind: str) -> None:
    stub = rt.namespace(Hostile).get("a")
    with pytest.raises(Exception) as caught:
        await asyncio.wait_for(getattr(stub, method)(kind), 5)
    assert not isinstance(caught.value, asyncio.TimeoutError), "it was never answered"
    assert isinstance(caught.value, RemoteError | RuntimeError)
    assert await asyncio.wait_for(stub.state(), 5) == {}


@pytest.mark.parametrize("kind", RAISED)
async def test_whatever_on_start_raises_fails_the_call(rt: LocalRuntime, kind: str) -> None:
    stub = rt.namespace(Hostile).get(f"start-{kind}")
    for _ in range(2):
        with pytest.raises(Exception) as caught:
            await asyncio.wait_for(stub.state(), 5)
        assert not isinstance(caught.value, asyncio.TimeoutError), "it was never answered"


@pytest.mark.parametrize("kind", RAISED)
async def test_whatever_a_timers_handler_raises_is_retried(rt: LocalRuntime, kind: str) -> None:
    stub = rt.namespace(Hostile).get("a")
    await stub.arm(kind)
    await rt.advance(minutes=1)
    assert "fired" in await asyncio.wait_for(stub.state(), 5)


async def test_a_turn_that_is_cut_short_before_its_first_step_leaves_no_warning(
    rt: LocalRuntime, recwarn: pytest.WarningsRecorder
) -> None:
    stub = rt.namespace(Hostile).get("a")
    await stub.state()
    host = only_partition(rt).find_host("Hostile", "a")
    assert host is not None
    call = asyncio.ensure_future(stub.waiting("cancelled"))
    for _ in range(100):
        if host.current is not None:
            break
        await asyncio.sleep(0)
    await rt.crash()
    with pytest.raises(RemoteError):
        await call
    assert not recwarn.list


# --- versions of the code that fit less ---------------------------------------------------------------


class Retired(DurableObject):
    """Its definition is missing for a while."""

    async def arm(self, count: int) -> None:
        for number in range(count):
            self.timers.set(f"timer {number}", after="1m", method="fire")

    def fire(self, info: TimerInfo) -> None:
        self.storage[info.name] = 1

    def fired(self) -> int:
        return len(self.storage)


async def test_timers_of_a_class_that_is_gone_wait_together_and_run_when_it_is_back(
    rt: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rt.namespace(Retired).get("a").arm(20)
    rt._classes.clear()  # a new process knows nobody
    module = sys.modules[__name__]
    retired = Retired
    monkeypatch.delattr(module, "Retired")
    await rt.crash()
    await rt.advance(minutes=4)
    assert isinstance(rt.clock, VirtualClock)
    assert len(rt.clock._later) < 20, "each timer waits for itself"
    monkeypatch.setattr(module, "Retired", retired, raising=False)
    await rt.advance(minutes=1)
    assert await rt.namespace(retired).get("a").fired() == 20


async def test_timers_that_are_due_while_their_class_is_loaded_are_looked_at_once(
    rt: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rt.namespace(Retired).get("a").arm(20)
    partition = only_partition(rt)
    assert isinstance(rt.clock, VirtualClock)
    rt.clock.move_to(rt.clock.wall_ms() + 60_000)
    loaded: list[Callable[[], None]] = []
    with monkeypatch.context() as patch:
        patch.setattr(partition.classes, "get", lambda name: None)
        patch.setattr(partition.classes, "when_loaded", lambda name, callback: loaded.append(callback))
        partition.tick()
    assert len(loaded) == 1
    loaded[0]()
    assert await rt.namespace(Retired).get("a").fired() == 20


class Shrinking(DurableObject):
    """Loses methods while turns of them are under way."""

    began: ClassVar[list[int]] = []
    hold: ClassVar[bool] = True

    async def call_out(self) -> int:
        self.began.append(self.turn.attempt)
        await self.namespace(Retired).get("called").fired()
        await self.namespace(Hostile).get("called").arm("none")
        if self.hold:
            await asyncio.Event().wait()
        self.storage["attempt"] = self.turn.attempt
        return self.turn.attempt

    def arm(self) -> None:
        self.timers.set("t", after="1s", method="call_out_by_timer")

    async def call_out_by_timer(self, info: TimerInfo) -> None:
        await self.call_out()

    def state(self) -> dict[str, Any]:
        return self.storage.list()


@pytest.fixture
def shrinking(monkeypatch: pytest.MonkeyPatch) -> type[Shrinking]:
    monkeypatch.setattr(Shrinking, "began", [])
    monkeypatch.setattr(Shrinking, "hold", True)
    return Shrinking


async def intents(rt: LocalRuntime) -> list[Any]:
    await rt.run_until_idle()
    return list(only_partition(rt).store.scan("intents"))


@pytest.mark.parametrize("by_timer", [False, True])
async def test_a_turn_whose_method_is_gone_when_it_must_be_run_again_ends_with_that(
    rt: LocalRuntime, shrinking: type[Shrinking], monkeypatch: pytest.MonkeyPatch, by_timer: bool
) -> None:
    stub = rt.namespace(shrinking).get("a")
    call = None
    if by_timer:
        await stub.arm()
        await rt.advance(seconds=1)
    else:
        call = asyncio.ensure_future(stub.call_out())
    assert await intents(rt)
    methods = dict(class_info(shrinking).methods)
    del methods["call_out_by_timer" if by_timer else "call_out"]
    monkeypatch.setattr(durable_object, "_INFOS", {shrinking: replace(class_info(shrinking), methods=methods)})
    await rt.crash()
    if call is not None:
        with pytest.raises(MethodNotCallable):
            await asyncio.wait_for(call, 5)
    assert await asyncio.wait_for(stub.state(), 5) == {}
    assert await intents(rt) == []


async def test_each_run_of_a_turn_has_an_attempt_of_its_own(rt: LocalRuntime, shrinking: type[Shrinking]) -> None:
    call = asyncio.ensure_future(rt.namespace(shrinking).get("a").call_out())
    for _ in range(2):
        assert await intents(rt)
        await rt.crash()
    assert await intents(rt)
    assert shrinking.began == [1, 2, 3]
    shrinking.hold = False
    await rt.crash()
    assert await asyncio.wait_for(call, 5) == 4


async def test_a_turn_that_called_out_is_run_again_also_past_its_deadline(shrinking: type[Shrinking]) -> None:
    shrinking.hold = False
    async with held_runtime() as (rt, commits):
        stub = rt.namespace(shrinking).get("a")
        await stub.state()
        commits.hold()
        call = asyncio.ensure_future(stub.with_options(timeout="5s").call_out())
        host = only_partition(rt).find_host("Shrinking", "a")
        assert host is not None
        while host.current is not None or not shrinking.began:  # its intent, and what it calls
            await commits.release()
        await commits.fail(CommitFailure.DISK_FULL)
        assert isinstance(rt.clock, VirtualClock)
        rt.clock.move_to(rt.clock.wall_ms() + 6_000)
        commits.let_go()
        rt.clock.run_due()
        assert await asyncio.wait_for(call, 5) == 2
        assert shrinking.began == [1, 2]
        assert await intents(rt) == []
