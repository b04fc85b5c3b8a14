"""The contract of channels over calls of a real Ray actor."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from actors.errors import ChannelClosed
from actors.settings import Settings
from tests.support.partition_actor import PartitionActor
from tests.support.ray_transports import POLL_MS, PausableRay
from tests.support.transport_host import Side
from tests.support.transport_suite import EPOCH, PARTITION, SETTINGS, TransportSuite, hello

pytestmark = pytest.mark.cluster


class RayTransport(PausableRay):
    """The Ray transport with Ray: one actor, a new server for each test."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.pid = 0

    async def serve(self, settings: Settings = SETTINGS, *, echo: bool = False, refuse: bool = False) -> None:
        self.pid = await self.actor.serve.remote(settings, PARTITION, EPOCH, 100 * POLL_MS, echo, refuse)

    async def host(self, operation: str, *args: Any) -> Any:
        return await self.actor.host.remote(operation, *args)

    async def stop(self) -> None:
        await self.actor.stop.remote()


@pytest.fixture(scope="module")
def partition_actor(local_ray: None) -> Iterator[Any]:
    import ray

    actor = ray.remote(num_cpus=0, enable_task_events=False)(PartitionActor).remote()
    yield actor
    ray.kill(actor)


@pytest.fixture
async def transport(partition_actor: Any) -> AsyncIterator[RayTransport]:
    transport = RayTransport(partition_actor)
    yield transport
    await transport.stop()


class TestRayTransport(TransportSuite):
    pass


async def test_a_killed_actor_closes_its_channels(local_ray: None) -> None:
    import ray

    actor = ray.remote(num_cpus=0, enable_task_events=False)(PartitionActor).remote()
    transport = RayTransport(actor)
    await transport.serve()
    side = Side()
    channel = await transport.connect(hello(), side)
    channel.send(b"before")
    assert await transport.host("frames", 0, 1) == [b"before"]
    os.kill(transport.pid, signal.SIGKILL)
    await side.until_event("closed")
    assert isinstance(side.error, ChannelClosed)
    with pytest.raises(ChannelClosed):
        await transport.connect(hello(2), Side())
    assert side.events == ["opened", "closed"]
