"""The coordinator: knows which partition owns each slot, what each partition has had, and the classes."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from actors.address import slot_of
from actors.channel import Endpoint
from actors.cluster_file import ClusterFile
from actors.coordinator_store import (
    SECRET_BYTES,
    ClassDefinition,
    CoordinatorStore,
    PartitionRecord,
    SlotMap,
)
from actors.demands import Demands
from actors.disks import DISK_LABEL, DisksPresent
from actors.errors import DataMissing, WrongPartition
from actors.logs import log_event
from actors.metrics import Snapshot
from actors.partition_leases import PartitionLeases
from actors.process_id import ProcessId
from actors.ray_calls import RayCalls, partition_actor, ray_namespace
from actors.settings import Settings
from actors.slot_moves import SlotMoves
from actors.slot_table import as_ranges
from drivers.files import FileLock
from timers.lease_sweep import HolderBacklog
from timers.leases import Holder

__all__ = [
    "Coordinator",
    "CoordinatorConfig",
    "CoordinatorStatus",
    "OpeningFacts",
    "RuntimeDescription",
    "Verdict",
]


#: How long a partition may take to say what one of its objects has sent.
_BACKLOG_TIMEOUT_S = 3.0


@dataclass(frozen=True)
class CoordinatorConfig:
    """What the coordinator's process is started with. The same at each restart; `run_id` names one run."""

    data_dir: str
    cluster_id: str
    run_id: str
    settings: Settings
    runtime: str = "default"
    demands: Demands = field(default_factory=Demands)


@dataclass(frozen=True)
class RuntimeDescription:
    """All that a process needs to find and use a runtime."""

    data_dir: str
    cluster_id: str
    run_id: str
    secret: bytes
    settings: Settings
    slot_map: SlotMap
    partitions: tuple[int, ...]
    #: label of the disk with a partition's files; partitions without one are left out
    disks: dict[int, str] = field(default_factory=dict)
    demands: Demands = field(default_factory=Demands)


@dataclass(frozen=True)
class OpeningFacts:
    """What a partition needs to know before it opens its files."""

    initialised: bool
    min_commit_seq: int
    slot_map: SlotMap


class Verdict(Enum):
    """The answer to a partition's announcement or report."""

    ACCEPTED = "accepted"
    FENCED = "fenced"  # a higher epoch of this partition is known: stop at once
    ROLLED_BACK = "rolled back"  # its file is older than what it has reported before


@dataclass(frozen=True)
class CoordinatorStatus:
    """What the coordinator knows, for people."""

    cluster_id: str
    map_version: int
    partitions: tuple[PartitionRecord, ...]
    endpoints: dict[int, Endpoint]
    #: how long the process of each partition has said nothing, in seconds, and how many were ended for that
    silent_s: dict[int, float] = field(default_factory=dict)
    silences: int = 0
    #: of the engine; empty while it is not open
    engine: dict[str, Any] = field(default_factory=dict)
    #: owners that were told to stop, since this process began
    fences: int = 0


class Coordinator:
    """Belongs to one event loop. Everything it acknowledges is durable in its own file.

    It keeps the slot map and carries moves out (`moves`), and has processes that went silent ended (`leases`).
    """

    def __init__(self, config: CoordinatorConfig, store: CoordinatorStore, lock: FileLock) -> None:
        self._config = config
        self._store = store
        self._lock = lock
        self._endpoints: dict[int, Endpoint] = {}
        self._calls = RayCalls(ray_namespace(config.runtime))
        self.moves = SlotMoves(store, self._calls, config.settings)
        self._fences = 0
        self.leases = PartitionLeases(config.settings.partition_lease_ms, self._end_partition)
        self._wanted: dict[str, asyncio.Event] = {}
        self._disks = DisksPresent()

    @classmethod
    async def open(cls, config: CoordinatorConfig, *, random_bytes: Callable[[int], bytes] = os.urandom) -> Coordinator:
        """Take the lock and open the file; create it only while `cluster.json` says that nothing was completed yet.

        Raises `PartitionBusy` (after `lock_wait_ms`), `DataMissing`, `WrongPartition` and `SchemaTooNew`.
        """
        data_dir = Path(config.data_dir)
        cluster = ClusterFile.read(data_dir)
        if cluster is None:
            raise DataMissing(f"{data_dir} holds no cluster: it was there when the runtime was started.")
        if cluster.cluster_id != config.cluster_id:
            raise WrongPartition(f"{data_dir} holds cluster {cluster.cluster_id}, not {config.cluster_id}.")
        lock = FileLock(data_dir / "coordinator" / "coordinator.lock")
        await asyncio.to_thread(lock.acquire, config.settings.lock_wait_ms)
        try:
            path = data_dir / "coordinator" / "coordinator.sqlite"
            if not cluster.ready and not path.exists():
                CoordinatorStore.create(path, cluster.cluster_id, cluster.partitions, random_bytes(SECRET_BYTES))
            store = CoordinatorStore.open(path, config.cluster_id)
            cluster.mark_ready(data_dir)
        except BaseException:
            lock.release()
            raise
        coordinator = cls(config, store, lock)
        coordinator.moves.start()
        coordinator.leases.expect(record.partition for record in store.partitions())
        coordinator.leases.start()
        return coordinator

    def close(self) -> None:
        """Close the file and give up the lock; idempotent."""
        self.moves.stop()
        self.leases.stop()
        self._store.close()
        self._lock.release()

    # --- for every process ------------------------------------------------------------------------

    def describe(self) -> RuntimeDescription:
        """What a process needs to find the partitions."""
        return RuntimeDescription(
            data_dir=self._config.data_dir,
            cluster_id=self._config.cluster_id,
            run_id=self._config.run_id,
            secret=self._store.secret,
            settings=self._config.settings,
            slot_map=self._store.slot_map(),
            partitions=tuple(record.partition for record in self._store.partitions()),
            disks={record.partition: record.disk for record in self._store.partitions() if record.disk},
            demands=self._demands(),
        )

    def _demands(self) -> Demands:
        deployed = self._store.deployed_environment(self._config.run_id)
        return self._config.demands if deployed is None else self._config.demands.with_environment(deployed)

    def deploy_environment(self, runtime_env: Mapping[str, Any]) -> None:
        """Partitions that are started from now on, in this run of the runtime, get this environment."""
        self._store.deploy_environment(self._config.run_id, runtime_env)

    def assign_disks(self, own: str, disks: Sequence[str]) -> dict[int, str]:
        """Give each partition without a disk one of these: those with data `own`, where they were started so far, new
        ones the disk with the fewest partitions. All partitions with their disks."""
        records = self._store.partitions()
        load = Counter(dict.fromkeys(disks, 0))
        load.update(record.disk for record in records if record.disk in load)
        for record in records:
            if not record.disk:
                disk = own if record.initialised else min(disks, key=lambda each: (load[each], disks.index(each)))
                load[disk] += 1
                self._store.assign_disk(record.partition, disk)
        return {record.partition: record.disk for record in self._store.partitions()}

    async def slot_map(self, newer_than: int = 0, wait_ms: int = 0) -> SlotMap:
        """Which partition owns each slot. Waits up to `wait_ms` for a map that is newer than the given one."""
        if wait_ms:
            await self.moves.wait_for_map(newer_than, wait_ms)
        return self._store.slot_map()

    def add_partition(self, partition: int) -> None:
        """Make room for a partition, which has no slots at first."""
        self._store.add_partition(partition)
        self.leases.expect((partition,))
        self._record_size()

    def remove_partition(self, partition: int) -> None:
        """Forget a partition that has been emptied and stopped. Raises `MoveRefused` while it owns slots."""
        self._store.remove_partition(partition)
        self._endpoints.pop(partition, None)
        self.leases.forget(partition)
        self._record_size()

    def _record_size(self) -> None:
        data_dir = Path(self._config.data_dir)
        cluster = ClusterFile.read(data_dir)
        if cluster is not None:
            cluster.resize(data_dir, len(self._store.partitions()))

    @property
    def engine_commit_seq(self) -> int:
        """A commit that the engine's file is known to have had. 0 where a power failure may take commits back."""
        return self._store.engine_commit_seq if self._config.settings.durability == "full" else 0

    def engine_reached(self, commit_seq: int) -> None:
        """The engine's file has this commit. Not noted with weaker durability: a power failure may take it back,
        which is no sign of a wrong file, also not when the runtime is started with full durability later."""
        if self._config.settings.durability == "full":
            self._store.raise_engine(commit_seq)

    def status(self) -> CoordinatorStatus:
        """Everything known of the partitions."""
        return CoordinatorStatus(
            self._store.cluster_id,
            self._store.slot_map().version,
            tuple(self._store.partitions()),
            dict(self._endpoints),
            self.leases.silent_s(),
            self.leases.ended,
            fences=self._fences,
        )

    def snapshot(self) -> Snapshot:
        """What the coordinator counts, for metrics."""
        progress = self.moves.progress()
        silent_s = self.leases.silent_s().values()
        numbers = {
            "slots_moved": progress["moved"],
            "moves_put_off": progress["put_off"],
            "move_bytes": progress["bytes_sent"],
            "move_errors": progress["errors"],
            "moves": len(progress["moves"]),
            "fences": self._fences,
            "silences": self.leases.ended,
            "map_version": self._store.slot_map().version,
            "silent_ms": round(max(silent_s, default=0) * 1_000),
        }
        return Snapshot(numbers, {})

    async def absences(self) -> dict[int, str]:
        """The partitions that Ray can't place, since no node of the cluster has the disk with their files; and why, for
        people."""
        present = await self._disks.get()
        if present is None:
            return {}
        return {
            record.partition: f"partition {record.partition} is not here: its files are on the disk labelled "
            f"{record.disk} (last served by node {record.node or 'unknown'}, in {self._config.data_dir}), and no "
            f"living node of this Ray has that disk. It comes back by itself when the node does: start it with "
            f'--labels "{DISK_LABEL}={record.disk}"'
            for record in self._store.partitions()
            if record.disk and record.disk not in present
        }

    def register_class(self, definition: ClassDefinition) -> None:
        """Record where a class comes from. Raises `DuplicateTypeName`."""
        self._store.register_class(definition, self._config.run_id)
        waiting = self._wanted.pop(definition.type_name, None)
        if waiting is not None:
            waiting.set()

    async def class_definition(self, type_name: str, wait_ms: int = 0) -> ClassDefinition | None:
        """Where a class comes from. Waits up to `wait_ms` for a registration that is still on its way."""
        found = self._store.class_definition(type_name)
        if found is None and wait_ms > 0:
            arrived = self._wanted.setdefault(type_name, asyncio.Event())
            try:
                await asyncio.wait_for(arrived.wait(), wait_ms / 1_000)
            except asyncio.TimeoutError:
                return None
            found = self._store.class_definition(type_name)
        return found

    # --- for partitions ---------------------------------------------------------------------------

    def opening_facts(self, partition: int) -> OpeningFacts:
        """What the partition must know before it opens. Raises `WrongPartition` for one that does not exist."""
        record = self._store.partition(partition)
        return OpeningFacts(record.initialised, record.commit_seq, self._store.slot_map())

    def initialised(self, partition: int) -> None:
        """The partition's files exist and are durable: it never starts empty again."""
        self._store.mark_initialised(partition)

    def announce(
        self, partition: int, epoch: int, endpoint: Endpoint, commit_seq: int, slots: Sequence[tuple[int, int]]
    ) -> Verdict:
        """A partition serves: in which epoch, where, from which commit on, and which slots it has (inclusive)."""
        record = self._store.partition(partition)
        verdict = self._judge(record, epoch)
        if verdict is not Verdict.ACCEPTED:
            return verdict
        if commit_seq < record.commit_seq:
            log_event(
                logging.CRITICAL,
                "partition_rolled_back",
                f"Partition {partition} has commit {commit_seq}, it has reported {record.commit_seq} before.",
                partition=partition,
                commit_seq=commit_seq,
                reported=record.commit_seq,
            )
            return Verdict.ROLLED_BACK
        self._store.raise_partition(partition, epoch, commit_seq)
        self._store.place_partition(partition, epoch, endpoint.node, self._config.data_dir)
        self._endpoints[partition] = endpoint
        owners = self._store.slot_map().owners()
        expected = as_ranges(slot for slot, owner in enumerate(owners) if owner == partition)
        moving = any(partition in (move.source, move.target) for move in self._store.moves.all())
        if list(slots) != expected and not moving:
            log_event(
                logging.ERROR,
                "slots_differ",
                f"Partition {partition} has other slots than the map says.",
                partition=partition,
                has=list(slots),
                expected=expected,
            )
        return verdict

    def renew(self, partition: int, process: ProcessId) -> None:
        """The partition's process runs. Raises `WrongPartition`."""
        self._store.partition(partition)
        self.leases.renew(partition, process)

    async def _end_partition(self, partition: int, process: ProcessId | None) -> None:
        # A stopped process obeys nothing but this signal; Ray's own way asks the process itself.
        if process is None or not process.kill():
            await self._calls.kill_async(partition_actor(partition))

    async def backlog(self, holder: Holder) -> HolderBacklog:
        """What an object has sent and has not arrived: the partition that owns it is asked. See `HolderBacklogs`."""
        owner = self._store.slot_map().owners()[slot_of(holder.type_name, holder.object_key)]
        backlog: HolderBacklog = await self._calls.call_async(
            partition_actor(owner), "holder_backlog", holder, timeout_s=_BACKLOG_TIMEOUT_S
        )
        return backlog

    def settle_moves(self, partition: int, moves: dict[str, tuple[str, int]]) -> None:
        """A partition that has just opened found slots of these moves in its file. See `SlotMoves.settle`."""
        self.moves.settle(partition, moves)

    def report(self, partition: int, epoch: int, commit_seq: int) -> Verdict:
        """A partition lives, and this is its last durable commit."""
        verdict = self._judge(self._store.partition(partition), epoch)
        if verdict is Verdict.ACCEPTED:
            self._store.raise_partition(partition, epoch, commit_seq)
        return verdict

    def _judge(self, record: PartitionRecord, epoch: int) -> Verdict:
        if epoch >= record.epoch:
            return Verdict.ACCEPTED
        self._fences += 1
        log_event(
            logging.WARNING,
            "partition_fenced",
            f"Epoch {epoch} of partition {record.partition} was told to stop: epoch {record.epoch} is known.",
            partition=record.partition,
            epoch=epoch,
            known=record.epoch,
        )
        return Verdict.FENCED
