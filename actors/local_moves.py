"""The slot map of a `LocalRuntime`, and its moves: what the coordinator is on Ray."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from actors.address import SLOTS
from actors.coordinator_store import SECRET_BYTES, CoordinatorStore
from actors.errors import PartitionStopped
from actors.mover import MovePort, Mover
from actors.partition import Partition

__all__ = ["LocalMoves"]


class LocalMoves:
    """Which partition has each slot. The map is on record from the first move on; before it is a formula."""

    def __init__(
        self, cluster_id: str, partitions: int, find: Callable[[int], Partition | None], directory: Path | None
    ) -> None:
        """`find` gives a partition that runs; `directory` is the data directory, None when nothing is kept."""
        self._cluster_id = cluster_id
        self._partitions = partitions
        self._find = find
        self._path = None if directory is None else directory / "coordinator" / "coordinator.sqlite"
        self._store: CoordinatorStore | None = None
        self._mover: Mover | None = None
        self._owners = [slot * partitions // SLOTS for slot in range(SLOTS)]
        self.version = 1
        if self._path is not None and self._path.exists():
            self._open(CoordinatorStore.open(self._path, cluster_id))

    def _open(self, store: CoordinatorStore) -> None:
        self._store = store
        self._read_map()

    def _read_map(self) -> None:
        assert self._store is not None
        slot_map = self._store.slot_map()
        self.version, self._owners = slot_map.version, slot_map.owners()

    def partition_of(self, slot: int) -> int:
        """The owner of a slot."""
        return self._owners[slot]

    @property
    def partitions(self) -> list[int]:
        """Every partition there is, those without slots too."""
        if self._store is None:
            return list(range(self._partitions))
        return [record.partition for record in self._store.partitions()]

    def slots_of(self, partition: int) -> list[int]:
        """The slots that the map gives to a partition."""
        return [slot for slot, owner in enumerate(self._owners) if owner == partition]

    def add(self, partition: int) -> None:
        """Make room for one more partition."""
        self._on_record().add_partition(partition)

    def remove(self, partition: int) -> None:
        """Forget a partition that owns nothing. Raises `MoveRefused`."""
        self._on_record().remove_partition(partition)

    def mover(self) -> Mover:
        """Carries out moves between the partitions that run."""
        if self._mover is None:
            self._mover = self.restart()
        return self._mover

    def restart(self, port: Callable[[MovePort], MovePort] = lambda port: port) -> Mover:
        """A mover that knows nothing but the record, as that of a coordinator that was killed; the one before it does
        nothing more. `port` may put something between it and the partitions."""
        if self._mover is not None:
            self._mover.stop()
        record = self._on_record()
        self._read_map()
        self._mover = Mover(
            record.moves,
            port(_LocalPort(self._find)),
            owners=lambda: self._owners,
            new_id=lambda: uuid.uuid4().hex,
            map_changed=self._read_map,
        )
        return self._mover

    def close(self) -> None:
        """Close the file. What was kept in memory is gone."""
        if self._mover is not None:
            self._mover.stop()
            self._mover = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def _on_record(self) -> CoordinatorStore:
        if self._store is None:
            if self._path is None:
                self._open(CoordinatorStore.ephemeral(self._cluster_id, self._owners))
            else:
                secret = os.urandom(SECRET_BYTES)
                CoordinatorStore.create(self._path, self._cluster_id, self._partitions, secret, self._owners)
                self._open(CoordinatorStore.open(self._path, self._cluster_id))
        assert self._store is not None
        return self._store


class _LocalPort:
    """Partitions of this process. See `MovePort`."""

    def __init__(self, find: Callable[[int], Partition | None]) -> None:
        self._find = find

    def _partition(self, number: int) -> Partition:
        partition = self._find(number)
        if partition is None or partition.stopped:
            raise PartitionStopped(f"partition {number} is not running")
        return partition

    async def check(self, partition: int) -> None:
        self._partition(partition)

    async def send_slots(
        self, source: int, move_id: str, slots: Sequence[int], target: int, patience_ms: int, cut_short: bool
    ) -> int:
        departures = self._partition(source).departures
        return await departures.send(move_id, slots, target, patience_ms=patience_ms, cut_short=cut_short)

    async def call_off(self, source: int, move_id: str) -> None:
        await self._partition(source).departures.call_off(move_id)

    async def complete(self, source: int, move_id: str) -> None:
        await self._partition(source).departures.complete(move_id)

    async def own(self, target: int, move_id: str, version: int) -> None:
        await self._partition(target).arrivals.own(move_id, version)

    async def discard(self, target: int, move_id: str) -> None:
        await self._partition(target).arrivals.discard(move_id)
