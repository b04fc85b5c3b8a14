"""A channel inside one process whose frames move only when a test says so."""

from __future__ import annotations

import asyncio
from collections import deque

from actors.channel import Channel, ChannelHandler, Hello
from actors.errors import ChannelClosed, FrameTooLarge

__all__ = ["MemoryChannel", "connected_pair"]


class MemoryChannel:
    """One side. Frames that were sent wait in `outbox` until `deliver` hands them to the other side.

    It is full, as far as flow control goes, while more than `max_waiting` frames wait.
    """

    trusted_pickle = False

    def __init__(self, peer: Hello, max_frame_bytes: int = 32 * 1024 * 1024, max_waiting: int = 1_000_000) -> None:
        self.peer = peer
        self.outbox: deque[bytes] = deque()
        self.handler: ChannelHandler | None = None
        self.other: MemoryChannel | None = None
        self.is_closed = False
        self._max_frame_bytes = max_frame_bytes
        self._max_waiting = max_waiting
        self._is_full = False

    @property
    def buffered_bytes(self) -> int:
        return sum(map(len, self.outbox))

    def open(self, handler: ChannelHandler) -> None:
        self.handler = handler
        handler.opened(self)

    def send(self, frame: bytes) -> None:
        if self.is_closed:
            raise ChannelClosed("the channel is closed")
        if len(frame) > self._max_frame_bytes:
            raise FrameTooLarge(f"a frame of {len(frame)} bytes")
        self.outbox.append(frame)
        if not self._is_full and len(self.outbox) > self._max_waiting and self.handler is not None:
            self._is_full = True
            self.handler.writable(False)

    def close(self, error: Exception | None = None) -> None:
        self._end(error)
        if self.other is not None:
            if error is None:
                self.deliver_after_close()
            self.other._end(ChannelClosed("the other side closed the connection"))

    def deliver(self, count: int | None = None) -> int:
        """Hand the next frames (all unless told otherwise) to the other side; returns how many there were."""
        delivered = 0
        while self.outbox and not self.is_closed and (count is None or delivered < count):
            self._hand_over(self.outbox.popleft())
            delivered += 1
        if self._is_full and not self.is_closed and len(self.outbox) <= self._max_waiting // 2:
            self._is_full = False
            assert self.handler is not None
            self.handler.writable(True)
        return delivered

    def deliver_after_close(self) -> None:
        """What was queued before a close without an error still arrives."""
        while self.outbox and self.other is not None and not self.other.is_closed:
            self._hand_over(self.outbox.popleft())

    def _hand_over(self, frame: bytes) -> None:
        other = self.other
        assert other is not None
        assert other.handler is not None
        try:
            other.handler.frame_received(frame)
        except Exception as error:  # as every channel does: what a handler raises closes its channel
            other.close(error)

    def _end(self, error: Exception | None) -> None:
        if not self.is_closed:
            self.is_closed = True
            if self.handler is not None:
                asyncio.get_running_loop().call_soon(self.handler.closed, error)


def connected_pair(client_hello: Hello, server_hello: Hello, **limits: int) -> tuple[MemoryChannel, MemoryChannel]:
    """The client's and the server's side, not opened yet."""
    client = MemoryChannel(server_hello, **limits)
    server = MemoryChannel(client_hello, **limits)
    client.other, server.other = server, client
    return client, server


def _complies(channel: MemoryChannel) -> Channel:
    return channel
