"""The Ray transport beyond the common contract: lost answers, dead actors, dead processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors.channel import Hello
from actors.errors import ChannelClosed, MalformedFrame
from actors.ray_transport import (
    BATCH_BYTES,
    CLOSED,
    FRAMES,
    MAX_LOST_POLLS,
    OPEN_SEQ,
    REFUSED,
    TAKEN,
    WANTED,
    RayChannel,
)
from actors.ray_transport_server import RayTransportServer
from tests.support.ray_transports import FakeRayTransport
from tests.support.transport_host import Host, Side
from tests.support.transport_suite import EPOCH, PARTITION, SESSION, SETTINGS, hello, numbered


@pytest.fixture
async def ray_link() -> AsyncIterator[FakeRayTransport]:
    transport = FakeRayTransport()
    yield transport
    await transport.stop()


class Actor:
    """The server's plain face, as an actor's methods see it."""

    def __init__(self, poll_ms: int = 20_000) -> None:
        self.host = Host()
        self.server = RayTransportServer(self.host.accept, SETTINGS, partition=PARTITION, epoch=EPOCH, poll_ms=poll_ms)
        assert self.submit(OPEN_SEQ, [WANTED.pack(PARTITION, EPOCH)])[0] == "opened"

    def submit(self, seq: int, frames: list[Any]) -> Any:
        return self.server.submit(SESSION, 1, seq, frames)

    async def replies(self, after: int) -> Any:
        return await self.server.replies(SESSION, 1, after)


class TestProcess:
    async def test_frames_of_a_lost_answer_are_delivered_once(
        self, ray_link: FakeRayTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("actors.ray_transport.LATE_MS", 0)
        await ray_link.serve()
        side = Side()
        await ray_link.connect(hello(), side)
        ray_link.actor.lose_replies = MAX_LOST_POLLS - 1
        for part in range(4):
            await ray_link.host("send", 0, numbered(10, f"{part}."))
        assert await side.until_frames(40) == [f for part in range(4) for f in numbered(10, f"{part}.")]

    async def test_an_actor_that_answers_no_poll_is_given_up(
        self, ray_link: FakeRayTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("actors.ray_transport.LATE_MS", 0)
        await ray_link.serve()
        side = Side()
        await ray_link.connect(hello(), side)
        ray_link.actor.lose_replies = MAX_LOST_POLLS
        await ray_link.host("send", 0, [b"lost"])
        await side.until_event("closed")
        assert isinstance(side.error, ChannelClosed)
        assert f"{MAX_LOST_POLLS} polls" in str(side.error)

    async def test_a_dead_actor_closes_the_channel_once(self, ray_link: FakeRayTransport) -> None:
        await ray_link.serve()
        side = Side()
        channel = await ray_link.connect(hello(), side)
        ray_link.actor.die()
        channel.send(b"into the void")
        await side.until_event("closed")
        assert isinstance(side.error, ChannelClosed)
        assert "died unexpectedly" in str(side.error)
        assert side.events == ["opened", "closed"]
        with pytest.raises(ChannelClosed):
            await ray_link.connect(hello(2), Side())

    async def test_one_batch_is_in_flight_and_small_enough_for_rays_direct_path(
        self, ray_link: FakeRayTransport
    ) -> None:
        await ray_link.serve()
        sizes: list[int] = []
        flying = 0
        submit = ray_link.actor.submit._call

        async def watched(session: bytes, connection: int, seq: int, frames: list[bytes]) -> Any:
            nonlocal flying
            flying += 1
            assert flying == 1
            sizes.append(sum(map(len, frames)))
            await asyncio.sleep(0)
            answer = await submit(session, connection, seq, frames)
            flying -= 1
            return answer

        channel = await ray_link.connect(hello(), Side())
        ray_link.actor.submit._call = watched
        for _ in range(300):
            channel.send(b"x" * 1_000)
        channel.send(b"x" * (BATCH_BYTES + 1))
        assert (await ray_link.host("frame_sizes", 0, 301))[-1] == BATCH_BYTES + 1
        assert max(sizes[:-1]) <= BATCH_BYTES
        assert len(sizes) == 5

    async def test_a_gap_in_the_replies_is_malformed(self, ray_link: FakeRayTransport) -> None:
        await ray_link.serve()
        side = Side()
        channel = await ray_link.connect(hello(), side)
        assert isinstance(channel, RayChannel)
        channel._take_frames((FRAMES, 2, [b"second"]))
        await side.until_event("closed")
        assert isinstance(side.error, MalformedFrame)
        assert side.frames == []


class TestPartition:
    async def test_a_batch_delivered_twice_is_taken_once(self) -> None:
        actor = Actor()
        assert actor.submit(1, [b"a"]) == (TAKEN,)
        assert actor.submit(1, [b"a"]) == (TAKEN,)
        assert actor.submit(2, [b"b"]) == (TAKEN,)
        assert await actor.host.frames(0, 2) == [b"a", b"b"]
        await actor.server.stop()

    async def test_a_gap_between_batches_is_malformed(self) -> None:
        actor = Actor()
        assert actor.submit(2, [b"b"])[0] == CLOSED
        assert (await actor.host.error(0)).startswith("MalformedFrame")

    async def test_a_frame_that_is_not_bytes_is_malformed(self) -> None:
        actor = Actor()
        assert actor.submit(1, ["text"])[0] == CLOSED
        assert (await actor.host.error(0)).startswith("MalformedFrame")

    async def test_replies_stay_until_a_poll_acknowledges_them(self) -> None:
        actor = Actor()
        await actor.host.send(0, [b"a", b"b", b"c"])
        assert await actor.replies(0) == (FRAMES, 1, [b"a", b"b", b"c"])
        assert await actor.replies(0) == (FRAMES, 1, [b"a", b"b", b"c"])
        assert await actor.replies(2) == (FRAMES, 3, [b"c"])
        assert await actor.replies(1) == (FRAMES, 3, [b"c"])  # an overtaken poll takes nothing back
        await actor.server.stop()

    async def test_a_poll_that_acknowledges_what_was_never_sent_is_malformed(self) -> None:
        actor = Actor()
        assert (await actor.replies(1))[0] == CLOSED
        assert (await actor.host.error(0)).startswith("MalformedFrame")

    async def test_a_poll_without_news_ends_empty(self) -> None:
        actor = Actor(poll_ms=10)
        assert await actor.replies(0) == (FRAMES, 1, [])
        await actor.server.stop()

    async def test_a_second_poll_ends_the_first(self) -> None:
        actor = Actor()
        first = asyncio.ensure_future(actor.replies(0))
        await asyncio.sleep(0)
        second = asyncio.ensure_future(actor.replies(0))
        assert await first == (FRAMES, 1, [])
        await actor.host.send(0, [b"a"])
        assert await second == (FRAMES, 1, [b"a"])
        await actor.server.stop()

    async def test_a_process_that_asks_for_nothing_any_more_is_dead(self) -> None:
        actor = Actor(poll_ms=10)
        assert "not been heard of" in await actor.host.error(0)
        assert actor.server.connections == 0
        assert actor.submit(1, [b"late"])[0] == CLOSED

    async def test_an_opening_batch_that_makes_no_sense_is_refused(self) -> None:
        actor = Actor()
        assert actor.server.submit(b"short", 1, OPEN_SEQ, [WANTED.pack(PARTITION, EPOCH)])[0] == REFUSED
        assert actor.server.submit(SESSION, 2, OPEN_SEQ, [b"?"])[0] == REFUSED
        assert len(actor.host.sides) == 1
        await actor.server.stop()

    async def test_calls_of_another_thread_are_posted_to_the_partitions_loop(self) -> None:
        host = Host(echo=True)
        server = RayTransportServer(host.accept, SETTINGS, partition=PARTITION, epoch=EPOCH)
        wanted = [WANTED.pack(PARTITION, EPOCH)]

        def elsewhere() -> Any:
            server.submit_threadsafe(SESSION, 1, OPEN_SEQ, wanted).result(10)
            server.submit_threadsafe(SESSION, 1, 1, [b"a"]).result(10)
            return server.replies_threadsafe(SESSION, 1, 0).result(10)

        assert await asyncio.to_thread(elsewhere) == (FRAMES, 1, [b"a"])
        assert (await host.peer(0))[:2] == (Hello(SESSION, 1, PARTITION, EPOCH).session, 1)
        await server.stop()
