"""A partition's side for transport tests. Driven by name and plain data, so that it can live in another process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from actors.channel import Channel
from actors.errors import ChannelClosed

#: A wait that takes longer is a failed test, not a slow one.
WAIT_S = 30.0


class Side:
    """A channel handler that records everything and can be waited on."""

    def __init__(self, log: list[tuple[int, str]] | None = None, index: int = 0) -> None:
        self.channel: Channel | None = None
        self.frames: list[bytes] = []
        self.events: list[str] = []
        self.error: Exception | None = None
        self.echo = False
        self._log = log if log is not None else []
        self._index = index
        self._waiters: list[asyncio.Future[None]] = []

    def opened(self, channel: Channel) -> None:
        self.channel = channel
        self._note("opened")

    def frame_received(self, frame: bytes) -> None:
        self.frames.append(frame)
        self._log.append((self._index, "frame"))
        if frame == b"raise":
            raise ZeroDivisionError("the handler failed")
        if frame == b"close":
            assert self.channel is not None
            self.channel.close()
        elif self.echo:
            assert self.channel is not None
            self.channel.send(frame)
        self._wake()

    def closed(self, error: Exception | None) -> None:
        self.error = error
        self._note("closed")

    def writable(self, ok: bool) -> None:
        self._note(f"writable {ok}")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that only this side's events can change."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await asyncio.wait_for(waiter, deadline - asyncio.get_running_loop().time())

    async def until_frames(self, count: int) -> list[bytes]:
        await self.until(lambda: len(self.frames) >= count)
        return self.frames

    async def until_event(self, event: str) -> None:
        await self.until(lambda: event in self.events)

    def _note(self, event: str) -> None:
        self.events.append(event)
        self._log.append((self._index, event))
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class Host:
    """Accepts channels and keeps a side for each. Every public coroutine is an operation a test can ask for."""

    def __init__(self, echo: bool = False, refuse: bool = False) -> None:
        self.sides: list[Side] = []
        self._log: list[tuple[int, str]] = []
        self._echo = echo
        self._refuse = refuse

    def accept(self, channel: Channel) -> Side:
        if self._refuse:
            raise RuntimeError("this partition is not in the mood")
        side = Side(self._log, len(self.sides))
        side.echo = self._echo
        self.sides.append(side)
        return side

    async def peer(self, index: int) -> tuple[bytes, int, bool]:
        channel = self._channel(index)
        return channel.peer.session, channel.peer.connection, channel.trusted_pickle

    async def frames(self, index: int, count: int) -> list[bytes]:
        """What a side has received, once it is at least `count` frames."""
        return list(await self.sides[index].until_frames(count))

    async def frame_sizes(self, index: int, count: int) -> list[int]:
        return [len(frame) for frame in await self.sides[index].until_frames(count)]

    async def send(self, index: int, frames: list[bytes]) -> None:
        for frame in frames:
            self._channel(index).send(frame)

    async def send_copies(self, index: int, frame: bytes, count: int) -> int:
        """Send the same frame again and again in one loop tick; gives the buffered bytes then."""
        for _ in range(count):
            self._channel(index).send(frame)
        return self._channel(index).buffered_bytes

    async def fill(self, index: int, frame: bytes) -> None:
        """Send, letting the loop turn in between, until the peer has fallen behind."""
        while "writable False" not in self.sides[index].events:
            self._channel(index).send(frame)
            await asyncio.sleep(0)

    async def overfill(self, index: int, frame: bytes) -> None:
        """Send on, whatever the flow control says, until the channel closes."""
        while "closed" not in self.sides[index].events:
            with contextlib.suppress(ChannelClosed):  # closed in this tick; the event follows
                self._channel(index).send(frame)
            await asyncio.sleep(0)

    async def close(self, index: int) -> None:
        self._channel(index).close()

    async def until_event(self, index: int, event: str) -> list[str]:
        await self.sides[index].until_event(event)
        return list(self.sides[index].events)

    async def error(self, index: int) -> str:
        """Name and text of what a side's `closed` was told, once it was."""
        await self.sides[index].until_event("closed")
        error = self.sides[index].error
        return f"{type(error).__name__}: {error}" if error is not None else "none"

    async def accepted(self) -> int:
        return len(self.sides)

    async def log(self) -> list[tuple[int, str]]:
        """Events and frames of all sides in the order in which they happened."""
        return list(self._log)

    async def do(self, operation: str, *args: Any) -> Any:
        return await getattr(self, operation)(*args)

    def _channel(self, index: int) -> Channel:
        channel = self.sides[index].channel
        assert channel is not None
        return channel
