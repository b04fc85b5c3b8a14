"""The link: frames over a Unix socket on the same node and over TCP between nodes.

This module has the channel that both ends use and the client's way to open one; `actors.link_server` listens.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from actors.base_channel import LINGER_S, BaseChannel
from actors.channel import Channel, ChannelHandler, Endpoint, Hello
from actors.errors import ChannelClosed, MalformedFrame
from actors.framing import LENGTH, FrameReader
from actors.handshake import (
    MAX_HANDSHAKE_FRAME_BYTES,
    NONCE_BYTES,
    ClientHandshake,
    Handshake,
    Refusal,
    Refused,
    refusal_frame,
)
from actors.settings import KIB, Settings

__all__ = ["LinkChannel", "connect_link"]

logger = logging.getLogger("mainspring.link")

#: Up to this size the frames of a tick are joined into one write; copying more costs more than it saves.
JOIN_BYTES = 128 * KIB

#: A TCP peer whose machine vanished is noticed after about 20 s: idle time, then probes, in seconds and a count.
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 3
KEEPALIVE_PROBES = 3
#: The same for a connection that has unacknowledged data, in milliseconds.
TCP_USER_TIMEOUT_MS = 20_000


class LinkChannel(BaseChannel, asyncio.Protocol):
    """One end of a link: the handshake first, then frames both ways.

    `made` is called when there is a connection, before a byte is read, and may `refuse`. `accept` is called when the
    peer is proved and gives the handler, or raises `Refused`. `gone` is called once after `made`, when the connection
    no longer exists.
    """

    trusted_pickle = False

    def __init__(
        self,
        handshake: Handshake,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        accept: Callable[[LinkChannel], ChannelHandler],
        gone: Callable[[LinkChannel], None],
        made: Callable[[LinkChannel], None] = lambda _: None,
    ) -> None:
        super().__init__(settings, loop)
        self._handshake = handshake
        self._handshake_timeout_ms = settings.handshake_timeout_ms
        self._accept = accept
        self._gone = gone
        self._made = made
        self._reader = FrameReader(MAX_HANDSHAKE_FRAME_BYTES)
        self._on_frame: Callable[[bytes], None] = self._handshake_frame
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0

    @property
    def buffered_bytes(self) -> int:
        if self._transport is None:
            return 0
        return self._out_bytes + self._transport.get_write_buffer_size()

    def send(self, frame: bytes) -> None:
        size = len(frame)
        self._check_send(size)
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += (LENGTH.pack(size), frame)
        self._out_bytes += LENGTH.size + size
        if self.buffered_bytes > self._high_water:
            self._check_backlog()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._closed:  # whoever was connecting has given up meanwhile
            self._transport.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            _detect_dead_peer(sock)
        # One mark for both: above it the transport always reports that it has drained (`resume_writing`), so no
        # pause of the handler is ever left without its end.
        self._transport.set_write_buffer_limits(high=self._low_water, low=self._low_water)
        self._timer = self._loop.call_later(self._handshake_timeout_ms / 1_000, self._handshake_late)
        self._made(self)
        first = self._handshake.first()
        if first is not None and not self._closed:
            self._write(first)

    def data_received(self, data: bytes) -> None:
        if self._closed:
            return
        try:
            for frame in self._reader.feed(data):
                self._on_frame(frame)
                if self._closed:
                    return
        except ChannelClosed as error:
            self.close(error)
        except Exception as error:
            self._handler_failed(error)

    def resume_writing(self) -> None:
        self._check_backlog()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        if not self._closed:
            self._closed = True
            self._error = self._lost_error(exc)
        self._out.clear()
        self._out_bytes = 0
        self._tell_closed()
        self._gone(self)

    # --- the handshake

    def _handshake_frame(self, frame: bytes) -> None:
        try:
            answer = self._handshake.receive(frame)
            if answer is not None:
                self._write(answer)
            if self._handshake.peer is not None:
                self._complete(self._handshake.peer)
        except Refused as refused:
            self.refuse(refused)

    def _complete(self, peer: Hello) -> None:
        self._peer = peer
        try:
            handler = self._accept(self)
        except Refused:
            raise
        except Exception as error:
            logger.error("a connection could not be accepted", exc_info=error)
            raise Refused(Refusal.NOT_ACCEPTED) from error
        if self._closed:
            return
        last = self._handshake.last()
        if last is not None:
            self._write(last)
        self._cancel_timer()
        self._reader.limit = self._max_frame_bytes
        self._on_frame = handler.frame_received
        self._open(handler)

    def refuse(self, refused: Refused) -> None:
        """End a handshake; tell the peer why unless it said so itself."""
        if self._closed:
            return
        self._closed = True
        self._error = refused.error()
        if not refused.by_peer:
            self._write(refusal_frame(refused.code))
        self._linger()

    def _handshake_late(self) -> None:
        self.close(ChannelClosed(f"no handshake within {self._handshake_timeout_ms} ms"))

    # --- writing and closing

    def _write(self, frame: bytes) -> None:
        assert self._transport is not None
        self._transport.write(LENGTH.pack(len(frame)) + frame)

    def _flush(self) -> None:
        if not self._out or self._transport is None:
            return
        out, size = self._out, self._out_bytes
        self._out, self._out_bytes = [], 0
        if size <= JOIN_BYTES:
            self._transport.write(b"".join(out))
        else:
            self._transport.writelines(out)
        if not self._writable:
            self._check_backlog()

    def _shut(self, error: Exception | None) -> None:
        if self._transport is None:
            return
        if error is None and self._handler is not None:
            self._flush()
            self._linger()
        else:
            self._transport.abort()

    def _linger(self) -> None:
        assert self._transport is not None
        self._cancel_timer()
        self._transport.close()
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _lost_error(self, exc: Exception | None) -> Exception:
        error: ChannelClosed
        if exc is not None:
            error = ChannelClosed(f"the connection was lost: {exc}")
            error.__cause__ = exc
        elif self._reader.partial:
            error = MalformedFrame("the connection ended inside a frame")
        elif self._handler is None:
            error = ChannelClosed("the peer closed the connection during the handshake")
        else:
            error = ChannelClosed("the peer closed the connection")
        return error


async def connect_link(
    endpoint: Endpoint,
    hello: Hello,
    secret: bytes,
    handler: ChannelHandler,
    settings: Settings,
    *,
    node: str | None = None,
    ssl_context: ssl.SSLContext | None = None,
    server_hostname: str | None = None,
    random_bytes: Callable[[int], bytes] = os.urandom,
) -> Channel:
    """Open a channel to a partition and prove the cluster secret to it, and it to us.

    `node` is where this process runs: the Unix socket is used when the endpoint has one on the same node, and with
    `node=None` whenever it has one; otherwise TCP, with TLS when `ssl_context` is given. `handler.opened` is called
    before this returns. `channel.peer.epoch` is the partition's real epoch, which may be higher than the endpoint's.

    Raises OSError when nothing listens, `AuthenticationFailed` when the secrets differ, and another `ChannelClosed`
    when the peer refuses, is another partition or an earlier incarnation, or does not answer within
    `handshake_timeout_ms`. After an error the handler has heard nothing, or both `opened` and `closed`.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    opened: asyncio.Future[None] = loop.create_future()

    def accept(_: LinkChannel) -> ChannelHandler:
        opened.set_result(None)
        return handler

    timeout_s = settings.handshake_timeout_ms / 1_000
    handshake = ClientHandshake(secret, random_bytes(NONCE_BYTES), hello, endpoint)
    channel = LinkChannel(handshake, settings, loop, accept, lambda _: ended.set_result(None))
    try:
        dial = _dial(endpoint, channel, node, ssl_context, server_hostname, timeout_s)
        await asyncio.wait_for(dial, timeout_s)
        await asyncio.wait((opened, ended), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.TimeoutError:
        error = ChannelClosed(f"no connection within {settings.handshake_timeout_ms} ms")
        channel.close(error)
        raise error from None
    except BaseException as failure:
        # Also a cancelled caller: nobody would ever use or close the channel.
        channel.close(ChannelClosed(f"connecting ended early: {failure!r}"))
        raise
    if not channel.is_open:
        raise channel.error or ChannelClosed("the channel was closed while it opened")
    return channel


async def _dial(
    endpoint: Endpoint,
    channel: LinkChannel,
    node: str | None,
    ssl_context: ssl.SSLContext | None,
    server_hostname: str | None,
    handshake_timeout_s: float,
) -> None:
    loop = asyncio.get_running_loop()
    if endpoint.unix_path is not None and node in (None, endpoint.node):
        await loop.create_unix_connection(lambda: channel, endpoint.unix_path)
        return
    if endpoint.host is None or endpoint.port is None:
        raise ChannelClosed(f"partition {endpoint.partition} has no address that this node can reach")
    await loop.create_connection(
        lambda: channel,
        endpoint.host,
        endpoint.port,
        ssl=ssl_context,
        server_hostname=server_hostname if ssl_context is not None else None,
        ssl_handshake_timeout=handshake_timeout_s if ssl_context is not None else None,
    )


def _detect_dead_peer(sock: socket.socket) -> None:
    """Make a TCP connection fail when the other machine is gone, not only when its process is."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
        ("TCP_USER_TIMEOUT", TCP_USER_TIMEOUT_MS),
    ):
        if hasattr(socket, option):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
