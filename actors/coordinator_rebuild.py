"""Makes lost files of the coordinator again from what the partitions' files say; only on an operator's word.

The coordinator itself never does this: a file that is missing may be on a disk that is not mounted, and two maps would
be two truths. Every partition must be at hand and at rest.

Leases that were held are free then, under epochs above all that were ever given. What objects have charged to quotas
is told again by the objects.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from actors.address import SLOTS
from actors.cluster_file import ClusterFile
from actors.coordinator_store import SECRET_BYTES, ClassDefinition, CoordinatorStore
from actors.errors import DataMissing, WrongPartition
from actors.slot_table import FROZEN, OWNED, as_ranges
from drivers.files import COORDINATOR, FileLock, store_files
from drivers.inspection import PartitionFacts, partition_facts
from drivers.sqlite_store import SqliteStore

__all__ = ["Rebuilt", "rebuild_coordinator"]


@dataclass(frozen=True)
class Rebuilt:
    """What was found: the partitions, and slots whose move had not ended (they stay where they came from); and what was
    made: the slot map, and the file with leases and quotas."""

    partitions: tuple[int, ...]
    map_version: int
    undecided: tuple[tuple[int, int], ...]
    made_map: bool
    made_engine: bool


def rebuild_coordinator(data_dir: Path, now_ms: int) -> Rebuilt:
    """Write `coordinator/coordinator.sqlite` and `engine.sqlite` anew, whichever is missing. `now_ms`: the time of day.

    Raises `DataMissing` when there is no cluster here or not every slot is in some partition's file, `WrongPartition`
    when no file of the coordinator is missing or a partition belongs to another cluster, and `PartitionBusy` while a
    process has any of the files. Nothing is written then.
    """
    cluster = ClusterFile.read(data_dir)
    if cluster is None:
        raise DataMissing(f"{data_dir} holds no cluster: give the directory that the runtime was started with")
    path = data_dir / "coordinator" / "coordinator.sqlite"
    engine = store_files(data_dir, COORDINATOR).database
    make_map, make_engine = not path.exists(), cluster.engine and not engine.exists()
    if not make_map and not make_engine:
        raise WrongPartition(f"{path} is there. Move it away first if it, or {engine.name}, can't be used.")
    with ExitStack() as held:
        for lock_file in sorted(data_dir.rglob("*.lock")):
            lock = FileLock(lock_file)
            lock.acquire(0)
            held.callback(lock.release)
        facts = partition_facts(data_dir)
        for each in facts:
            if each.cluster_id != cluster.cluster_id:
                raise WrongPartition(f"partition {each.partition} belongs to cluster {each.cluster_id}: not this one's")
        owners, undecided = _owners(facts)
        version = 1 + max((version for each in facts for _, _, version in each.slots), default=0)
        if make_engine:
            # Nobody knows how many epochs were given. There were fewer than milliseconds since 1970.
            above = max(now_ms, max((each.highest_lease_epoch for each in facts), default=0))
            if not make_map:
                _forget_engine(path, cluster.cluster_id)  # before there is one: this is not asked for twice
            _remove_companions(engine)
            SqliteStore.create(engine, cluster.cluster_id, COORDINATOR, generation=above)
        if make_map:
            _remove_companions(path)
            _write(path, cluster.cluster_id, facts, owners, version)
        partitions = tuple(each.partition for each in facts)
        return Rebuilt(partitions, version, tuple(as_ranges(undecided)), make_map, make_engine)


def _remove_companions(database: Path) -> None:
    """What was left of a file that is gone would be read into the one that takes its place."""
    for suffix in ("-wal", "-shm", "-journal"):
        database.with_name(database.name + suffix).unlink(missing_ok=True)


def _forget_engine(path: Path, cluster_id: str) -> None:
    """How far the lost engine had come is no measure of the new one, which would be taken for an older copy."""
    store = CoordinatorStore.open(path, cluster_id)
    try:
        store.forget_engine()
    finally:
        store.close()


def _owners(facts: list[PartitionFacts]) -> tuple[list[int], list[int]]:
    """The owner of each slot, and the slots that nobody owns because their move had not been decided."""
    best: dict[int, tuple[bool, int, int]] = {}
    for each in facts:
        for slot, state, version in each.slots:
            if state in (OWNED, FROZEN):
                best[slot] = max(best.get(slot, (False, -1, -1)), (state == OWNED, version, each.partition))
    missing = [slot for slot in range(SLOTS) if slot not in best]
    if missing:
        raise DataMissing(
            f"slots {as_ranges(missing)} are in no partition's file: bring the missing partitions' files back first"
        )
    return [best[slot][2] for slot in range(SLOTS)], [slot for slot in range(SLOTS) if not best[slot][0]]


def _write(path: Path, cluster_id: str, facts: list[PartitionFacts], owners: list[int], version: int) -> None:
    numbers = [each.partition for each in facts]
    CoordinatorStore.create(path, cluster_id, numbers, os.urandom(SECRET_BYTES), owners, map_version=version)
    store = CoordinatorStore.open(path, cluster_id)
    try:
        for each in facts:
            store.mark_initialised(each.partition)
            store.raise_partition(each.partition, each.epoch, each.commit_seq)
            for type_name, module, qualname in each.classes:
                # of no run: the next one may move the class
                store.register_class(ClassDefinition(type_name, module, qualname, None), "")
    finally:
        store.close()
