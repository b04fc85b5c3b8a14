"""Objects that send each other messages: each receiver keeps what was applied, so that a loss or a repeat shows."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, ClassVar

from actors.durable_object import DurableObject, shared
from actors.errors import Rejected
from actors.object_timers import TimerInfo
from actors.testing import LocalRuntime
from timers.backoff import RetryPolicy

__all__ = [
    "Box",
    "Greeter",
    "Leaf",
    "LooseBox",
    "LoosePost",
    "NoThanks",
    "Post",
    "outbox",
    "received",
    "until_delivered",
]

#: Looks at the outboxes before they must be empty, and the virtual time between two.
_LOOKS = 400
_LOOK_S = 2


class NoThanks(Rejected):
    """A receiver's own no."""


class Leaf(DurableObject):
    """Called by receivers in their turns."""

    def add(self) -> int:
        count: int = self.storage.get("n", 0) + 1
        self.storage.put("n", count)
        return count

    def total(self) -> int:
        count: int = self.storage.get("n", 0)
        return count


class _Receives(DurableObject):
    """What `Box` and `LooseBox` have in common. `runs` counts the runs in this process by what was sent."""

    runs: ClassVar[Counter[Any]] = Counter()
    gates: ClassVar[dict[str, asyncio.Event]] = {}
    #: what raises: the value -> how many runs of it still raise; a negative number: all of them
    failing: ClassVar[dict[Any, int]] = {}
    noted: ClassVar[list[Any]] = []

    def put(self, value: Any) -> None:
        self._keep(value)

    async def put_at_gate(self, value: Any) -> None:
        self.runs["begun", value] += 1
        gate = self.gates.get(self.key)
        if gate is not None:
            await gate.wait()
        self._keep(value)

    async def put_slowly(self, value: Any) -> None:
        self.runs["begun", value] += 1
        await asyncio.sleep(0)
        self._keep(value)

    async def put_and_call(self, value: Any, leaf: str) -> None:
        await self.namespace(Leaf).get(leaf).add()
        self._keep(value)

    async def put_and_wait(self, value: Any) -> None:
        self._keep(value)
        await self.namespace(Leaf).get("leaf").add()

    def look(self) -> None:
        """Writes nothing."""
        self.runs["look"] += 1

    def note(self, value: Any) -> None:
        """Writes nothing, and costs little."""
        self.noted.append(value)

    def answer_with_lock(self) -> Any:
        """Has a result that can't travel."""
        self._keep("locked")
        return object()

    def _keep(self, value: Any) -> None:
        self.runs[value] += 1
        values = self.storage.get("values", [])
        self.storage.put("values", [*values, value])
        left = self.failing.get(value, 0)
        if left:
            self.failing[value] = left - 1
            raise NoThanks(f"not {value!r}")

    @shared
    def values(self) -> list[Any]:
        """What was applied, in order."""
        values: list[Any] = self.storage.get("values", [])
        return values

    async def send_back(self, post: str, value: Any) -> None:
        self._keep(value)
        self.send(Post, post).put(value)


class Box(_Receives):
    """Serial."""


class LooseBox(_Receives):
    """Interleaved."""

    turns = "interleaved"


class _Sends(_Receives):
    """What `Post` and `LoosePost` have in common."""

    def send_one(self, to: str, value: Any, method: str = "put", retry: RetryPolicy | None = None) -> None:
        self.storage.put("sent", self.storage.get("sent", 0) + 1)
        getattr(self.send(Box, to, retry=retry), method)(value)

    def send_many(
        self, to: list[str], values: list[Any], method: str = "put", retry: RetryPolicy | None = None
    ) -> None:
        for value in values:
            for each in to:
                getattr(self.send(Box, each, retry=retry), method)(value)

    def send_loosely(self, to: str, values: list[Any], method: str) -> None:
        for value in values:
            getattr(self.send(LooseBox, to), method)(value)

    def send_with(self, to: str, method: str, *args: Any) -> None:
        getattr(self.send(Box, to), method)(*args)

    def send_after(self, to: str, value: Any, delay: Any) -> None:
        self.send(Box, to).after(delay).put(value)

    def send_at(self, to: str, value: Any, when_ms: int) -> None:
        self.send(Box, to, at=when_ms).put(value)

    def send_and_raise(self, to: str, value: Any) -> None:
        self.send(Box, to).put(value)
        self.send(Box, to).after("1s").put(value)
        raise NoThanks("rolled back")

    def send_in_transaction(self, to: str) -> None:
        with self.storage.transaction():
            self.send(Box, to).put("kept")
        with self.storage.transaction() as transaction:
            self.send(Box, to).put("rolled back")
            transaction.rollback()
        self.send(Box, to).put("after")

    async def send_around_waits(self, to: str, values: list[Any]) -> None:
        for value in values:
            self.send(Box, to).put(value)
            await asyncio.sleep(0)

    async def send_synced_and_raise(self, to: str) -> None:
        self.send(Box, to).put("synced")
        await self.storage.sync()
        self.send(Box, to).put("rolled back")
        raise NoThanks("after the sync")

    async def send_and_call(self, to: str) -> int:
        """The receiver sends back to this object, which is still in its turn and has called another."""
        self.send(Box, to).send_back(self.key, "back")
        return int(await self.namespace(Leaf).get("leaf").add())

    def send_to_self(self, value: Any) -> None:
        self.send(type(self), self.key).put(value)

    def send_wrongly(self, to: str, what: str) -> None:
        """Try what is refused at once."""
        {
            "an unknown method": lambda: self.send(Box, to).no_such_method(),
            "a private method": lambda: self.send(Box, to)._keep(1),
            "a method that only reads": lambda: self.send(Box, to).values(),
            "an empty key": lambda: self.send(Box, "").put(1),
            "a value that can't be stored": lambda: self.send(Box, to).put(object()),
            "too large a value": lambda: self.send(Box, to).put("x" * 200_000),
            "after and at": lambda: self.send(Box, to, after="1s", at=1).put(1),
            "a retry that is none": lambda: self.send(Box, to, retry=3).put(1),  # type: ignore[arg-type]
        }[what]()

    def arm(self, to: str, after: str) -> None:
        self.timers.set("t", after=after, method="on_timer", payload=to)

    def on_timer(self, info: TimerInfo) -> None:
        self.send(Box, info.payload).put("from the timer")

    @shared
    def send_from_shared(self, to: str) -> None:
        self.send(Box, to).put("never")

    def clear(self) -> None:
        self.storage.delete_all()


class Post(_Sends):
    """Serial."""


class LoosePost(_Sends):
    """Interleaved."""

    turns = "interleaved"


class Greeter(DurableObject):
    """Sends when it starts."""

    def on_start(self) -> None:
        self.send(Box, "greeted").put(self.key)

    def hello(self) -> str:
        return "hello"


def outbox(runtime: LocalRuntime) -> int:
    """Messages on their way, durably; a partition that is just being opened has one at least."""
    return sum(partition.store.count("outbox") if partition else 1 for partition in runtime.partitions)


def received(runtime: LocalRuntime) -> list[tuple[Any, ...]]:
    """The numbers that receivers have applied, as rows."""
    return [row for partition in runtime.partitions if partition for row in partition.store.scan("received")]


async def until_delivered(runtime: LocalRuntime) -> None:
    """Until nothing is on its way. Clients reconnect in real time, pauses and retries pass in virtual time."""
    for _ in range(_LOOKS):
        await runtime.run_until_idle()
        if not outbox(runtime):
            return
        await asyncio.sleep(0.002)
        await runtime.advance(seconds=_LOOK_S)
    raise AssertionError(f"{outbox(runtime)} messages are never delivered: {runtime.status()}")
