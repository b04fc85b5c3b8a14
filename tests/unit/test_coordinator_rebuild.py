"""Lost files of the coordinator are made again on an operator's word; epochs of leases never go back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.address import SLOTS
from actors.cli import app
from actors.cluster_file import ClusterFile
from actors.coordinator_engine import CoordinatorEngine, EngineConfig
from actors.coordinator_rebuild import rebuild_coordinator
from actors.coordinator_services import LeaseGrant, LeaseRequest
from actors.coordinator_store import SECRET_BYTES, CoordinatorStore
from actors.errors import DataMissing, DataRolledBack, PartitionBusy, WrongPartition
from actors.settings import Settings
from actors.slot_table import owned_ops
from drivers.clock import VirtualClock
from drivers.files import COORDINATOR, FileLock, store_files
from drivers.native import NativeDriver
from drivers.snapshot import snapshot
from timers.lease_sweep import HolderBacklog
from timers.leases import Holder

NOW_MS = 1_900_000_000_000
CLUSTER = "c1"
MAP = Path("coordinator") / "coordinator.sqlite"
ENGINE = Path("coordinator") / "engine.sqlite"


class NothingSent:
    """No holder has anything under way."""

    async def backlog(self, holder: Holder) -> HolderBacklog:
        return HolderBacklog(0, 0)


def driver() -> NativeDriver:
    return NativeDriver(clock=VirtualClock(), inline=True, durability="off", poll_ms=None, lock_wait_ms=0)


async def open_engine(data_dir: Path, min_commit_seq: int = 0) -> CoordinatorEngine:
    config = EngineConfig(str(data_dir), CLUSTER, recorded=True, settings=Settings())
    return await CoordinatorEngine.open(config, driver(), NothingSent(), min_commit_seq=min_commit_seq)


async def grant(engine: CoordinatorEngine, name: str) -> int:
    answer = await engine.acquire_lease(LeaseRequest(name, Holder("Worker", "a"), f"request {name}", 30_000))
    assert isinstance(answer, LeaseGrant)
    return answer.epoch


@pytest.fixture
async def data(tmp_path: Path) -> Path:
    """A cluster of one partition with all slots, and an engine that has granted a lease."""
    ClusterFile(CLUSTER, 1, ready=True).create(tmp_path)
    CoordinatorStore.create(tmp_path / MAP, CLUSTER, 1, bytes(SECRET_BYTES))
    opened = driver().open_store(str(tmp_path), CLUSTER, 0, create=True, min_commit_seq=0)
    opened.store.begin()
    opened.store.write(owned_ops(range(SLOTS), 1))
    opened.store.flush()
    opened.store.commit()
    opened.close()
    engine = await open_engine(tmp_path)
    await grant(engine, "before")
    await engine.stop()
    return tmp_path


async def test_a_lost_engine_is_made_again_with_epochs_above_all_that_were_given(data: Path) -> None:
    engine = await open_engine(data)
    known = [await grant(engine, f"name {number}") for number in range(10)]
    await engine.stop()
    (data / ENGINE).unlink()
    with pytest.raises(DataMissing):
        await open_engine(data)
    rebuilt = rebuild_coordinator(data, NOW_MS)
    assert (rebuilt.made_map, rebuilt.made_engine) == (False, True)
    engine = await open_engine(data)
    assert await grant(engine, "name 0") > max(NOW_MS, *known)
    await engine.stop()


async def test_an_engine_that_is_made_again_is_not_taken_for_an_older_copy(data: Path) -> None:
    store = CoordinatorStore.open(data / MAP, CLUSTER)
    store.raise_engine(1_000)
    store.close()
    (data / ENGINE).unlink()
    rebuild_coordinator(data, NOW_MS)
    store = CoordinatorStore.open(data / MAP, CLUSTER)
    known = store.engine_commit_seq
    store.close()
    engine = await open_engine(data, min_commit_seq=known)
    assert await grant(engine, "after") > NOW_MS
    await engine.stop()


async def test_what_was_left_of_a_lost_file_is_not_read_into_the_new_one(data: Path) -> None:
    engine = await open_engine(data)
    await grant(engine, "in the log")
    shutil.copy(data / f"{ENGINE}-wal", data / "kept")
    await engine.stop()
    (data / ENGINE).unlink()
    (data / "kept").rename(data / f"{ENGINE}-wal")
    rebuild_coordinator(data, NOW_MS)
    engine = await open_engine(data)
    assert await engine.leases("", None, 10) == []
    await engine.stop()


async def test_both_files_are_made_again(data: Path) -> None:
    shutil.rmtree(data / "coordinator")
    rebuilt = rebuild_coordinator(data, NOW_MS)
    assert (rebuilt.partitions, rebuilt.made_map, rebuilt.made_engine) == ((0,), True, True)
    store = CoordinatorStore.open(data / MAP, CLUSTER)
    assert set(store.slot_map().owners()) == {0}
    store.close()
    engine = await open_engine(data)
    assert await grant(engine, "before") > NOW_MS
    await engine.stop()


async def test_an_engine_that_is_there_is_kept_when_the_map_is_made_again(data: Path) -> None:
    (data / MAP).unlink()
    rebuilt = rebuild_coordinator(data, NOW_MS)
    assert (rebuilt.made_map, rebuilt.made_engine) == (True, False)
    engine = await open_engine(data)
    assert [lease.name for lease in await engine.leases("", None, 10)] == ["before"]
    await engine.stop()


async def test_where_nothing_is_missing_nothing_is_made(data: Path) -> None:
    with pytest.raises(WrongPartition, match="Move it away first"):
        rebuild_coordinator(data, NOW_MS)


async def test_where_a_process_has_the_files_nothing_is_made(data: Path) -> None:
    (data / ENGINE).unlink()
    lock = FileLock(store_files(data, COORDINATOR).lock)
    lock.acquire(0)
    try:
        with pytest.raises(PartitionBusy):
            rebuild_coordinator(data, NOW_MS)
    finally:
        lock.release()
    assert not (data / ENGINE).exists()


async def test_an_older_copy_of_the_engine_is_refused(data: Path) -> None:
    shutil.copy(data / ENGINE, data / "older")
    engine = await open_engine(data)
    await grant(engine, "later")
    reached = engine.store.commit_seq
    await engine.stop()
    shutil.copy(data / "older", data / ENGINE)
    with pytest.raises(DataRolledBack, match="older copy"):
        await open_engine(data, min_commit_seq=reached)


def test_what_is_on_record_of_the_engine_only_grows(tmp_path: Path) -> None:
    CoordinatorStore.create(tmp_path / MAP, CLUSTER, 1, bytes(SECRET_BYTES))
    store = CoordinatorStore.open(tmp_path / MAP, CLUSTER)
    assert store.engine_commit_seq == 0
    store.raise_engine(7)
    store.raise_engine(3)
    store.close()
    store = CoordinatorStore.open(tmp_path / MAP, CLUSTER)
    assert store.engine_commit_seq == 7
    store.close()


async def test_a_directory_that_has_lost_its_cluster_file_is_not_copied_as_a_part_of_a_cluster(data: Path) -> None:
    (data / "cluster.json").unlink()
    with pytest.raises(DataMissing, match=r"coordinator's files but no cluster\.json"):
        snapshot(data, data / "copy")
    assert not (data / "copy").exists()


async def test_verify_looks_at_the_coordinators_files_too(data: Path) -> None:
    def verified() -> tuple[int, dict[str, str]]:
        done = CliRunner().invoke(app, ["verify", str(data), "--json"])
        return done.exit_code, {str(row["partition"]): row["integrity"] for row in json.loads(done.output)}

    names = ["0", "coordinator/coordinator.sqlite", "coordinator/engine.sqlite"]
    assert verified() == (0, dict.fromkeys(names, "ok"))
    for path in (ENGINE, Path("partitions") / "0000" / "partition.sqlite"):
        content = (data / path).read_bytes()
        (data / path).write_bytes(content[:-4_096] + bytes([7]) * 4_096)  # the last page becomes nonsense
    exit_code, found = verified()
    assert exit_code == 1
    assert [name for name, verdict in found.items() if verdict == "ok"] == ["coordinator/coordinator.sqlite"]
