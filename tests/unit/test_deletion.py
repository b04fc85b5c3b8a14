"""Deleting an object whole: its place among the calls, what comes after it, crashes, and failed commits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, ClassVar

import pytest
import pytest_asyncio

from actors.client import Client
from actors.durable_object import DurableObject, class_info, shared
from actors.errors import MainspringError
from actors.messages import DELETE
from actors.object_timers import TimerInfo
from actors.testing import LocalRuntime
from tests.support.held_commits import CommitFailure, held_runtime, turn_loop


class Box(DurableObject):
    """Notes what it is told; waits when it is told to."""

    gates: ClassVar[dict[str, asyncio.Event]] = {}
    stopped: ClassVar[list[str]] = []

    def on_stop(self) -> None:
        self.stopped.append(self.key)

    def put(self, name: str) -> list[str]:
        self.storage[name] = 1
        return list(self.storage)

    async def put_later(self, name: str) -> list[str]:
        self.storage[name] = 1
        await self.gates.setdefault("put", asyncio.Event()).wait()
        return list(self.storage)

    def arm(self) -> None:
        self.storage["armed"] = 1
        self.timers.set("t", after="1m", method="fire")

    def fire(self, info: TimerInfo) -> None:
        self.storage["fired"] = 1

    @shared
    async def names_later(self) -> list[str]:
        await self.gates.setdefault("names", asyncio.Event()).wait()
        return list(self.storage)

    def names(self) -> list[str]:
        return list(self.storage)


class WideBox(Box):
    turns = "interleaved"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Box, "gates", {})
    monkeypatch.setattr(Box, "stopped", [])


@pytest_asyncio.fixture
async def rt() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime() as runtime:
        yield runtime


def start(call: Awaitable[Any]) -> asyncio.Future[Any]:
    return asyncio.ensure_future(call)


async def answered(call: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(call, 5)


@pytest.mark.parametrize("box", [Box, WideBox])
@pytest.mark.parametrize("waiting", ["put_later", "names_later"])
async def test_it_waits_behind_turns_that_run_and_before_calls_that_come_later(
    rt: LocalRuntime, box: type[Box], waiting: str
) -> None:
    boxes = rt.namespace(box)
    await boxes.get("a").put("old")
    before = start(getattr(boxes.get("a"), waiting)(*["new"] * (waiting == "put_later")))
    await turn_loop()
    deletion = start(boxes.delete("a"))
    await turn_loop()
    after = start(boxes.get("a").put("after"))
    await turn_loop()
    assert not before.done()
    assert not deletion.done()
    assert not after.done()
    for gate in Box.gates.values():
        gate.set()
    assert await answered(before) == (["new", "old"] if waiting == "put_later" else ["old"])
    assert await answered(deletion) is True
    assert await answered(after) == ["after"]
    assert Box.stopped == ["a"]
    await rt.crash()
    assert await answered(boxes.get("a").names()) == ["after"]
    assert [entry.key for entry in await boxes.list()] == ["a"]


async def test_timers_and_the_object_are_gone(rt: LocalRuntime) -> None:
    boxes = rt.namespace(Box)
    await boxes.get("a").arm()
    assert await boxes.delete("a") is True
    assert await boxes.delete("a") is False
    await rt.advance(minutes=5)
    assert await boxes.list() == []
    assert await boxes.get("a").names() == []
    (partition,) = rt.partitions
    assert partition is not None
    assert partition.deletions == {}
    assert list(partition.store.scan("timers")) == []
    assert list(partition.store.scan("kv")) == []


async def test_what_no_object_is_needs_no_commit(rt: LocalRuntime) -> None:
    assert await rt.namespace(Box).delete("nobody") is False


async def test_writes_on_their_way_are_deleted_too_and_a_failed_commit_undoes_both() -> None:
    async with held_runtime() as (rt, commits):
        boxes = rt.namespace(Box)
        await boxes.get("a").put("old")
        commits.hold()
        first = start(boxes.get("a").put("new"))
        await commits.arrived()
        deletion = start(boxes.delete("a"))
        await turn_loop()
        last = start(boxes.get("a").put("after"))
        await turn_loop()
        await commits.release()
        assert await answered(first) == ["new", "old"]
        assert not deletion.done()
        await commits.fail(CommitFailure.DISK_FULL)
        for call in (deletion, last):
            with pytest.raises(MainspringError):
                await answered(call)
        commits.let_go()
        assert await boxes.get("a").names() == ["new", "old"]
        assert await boxes.delete("a") is True
        assert await boxes.get("a").names() == []


async def test_a_repeat_of_it_does_not_delete_what_was_written_since() -> None:
    async with held_runtime() as (rt, commits):
        boxes = rt.namespace(Box)
        await boxes.get("a").put("old")
        commits.hold()
        deletion = start(boxes.delete("a"))
        await commits.arrived()
        (partition,) = rt.partitions
        assert partition is not None
        for connection in list(partition._connections):
            connection._replies = _Deaf()  # the answer gets lost
        commits.let_go()
        await turn_loop()
        assert not deletion.done()
        entries = [entry for row in partition.inbox._rows.values() for entry in row.entries.values()]
        assert [entry.class_name for entry in entries] == ["Box"]
        # somebody else begins anew, and then the caller asks again
        (host,) = [host for host in partition._hosts.values() if host.id.key == "a"]
        assert host.state.oid is None
        other = await _from_elsewhere(rt, "after")
        assert other == ["after"]
        await rt.crash()
        assert await answered(deletion) is True
        assert await boxes.get("a").names() == ["after"]


class _Deaf(list[Any]):
    def append(self, item: Any) -> None:
        return None


async def _from_elsewhere(rt: LocalRuntime, name: str) -> Any:
    """A call of another process."""
    client = Client(rt._directory, rt.settings)
    try:
        return await answered(client.call(class_info(Box).ref, "a", "put", [name], {}))
    finally:
        await client.close()


async def test_a_moved_object_is_deleted_where_it_is() -> None:
    async with LocalRuntime(partitions=2) as rt:
        boxes = rt.namespace(Box)
        stub = boxes.get("a")
        await stub.put("old")
        (owner,) = [p for p in rt.partitions if p is not None and p.runs_slot(stub.id.slot)]
        owner.slot_table.leaving.add(stub.id.slot)  # about to go elsewhere: nothing new begins
        deletion = start(boxes.delete("a"))
        await turn_loop()
        assert not deletion.done()
        assert owner.store.find_object("Box", "a") is not None
        deletion.cancel()


async def test_its_name_is_no_method_of_a_stub(rt: LocalRuntime) -> None:
    with pytest.raises(MainspringError):
        getattr(rt.namespace(Box).get("a"), DELETE)
