"""The Ray transport under test: over an actor that is emulated in this process, and over any real handle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from actors.channel import Channel, ChannelHandler, Hello
from actors.ray_transport import RayChannel, connect_ray
from actors.ray_transport_server import RayTransportServer
from actors.settings import Settings
from tests.support.transport_host import Host
from tests.support.transport_suite import EPOCH, PARTITION, SETTINGS

POLL_MS = 200


class FakeMethod:
    """`actor.method`: `.remote(...)` starts at once and gives an awaitable, as with Ray."""

    def __init__(self, actor: FakeActor, call: Callable[..., Awaitable[Any]]) -> None:
        self._actor = actor
        self._call = call

    def remote(self, *args: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self._actor.run(self._call, args))


class FakeActor:
    """A handle whose actor lives in this process. Its answers can be lost and it can die."""

    def __init__(self, server: RayTransportServer) -> None:
        self._server = server
        self._death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        #: Answers of `replies` that are still to be lost on their way.
        self.lose_replies = 0
        self.submit = FakeMethod(self, self._submit)
        self.replies = FakeMethod(self, self._replies)

    def die(self) -> None:
        if not self._death.done():
            self._death.set_result(None)

    async def run(self, call: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        work = asyncio.ensure_future(call(*args))
        await asyncio.wait((work, self._death), return_when=asyncio.FIRST_COMPLETED)
        if self._death.done():
            work.cancel()
            raise RuntimeError("The actor died unexpectedly before finishing this task.")
        return work.result()

    async def _submit(self, *args: Any) -> Any:
        return await asyncio.wrap_future(self._server.submit_threadsafe(*args))

    async def _replies(self, *args: Any) -> Any:
        answer = await asyncio.wrap_future(self._server.replies_threadsafe(*args))
        if self.lose_replies and answer[0] == "frames" and answer[2]:
            self.lose_replies -= 1
            await asyncio.get_running_loop().create_future()  # never comes
        return answer


class PausableRay:
    """What both Ray transports share: connecting through a handle, and a process that stops polling."""

    trusted_pickle = True
    actor: Any = None

    async def connect(self, hello: Hello, handler: ChannelHandler, settings: Settings = SETTINGS) -> Channel:
        return await connect_ray(self.actor, hello, handler, settings, poll_ms=POLL_MS)

    def stop_reading(self, channel: Channel) -> None:
        assert isinstance(channel, RayChannel)
        assert channel._polling is not None
        channel._polling.cancel()

    def read_again(self, channel: Channel) -> None:
        assert isinstance(channel, RayChannel)
        channel._polling = asyncio.get_running_loop().create_task(channel._poll())


class FakeRayTransport(PausableRay):
    """The Ray transport without Ray."""

    def __init__(self) -> None:
        self._host: Host | None = None
        self._server: RayTransportServer | None = None

    async def serve(self, settings: Settings = SETTINGS, *, echo: bool = False, refuse: bool = False) -> None:
        self._host = Host(echo, refuse)
        # The slow-reader tests stop polling for a while, which must not look like a dead process.
        self._server = RayTransportServer(
            self._host.accept, settings, partition=PARTITION, epoch=EPOCH, poll_ms=100 * POLL_MS
        )
        self.actor = FakeActor(self._server)

    async def host(self, operation: str, *args: Any) -> Any:
        assert self._host is not None
        return await self._host.do(operation, *args)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop()
