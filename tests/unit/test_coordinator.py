"""The coordinator decides who is fenced, never makes a map twice, and keeps its file to itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.channel import Endpoint
from actors.cluster_file import ClusterFile
from actors.coordinator import Coordinator, CoordinatorConfig, Verdict
from actors.coordinator_store import ClassDefinition
from actors.errors import DataMissing, PartitionBusy, WrongPartition
from actors.settings import Settings

SETTINGS = Settings(lock_wait_ms=0)
SHIPPED = ClassDefinition("Cart", "__main__", "Cart", b"pickle")


def config(data_dir: Path) -> CoordinatorConfig:
    return CoordinatorConfig(str(data_dir), "c1", "run1", SETTINGS)


def endpoint(epoch: int) -> Endpoint:
    return Endpoint(0, epoch, "n1", "/tmp/socket", None, None, "partition-0000")


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    ClusterFile("c1", 2).create(tmp_path)
    return tmp_path


@pytest.fixture
async def coordinator(data_dir: Path) -> AsyncIterator[Coordinator]:
    opened = await Coordinator.open(config(data_dir))
    yield opened
    opened.close()


async def test_the_first_opening_creates_the_file_and_says_so_in_the_cluster_file(data_dir: Path) -> None:
    coordinator = await Coordinator.open(config(data_dir))
    assert coordinator.describe().partitions == (0, 1)
    assert ClusterFile.read(data_dir) == ClusterFile("c1", 2, ready=True)
    coordinator.close()


async def test_a_creation_that_was_cut_short_after_the_file_is_completed(data_dir: Path) -> None:
    first = await Coordinator.open(config(data_dir))
    secret = first.describe().secret
    first.close()
    (data_dir / "cluster.json").unlink()
    (data_dir / "coordinator").rename(data_dir / "aside")
    ClusterFile("c1", 2).create(data_dir)
    (data_dir / "aside").rename(data_dir / "coordinator")

    again = await Coordinator.open(config(data_dir))
    assert again.describe().secret == secret
    assert ClusterFile.read(data_dir) == ClusterFile("c1", 2, ready=True)
    again.close()


async def test_a_file_that_is_lost_later_is_missing_and_never_made_again(data_dir: Path) -> None:
    (await Coordinator.open(config(data_dir))).close()
    for file in (data_dir / "coordinator").iterdir():
        file.unlink()
    with pytest.raises(DataMissing):
        await Coordinator.open(config(data_dir))


async def test_a_directory_that_lost_its_cluster_file_is_missing_data(tmp_path: Path) -> None:
    with pytest.raises(DataMissing):
        await Coordinator.open(config(tmp_path))


async def test_another_cluster_in_the_directory_is_refused(tmp_path: Path) -> None:
    ClusterFile("other", 2).create(tmp_path)
    with pytest.raises(WrongPartition):
        await Coordinator.open(config(tmp_path))


async def test_a_second_coordinator_on_the_same_files_is_refused(coordinator: Coordinator, data_dir: Path) -> None:
    with pytest.raises(PartitionBusy):
        await Coordinator.open(config(data_dir))


async def test_an_opening_that_fails_gives_the_lock_up(data_dir: Path) -> None:
    (await Coordinator.open(config(data_dir))).close()
    path = data_dir / "coordinator" / "coordinator.sqlite"
    path.rename(data_dir / "aside")
    with pytest.raises(DataMissing):
        await Coordinator.open(config(data_dir))
    (data_dir / "aside").rename(path)
    (await Coordinator.open(config(data_dir))).close()


async def test_a_partition_is_uninitialised_until_it_says_that_its_files_exist(coordinator: Coordinator) -> None:
    assert not coordinator.opening_facts(0).initialised
    coordinator.initialised(0)
    assert coordinator.opening_facts(0).initialised
    assert not coordinator.opening_facts(1).initialised


async def test_the_last_reported_commit_is_what_the_partition_must_have_at_its_next_opening(
    coordinator: Coordinator,
) -> None:
    assert coordinator.announce(0, 1, endpoint(1), 10, [(0, 2047)]) is Verdict.ACCEPTED
    assert coordinator.report(0, 1, 25) is Verdict.ACCEPTED
    assert coordinator.opening_facts(0).min_commit_seq == 25


async def test_a_lower_epoch_than_the_known_one_is_told_to_fence_itself(coordinator: Coordinator) -> None:
    coordinator.announce(0, 5, endpoint(5), 10, [(0, 2047)])
    assert coordinator.announce(0, 4, endpoint(4), 99, [(0, 2047)]) is Verdict.FENCED
    assert coordinator.report(0, 4, 99) is Verdict.FENCED
    assert coordinator.status().fences == coordinator.snapshot().status["fences"] == 2
    status = coordinator.status()
    assert status.endpoints[0].epoch == 5
    assert (status.partitions[0].epoch, status.partitions[0].commit_seq) == (5, 10)


async def test_an_announcement_may_come_twice(coordinator: Coordinator) -> None:
    for _ in range(2):
        assert coordinator.announce(0, 5, endpoint(5), 10, [(0, 2047)]) is Verdict.ACCEPTED


async def test_a_file_older_than_what_was_reported_is_not_accepted(coordinator: Coordinator) -> None:
    coordinator.announce(0, 1, endpoint(1), 100, [(0, 2047)])
    assert coordinator.announce(0, 2, endpoint(2), 99, [(0, 2047)]) is Verdict.ROLLED_BACK
    assert coordinator.status().partitions[0].epoch == 1


async def test_a_class_is_given_to_whoever_asks(coordinator: Coordinator) -> None:
    coordinator.register_class(SHIPPED)
    assert await coordinator.class_definition("Cart") == SHIPPED


async def test_a_class_whose_registration_is_on_its_way_is_waited_for(coordinator: Coordinator) -> None:
    asked = asyncio.ensure_future(coordinator.class_definition("Cart", wait_ms=60_000))
    await asyncio.sleep(0)
    assert not asked.done()
    coordinator.register_class(SHIPPED)
    assert await asked == SHIPPED


async def test_a_class_that_nobody_registers_is_unknown(coordinator: Coordinator) -> None:
    assert await coordinator.class_definition("Cart", wait_ms=1) is None


async def test_only_commits_that_a_power_failure_leaves_are_held_against_the_engines_file(data_dir: Path) -> None:
    known = []
    for durability, reached in (("normal", 5), ("full", 3), ("normal", 9), ("full", 2)):
        settings = Settings(lock_wait_ms=0, durability=durability)  # type: ignore[arg-type]
        opened = await Coordinator.open(CoordinatorConfig(str(data_dir), "c1", "run1", settings))
        known.append(opened.engine_commit_seq)
        opened.engine_reached(reached)
        opened.close()
    assert known == [0, 0, 0, 3]
