"""Partitions are found where they run now; without a coordinator the known map goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors import ray_directory
from actors.channel import Channel, Endpoint
from actors.coordinator_store import SlotMap, SlotRange
from actors.errors import ChannelClosed, DataMissing, PartitionAbsent
from actors.link_server import LinkServer
from actors.ray_calls import ActorUnreachable
from actors.ray_directory import RayDirectory, Transport
from actors.ray_transport_server import RayTransportServer
from actors.settings import Settings
from tests.support.ray_transports import FakeActor
from tests.support.stub_partition import StubPartition

SECRET = bytes(range(32))
SESSION = bytes(16)
SETTINGS = Settings()
MAP_1 = SlotMap(1, (SlotRange(0, 2047, 0, 1), SlotRange(2048, 4095, 1, 1)))
MAP_2 = SlotMap(2, (SlotRange(0, 99, 0, 1), SlotRange(100, 4095, 1, 2)))


class FakeCalls:
    """Answers what the coordinator and the partition's actor would; an exception is raised."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], Any] = {}
        self.asked: list[tuple[str, str]] = []
        self.actor: Any = None
        #: what gives no answer before `speak`
        self.silent: set[tuple[str, str]] = set()
        self.speak = asyncio.Event()
        self.absences_asked = asyncio.Event()

    async def call_async(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.asked.append((actor, method))
        if method == "absences":
            self.absences_asked.set()
        if (actor, method) in self.silent:
            await self.speak.wait()
        answer = self.answers.get((actor, method), ActorUnreachable(f"{actor} is down"))
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def handle_async(self, actor: str) -> Any:
        if self.actor is None:
            raise ActorUnreachable(f"{actor} is down")
        return self.actor


class EchoClient:
    """Sends one frame and gives what comes back."""

    def __init__(self) -> None:
        self.echoed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def opened(self, channel: Channel) -> None:
        channel.send(b"hello")

    def frame_received(self, frame: bytes) -> None:
        self.echoed.set_result(frame)

    def closed(self, error: Exception | None) -> None:
        return None

    def writable(self, ok: bool) -> None:
        return None


class Bench:
    """A partition behind a link and the Ray transport, and a directory that looks for it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.calls = FakeCalls()
        self.servers: list[LinkServer] = []
        self.connections = 0

    def directory(self, transport: Transport = "auto", node: str = "n1", secret: bytes | None = SECRET) -> RayDirectory:
        return RayDirectory(self.calls, MAP_1, secret, SETTINGS, transport=transport, node=node)  # type: ignore[arg-type]

    async def serve(self, epoch: int = 1) -> Endpoint:
        """Let a new incarnation of the partition serve in place of the last."""
        for server in self.servers:
            await server.stop()
        partition = StubPartition(epoch)
        server = LinkServer(SECRET, partition.accept, SETTINGS, partition=0, epoch=epoch, node="n1")
        self.servers = [server]
        endpoint = await server.start(unix_dir=self.base)
        self.calls.actor = FakeActor(RayTransportServer(partition.accept, SETTINGS, partition=0, epoch=epoch))
        self.calls.answers["partition-0000", "endpoint"] = endpoint
        return endpoint

    async def connect(self, directory: RayDirectory) -> Channel:
        self.connections += 1
        client = EchoClient()
        channel = await directory.connect(0, SESSION, self.connections, client)
        assert await client.echoed == b"hello"
        return channel


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    yield made
    for server in made.servers:
        await server.stop()


async def test_a_partition_on_the_same_node_is_reached_over_its_socket(bench: Bench) -> None:
    await bench.serve(epoch=4)
    channel = await bench.connect(bench.directory())
    assert channel.peer.epoch == 4
    assert not channel.trusted_pickle


async def test_an_address_is_asked_for_once(bench: Bench) -> None:
    await bench.serve()
    directory = bench.directory()
    for _ in range(3):
        await bench.connect(directory)
    assert bench.calls.asked == [("partition-0000", "endpoint")]


async def test_a_partition_that_restarted_elsewhere_is_found_within_the_same_call(bench: Bench) -> None:
    directory = bench.directory()
    for epoch in (1, 2):
        await bench.serve(epoch)
        assert (await bench.connect(directory)).peer.epoch == epoch


async def test_a_partition_that_can_not_be_found_now_is_worth_another_try(bench: Bench) -> None:
    with pytest.raises(ChannelClosed):
        await bench.connect(bench.directory())


async def test_a_partition_that_can_not_serve_gives_its_own_error(bench: Bench) -> None:
    bench.calls.answers["partition-0000", "endpoint"] = DataMissing("gone")
    with pytest.raises(DataMissing):
        await bench.connect(bench.directory())


async def test_a_fresh_address_at_which_nobody_listens_is_worth_another_try_and_forgotten(bench: Bench) -> None:
    await bench.serve()
    await bench.servers[0].stop()
    directory = bench.directory()
    with pytest.raises(OSError, match=r"No such file|refused"):
        await bench.connect(directory)
    await bench.serve(epoch=2)
    assert (await bench.connect(directory)).peer.epoch == 2


async def test_from_another_node_without_an_address_calls_go_through_ray(bench: Bench) -> None:
    await bench.serve()
    channel = await bench.connect(bench.directory(node="n2"))
    assert channel.trusted_pickle
    channel.close()


async def test_ray_alone_can_be_asked_for(bench: Bench) -> None:
    await bench.serve()
    channel = await bench.connect(bench.directory("ray"))
    assert channel.trusted_pickle
    channel.close()


async def test_the_link_alone_can_be_asked_for(bench: Bench) -> None:
    await bench.serve()
    with pytest.raises(ChannelClosed, match="no address"):
        await bench.connect(bench.directory("link", node="n2"))


async def test_pickles_go_through_ray_also_where_a_link_can_be_made(bench: Bench) -> None:
    await bench.serve(epoch=4)
    directory = bench.directory()
    assert directory.connect_trusted is not None
    client = EchoClient()
    channel = await directory.connect_trusted(0, SESSION, 1, client)
    assert await client.echoed == b"hello"
    assert channel.trusted_pickle
    assert channel.peer.epoch == 4
    channel.close()


async def test_an_address_that_did_not_work_for_pickles_is_asked_for_again(bench: Bench) -> None:
    directory = bench.directory()
    assert directory.connect_trusted is not None
    with pytest.raises(ChannelClosed):
        await directory.connect_trusted(0, SESSION, 1, EchoClient())
    await bench.serve()
    channel = await directory.connect_trusted(0, SESSION, 2, EchoClient())
    channel.close()


async def test_where_only_links_may_be_used_there_is_no_way_for_pickles(bench: Bench) -> None:
    assert bench.directory("link").connect_trusted is None


async def test_a_secret_that_did_not_travel_along_is_fetched_through_ray(bench: Bench) -> None:
    class Description:
        secret = SECRET

    await bench.serve()
    bench.calls.answers["coordinator", "describe"] = Description
    directory = bench.directory(secret=None)
    await bench.connect(directory)
    await bench.connect(directory)
    assert bench.calls.asked.count(("coordinator", "describe")) == 1


async def test_the_map_tells_owners_and_is_replaced_by_a_newer_one(bench: Bench) -> None:
    directory = bench.directory()
    assert (directory.map_version, directory.partition_of(100), directory.partitions()) == (1, 0, [0, 1])
    bench.calls.answers["coordinator", "slot_map"] = MAP_2
    await directory.refresh(1)
    assert (directory.map_version, directory.partition_of(99), directory.partition_of(100)) == (2, 0, 1)


async def test_an_older_map_never_replaces_a_newer_one(bench: Bench) -> None:
    directory = bench.directory()
    directory.take_map(MAP_2)
    bench.calls.answers["coordinator", "slot_map"] = MAP_1
    await directory.refresh(2)
    assert directory.map_version == 2


async def test_a_map_that_is_newer_than_the_one_seen_is_not_asked_for(bench: Bench) -> None:
    directory = bench.directory()
    directory.take_map(MAP_2)
    await directory.refresh(1)
    assert bench.calls.asked == []


async def test_without_a_coordinator_the_known_map_goes_on(bench: Bench) -> None:
    directory = bench.directory()
    await directory.refresh(1)
    assert (directory.map_version, directory.partition_of(0)) == (1, 0)


async def test_a_partition_whose_node_is_gone_says_so_and_ray_is_not_asked_again_before_it_is_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_directory, "_ABSENT_AFTER_S", 0.01)
    bench.calls.silent.add(("partition-0000", "endpoint"))
    bench.calls.answers["coordinator", "absences"] = {0: "its files are on disk d2 of node n7, in /data"}
    directory = bench.directory()
    for _ in range(3):
        with pytest.raises(PartitionAbsent, match="n7, in /data"):
            await bench.connect(directory)
    assert bench.calls.asked.count(("partition-0000", "endpoint")) == 1
    bench.calls.answers["coordinator", "absences"] = {}
    bench.calls.silent.clear()
    await bench.serve(epoch=2)
    assert (await bench.connect(directory)).peer.epoch == 2


async def test_while_a_partition_restarts_and_nobody_knows_more_its_address_is_waited_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_directory, "_ABSENT_AFTER_S", 0.01)
    await bench.serve()
    bench.calls.silent.add(("partition-0000", "endpoint"))
    connecting = asyncio.ensure_future(bench.connect(bench.directory()))
    await bench.calls.absences_asked.wait()
    bench.calls.speak.set()
    assert (await connecting).peer.epoch == 1
