"""A channel inside one process: frames pass between two handlers on one loop, in order, without a socket."""

from __future__ import annotations

import asyncio
import logging

from actors.channel import Accept, Channel, ChannelHandler, Hello
from actors.errors import ChannelClosed, FrameTooLarge

__all__ = ["connect_loopback"]

logger = logging.getLogger("mainspring.loopback")


class _End:
    """One side. Each frame is delivered at the next loop turn, as from a socket that is always ready."""

    def __init__(self, peer: Hello, max_frame_bytes: int, trusted_pickle: bool) -> None:
        self.peer = peer
        self.trusted_pickle = trusted_pickle
        self.other: _End | None = None
        self.handler: ChannelHandler | None = None
        self._loop = asyncio.get_running_loop()
        self._max_frame_bytes = max_frame_bytes
        self._sent: list[bytes] = []
        self._closed = False

    @property
    def buffered_bytes(self) -> int:
        return sum(len(frame) for frame in self._sent)

    def send(self, frame: bytes) -> None:
        if self._closed:
            raise ChannelClosed("the channel is closed")
        if len(frame) > self._max_frame_bytes:
            raise FrameTooLarge(f"a frame of {len(frame):,} bytes (max_frame_bytes={self._max_frame_bytes:,})")
        if not self._sent:
            self._loop.call_soon(self._deliver)
        self._sent.append(frame)

    def _deliver(self) -> None:
        frames, self._sent = self._sent, []
        other = self.other
        if other is None:
            return
        for frame in frames:
            if other._closed or other.handler is None:
                return
            try:
                other.handler.frame_received(frame)
            except Exception as error:  # as on every transport: what a handler raises closes its channel
                logger.exception("a frame handler failed", extra={"event": "handler_failed"})
                other.close(error)

    def close(self, error: Exception | None = None) -> None:
        if self._closed:
            return
        if error is None:
            self._deliver()
        self._end(error)
        if self.other is not None:
            self.other._end(error or ChannelClosed("the other side closed the channel"))

    def _end(self, error: Exception | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._sent.clear()
        if self.handler is not None:
            self._loop.call_soon(self.handler.closed, error)


def connect_loopback(
    accept: Accept,
    client: Hello,
    server: Hello,
    handler: ChannelHandler,
    max_frame_bytes: int,
    *,
    trusted_pickle: bool = False,
) -> Channel:
    """Connect a client's handler to a partition on the same loop; the client's side is returned, opened.

    It carries what a link carries, or with `trusted_pickle` what Ray does, so that here nothing works that would not
    work there.
    """
    near, far = _End(server, max_frame_bytes, trusted_pickle), _End(client, max_frame_bytes, trusted_pickle)
    near.other, far.other = far, near
    far.handler = accept(far)
    near.handler = handler
    far.handler.opened(far)
    handler.opened(near)
    return near
