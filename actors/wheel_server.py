"""The release wheel as partitions see it: each has one armed wake, and gets it a little before its time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from actors.channel import Channel, ChannelHandler, Endpoint
from actors.errors import MalformedFrame
from actors.link_server import LinkServer
from actors.settings import Settings
from actors.wheel_frames import WHEEL, WheelFrame, decode_wheel_frame, wake_frame
from drivers.process_wheel import new_release_timer
from drivers.waker import lateness_status
from timers.lateness import LatenessRecorder
from timers.release_timer import ReleaseTimer, ReleaseToken
from timers.transit import Transit

__all__ = ["WheelServer"]

_MS_NS = 1_000_000


class WheelServer:
    """Serves the partitions of one node on the running event loop: their deadlines share one heap and one thread."""

    def __init__(
        self,
        settings: Settings,
        timer: ReleaseTimer,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`timer` runs on `monotonic_ns`; it is closed with the server."""
        self.settings = settings
        self.timer = timer
        self.wall_ns = wall_ns
        self.monotonic_ns = monotonic_ns
        self.loop = asyncio.get_running_loop()
        #: From the instant at which a wake should leave to its bytes handed to the connection.
        self.lateness = LatenessRecorder()
        self.armed = self.stale = 0
        self.partitions: set[_Partition] = set()
        self.endpoint: Endpoint | None = None
        self._link: LinkServer | None = None

    @classmethod
    async def open(
        cls, secret: bytes, settings: Settings, node: str, *, unix_dir: str | os.PathLike[str] | None = None
    ) -> WheelServer:
        """Serve on a Unix socket of this node. Raises OSError, and `InvalidOption` when its path is too long."""
        server = cls(settings, new_release_timer())
        link = LinkServer(secret, server.accept, settings, partition=WHEEL, epoch=0, node=node)
        server.endpoint = await link.start(unix_dir=tempfile.gettempdir() if unix_dir is None else unix_dir)
        server._link = link
        return server

    def accept(self, channel: Channel) -> ChannelHandler:
        """A partition has proved itself."""
        return _Partition(self)

    async def stop(self) -> None:
        """Close the connections and the timer. Idempotent."""
        link, self._link = self._link, None
        if link is not None:
            await link.stop()
        self.timer.close()

    def status(self) -> dict[str, Any]:
        """What the wheel is doing, as plain data."""
        return {
            "pid": os.getpid(),
            "release_timer": self.timer.backend.value,
            "partitions": len(self.partitions),
            "waiting": sum(partition.is_waiting for partition in self.partitions),
            "armed": self.armed,
            "stale": self.stale,
            "longest_lead_us": max((partition.lead_ns // 1_000 for partition in self.partitions), default=0),
            "lateness": lateness_status(self.lateness),
        }


class _Partition:
    """The connection of one partition, and its one wake."""

    def __init__(self, server: WheelServer) -> None:
        self._server = server
        self._channel: Channel | None = None
        self._generation = 0
        self._token: ReleaseToken | None = None
        self._transit = Transit(server.settings.wheel_lead_max_ms * _MS_NS)
        #: Generation of the wake that is under way, and when it should have left.
        self._sent: tuple[int, int] | None = None

    @property
    def is_waiting(self) -> bool:
        return self._token is not None

    @property
    def lead_ns(self) -> int:
        return self._transit.lead_ns

    # --- ChannelHandler ---------------------------------------------------------------------------

    def opened(self, channel: Channel) -> None:
        self._channel = channel
        self._server.partitions.add(self)

    def frame_received(self, frame: bytes) -> None:
        kind, generation, due_ms = decode_wheel_frame(frame)
        if kind is WheelFrame.ARM:
            self._arm(generation, due_ms)
        elif kind is WheelFrame.ACK:
            self._acknowledged(generation)
        else:
            raise MalformedFrame("only the wheel wakes")

    def closed(self, error: Exception | None) -> None:
        self._server.partitions.discard(self)
        self._channel = self._token = None  # abandoned: the heap lets go of it

    def writable(self, ok: bool) -> None:
        return None  # one frame of 17 bytes for each that the partition sends: nothing can pile up

    # --- its one wake -----------------------------------------------------------------------------

    def _arm(self, generation: int, due_ms: int) -> None:
        if generation <= self._generation:
            raise MalformedFrame(f"generation {generation} after {self._generation}: they must count up")
        server = self._server
        self._generation = generation
        server.armed += 1
        # The wall clock is read first: what passes between the readings makes the wake later, not earlier. A wall
        # clock that is set afterwards is the partition's business: it looks before it fires, and each second.
        remaining_ns = due_ms * _MS_NS - server.wall_ns()
        now_ns = server.monotonic_ns()
        self._token = server.timer.arm_at(now_ns + remaining_ns - self._transit.lead_ns)
        if self._token.released:
            self._wake(max(self._token.at_ns, now_ns))
        else:
            self._token.when_ended(lambda: self._post(generation))

    def _post(self, generation: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the wheel with it
            self._server.loop.call_soon_threadsafe(self._released, generation)

    def _released(self, generation: int) -> None:
        token = self._token
        if generation != self._generation or token is None:
            self._server.stale += 1
        elif token.released:
            self._wake(token.at_ns)
            self._server.lateness.record(self._server.monotonic_ns() - token.at_ns)

    def _wake(self, at_ns: int) -> None:
        self._token = None
        self._sent = (self._generation, at_ns)
        assert self._channel is not None
        self._channel.send(wake_frame(self._generation))

    def _acknowledged(self, generation: int) -> None:
        if self._sent is not None and self._sent[0] == generation:
            self._transit.observe(self._server.monotonic_ns() - self._sent[1])
            self._sent = None
