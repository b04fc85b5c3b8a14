"""Requests that make no sense, are too much or come from the wrong place: they are answered, and nobody is stuck."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from actors.dead_letters import DeadLetter
from actors.durable_object import DurableObject
from actors.errors import InvalidOption, ReplyLost, WrongThread
from actors.settings import Settings
from actors.testing import LocalRuntime, SystemClock, VirtualClock


class Plain(DurableObject):
    """Counts."""

    def add(self) -> int:
        self.storage["n"] = self.storage.get("n", 0) + 1
        return int(self.storage["n"])


class Late(Plain):
    """Named outside of the event loop."""


@pytest_asyncio.fixture
async def rt() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime() as runtime:
        yield runtime


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("list_objects", ["Plain", 5, None, 10]),
        ("list_objects", ["Plain", None, None, "many"]),
        ("list_objects", ["Plain"]),
        ("dead_letters", ["many", None]),
        ("dead_letters", [1, 1 << 80]),
        ("discard", [1 << 80]),
        ("redrive", [1 << 80]),
        ("no such request", []),
    ],
)
async def test_strange_arguments_are_refused_and_calls_behind_them_go_on(
    rt: LocalRuntime, op: str, args: list[Any]
) -> None:
    plain = rt.namespace(Plain).get("a")
    await plain.add()
    asked = asyncio.ensure_future(rt.client().admin(0, op, args))
    call = asyncio.ensure_future(plain.add())
    assert await asyncio.wait_for(call, 5) == 2
    try:
        await asyncio.wait_for(asked, 5)
    except InvalidOption:
        return
    pytest.fail("it was answered")


async def test_a_letter_that_cannot_be_is_refused(rt: LocalRuntime) -> None:
    letter = DeadLetter(1 << 80, 0, "Plain", "a", 1, "t", 0, 1, 0, "", 0)
    for act in (rt.redrive, rt.discard):
        with pytest.raises(InvalidOption):
            await asyncio.wait_for(act(letter), 5)


async def test_an_answer_that_fits_no_frame_is_an_error_and_leaves_the_connection() -> None:
    settings = Settings(durability="off", max_frame_bytes=20_000)
    async with LocalRuntime(settings=settings) as rt:
        plain = rt.namespace(Plain)
        for number in range(40):
            await plain.get(f"{number:01000}").add()
        connections = set(_connections(rt))
        with pytest.raises(ReplyLost, match="ask for less"):
            await asyncio.wait_for(plain.list(), 5)
        assert len(await plain.list(limit=10)) == 10
        assert set(_connections(rt)) == connections


def _connections(rt: LocalRuntime) -> set[Any]:
    (partition,) = rt.partitions
    assert partition is not None
    return set(partition._connections)


@pytest.mark.parametrize("is_virtual", [True, False])
def test_a_class_named_while_the_loop_stands_still_is_known_when_it_goes_on(is_virtual: bool) -> None:
    with asyncio.Runner() if hasattr(asyncio, "Runner") else _Loop() as runner:
        rt = LocalRuntime(clock=VirtualClock() if is_virtual else SystemClock())
        runner.run(rt.start())
        stub = rt.namespace(Late).get("a")

        async def use() -> int:
            return await asyncio.wait_for(stub.add(), 5)

        assert runner.run(use()) == 1
        runner.run(rt.stop())


class _Loop:
    """`asyncio.Runner` for a Python that has none."""

    def __enter__(self) -> _Loop:
        self._loop = asyncio.new_event_loop()
        return self

    def run(self, work: Any) -> Any:
        return self._loop.run_until_complete(work)

    def __exit__(self, *_: object) -> None:
        self._loop.close()


async def test_a_class_named_on_another_thread_is_refused(rt: LocalRuntime) -> None:
    with pytest.raises(WrongThread):
        await asyncio.to_thread(rt.namespace, Late)
    assert await asyncio.wait_for(rt.namespace(Late).get("a").add(), 5) == 1


async def test_a_clock_that_jumps_ahead_makes_nobody_forget_what_was_answered(rt: LocalRuntime) -> None:
    plain = rt.namespace(Plain).get("a")
    (partition,) = rt.partitions
    assert partition is not None
    kept = asyncio.ensure_future(plain.add())
    for _ in range(100):
        if len(partition.inbox):
            break
        await asyncio.sleep(0)
    (entry,) = [entry for row in partition.inbox._rows.values() for entry in row.entries.values()]
    for connection in list(partition._connections):
        partition.inbox.disconnected(connection.session, partition.serving_ms())
    assert isinstance(rt.clock, VirtualClock)
    rt.clock.step_wall(24 * 3_600_000)
    partition._sweep._run()
    assert partition.inbox.look_up(entry.call_id)[0] is not None
    assert await kept == 1
