"""A release wheel over a Unix socket, and partitions' ways to it, without Ray."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from actors.channel import Endpoint
from actors.errors import ChannelClosed
from actors.settings import Settings
from actors.wheel_server import WheelServer
from actors.wheel_waker import WheelWaker

__all__ = ["MS", "NODE", "PATIENCE_S", "SECRET", "SETTINGS", "NodeWheel", "now_ms", "until"]

MS = 1_000_000
NODE = "n1"
SECRET = b"the secret of this test cluster."
#: Wakes are short here, so that tests are; what is nearer than 5 ms stays in the partition.
SETTINGS = Settings(wheel_near_ms=5, wheel_retry_ms=1, wheel_lead_max_ms=3)
PATIENCE_S = 30.0


def now_ms() -> int:
    return time.time_ns() // MS


async def until(look: Callable[[], object]) -> None:
    """Wait until `look()` is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.001)


class NodeWheel:
    """The wheel of a node, that can be killed and started again."""

    def __init__(self, socket_dir: str) -> None:
        self._socket_dir = socket_dir
        self._wakers: list[WheelWaker] = []
        self.server: WheelServer | None = None

    async def start(self, *, secret: bytes = SECRET, node: str = NODE, settings: Settings = SETTINGS) -> WheelServer:
        self.server = await WheelServer.open(secret, settings, node, unix_dir=self._socket_dir)
        return self.server

    async def kill(self) -> None:
        assert self.server is not None
        server, self.server = self.server, None
        await server.stop()

    async def find(self) -> Endpoint:
        if self.server is None or self.server.endpoint is None:
            raise ChannelClosed("there is no wheel")
        return self.server.endpoint

    def waker(self, *, settings: Settings = SETTINGS) -> WheelWaker:
        """A partition's way to it, started."""
        waker = WheelWaker(self.find, SECRET, settings, NODE)
        waker.start()
        self._wakers.append(waker)
        return waker

    async def connected(self, *, settings: Settings = SETTINGS) -> WheelWaker:
        """The same, once it is connected."""
        waker = self.waker(settings=settings)
        await until(lambda: waker.status()["backend"] == "release-wheel")
        return waker

    async def stop(self) -> None:
        for waker in self._wakers:
            waker.stop()
        if self.server is not None:
            await self.kill()
