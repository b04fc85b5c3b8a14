"""What a connection between a process and a partition looks like, whichever transport carries it.

A channel is one ordered two-way stream of opaque frames. The link (`actors.link`) and the Ray transport
(`actors.ray_transport`) both implement it and pass one shared test-suite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["SESSION_BYTES", "Accept", "Channel", "ChannelHandler", "Endpoint", "Hello"]

#: Length of a session id: random, so two processes never choose the same.
SESSION_BYTES = 16


@dataclass(frozen=True)
class Hello:
    """What one side says about itself when a channel opens.

    A client says which session it is, the number of this connection (counting up within the session), the
    partition that it wants and the lowest epoch that it accepts. A server answers with the same session and
    connection, its own partition, and the epoch that it runs in.
    """

    session: bytes
    connection: int
    partition: int
    epoch: int

    def __post_init__(self) -> None:
        if len(self.session) != SESSION_BYTES:
            raise ValueError(f"a session id has {SESSION_BYTES} bytes, this one has {len(self.session)}")


@dataclass(frozen=True)
class Endpoint:
    """Where a partition can be reached. Its Unix path is of use only on `node`."""

    partition: int
    epoch: int
    node: str
    unix_path: str | None
    host: str | None
    port: int | None
    actor_name: str | None


class Channel(Protocol):
    """One ordered two-way stream of frames. Not thread-safe: it belongs to one event loop."""

    @property
    def peer(self) -> Hello:
        """What the other side said, and proved, in the handshake."""
        ...

    @property
    def trusted_pickle(self) -> bool:
        """True only for a transport that itself runs on pickle (Ray): frames may then carry pickles."""
        ...

    @property
    def buffered_bytes(self) -> int:
        """Bytes that `send` has taken and the transport has not passed on yet."""
        ...

    def send(self, frame: bytes) -> None:
        """Queue a frame; never blocks.

        Raises `ChannelClosed` when the channel is closed, and `FrameTooLarge` (nothing is queued, the channel
        stays open) when the frame is larger than `max_frame_bytes`. May call the own handler's
        `writable(False)` before it returns.
        """
        ...

    def close(self, error: Exception | None = None) -> None:
        """Close at once; again does nothing. The own handler's `closed(error)` follows on the next loop tick.

        No frame is delivered afterwards. Without an error, frames queued by `send` are still written while
        the transport lingers (about a second); with one they are dropped.
        """
        ...


class ChannelHandler(Protocol):
    """What a side of a channel implements. All methods are called on the channel's event loop."""

    def opened(self, channel: Channel) -> None:
        """The peer has proved itself. Called first, once."""
        ...

    def frame_received(self, frame: bytes) -> None:
        """The next frame of the peer. An exception from here closes the channel with that exception."""
        ...

    def closed(self, error: Exception | None) -> None:
        """The channel is gone: called last, exactly once. `error` is None only after the own `close()`."""
        ...

    def writable(self, ok: bool) -> None:
        """False once `buffered_bytes` is over `link_high_water_bytes`, True when it is down to half of that.

        A side that goes on regardless is disconnected when `buffered_bytes` passes `link_kill_bytes`.
        """
        ...


#: Called by a server for each authenticated channel; gives the handler that serves it. What it raises refuses
#: the connection.
Accept = Callable[[Channel], ChannelHandler]
