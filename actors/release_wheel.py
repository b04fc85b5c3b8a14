"""The release wheel as a Ray actor: one per node, shared by the partitions there. It has no state worth keeping."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from actors.channel import Endpoint
from actors.logs import log_to_stderr
from actors.loop_thread import LoopThread
from actors.node import node_identity
from actors.opening import Opening
from actors.ray_calls import remote_method
from actors.settings import Settings
from actors.wheel_server import WheelServer
from drivers.durable_object import tune_process

__all__ = ["ReleaseWheelActor", "WheelConfig"]


@dataclass(frozen=True)
class WheelConfig:
    """What the actor is created with. Ray passes the same again at each restart."""

    secret: bytes
    settings: Settings


class ReleaseWheelActor:
    """Ray's loop thread runs these methods; the wheel serves on a thread of its own, as partitions do."""

    # It must not raise: an actor whose `__init__` raises is never restarted. Opening goes on in the background.
    async def __init__(self, config: WheelConfig) -> None:  # type: ignore[misc]
        log_to_stderr()
        tune_process()
        self._thread = LoopThread("release-wheel", config.settings)
        self._thread.start()
        self._opening: Opening[WheelServer] = Opening(
            "The release wheel", lambda: WheelServer.open(config.secret, config.settings, node_identity())
        )
        self._running = self._thread.post(self._opening.run())

    async def _server(self) -> WheelServer:
        return await asyncio.wrap_future(self._thread.post(self._opening.get()))

    # Tried again by Ray across a restart: it only asks.
    @remote_method(max_task_retries=-1)
    async def endpoint(self) -> Endpoint:
        """Where the wheel serves. Raises why it can't."""
        endpoint = (await self._server()).endpoint
        assert endpoint is not None
        return endpoint

    async def status(self) -> dict[str, Any]:
        """Plain facts about the wheel."""
        server = await self._server()

        async def ask() -> dict[str, Any]:
            return server.status()

        return await asyncio.wrap_future(self._thread.post(ask()))

    async def stop(self) -> None:
        """Close the socket, so that nothing is left behind. Idempotent."""
        self._running.cancel()
        server = self._opening.opened
        if server is not None:
            await asyncio.wrap_future(self._thread.post(server.stop()))
