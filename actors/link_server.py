"""The partition's end of the link: listens, has peers prove themselves, keeps each session's newest connection."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket
import ssl
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from actors.channel import Accept, ChannelHandler, Endpoint
from actors.errors import AuthenticationFailed, ChannelClosed, InvalidOption, MalformedFrame
from actors.handshake import NONCE_BYTES, Refusal, Refused, ServerHandshake
from actors.link import LinkChannel
from actors.sessions import SessionTable
from actors.settings import Settings

__all__ = ["LinkServer"]

logger = logging.getLogger("mainspring.link")

#: `sockaddr_un` has 108 bytes on Linux, one of them for the final NUL.
MAX_UNIX_PATH_BYTES = 107
#: Connections that the kernel keeps while the loop is busy: a restart is met by every process at once.
LISTEN_BACKLOG = 1_024


class LinkServer:
    """Accepts links for one partition, in one epoch. Bound to the event loop that calls `start`.

    `accept(channel)` is called for every peer that has proved the secret and gives the handler that serves it.
    `max_connections` bounds the sessions, and separately the peers that have not proved themselves yet.
    """

    def __init__(
        self,
        secret: bytes,
        accept: Accept,
        settings: Settings,
        *,
        partition: int,
        epoch: int,
        node: str = "",
        actor_name: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._secret = secret
        self._accept = accept
        self._settings = settings
        self._partition = partition
        self._epoch = epoch
        self._node = node
        self._actor_name = actor_name
        self._ssl_context = ssl_context
        self._random_bytes = random_bytes
        self._sessions: SessionTable[LinkChannel] = SessionTable(settings.max_connections)
        self._channels: set[LinkChannel] = set()
        self._unproved: set[LinkChannel] = set()
        self._servers: list[asyncio.AbstractServer] = []
        self._unix_path: Path | None = None
        self._stopping = False
        self._drained: asyncio.Future[None] | None = None
        #: Connections that ended before they were accepted, by the name of the error.
        self.refusals: Counter[str] = Counter()

    @property
    def connections(self) -> int:
        """Live, proved connections."""
        return len(self._sessions)

    async def start(
        self,
        *,
        unix_dir: str | os.PathLike[str] | None,
        tcp_host: str | None = None,
        tcp_port: int = 0,
        advertised_host: str | None = None,
    ) -> Endpoint:
        """Listen, and tell where.

        The Unix socket goes into a directory of mode 0700 under `unix_dir`. TCP listens on `tcp_host` if given;
        port 0 lets the system choose; `advertised_host` is what the endpoint says when that is not `tcp_host`.
        Raises OSError, and `InvalidOption` when the socket's path would be too long.
        """
        loop = asyncio.get_running_loop()
        port: int | None = None
        if unix_dir is not None:
            sock, self._unix_path = self._bind_unix(Path(unix_dir))
            self._servers.append(await loop.create_unix_server(self._new_channel, sock=sock, backlog=LISTEN_BACKLOG))
        if tcp_host is not None:
            timeout_s = self._settings.handshake_timeout_ms / 1_000 if self._ssl_context is not None else None
            server = await loop.create_server(
                self._new_channel,
                tcp_host,
                tcp_port,
                ssl=self._ssl_context,
                ssl_handshake_timeout=timeout_s,
                backlog=LISTEN_BACKLOG,
            )
            self._servers.append(server)
            port = server.sockets[0].getsockname()[1]
        return Endpoint(
            partition=self._partition,
            epoch=self._epoch,
            node=self._node,
            unix_path=str(self._unix_path) if self._unix_path is not None else None,
            host=(advertised_host or tcp_host) if tcp_host is not None else None,
            port=port,
            actor_name=self._actor_name,
        )

    async def stop(self) -> None:
        """Stop listening and close every connection; what was queued is still written for a moment."""
        self._stopping = True
        for server in self._servers:
            server.close()
        if self._unix_path is not None:
            # Its random part makes the name this server's own: nobody else's socket can be under it.
            self._unix_path.unlink(missing_ok=True)
            self._unix_path = None
        for channel in list(self._channels):
            channel.close()
        if self._channels:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()

    # --- connections

    def _new_channel(self) -> LinkChannel:
        handshake = ServerHandshake(self._secret, self._random_bytes(NONCE_BYTES), self._partition, self._epoch)
        loop = asyncio.get_running_loop()
        return LinkChannel(handshake, self._settings, loop, self._admit, self._gone, self._made)

    def _made(self, channel: LinkChannel) -> None:
        # Not earlier: a TLS handshake that fails makes a channel that never has a connection, nor an end of one.
        self._channels.add(channel)
        self._unproved.add(channel)
        if self._stopping or len(self._unproved) > self._settings.max_connections:
            channel.refuse(Refused(Refusal.NOT_ACCEPTED if self._stopping else Refusal.FULL))

    def _admit(self, channel: LinkChannel) -> ChannelHandler:
        self._unproved.discard(channel)
        if self._stopping:
            raise Refused(Refusal.NOT_ACCEPTED)
        peer = channel.peer
        older = self._sessions.claim(peer.session, peer.connection, channel)
        if older is not None:
            # The older one's unread frames end here, before anything of the newer one is read.
            older.close_now(ChannelClosed("a newer connection of the session replaced this one"))
        return self._accept(channel)

    def _gone(self, channel: LinkChannel) -> None:
        self._channels.discard(channel)
        self._unproved.discard(channel)
        if channel.was_proved:
            self._sessions.release(channel.peer.session, channel.peer.connection, channel)
        if not channel.was_opened and not self._stopping:
            reason = type(channel.error).__name__
            self.refusals[reason] += 1
            # A peer that merely went away (a probe, a killed process) is no news; one that failed to prove itself is.
            suspect = isinstance(channel.error, (AuthenticationFailed, MalformedFrame))
            level = logging.WARNING if suspect else logging.INFO
            logger.log(level, "partition %d accepted no channel: %s", self._partition, channel.error)
        if self._drained is not None and not self._channels and not self._drained.done():
            self._drained.set_result(None)

    # --- the Unix socket

    def _bind_unix(self, base: Path) -> tuple[socket.socket, Path]:
        directory = _private_directory(base)
        # The same for every incarnation of this partition, and tells a stranger nothing about the cluster.
        family = hmac.digest(self._secret, b"socket %d" % self._partition, "sha256").hex()[:12]
        _remove_dead_sockets(directory, family)
        path = directory / f"{family}-{self._random_bytes(4).hex()}"
        if len(os.fsencode(path)) > MAX_UNIX_PATH_BYTES:
            raise InvalidOption(
                f"the socket path {path} is longer than {MAX_UNIX_PATH_BYTES} bytes: use a shorter directory"
            )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(os.fspath(path))
        except OSError:
            sock.close()
            raise
        return sock, path


def _private_directory(base: Path) -> Path:
    """The directory for sockets under `base`: nobody but this user can reach what is inside."""
    directory = base / f"mainspring-{os.geteuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    # In a shared directory such as /tmp another user may have made it first, and would then own our sockets.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{directory} is not a directory of this user; remove it or choose another base")
    if stat.S_IMODE(found.st_mode) != 0o700:
        directory.chmod(0o700)
    return directory


def _remove_dead_sockets(directory: Path, family: str) -> None:
    """Remove what killed incarnations of this partition left behind: sockets that nobody listens on."""
    for path in directory.glob(f"{family}-*"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # alive with a full backlog, or already gone
