"""The node's release wheel over a real socket: two stages, one wake per partition, and nothing rests on it alone."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator

import pytest

from actors.channel import Hello
from actors.errors import ChannelClosed, MalformedFrame
from actors.link import connect_link
from actors.wheel_frames import WHEEL, WheelFrame, ack_frame, arm_frame, decode_wheel_frame, wake_frame
from actors.wheel_waker import WheelWaker
from drivers.alarm import Alarm
from drivers.clock import SystemClock
from tests.support.node_wheel import MS, NODE, PATIENCE_S, SECRET, SETTINGS, NodeWheel, now_ms, until
from tests.support.transport_host import Side

HOUR_MS = 3_600_000
#: Goes to the wheel, also when the machine is so busy that arming takes a while.
FAR_ENOUGH_MS = 150


@pytest.fixture
async def wheel() -> AsyncIterator[NodeWheel]:
    with tempfile.TemporaryDirectory(prefix="ms") as socket_dir:
        node_wheel = NodeWheel(socket_dir)
        await node_wheel.start()
        yield node_wheel
        await node_wheel.stop()


async def woken_ns(waker: WheelWaker, due_ms: int) -> int:
    """Arm, wait for the wake, and tell the wall time at it."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waker.arm(due_ms, lambda: future.set_result(time.time_ns()))
    return await asyncio.wait_for(future, PATIENCE_S)


# --- two stages ---------------------------------------------------------------------------------------


async def test_wakes_through_the_wheel_are_never_early_end_to_end(wheel: NodeWheel) -> None:
    """Ten partitions with their own wakes at once, 300 in all."""
    chance = random.Random(1)
    wakers = [await wheel.connected() for _ in range(10)]

    async def go_on(waker: WheelWaker) -> list[int]:
        late = []
        for _ in range(30):
            due_ms = now_ms() + chance.randint(0, 30)
            late.append(await woken_ns(waker, due_ms) - due_ms * MS)
        return late

    late = [each for some in await asyncio.gather(*map(go_on, wakers)) for each in some]
    assert len(late) == 300
    assert min(late) >= 0
    assert wheel.server is not None
    status = wheel.server.status()
    assert status["partitions"] == 10
    assert 0 < status["armed"] < 300, "what is near stays in the partition"


async def test_the_wheel_wakes_ahead_and_the_partition_waits_out_the_rest(wheel: NodeWheel) -> None:
    waker = await wheel.connected()
    for _ in range(3):
        due_ms = now_ms() + FAR_ENOUGH_MS
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waker.arm(due_ms, lambda future=future: future.set_result(time.time_ns()))  # type: ignore[misc]
        assert waker._near._token is None, "the partition's own timer has nothing to do yet"
        assert await asyncio.wait_for(future, PATIENCE_S) >= due_ms * MS
    assert waker.wakes == 3
    assert waker.status()["lateness"]["count"] == 3


async def test_a_wake_that_is_near_does_not_go_to_the_wheel(wheel: NodeWheel) -> None:
    waker = await wheel.connected()
    due_ms = now_ms() + SETTINGS.wheel_near_ms
    assert await woken_ns(waker, due_ms) >= due_ms * MS
    assert wheel.server is not None
    assert wheel.server.status()["armed"] == 0


async def test_the_lead_is_measured_from_acknowledgements_and_bounded(wheel: NodeWheel) -> None:
    waker = await wheel.connected()
    assert wheel.server is not None
    (partition,) = wheel.server.partitions
    assert partition.lead_ns == SETTINGS.wheel_lead_max_ms * MS
    await woken_ns(waker, now_ms() + FAR_ENOUGH_MS)
    await until(lambda: partition._transit._mean_ns is not None)
    assert 0 < partition.lead_ns <= SETTINGS.wheel_lead_max_ms * MS


async def test_a_wake_that_left_on_arming_is_no_sample_of_lateness(wheel: NodeWheel) -> None:
    """C.2.18: it says nothing about the wheel's thread. Nor does it lengthen the lead by the time it was overdue."""
    side = Side()
    channel = await connect_link(await wheel.find(), Hello(b"x" * 16, 1, WHEEL, 0), SECRET, side, SETTINGS, node=NODE)
    channel.send(arm_frame(1, now_ms() - HOUR_MS))
    await side.until(lambda: side.frames == [wake_frame(1)])
    channel.send(ack_frame(1))
    assert wheel.server is not None
    (partition,) = wheel.server.partitions
    await until(lambda: partition._transit._mean_ns is not None)
    assert partition._transit._mean_ns < HOUR_MS * MS
    assert wheel.server.status()["lateness"]["count"] == 0


async def test_a_partition_arms_only_its_next_wake(wheel: NodeWheel) -> None:
    waker = await wheel.connected()
    assert wheel.server is not None
    for number in range(200):
        waker.arm(now_ms() + HOUR_MS - number, lambda: None)
    await until(lambda: wheel.server is not None and wheel.server.armed == 200)
    assert wheel.server.status()["waiting"] == 1
    await until(lambda: wheel.server is not None and len(wheel.server.timer) < 100)  # the other slots are swept


# --- stale wakes --------------------------------------------------------------------------------------


async def test_a_wake_for_what_was_armed_before_is_stale_and_dropped(wheel: NodeWheel) -> None:
    """The wheel had sent it before it heard of the newer one."""
    waker = await wheel.connected()
    order: list[str] = []
    waker.arm(now_ms() + HOUR_MS, lambda: order.append("first"))
    first = waker._generation
    waker.arm(now_ms() + 2 * HOUR_MS, lambda: order.append("second"))
    waker.received(wake_frame(first))
    assert waker.stale == 1
    assert waker._near._token is None
    waker.disarm()
    waker.received(wake_frame(waker._generation))
    assert waker.stale == 2
    assert order == []


async def test_the_wheel_drops_a_release_that_was_replaced_while_it_was_on_its_way_to_the_loop(
    wheel: NodeWheel,
) -> None:
    waker = await wheel.connected()
    assert wheel.server is not None
    (partition,) = wheel.server.partitions
    waker.arm(now_ms() + HOUR_MS, lambda: None)
    waker.arm(now_ms() + 2 * HOUR_MS, lambda: None)
    await until(lambda: wheel.server is not None and wheel.server.armed == 2)
    partition._released(waker._generation - 1)
    assert wheel.server.stale == 1
    assert partition.is_waiting
    assert waker.wakes == waker.stale == 0


# --- the wheel is not needed --------------------------------------------------------------------------


async def test_without_a_wheel_the_partition_wakes_itself(wheel: NodeWheel) -> None:
    await wheel.kill()
    waker = wheel.waker()
    due_ms = now_ms() + 30
    assert await woken_ns(waker, due_ms) >= due_ms * MS
    assert waker.status()["backend"] == "process"
    await until(lambda: "there is no wheel" in (waker.status()["wheel_missing"] or ""))


async def test_what_a_killed_wheel_had_is_woken_all_the_same_and_armed_again_when_it_is_back(
    wheel: NodeWheel,
) -> None:
    waker, far = await wheel.connected(), await wheel.connected()
    far.arm(now_ms() + HOUR_MS, lambda: None)
    due_ms = now_ms() + 200
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waker.arm(due_ms, lambda: future.set_result(time.time_ns()))
    await until(lambda: wheel.server is not None and wheel.server.armed == 2)
    await wheel.kill()
    assert await asyncio.wait_for(future, PATIENCE_S) >= due_ms * MS
    assert far.status()["backend"] == "process"
    back = await wheel.start()
    await until(lambda: back.status()["waiting"] == 1)
    assert far.status()["backend"] == "release-wheel"
    assert far._near._token is None, "its own timer has let go of it"
    await until(lambda: waker.status()["backend"] == "release-wheel")
    before = waker.wakes
    again_ms = now_ms() + FAR_ENOUGH_MS
    assert await woken_ns(waker, again_ms) >= again_ms * MS
    assert waker.wakes == before + 1


async def test_a_wheel_that_hangs_delays_nothing(wheel: NodeWheel) -> None:
    """It is connected, takes what is armed, and never wakes: the alarm's own call-back comes."""
    waker = await wheel.connected()
    assert wheel.server is not None
    (partition,) = wheel.server.partitions
    partition._released = lambda generation: None  # type: ignore[method-assign]
    fired: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    alarm = Alarm(
        SystemClock(),
        lambda: fired.set_result(time.time_ns()),
        earliest_ms=lambda: None,
        poll_ms=1_000,
        waker=waker,
    )
    due_ms = now_ms() + 50
    alarm.arm(due_ms)
    assert await asyncio.wait_for(fired, PATIENCE_S) >= due_ms * MS
    assert waker.wakes == 0
    alarm.stop()


@pytest.mark.parametrize(
    ("given", "missing"),
    [({"secret": b"the secret of another cluster..."}, "AuthenticationFailed"), ({"node": "n2"}, "another node")],
)
async def test_a_wheel_of_another_cluster_or_node_is_not_used(
    wheel: NodeWheel, given: dict[str, object], missing: str
) -> None:
    await wheel.kill()
    await wheel.start(**given)  # type: ignore[arg-type]
    waker = wheel.waker()
    await until(lambda: missing in (waker.status()["wheel_missing"] or ""))
    due_ms = now_ms() + 20
    assert await woken_ns(waker, due_ms) >= due_ms * MS
    assert waker.status()["backend"] == "process"


async def test_a_stopped_waker_leaves_the_wheel_and_wakes_nobody(wheel: NodeWheel) -> None:
    waker = await wheel.connected()
    fired: list[int] = []
    waker.arm(now_ms() + 40, lambda: fired.append(1))
    waker.stop()
    await until(lambda: wheel.server is not None and not wheel.server.partitions)
    witness = await wheel.connected()
    await woken_ns(witness, now_ms() + 60)
    assert fired == []


# --- frames -------------------------------------------------------------------------------------------


def test_frames_carry_kind_generation_and_due_time() -> None:
    assert decode_wheel_frame(arm_frame(2**63, 253_402_300_799_999)) == (WheelFrame.ARM, 2**63, 253_402_300_799_999)
    assert decode_wheel_frame(wake_frame(7)) == (WheelFrame.WAKE, 7, 0)
    assert decode_wheel_frame(ack_frame(7)) == (WheelFrame.ACK, 7, 0)


@pytest.mark.parametrize("frame", [b"", b"\x01", arm_frame(1, 1) + b"\0", b"\x09" + arm_frame(1, 1)[1:]])
def test_a_frame_that_makes_no_sense_is_refused(frame: bytes) -> None:
    with pytest.raises(MalformedFrame):
        decode_wheel_frame(frame)


@pytest.mark.parametrize(
    "frames",
    [[wake_frame(1)], [arm_frame(2, 0), arm_frame(2, 0)], [arm_frame(2, 0), arm_frame(1, 0)], [b"nonsense"]],
)
async def test_a_peer_that_breaks_the_protocol_loses_its_connection_and_nobody_else_does(
    wheel: NodeWheel, frames: list[bytes]
) -> None:
    honest = await wheel.connected()
    side = Side()
    channel = await connect_link(await wheel.find(), Hello(b"x" * 16, 1, WHEEL, 0), SECRET, side, SETTINGS, node=NODE)
    for frame in frames:
        channel.send(frame)
    await side.until(lambda: side.error is not None)
    assert isinstance(side.error, ChannelClosed)
    due_ms = now_ms() + 20
    assert await woken_ns(honest, due_ms) >= due_ms * MS
    assert honest.status()["backend"] == "release-wheel"
