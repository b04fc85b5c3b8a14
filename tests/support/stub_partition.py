"""A partition without objects, for tests of what surrounds a partition."""

from __future__ import annotations

import asyncio
from typing import Any

from actors.channel import Channel
from actors.metrics import Snapshot
from timers.lease_sweep import HolderBacklog
from timers.leases import Holder


class EchoHandler:
    """Sends every frame back."""

    def __init__(self) -> None:
        self._channel: Channel | None = None

    def opened(self, channel: Channel) -> None:
        self._channel = channel

    def frame_received(self, frame: bytes) -> None:
        assert self._channel is not None
        self._channel.send(frame)

    def closed(self, error: Exception | None) -> None:
        self._channel = None

    def writable(self, ok: bool) -> None:
        return None


class StubPartition:
    """What a `PartitionHost` needs of a partition. Made on a running loop."""

    def __init__(self, epoch: int = 1, commit_seq: int = 0) -> None:
        self.epoch = epoch
        self.commit_seq = commit_seq
        self.slots = [(0, 2047)]
        self.moves: dict[str, tuple[str, int]] = {}
        self.departures: Any = None
        self.arrivals: Any = None
        self.exited: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.stopped = False

    def accept(self, channel: Channel) -> EchoHandler:
        return EchoHandler()

    def status(self) -> dict[str, Any]:
        return {"objects": 0}

    def snapshot(self) -> Snapshot:
        return Snapshot(self.status(), {})

    def leftovers(self) -> str:
        return ""

    def holder_backlog(self, holder: Holder) -> HolderBacklog:
        return HolderBacklog(0, 0)

    async def stop(self) -> None:
        self.stopped = True
