"""The coordinator's engine: decides once, answers when it is durable, never starts empty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from actors import DurableObject
from actors.cluster_file import ClusterFile
from actors.coordinator_engine import MAX_PLANS, CoordinatorEngine, EngineConfig
from actors.coordinator_services import SERVICES, LeaseGrant, LeaseRefusal, LeaseRequest, NoCoordinator, QuotaTotal
from actors.errors import CoordinatorUnavailable, DataMissing, PartitionBusy
from actors.settings import Settings
from actors.testing import LocalRuntime, VirtualClock
from drivers.native import NativeDriver
from tests.support.crash_points import CommitControl, ControlledDriver
from timers.batch import Batch, Outcome
from timers.lease_sweep import HolderBacklog
from timers.leases import Holder
from timers.quotas import QuotaPush, QuotaWindow, Usage

TTL_MS = 30_000
A, B = Holder("Worker", "a"), Holder("Worker", "b")


class Sent:
    """Holders with so many messages on their way."""

    def __init__(self, messages: int = 0) -> None:
        self.messages = messages

    async def backlog(self, holder: Holder) -> HolderBacklog:
        return HolderBacklog(self.messages, 0)


def request(holder: Holder, request_id: str, name: str = "job") -> LeaseRequest:
    return LeaseRequest(name, holder, request_id, TTL_MS)


class World:
    """An engine on virtual time, with commits under control."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.control = CommitControl()
        self.driver = ControlledDriver(self.control, self.clock, memory=True)
        self.sent = Sent()
        self.ended: list[BaseException] = []
        self.engine: CoordinatorEngine

    async def open(self) -> CoordinatorEngine:
        config = EngineConfig("", "c", recorded=False, settings=Settings(durability="off"))
        self.engine = await CoordinatorEngine.open(config, self.driver, self.sent, ended=self.ended.append)
        return self.engine

    async def advance(self, seconds: int) -> None:
        """Let time pass, second by second, and what is due run."""
        for _ in range(seconds):
            self.clock.move_to(self.clock.wall_ms() + 1_000)
            self.clock.run_due()
            for _ in range(50):  # more than a tick takes when everything runs inline
                await asyncio.sleep(0)
            assert not self.engine.busy


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.open()
    yield made
    await made.engine.stop()


# --- deciding -----------------------------------------------------------------------------------------


async def test_a_request_that_comes_again_gets_what_it_was_granted(world: World) -> None:
    first = await world.engine.acquire_lease(request(A, "one"))
    assert await world.engine.acquire_lease(request(A, "one")) == first
    again = await world.engine.acquire_lease(request(A, "two"))
    assert isinstance(first, LeaseGrant)
    assert isinstance(again, LeaseGrant)
    assert again.epoch > first.epoch


async def test_a_request_that_comes_again_after_its_lease_has_ended_is_a_new_one(world: World) -> None:
    first = await world.engine.acquire_lease(request(A, "one"))
    world.clock.move_to(world.clock.wall_ms() + TTL_MS)
    again = await world.engine.acquire_lease(request(A, "one"))
    assert isinstance(first, LeaseGrant)
    assert isinstance(again, LeaseGrant)
    assert again.epoch > first.epoch


async def test_what_is_decided_at_once_shares_commits_and_each_rests_on_the_one_before(world: World) -> None:
    holders = [Holder("Worker", str(number)) for number in range(30)]
    answers = await asyncio.gather(
        *(world.engine.acquire_lease(request(holder, holder.object_key)) for holder in holders),
        *(world.engine.acquire_lease(request(holder, holder.object_key, holder.object_key)) for holder in holders),
    )
    assert [isinstance(answer, LeaseGrant) for answer in answers] == [True] + [False] * 29 + [True] * 30
    assert world.control.commits <= 3


async def test_a_refusal_leaves_only_once_the_grant_that_it_rests_on_is_durable(world: World) -> None:
    with world.control.hold():
        granted = asyncio.ensure_future(world.engine.acquire_lease(request(A, "one")))
        refused = asyncio.ensure_future(world.engine.acquire_lease(request(B, "two")))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not granted.done()
        assert not refused.done()
    assert isinstance(await granted, LeaseGrant)
    assert isinstance(await refused, LeaseRefusal)


async def test_pushes_at_once_share_commits_and_none_is_lost(world: World) -> None:
    """A.8.5: all of one window rest on one total."""
    window = QuotaWindow.at("q", 3_600_000, world.clock.wall_ms())
    pushes = [QuotaPush(window, f"s{number}", Usage(number, 1)) for number in range(1, 101)]
    totals = await asyncio.gather(*(world.engine.apply_quota(push) for push in pushes))
    assert totals[-1] == Usage(sum(range(101)), 100)
    assert world.control.commits <= 3
    await asyncio.gather(*(world.engine.apply_quota(push) for push in pushes))
    assert await world.engine.quota_total("q", 3_600_000) == QuotaTotal(5_050, 100, window.end_ms)
    await asyncio.gather(*(world.engine.drop_quota_source(window, push.source) for push in pushes))
    for table in ("quota_totals", "quota_sources", "timers"):
        assert world.engine.store.scan(table) == []


async def test_pushes_whose_commit_fails_are_told_so_and_leave_no_trace(world: World) -> None:
    window = QuotaWindow.at("q", 3_600_000, world.clock.wall_ms())
    world.control.fail_next()
    first = world.engine.apply_quota(QuotaPush(window, "a", Usage(1, 0)))
    second = world.engine.apply_quota(QuotaPush(window, "b", Usage(2, 0)))
    answers = await asyncio.gather(first, second, return_exceptions=True)
    assert all(isinstance(answer, CoordinatorUnavailable) for answer in answers)
    assert await world.engine.apply_quota(QuotaPush(window, "b", Usage(2, 0))) == Usage(2, 0)


async def test_what_others_change_at_each_plan_ends_in_an_error(world: World) -> None:
    """A.8.5: planned again a bounded number of times."""
    granted = await world.engine.acquire_lease(request(A, "one"))
    assert isinstance(granted, LeaseGrant)
    judged: list[object] = []

    async def too_late(batches: Sequence[Batch]) -> Sequence[Outcome]:
        judged.extend(batches)
        return [Outcome.PRECONDITION_FAILED]

    world.engine.committer.apply = too_late  # type: ignore[method-assign]
    with pytest.raises(CoordinatorUnavailable, match="others were faster"):
        await world.engine.acquire_lease(request(A, "two"))
    assert len(judged) == MAX_PLANS == 1 + 8


async def test_a_commit_that_fails_grants_nothing_and_is_told(world: World) -> None:
    world.control.fail_next()
    with pytest.raises(CoordinatorUnavailable):
        await world.engine.acquire_lease(request(A, "one"))
    assert isinstance(await world.engine.acquire_lease(request(B, "two")), LeaseGrant)


async def test_an_epoch_of_a_grant_that_failed_is_skipped(world: World) -> None:
    first = await world.engine.acquire_lease(request(A, "one"))
    world.control.fail_next()
    with pytest.raises(CoordinatorUnavailable):
        await world.engine.acquire_lease(request(A, "two"))
    second = await world.engine.acquire_lease(request(A, "three"))
    assert isinstance(first, LeaseGrant)
    assert isinstance(second, LeaseGrant)
    assert second.epoch == first.epoch + 2


async def test_a_commit_whose_outcome_is_unknown_ends_the_engine(world: World) -> None:
    def broken() -> int:
        raise OSError("fsync failed")

    world.engine.store.commit = broken  # type: ignore[method-assign]
    asked = asyncio.ensure_future(world.engine.acquire_lease(request(A, "one")))
    await asyncio.wait({asked})
    assert asked.cancelled()
    assert len(world.ended) == 1
    assert world.engine.stopped


async def test_a_partition_without_a_coordinator_says_so() -> None:
    nobody = NoCoordinator()
    for name in SERVICES:
        service: Callable[..., Any] = getattr(nobody, name)
        arguments = [None] * (service.__code__.co_argcount - 1)
        with pytest.raises(CoordinatorUnavailable):
            await service(*arguments)


# --- the sweep ----------------------------------------------------------------------------------------


async def test_status_counts_leases_that_were_found_kept_for_more_than_a_minute(world: World) -> None:
    world.sent.messages = 1
    await world.engine.acquire_lease(request(A, "one"))
    await world.advance(seconds=30 + 60)
    assert world.engine.status()["lagging_leases"] == 0
    await world.advance(seconds=20)
    assert world.engine.status()["lagging_leases"] == 2  # looked at each 10 s
    world.sent.messages = 0
    await world.advance(seconds=10)
    assert world.engine.store.scan("leases") == []
    assert world.engine.status()["next_due_ms"] is None


class Worker(DurableObject):
    """Takes a lease and stays in its turn."""

    turn_timeout_ms = 600_000
    go: asyncio.Event

    async def take_and_stay(self) -> None:
        await self.leases.acquire("job")
        await self.go.wait()
        self.storage["done"] = True


async def test_a_lease_is_kept_while_its_holder_is_in_the_turn_that_took_it() -> None:
    async with LocalRuntime(memory=True) as runtime:
        Worker.go = asyncio.Event()
        staying = asyncio.ensure_future(runtime.namespace(Worker).get("a").take_and_stay())
        await runtime.advance(seconds=45)
        engine = runtime.coordinator.engine
        assert engine is not None
        assert len(engine.store.scan("leases")) == 1
        Worker.go.set()
        await staying
        await runtime.advance(seconds=10)
        assert engine.store.scan("leases") == []


class Receiver(DurableObject):
    """Takes a message when it is let."""

    go: asyncio.Event

    async def tell(self) -> None:
        await self.go.wait()


class Sender(DurableObject):
    async def take_and_send(self) -> None:
        await self.leases.acquire("job")
        self.send(Receiver, "r").tell()

    async def take(self) -> None:
        await self.leases.acquire("job")


async def test_a_lease_is_kept_while_a_message_of_its_holder_is_under_way_and_can_be_taken_all_the_same() -> None:
    """A.5.10: kept means kept in sight; who waits for an expired lease need not wait for messages."""
    async with LocalRuntime(memory=True) as runtime:
        Receiver.go = asyncio.Event()
        began_ms = runtime.clock.wall_ms()
        runtime.namespace(Receiver)
        await runtime.namespace(Sender).get("a").take_and_send()
        engine = runtime.coordinator.engine
        assert engine is not None
        await runtime.advance(seconds=31)
        ((_name, _epoch, _class, key, _request, _expires, _due, watermark_ms),) = engine.store.scan("leases")
        assert (key, watermark_ms) == ("a", began_ms)
        Receiver.go.set()
        await runtime.advance(seconds=10)
        assert engine.store.scan("leases") == []
        Receiver.go.clear()
        await runtime.namespace(Sender).get("a").take_and_send()
        await runtime.advance(seconds=31)
        await runtime.namespace(Sender).get("b").take()
        Receiver.go.set()


# --- files --------------------------------------------------------------------------------------------


def driver() -> NativeDriver:
    return NativeDriver(clock=VirtualClock(), inline=True, durability="off", poll_ms=None, lock_wait_ms=0)


def config(data_dir: Path) -> EngineConfig:
    return EngineConfig(str(data_dir), "c1", recorded=True, settings=Settings())


async def open_engine(data_dir: Path) -> CoordinatorEngine:
    return await CoordinatorEngine.open(config(data_dir), driver(), Sent())


async def test_a_directory_of_before_there_were_engines_gets_one_and_it_is_on_record(tmp_path: Path) -> None:
    ClusterFile("c1", 2, ready=True).create(tmp_path)
    text = (tmp_path / "cluster.json").read_text()
    (tmp_path / "cluster.json").write_text(text.replace('"engine": false,\n', ""))
    await (await open_engine(tmp_path)).stop()
    assert ClusterFile.read(tmp_path) == ClusterFile("c1", 2, ready=True, engine=True)
    await (await open_engine(tmp_path)).stop()


async def test_a_creation_that_was_cut_short_after_the_file_is_completed(tmp_path: Path) -> None:
    ClusterFile("c1", 2, ready=True).create(tmp_path)
    engine = await open_engine(tmp_path)
    granted = await engine.acquire_lease(request(A, "one"))
    await engine.stop()
    (tmp_path / "cluster.json").unlink()
    (tmp_path / "coordinator").rename(tmp_path / "aside")
    ClusterFile("c1", 2, ready=True).create(tmp_path)
    (tmp_path / "aside").rename(tmp_path / "coordinator")
    engine = await open_engine(tmp_path)
    assert await engine.acquire_lease(request(A, "one")) == granted
    await engine.stop()


async def test_a_file_that_is_lost_later_is_missing_and_never_made_again(tmp_path: Path) -> None:
    ClusterFile("c1", 2, ready=True).create(tmp_path)
    await (await open_engine(tmp_path)).stop()
    (tmp_path / "coordinator" / "engine.sqlite").unlink()
    with pytest.raises(DataMissing):
        await open_engine(tmp_path)


async def test_there_is_one_engine_at_a_time(tmp_path: Path) -> None:
    ClusterFile("c1", 2, ready=True).create(tmp_path)
    engine = await open_engine(tmp_path)
    with pytest.raises(PartitionBusy):
        await open_engine(tmp_path)
    await engine.stop()
