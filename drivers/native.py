"""The native driver: files, clock, commits and wake-ups of partitions in this very process, without Ray."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Protocol

from drivers.checkpoint import Checkpointer
from drivers.clock import Clock, SystemClock
from drivers.errors import DataMissing
from drivers.executor import Executor, InlineExecutor, ThreadExecutor
from drivers.files import FileLock, check_filesystem, make_directory, store_files
from drivers.memory_store import MemoryData, MemoryStore
from drivers.sqlite_store import SqliteStore
from drivers.store import Store
from drivers.waker import ProcessWaker, Waker

__all__ = ["Driver", "NativeDriver", "OpenedStore", "has_partition_file"]


def has_partition_file(data_dir: str, partition: int) -> bool:
    """Whether the partition has a database in this data directory."""
    return store_files(data_dir, partition).database.exists()


class OpenedStore(Protocol):
    """A store and what must be given back with it."""

    store: Store

    def close(self) -> None: ...


class Driver(Protocol):
    """What hosts a partition: where its rows are, what time it is, and where blocking work runs."""

    clock: Clock
    poll_ms: int | None

    def open_store(
        self, data_dir: str, cluster_id: str, partition: int, *, create: bool, min_commit_seq: int
    ) -> OpenedStore:
        """Open the partition's data for this owner alone, in protocol order: lock, checks, epoch.

        Raises `PartitionBusy`, `DataMissing`, `DataRolledBack`, `WrongPartition`, `SchemaTooNew`.
        """
        ...

    def executor(self, partition: int) -> Executor: ...

    def checkpointer(self, store: Store) -> Checkpointer | None: ...

    def waker(self) -> Waker | None:
        """What wakes the partition more precisely than the clock does, for the running loop; None where nothing can."""
        ...


class _LockedStore:
    def __init__(self, store: Store, lock: FileLock | None) -> None:
        self.store = store
        self._lock = lock

    def close(self) -> None:
        self.store.close()
        if self._lock is not None:
            self._lock.release()


class NativeDriver:
    """Partitions in this process. With `inline=True` and a `VirtualClock` everything happens in one order.

    `memory` keeps the data of partitions in dictionaries instead of files; it survives closing, not the process.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        inline: bool = False,
        durability: str = "full",
        poll_ms: int | None = 1_000,
        lock_wait_ms: int = 10_000,
        busy_timeout_ms: int = 30_000,
        checkpoint_interval_ms: int = 1_000,
        memory: dict[int, MemoryData] | None = None,
        writer_factory: type[sqlite3.Connection] = sqlite3.Connection,
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.poll_ms = poll_ms
        self._inline = inline
        self._durability = durability
        self._lock_wait_ms = lock_wait_ms
        self._busy_timeout_ms = busy_timeout_ms
        self._checkpoint_interval_ms = checkpoint_interval_ms
        self._memory = memory
        self._writer_factory = writer_factory

    def open_store(
        self, data_dir: str, cluster_id: str, partition: int, *, create: bool, min_commit_seq: int
    ) -> OpenedStore:
        if self._memory is not None:
            data = self._memory.setdefault(partition, MemoryData(cluster_id, partition))
            return _LockedStore(MemoryStore(data), None)
        files = store_files(data_dir, partition)
        directory = files.directory
        check_filesystem(directory)
        if create:
            make_directory(directory)
        elif not directory.exists():  # nothing is made here: the disk that belongs in this place may be away
            raise DataMissing(f"partition {partition}: {directory} does not exist. Mount its disk or bring it back.")
        lock = FileLock(files.lock)
        lock.acquire(self._lock_wait_ms)
        try:
            path = files.database
            if create and not path.exists():
                SqliteStore.create(path, cluster_id, partition)
            store = self._open_file(path, cluster_id, partition, min_commit_seq)
        except BaseException:
            lock.release()
            raise
        return _LockedStore(store, lock)

    def _open_file(self, path: Path, cluster_id: str, partition: int, min_commit_seq: int) -> SqliteStore:
        return SqliteStore.open(
            path,
            cluster_id=cluster_id,
            partition_id=partition,
            min_commit_seq=min_commit_seq,
            durability=self._durability,
            busy_timeout_ms=self._busy_timeout_ms,
            writer_factory=self._writer_factory,
        )

    def executor(self, partition: int) -> Executor:
        if self._inline:
            return InlineExecutor()
        return ThreadExecutor(f"mainspring-commit-{partition}", asyncio.get_running_loop())

    def checkpointer(self, store: Store) -> Checkpointer | None:
        if self._inline or not isinstance(store, SqliteStore):
            return None
        return Checkpointer(store.path, self._checkpoint_interval_ms)

    def waker(self) -> Waker | None:
        return None if self._inline or not isinstance(self.clock, SystemClock) else ProcessWaker()
