"""A partition opens when its files allow it, serves whether or not the coordinator is there, and stops when told."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from actors.channel import Channel, Endpoint, Hello
from actors.coordinator import OpeningFacts, Verdict
from actors.coordinator_store import ClassDefinition, SlotMap, SlotRange
from actors.errors import (
    CommitOutcomeUnknown,
    DataMissing,
    DataRolledBack,
    Fenced,
    PartitionBusy,
    PartitionStopped,
    WrongPartition,
)
from actors.link import connect_link
from actors.partition_host import HostConfig, OpenOrder, PartitionHost
from actors.ray_calls import ActorUnreachable
from actors.settings import Settings
from drivers.files import partition_directory
from tests.support.stub_partition import StubPartition

SECRET = bytes(32)
SETTINGS = Settings()
MAP = SlotMap(1, (SlotRange(0, 2047, 0, 1), SlotRange(2048, 4095, 1, 1)))


class FakeCoordinator:
    """Records what it is told; `up` says whether it answers."""

    def __init__(self, *, initialised: bool = True, min_commit_seq: int = 0) -> None:
        self.up = True
        self.error: Exception = ActorUnreachable("the coordinator is down")
        self.is_initialised = initialised
        self.min_commit_seq = min_commit_seq
        self.verdict = Verdict.ACCEPTED
        self.told: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
        self.log: list[str] = []

    def _answer(self, what: str) -> None:
        self.log.append(what)
        if not self.up:
            self.told.put_nowait(("unanswered",))
            raise self.error

    async def opening_facts(self, partition: int) -> OpeningFacts:
        self._answer("facts")
        return OpeningFacts(self.is_initialised, self.min_commit_seq, MAP)

    async def initialised(self, partition: int) -> None:
        self._answer("initialised")
        self.is_initialised = True

    async def announce(
        self, partition: int, epoch: int, endpoint: Endpoint, commit_seq: int, slots: Sequence[tuple[int, int]]
    ) -> Verdict:
        self._answer("announce")
        self.told.put_nowait(("announce", epoch, commit_seq, list(slots)))
        return self.verdict

    async def report(self, partition: int, epoch: int, commit_seq: int) -> Verdict:
        self._answer("report")
        self.told.put_nowait(("report", epoch, commit_seq))
        return self.verdict

    async def settle_moves(self, partition: int, moves: dict[str, tuple[str, int]]) -> None:
        self._answer("settle_moves")
        self.told.put_nowait(("settle_moves", partition, moves))

    async def class_definition(self, type_name: str) -> ClassDefinition | None:
        return None


class Bench:
    """A host with a stub partition; `fails` are errors of the next attempts to open."""

    def __init__(self, data_dir: Path, coordinator: FakeCoordinator, fails: Sequence[Exception]) -> None:
        self.coordinator = coordinator
        self.orders: list[OpenOrder] = []
        self.partitions: list[StubPartition] = []
        self.ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._fails = list(fails)
        config = HostConfig(str(data_dir), "c1", 0, SECRET, SETTINGS, "n1", "127.0.0.1", "partition-0000")
        self.host = PartitionHost(
            config,
            coordinator,
            self._open,
            self.ended.set_result,
            retry_s=0.001,
            report_interval_s=0.001,
            announce_retry_s=0.001,
        )

    async def _open(self, order: OpenOrder) -> StubPartition:
        self.orders.append(order)
        if self._fails:
            raise self._fails.pop(0)
        self.partitions.append(StubPartition(epoch=3, commit_seq=70))
        return self.partitions[-1]


@asynccontextmanager
async def hosted(
    tmp_path: Path, coordinator: FakeCoordinator | None = None, fails: Sequence[Exception] = ()
) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path, coordinator or FakeCoordinator(), fails)
    bench.host.start()
    yield bench
    await bench.host.stop()


def with_files(data_dir: Path) -> None:
    directory = partition_directory(data_dir, 0)
    directory.mkdir(parents=True)
    (directory / "partition.sqlite").touch()


def socket_exists(endpoint: Endpoint) -> bool:
    return endpoint.unix_path is not None and Path(endpoint.unix_path).exists()


async def endpoint_of(bench: Bench) -> Endpoint:
    """Asks until the partition serves, as a client does."""
    while True:
        try:
            return await bench.host.endpoint()
        except (DataMissing, PartitionBusy, ActorUnreachable):
            await asyncio.sleep(0.001)


async def test_a_partition_that_serves_can_be_reached_where_it_says(tmp_path: Path) -> None:
    async with hosted(tmp_path) as bench:
        endpoint = await bench.host.endpoint()
        assert (endpoint.partition, endpoint.epoch, endpoint.node, endpoint.host) == (0, 3, "n1", None)
        echoed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        class Handler:
            def opened(self, channel: Channel) -> None:
                channel.send(b"hello")

            def frame_received(self, frame: bytes) -> None:
                echoed.set_result(frame)

            def closed(self, error: Exception | None) -> None:
                return None

            def writable(self, ok: bool) -> None:
                return None

        await connect_link(endpoint, Hello(bytes(16), 1, 0, 3), SECRET, Handler(), SETTINGS, node="n1")
        assert await echoed == b"hello"
        status = await bench.host.status()
        assert (status["partition"], status["epoch"], status["connections"]) == (0, 3, 1)


async def test_a_partition_that_never_had_data_is_created_and_recorded_before_it_serves(tmp_path: Path) -> None:
    async with hosted(tmp_path, FakeCoordinator(initialised=False)) as bench:
        await bench.host.endpoint()
        assert bench.orders == [OpenOrder(create=True, slots=[(0, 2047)], min_commit_seq=0)]
        assert bench.coordinator.log[:2] == ["facts", "initialised"]


async def test_a_partition_that_has_had_data_is_never_created(tmp_path: Path) -> None:
    async with hosted(tmp_path, FakeCoordinator(initialised=True, min_commit_seq=55)) as bench:
        await bench.host.endpoint()
        assert bench.orders == [OpenOrder(create=False, slots=[(0, 2047)], min_commit_seq=55)]
        assert "initialised" not in bench.coordinator.log


async def test_a_creation_that_cannot_be_recorded_does_not_serve_and_is_tried_again(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(initialised=False)
    refused = 0

    async def initialised(partition: int) -> None:
        nonlocal refused
        if refused < 2:
            refused += 1
            raise ActorUnreachable("the coordinator is down")
        coordinator.is_initialised = True

    coordinator.initialised = initialised  # type: ignore[method-assign]
    async with hosted(tmp_path, coordinator) as bench:
        with pytest.raises(ActorUnreachable):
            await bench.host.endpoint()
        await endpoint_of(bench)
        assert [partition.stopped for partition in bench.partitions] == [True, True, False]


async def test_missing_data_is_answered_and_looked_for_again(tmp_path: Path) -> None:
    async with hosted(tmp_path, fails=[DataMissing("gone"), DataMissing("gone")]) as bench:
        with pytest.raises(DataMissing):
            await bench.host.endpoint()
        assert (await endpoint_of(bench)).epoch == 3
        assert len(bench.orders) == 3


async def test_files_held_by_another_process_are_answered_with_busy(tmp_path: Path) -> None:
    async with hosted(tmp_path, fails=[PartitionBusy("held")]) as bench:
        with pytest.raises(PartitionBusy):
            await bench.host.endpoint()
        await endpoint_of(bench)


async def test_without_a_coordinator_a_partition_with_files_serves(tmp_path: Path) -> None:
    with_files(tmp_path)
    coordinator = FakeCoordinator()
    coordinator.up = False
    async with hosted(tmp_path, coordinator) as bench:
        await bench.host.endpoint()
        assert bench.orders == [OpenOrder(create=False, slots=[], min_commit_seq=0)]


async def test_without_a_coordinator_a_partition_without_files_waits_for_it(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    coordinator.up = False
    async with hosted(tmp_path, coordinator) as bench:
        with pytest.raises(DataMissing):
            await bench.host.endpoint()
        assert bench.orders == []
        coordinator.up = True
        await endpoint_of(bench)


async def test_the_coordinator_is_told_epoch_commit_and_slots_and_then_kept_informed(tmp_path: Path) -> None:
    async with hosted(tmp_path) as bench:
        assert await bench.coordinator.told.get() == ("announce", 3, 70, [(0, 2047)])
        bench.partitions[0].commit_seq = 71
        while await bench.coordinator.told.get() != ("report", 3, 71):
            pass


async def test_a_coordinator_that_comes_back_is_announced_to_again(tmp_path: Path) -> None:
    async with hosted(tmp_path) as bench:
        told = bench.coordinator.told
        await told.get()
        bench.coordinator.up = False
        while await told.get() != ("unanswered",):
            pass
        await bench.host.endpoint()  # it serves all the while
        bench.coordinator.up = True
        while (await told.get())[0] != "announce":
            pass


async def test_with_weaker_durability_no_commit_is_promised_to_the_coordinator(tmp_path: Path) -> None:
    coordinator = FakeCoordinator()
    bench = Bench(tmp_path, coordinator, [])
    bench.host._config = HostConfig(
        str(tmp_path), "c1", 0, SECRET, Settings(durability="normal"), "n1", "127.0.0.1", "partition-0000"
    )
    bench.host.start()
    assert await coordinator.told.get() == ("announce", 3, 0, [(0, 2047)])
    await bench.host.stop()


@pytest.mark.parametrize(("verdict", "error"), [(Verdict.FENCED, Fenced), (Verdict.ROLLED_BACK, DataRolledBack)])
async def test_a_partition_that_is_told_off_by_the_coordinator_ends_its_process(
    tmp_path: Path, verdict: Verdict, error: type[Exception]
) -> None:
    coordinator = FakeCoordinator()
    coordinator.verdict = verdict
    async with hosted(tmp_path, coordinator) as bench:
        assert isinstance(await bench.ended, error)


async def test_a_partition_that_must_not_go_on_ends_its_process(tmp_path: Path) -> None:
    async with hosted(tmp_path) as bench:
        await bench.host.endpoint()
        bench.partitions[0].exited.set_result(CommitOutcomeUnknown("fsync failed"))
        assert isinstance(await bench.ended, CommitOutcomeUnknown)


async def test_stopping_closes_the_partition_once_and_answers_stopped_afterwards(tmp_path: Path) -> None:
    async with hosted(tmp_path) as bench:
        endpoint = await bench.host.endpoint()
        assert socket_exists(endpoint)
        await asyncio.gather(bench.host.stop(), bench.host.stop())
        assert bench.partitions[0].stopped
        with pytest.raises(PartitionStopped):
            await bench.host.endpoint()
        assert not socket_exists(endpoint)
        assert not bench.ended.done()


async def test_stopping_while_it_can_not_open_yet_works(tmp_path: Path) -> None:
    async with hosted(tmp_path, fails=[DataMissing("gone")] * 100_000) as bench:
        with pytest.raises(DataMissing):
            await bench.host.endpoint()
        await bench.host.stop()
    assert bench.partitions == []


async def test_moves_that_have_not_ended_are_told_with_each_announcement(tmp_path: Path) -> None:
    async with hosted(tmp_path) as bench:
        told = bench.coordinator.told
        await told.get()
        bench.partitions[0].moves = {"m1": ("frozen", 7)}
        bench.coordinator.up = False
        while await told.get() != ("unanswered",):
            pass
        bench.coordinator.up = True
        while await told.get() != ("settle_moves", 0, {"m1": ("frozen", 7)}):
            pass
        assert bench.coordinator.log[-2:] == ["announce", "settle_moves"]


async def test_moves_that_have_not_ended_are_told_with_each_report(tmp_path: Path) -> None:
    """A step that never arrived is made up for without a restart of anybody."""
    async with hosted(tmp_path) as bench:
        told = bench.coordinator.told
        await told.get()
        bench.partitions[0].moves = {"m1": ("incoming", 7)}
        for _ in range(2):
            while await told.get() != ("settle_moves", 0, {"m1": ("incoming", 7)}):
                pass
            assert bench.coordinator.log[-2:] == ["report", "settle_moves"]


BROKEN = [
    sqlite3.OperationalError("database or disk is full"),
    DataMissing("the coordinator's file is gone"),
    ZeroDivisionError("no"),
]


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
async def test_a_coordinator_that_fails_stops_no_partition_and_is_told_again_once_it_works(
    tmp_path: Path, error: Exception
) -> None:
    async with hosted(tmp_path) as bench:
        told = bench.coordinator.told
        assert (await told.get())[0] == "announce"
        bench.coordinator.error = error
        bench.coordinator.up = False
        for _ in range(3):
            while await told.get() != ("unanswered",):
                pass
        bench.coordinator.up = True
        while (await told.get())[0] != "announce":
            pass
        assert not bench.ended.done()


@pytest.mark.parametrize("error", BROKEN, ids=lambda error: type(error).__name__)
async def test_a_partition_with_files_opens_although_the_coordinator_fails(tmp_path: Path, error: Exception) -> None:
    with_files(tmp_path)
    coordinator = FakeCoordinator()
    coordinator.up, coordinator.error = False, error
    async with hosted(tmp_path, coordinator) as bench:
        await bench.host.endpoint()
        assert bench.orders == [OpenOrder(False, [], 0)]


async def test_a_partition_that_the_coordinator_does_not_know_ends_its_process(tmp_path: Path) -> None:
    async with hosted(tmp_path) as bench:
        await bench.coordinator.told.get()
        bench.coordinator.error = WrongPartition("there is no partition 0")
        bench.coordinator.up = False
        assert isinstance(await bench.ended, WrongPartition)
