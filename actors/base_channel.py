"""What the channels of all transports do alike: the order of handler calls, flow control, closing once."""

from __future__ import annotations

import asyncio
import logging

from actors.channel import ChannelHandler, Hello
from actors.errors import ChannelClosed, FrameTooLarge
from actors.settings import Settings

__all__ = ["LINGER_S", "BaseChannel"]

logger = logging.getLogger("mainspring.link")

#: How long a channel that was closed without an error may take to pass on what was already queued.
LINGER_S = 1.0


class BaseChannel:
    """One side of a channel. Transports subclass it and provide `buffered_bytes`, `send` and `_shut`."""

    def __init__(self, settings: Settings, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._max_frame_bytes = settings.max_frame_bytes
        self._high_water = settings.link_high_water_bytes
        self._low_water = settings.link_high_water_bytes // 2
        self._kill_bytes = settings.link_kill_bytes
        self._handler: ChannelHandler | None = None
        self._peer: Hello | None = None
        self._writable = True
        self._closed = False
        self._told = False
        self._error: Exception | None = None

    @property
    def peer(self) -> Hello:
        """What the other side said, and proved, in the handshake."""
        if self._peer is None:
            raise ChannelClosed("the handshake is not complete")
        return self._peer

    @property
    def was_proved(self) -> bool:
        """The peer is known, whether or not a handler was found for it."""
        return self._peer is not None

    @property
    def was_opened(self) -> bool:
        """The handler has been told `opened`."""
        return self._handler is not None

    @property
    def is_open(self) -> bool:
        """The handler has been told `opened`, and neither side has closed the channel."""
        return self._handler is not None and not self._closed

    @property
    def error(self) -> Exception | None:
        """Why the channel ended; None while it is open and after a wanted close."""
        return self._error

    @property
    def buffered_bytes(self) -> int:
        """Bytes that `send` has taken and the transport has not passed on yet."""
        raise NotImplementedError

    def close(self, error: Exception | None = None) -> None:
        """See `Channel.close`."""
        if self._end(error):
            self._loop.call_soon(self._tell_closed)

    def close_now(self, error: Exception | None) -> None:
        """Close, and call the handler's `closed` before this returns. For loop call-backs, never for handlers."""
        self._end(error)
        self._tell_closed()

    def _shut(self, error: Exception | None) -> None:
        """Close the transport: without an error pass on what is queued (for `LINGER_S`), with one drop it."""
        raise NotImplementedError

    def _open(self, handler: ChannelHandler) -> None:
        self._handler = handler
        try:
            handler.opened(self)  # type: ignore[arg-type]  # the subclasses are complete channels
        except Exception as error:
            self._handler_failed(error)

    def _check_send(self, size: int) -> None:
        if self._closed:
            raise ChannelClosed("the connection is closed") from self._error
        if size > self._max_frame_bytes:
            raise FrameTooLarge(f"a frame of {size} bytes; `max_frame_bytes` is {self._max_frame_bytes}")

    def _check_backlog(self) -> None:
        """Tell the handler to pause or go on; cut off a reader that is too far behind."""
        handler = self._handler
        if self._closed or handler is None:
            return
        buffered = self.buffered_bytes
        if buffered > self._kill_bytes:
            self.close(
                ChannelClosed(
                    f"the peer reads too slowly: {buffered} bytes wait, `link_kill_bytes` is {self._kill_bytes}"
                )
            )
        elif self._writable and buffered > self._high_water:
            self._writable = False
            handler.writable(False)
        elif not self._writable and buffered <= self._low_water:
            self._writable = True
            handler.writable(True)

    def _handler_failed(self, error: Exception) -> None:
        logger.error("a channel's handler failed; the channel is closed", exc_info=error)
        self.close(error)

    def _end(self, error: Exception | None) -> bool:
        if self._closed:
            return False
        self._closed = True
        self._error = error
        self._shut(error)
        return True

    def _tell_closed(self) -> None:
        if self._told:
            return
        self._told = True
        if self._handler is None:
            return
        try:
            self._handler.closed(self._error)
        except Exception as error:
            self._loop.call_exception_handler({"message": "a channel handler's closed() failed", "exception": error})
