"""What every transport must do. Subclassed once per tier with a `transport` fixture."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from actors.channel import Channel, ChannelHandler, Hello
from actors.errors import ChannelClosed, FrameTooLarge
from actors.settings import KIB, MIB, Settings
from tests.support.transport_host import Side

PARTITION = 3
EPOCH = 7
SESSION = bytes(range(16))
OTHER_SESSION = bytes(range(16, 32))

SETTINGS = Settings(max_frame_bytes=4 * MIB)
#: Small marks, so that falling behind takes little.
NARROW = Settings(max_frame_bytes=64 * KIB, link_high_water_bytes=64 * KIB, link_kill_bytes=1 * MIB)


class Transport(Protocol):
    """A transport under test: one partition's server, and a way to connect to it."""

    trusted_pickle: bool

    async def serve(self, settings: Settings = SETTINGS, *, echo: bool = False, refuse: bool = False) -> None: ...

    async def connect(self, hello: Hello, handler: ChannelHandler, settings: Settings = SETTINGS) -> Channel: ...

    async def host(self, operation: str, *args: Any) -> Any: ...

    def stop_reading(self, channel: Channel) -> None: ...

    def read_again(self, channel: Channel) -> None: ...

    async def stop(self) -> None: ...


def hello(connection: int = 1, session: bytes = SESSION, partition: int = PARTITION, epoch: int = EPOCH) -> Hello:
    return Hello(session, connection, partition, epoch)


def numbered(count: int, prefix: str = "") -> list[bytes]:
    return [f"{prefix}{number}".encode() for number in range(count)]


class TransportSuite:
    """The contract of `Channel` and `ChannelHandler`."""

    # --- frames

    async def test_frames_of_the_process_arrive_in_order(self, transport: Transport) -> None:
        await transport.serve()
        channel = await transport.connect(hello(), Side())
        for frame in numbered(500):
            channel.send(frame)
        assert await transport.host("frames", 0, 500) == numbered(500)

    async def test_frames_of_the_partition_arrive_in_order(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        await transport.connect(hello(), side)
        await transport.host("send", 0, numbered(500))
        assert await side.until_frames(500) == numbered(500)

    async def test_both_directions_run_at_once(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        channel = await transport.connect(hello(), side)
        for part in range(5):
            for frame in numbered(100, f"up{part}."):
                channel.send(frame)
            await transport.host("send", 0, numbered(100, f"down{part}."))
        up = [frame for part in range(5) for frame in numbered(100, f"up{part}.")]
        down = [frame for part in range(5) for frame in numbered(100, f"down{part}.")]
        assert await transport.host("frames", 0, 500) == up
        assert await side.until_frames(500) == down

    async def test_frames_from_empty_to_the_bound_pass_both_ways(self, transport: Transport) -> None:
        await transport.serve(echo=True)
        side = Side()
        channel = await transport.connect(hello(), side)
        frames = [b"", b"x", b"y" * 100_000, b"", b"z" * SETTINGS.max_frame_bytes, b"end"]
        for frame in frames:
            channel.send(frame)
        assert await side.until_frames(len(frames)) == frames

    async def test_twenty_thousand_small_frames_come_back_complete(self, transport: Transport) -> None:
        await transport.serve(echo=True)
        side = Side()
        channel = await transport.connect(hello(), side)
        frames = [b"%099d" % number for number in range(20_000)]
        for frame in frames:
            channel.send(frame)
        assert await side.until_frames(20_000) == frames

    # --- bounds

    async def test_a_frame_over_the_bound_is_refused_at_send_and_harms_nothing(self, transport: Transport) -> None:
        await transport.serve(NARROW)
        channel = await transport.connect(hello(), Side(), NARROW)
        with pytest.raises(FrameTooLarge, match="max_frame_bytes"):
            channel.send(b"x" * (NARROW.max_frame_bytes + 1))
        channel.send(b"still open")
        assert await transport.host("frames", 0, 1) == [b"still open"]

    async def test_the_partition_closes_when_a_frame_over_its_bound_arrives(self, transport: Transport) -> None:
        await transport.serve(NARROW)
        side = Side()
        channel = await transport.connect(hello(), side, SETTINGS)
        channel.send(b"fits")
        channel.send(b"x" * (NARROW.max_frame_bytes + 1))
        channel.send(b"never read")
        assert (await transport.host("error", 0)).startswith("FrameTooLarge")
        assert await transport.host("frames", 0, 1) == [b"fits"]
        await side.until_event("closed")
        assert isinstance(side.error, ChannelClosed)

    async def test_the_process_closes_when_a_frame_over_its_bound_arrives(self, transport: Transport) -> None:
        await transport.serve(SETTINGS)
        side = Side()
        await transport.connect(hello(), side, NARROW)
        await transport.host("send", 0, [b"fits", b"x" * (NARROW.max_frame_bytes + 1), b"never read"])
        await side.until_event("closed")
        assert isinstance(side.error, FrameTooLarge)
        assert side.frames == [b"fits"]
        assert (await transport.host("error", 0)).startswith("ChannelClosed")

    async def test_sessions_over_max_connections_are_refused(self, transport: Transport) -> None:
        settings = Settings(max_connections=1)
        await transport.serve(settings)
        await transport.connect(hello(1), Side())
        with pytest.raises(ChannelClosed, match="max_connections"):
            await transport.connect(hello(1, OTHER_SESSION), Side())
        # A newer connection of the same session takes the older one's place, not another one.
        await transport.connect(hello(2), Side())
        assert await transport.host("accepted") == 2

    # --- opening

    async def test_both_sides_know_their_peer(self, transport: Transport) -> None:
        await transport.serve()
        channel = await transport.connect(hello(connection=5, epoch=EPOCH - 2), Side())
        assert channel.peer == Hello(SESSION, 5, PARTITION, EPOCH)
        assert channel.trusted_pickle is transport.trusted_pickle
        assert await transport.host("peer", 0) == (SESSION, 5, transport.trusted_pickle)

    async def test_another_partition_is_refused(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        with pytest.raises(ChannelClosed, match="another partition"):
            await transport.connect(hello(partition=PARTITION + 1), side)
        assert side.events == []
        assert await transport.host("accepted") == 0

    async def test_an_earlier_incarnation_is_refused(self, transport: Transport) -> None:
        await transport.serve()
        with pytest.raises(ChannelClosed, match="earlier incarnation"):
            await transport.connect(hello(epoch=EPOCH + 1), Side())
        assert await transport.host("accepted") == 0

    async def test_a_partition_that_accepts_nobody_refuses(self, transport: Transport) -> None:
        await transport.serve(refuse=True)
        side = Side()
        with pytest.raises(ChannelClosed, match="takes no connections"):
            await transport.connect(hello(), side)
        assert side.events == []

    # --- the newest connection of a session

    async def test_a_newer_connection_closes_the_older_before_it_opens(self, transport: Transport) -> None:
        await transport.serve()
        older, newer = Side(), Side()
        await transport.connect(hello(1), older)
        await transport.connect(hello(2), newer)
        await older.until_event("closed")
        assert isinstance(older.error, ChannelClosed)
        assert await transport.host("log") == [(0, "opened"), (0, "closed"), (1, "opened")]
        assert newer.events == ["opened"]

    async def test_unread_frames_of_the_older_connection_are_dropped(self, transport: Transport) -> None:
        await transport.serve()
        first = await transport.connect(hello(1), Side())
        for frame in numbered(2_000, "old"):
            first.send(frame)
        second = await transport.connect(hello(2), Side())
        for frame in numbered(10, "new"):
            second.send(frame)
        with_new = await transport.host("frames", 1, 10)
        assert with_new == numbered(10, "new")
        log = await transport.host("log")
        assert (0, "frame") not in log[log.index((0, "closed")) :]
        assert log.index((0, "closed")) < log.index((1, "opened"))

    @pytest.mark.parametrize("number", [3, 4])
    async def test_an_older_or_equal_connection_is_refused(self, transport: Transport, number: int) -> None:
        await transport.serve(echo=True)
        side = Side()
        channel = await transport.connect(hello(4), side)
        with pytest.raises(ChannelClosed, match="this connection or a newer one"):
            await transport.connect(hello(number), Side())
        channel.send(b"unharmed")
        assert await side.until_frames(1) == [b"unharmed"]

    @pytest.mark.parametrize("number", [3, 4])
    async def test_an_older_connection_is_refused_after_the_newer_one_ended(
        self, transport: Transport, number: int
    ) -> None:
        await transport.serve()
        channel = await transport.connect(hello(4), Side())
        channel.close()
        await transport.host("error", 0)
        with pytest.raises(ChannelClosed, match="this connection or a newer one"):
            await transport.connect(hello(number), Side())
        await transport.connect(hello(5), Side())

    async def test_sessions_do_not_disturb_each_other(self, transport: Transport) -> None:
        await transport.serve(echo=True)
        one, other = Side(), Side()
        first = await transport.connect(hello(9), one)
        second = await transport.connect(hello(1, OTHER_SESSION), other)
        first.send(b"one")
        second.send(b"other")
        assert await one.until_frames(1) == [b"one"]
        assert await other.until_frames(1) == [b"other"]

    # --- closing

    async def test_closing_here_is_told_once_on_both_sides(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        channel = await transport.connect(hello(), side)
        channel.close()
        channel.close(ValueError("too late to matter"))
        assert side.events == ["opened"]  # told on a later tick, never from inside close()
        with pytest.raises(ChannelClosed):
            channel.send(b"x")
        await side.until_event("closed")
        assert side.error is None
        assert (await transport.host("error", 0)).startswith("ChannelClosed")
        assert await transport.host("until_event", 0, "closed") == ["opened", "closed"]
        await transport.stop()
        assert side.events == ["opened", "closed"]

    async def test_closing_there_is_told_once_on_both_sides(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        channel = await transport.connect(hello(), side)
        await transport.host("close", 0)
        await side.until_event("closed")
        assert isinstance(side.error, ChannelClosed)
        with pytest.raises(ChannelClosed):
            channel.send(b"x")
        assert await transport.host("error", 0) == "none"
        await transport.stop()
        assert side.events == ["opened", "closed"]
        assert await transport.host("until_event", 0, "closed") == ["opened", "closed"]

    async def test_an_error_given_to_close_is_what_the_own_handler_is_told(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        channel = await transport.connect(hello(), side)
        reason = ValueError("enough")
        channel.close(reason)
        await side.until_event("closed")
        assert side.error is reason
        assert (await transport.host("error", 0)).startswith("ChannelClosed")

    async def test_frames_queued_before_a_close_are_still_written(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        channel = await transport.connect(hello(), side)
        for frame in numbered(300):
            channel.send(frame)
        channel.close()
        assert await transport.host("frames", 0, 300) == numbered(300)

    async def test_frames_queued_before_the_partition_closes_still_arrive(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        await transport.connect(hello(), side)
        await transport.host("send", 0, numbered(300))
        await transport.host("close", 0)
        await side.until_event("closed")
        assert side.frames == numbered(300)

    async def test_after_the_partition_closes_no_frame_is_delivered(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        channel = await transport.connect(hello(), side)
        for frame in [*numbered(50), b"close", *numbered(50)]:
            channel.send(frame)
        await side.until_event("closed")
        assert await transport.host("error", 0) == "none"
        assert await transport.host("frames", 0, 51) == [*numbered(50), b"close"]

    async def test_after_the_process_closes_no_frame_is_delivered(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        await transport.connect(hello(), side)
        await transport.host("send", 0, [*numbered(50), b"close", *numbered(50)])
        await side.until_event("closed")
        assert (await transport.host("error", 0)).startswith("ChannelClosed")
        assert side.frames == [*numbered(50), b"close"]

    async def test_a_handler_that_fails_closes_its_channel_with_its_error(self, transport: Transport) -> None:
        await transport.serve()
        side = Side()
        channel = await transport.connect(hello(), side)
        channel.send(b"raise")
        channel.send(b"never read")
        assert (await transport.host("error", 0)).startswith("ZeroDivisionError")
        assert await transport.host("frames", 0, 1) == [b"raise"]
        await side.until_event("closed")
        assert isinstance(side.error, ChannelClosed)

    async def test_stopping_the_partition_closes_every_channel_and_takes_no_more(self, transport: Transport) -> None:
        await transport.serve()
        sides = [Side(), Side()]
        await transport.connect(hello(1), sides[0])
        await transport.connect(hello(1, OTHER_SESSION), sides[1])
        await transport.stop()
        for side in sides:
            await side.until_event("closed")
            assert isinstance(side.error, ChannelClosed)
        with pytest.raises((ChannelClosed, OSError)):
            await transport.connect(hello(2), Side())

    # --- flow control

    async def test_a_slow_reader_pauses_the_partition_and_lets_it_go_on(self, transport: Transport) -> None:
        await transport.serve(NARROW)
        side = Side()
        channel = await transport.connect(hello(), side, NARROW)
        transport.stop_reading(channel)
        await transport.host("fill", 0, b"x" * 8 * KIB)
        assert await transport.host("until_event", 0, "writable False") == ["opened", "writable False"]
        transport.read_again(channel)
        events = await transport.host("until_event", 0, "writable True")
        assert events == ["opened", "writable False", "writable True"]

    async def test_a_burst_pauses_the_sender_at_once_and_drains(self, transport: Transport) -> None:
        await transport.serve(NARROW)
        side = Side()
        channel = await transport.connect(hello(), side, NARROW)
        for _ in range(10):
            channel.send(b"x" * 8 * KIB)
        assert channel.buffered_bytes >= 80 * KIB
        assert side.events == ["opened", "writable False"]
        await side.until_event("writable True")
        assert await transport.host("frame_sizes", 0, 10) == [8 * KIB] * 10
        await transport.host("send_copies", 0, b"y" * 8 * KIB, 10)
        assert await side.until_frames(10) == [b"y" * 8 * KIB] * 10
        events = await transport.host("until_event", 0, "writable True")
        assert events == ["opened", "writable False", "writable True"]

    async def test_a_reader_too_far_behind_is_disconnected(self, transport: Transport) -> None:
        await transport.serve(NARROW)
        side = Side()
        channel = await transport.connect(hello(), side, NARROW)
        transport.stop_reading(channel)
        await transport.host("overfill", 0, b"x" * 32 * KIB)
        assert "link_kill_bytes" in await transport.host("error", 0)
        transport.read_again(channel)
        await side.until_event("closed")
        assert isinstance(side.error, ChannelClosed)
        events = await transport.host("until_event", 0, "closed")
        assert events == ["opened", "writable False", "closed"]
