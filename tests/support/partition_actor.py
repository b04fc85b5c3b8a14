"""A Ray actor that hosts the Ray transport as a partition's process does: on a loop thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import uvloop

from actors.ray_transport_server import RayTransportServer
from actors.settings import Settings
from tests.support.transport_host import Host


class PartitionActor:
    """Made an actor by the test. Ray runs the methods on its loop; everything else is on the partition's."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="partition", daemon=True).start()
        self._server: RayTransportServer | None = None
        self._host: Host | None = None

    async def serve(
        self, settings: Settings, partition: int, epoch: int, poll_ms: int, echo: bool, refuse: bool
    ) -> int:
        """A new server in place of the last; gives this process's id."""

        async def start() -> None:
            self._host = Host(echo, refuse)
            self._server = RayTransportServer(
                self._host.accept, settings, partition=partition, epoch=epoch, poll_ms=poll_ms
            )

        await self._post(start())
        return os.getpid()

    async def host(self, operation: str, *args: Any) -> Any:
        assert self._host is not None
        return await self._post(self._host.do(operation, *args))

    async def stop(self) -> None:
        assert self._server is not None
        await self._post(self._server.stop())

    async def submit(self, session: bytes, connection: int, seq: int, frames: list[bytes]) -> Any:
        assert self._server is not None
        return await asyncio.wrap_future(self._server.submit_threadsafe(session, connection, seq, frames))

    async def replies(self, session: bytes, connection: int, after_seq: int) -> Any:
        assert self._server is not None
        return await asyncio.wrap_future(self._server.replies_threadsafe(session, connection, after_seq))

    async def _post(self, work: Any) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
