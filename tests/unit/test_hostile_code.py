"""What an application's code may do wrong without taking its object, its timers or its neighbours along."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import pytest
import pytest_asyncio

from actors import testing
from actors.durable_object import DurableObject
from actors.errors import RemoteError
from actors.object_timers import TimerInfo
from actors.testing import LocalRuntime


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
    partition = rt.partitions[0]
    assert partition is not None
    host = partition.find_host("Hostile", "a")
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
