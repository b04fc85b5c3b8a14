"""What the coordinator must not forget: the slot map, what each partition has had, the classes, the secret."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from actors.address import SLOTS
from actors.errors import DataMissing, DuplicateTypeName, InvalidOption, MoveRefused, SchemaTooNew, WrongPartition
from actors.move_store import MOVE_TABLES, MoveStore
from drivers.files import fsync_directory

__all__ = [
    "SECRET_BYTES",
    "ClassDefinition",
    "CoordinatorStore",
    "PartitionRecord",
    "SlotMap",
    "SlotRange",
    "balanced_ranges",
]

#: Length of the secret that peers prove to each other: as long as the HMAC's block of output.
SECRET_BYTES = 32
#: Written to PRAGMA user_version; a file with a higher number belongs to a newer Mainspring.
SCHEMA_VERSION = 5
#: Whoever looks at the file with a tool of his own may hold its lock: that is waited for, as partitions do for theirs.
BUSY_TIMEOUT_S = 30.0

coordinator_migrations = Migrations("mainspring_coordinator")

_TABLES_V1 = (
    """
    CREATE TABLE cluster (
        id INTEGER PRIMARY KEY CHECK (id = 1),
        cluster_id TEXT NOT NULL,
        secret BLOB NOT NULL,
        map_version INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE partitions (
        partition INTEGER PRIMARY KEY,
        initialised INTEGER NOT NULL,
        epoch INTEGER NOT NULL,
        commit_seq INTEGER NOT NULL,
        node TEXT NOT NULL,
        directory TEXT NOT NULL
    )
    """,
    """
    CREATE TABLE slots (
        slot INTEGER PRIMARY KEY,
        partition INTEGER NOT NULL REFERENCES partitions (partition),
        version INTEGER NOT NULL
    )
    """,
    """
    CREATE TABLE classes (
        type_name TEXT PRIMARY KEY,
        module TEXT NOT NULL,
        qualname TEXT NOT NULL,
        shipped BLOB,
        run_id TEXT NOT NULL
    ) WITHOUT ROWID
    """,
)

INSERT_CLUSTER = "INSERT INTO cluster (id, cluster_id, secret, map_version) VALUES (1, ?, ?, ?)"
READ_CLUSTER = "SELECT cluster_id, secret, map_version FROM cluster WHERE id = 1"
INSERT_PARTITION = (
    "INSERT INTO partitions (partition, initialised, epoch, commit_seq, node, directory) VALUES (?, 0, 0, 0, '', '')"
)
DELETE_PARTITION = "DELETE FROM partitions WHERE partition = ?"
_PARTITION_COLUMNS = "partition, initialised, epoch, commit_seq, node, directory, disk"
READ_PARTITION = f"SELECT {_PARTITION_COLUMNS} FROM partitions WHERE partition = ?"
LIST_PARTITIONS = f"SELECT {_PARTITION_COLUMNS} FROM partitions ORDER BY partition"
ASSIGN_DISK = "UPDATE partitions SET disk = ? WHERE partition = ? AND disk = ''"
MARK_INITIALISED = "UPDATE partitions SET initialised = 1 WHERE partition = ?"
# What is known only grows: a late or repeated message changes nothing.
RAISE_PARTITION = (
    "UPDATE partitions SET epoch = max(epoch, ?), commit_seq = max(commit_seq, ?) WHERE partition = ? AND epoch <= ?"
)
PLACE_PARTITION = "UPDATE partitions SET node = ?, directory = ? WHERE partition = ? AND epoch = ?"
INSERT_SLOT = "INSERT INTO slots (slot, partition, version) VALUES (?, ?, 1)"
LIST_SLOTS = "SELECT slot, partition, version FROM slots ORDER BY slot"
READ_CLASS = "SELECT type_name, module, qualname, shipped, run_id FROM classes WHERE type_name = ?"
PUT_DEPLOYED = "INSERT OR REPLACE INTO deployed (id, run_id, runtime_env) VALUES (1, ?, ?)"
READ_DEPLOYED = "SELECT runtime_env FROM deployed WHERE id = 1 AND run_id = ?"
RAISE_ENGINE = "UPDATE engine SET commit_seq = max(commit_seq, ?) WHERE id = 1"
FORGET_ENGINE = "UPDATE engine SET commit_seq = 0 WHERE id = 1"
READ_ENGINE = "SELECT commit_seq FROM engine WHERE id = 1"
PUT_CLASS = "INSERT OR REPLACE INTO classes (type_name, module, qualname, shipped, run_id) VALUES (?, ?, ?, ?, ?)"


@coordinator_migrations()
def m001_first_tables(db: Database) -> None:
    """Cluster, partitions, slots and classes."""
    for statement in _TABLES_V1:
        db.execute(statement)


@coordinator_migrations()
def m002_moves(db: Database) -> None:
    """Slots on their way from one partition to another."""
    for statement in MOVE_TABLES:
        db.execute(statement)


@coordinator_migrations()
def m003_disks(db: Database) -> None:
    """Which disk holds the files of each partition; '' until one is assigned, and where disks have no labels."""
    db.execute("ALTER TABLE partitions ADD COLUMN disk TEXT NOT NULL DEFAULT ''")


@coordinator_migrations()
def m004_deployed(db: Database) -> None:
    """The environment that the last deployment gave to partitions' processes, and in which run of the runtime."""
    db.execute("CREATE TABLE deployed (id INTEGER PRIMARY KEY CHECK (id = 1), run_id TEXT NOT NULL, runtime_env TEXT)")


@coordinator_migrations()
def m005_engine(db: Database) -> None:
    """The last commit of the engine's file that is known: an older copy in its place is found out."""
    db.execute("CREATE TABLE engine (id INTEGER PRIMARY KEY CHECK (id = 1), commit_seq INTEGER NOT NULL)")
    db.execute("INSERT INTO engine (id, commit_seq) VALUES (1, 0)")


@dataclass(frozen=True)
class SlotRange:
    """Slots `first` to `last`, both included, that one partition owns since one version of the map."""

    first: int
    last: int
    partition: int
    version: int


@dataclass(frozen=True)
class SlotMap:
    """Which partition owns each slot. `version` grows with every change."""

    version: int
    ranges: tuple[SlotRange, ...]

    def owners(self) -> list[int]:
        """The owner of each slot, by slot number."""
        return [part.partition for part in self.ranges for _ in range(part.first, part.last + 1)]

    def slots_of(self, partition: int) -> list[tuple[int, int]]:
        """The inclusive ranges that the partition owns."""
        return [(part.first, part.last) for part in self.ranges if part.partition == partition]


@dataclass(frozen=True)
class PartitionRecord:
    """What the coordinator knows of a partition: the highest epoch and commit it has reported, and where it was.

    `disk` is the label of the disk with its files, '' where disks have no labels.
    """

    partition: int
    initialised: bool
    epoch: int
    commit_seq: int
    node: str
    directory: str
    disk: str = ""


@dataclass(frozen=True)
class ClassDefinition:
    """Where a class comes from. `shipped` is its pickle when no process can import it by its module."""

    type_name: str
    module: str
    qualname: str
    shipped: bytes | None


def balanced_ranges(partitions: int) -> list[tuple[int, int]]:
    """One contiguous inclusive range of slots per partition; their sizes differ by at most one."""
    if not 1 <= partitions <= SLOTS:
        raise InvalidOption(f"partitions must be 1 to {SLOTS}, not {partitions}")
    edges = [number * SLOTS // partitions for number in range(partitions + 1)]
    return [(first, after - 1) for first, after in itertools.pairwise(edges)]


class CoordinatorStore:
    """The coordinator's SQLite file. Belongs to one thread; every change is durable when the method returns."""

    def __init__(self, db: Database, path: Path) -> None:
        self._db = db
        self.path = path
        self.cluster_id, self.secret, _version = self._cluster()
        self.moves = MoveStore(db)

    # --- opening --------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        path: Path,
        cluster_id: str,
        partitions: int | Sequence[int],
        secret: bytes,
        owners: Sequence[int] | None = None,
        *,
        map_version: int = 1,
    ) -> None:
        """Make the file of a new cluster, whole or not at all. Raises FileExistsError when there is one.

        `partitions`: how many, or which. `owners` is the owner of each slot, when they are not to have equal shares.
        """
        numbers = range(partitions) if isinstance(partitions, int) else partitions
        if owners is None:
            ranges = zip(numbers, balanced_ranges(len(numbers)), strict=True)
            owners = [partition for partition, (first, last) in ranges for _ in range(first, last + 1)]
        if len(secret) != SECRET_BYTES:
            raise ValueError(f"the secret has {len(secret)} bytes, not {SECRET_BYTES}")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        draft = path.with_name(path.name + ".new")
        draft.unlink(missing_ok=True)
        # made first, so that the secret is never readable by others; SQLite gives its WAL the same mode
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        connection = sqlite3.connect(draft, isolation_level=None)
        try:
            connection.execute("PRAGMA synchronous = FULL")
            db = Database(connection)
            coordinator_migrations.apply(db)
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(INSERT_CLUSTER, (cluster_id, secret, map_version))
            connection.executemany(INSERT_PARTITION, ((partition,) for partition in numbers))
            connection.executemany(INSERT_SLOT, enumerate(owners))
            connection.execute("COMMIT")
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            connection.execute("PRAGMA journal_mode = WAL")  # here, where nobody else can have the file open
        finally:
            connection.close()
        os.link(draft, path)  # unlike a rename, never replaces a file that is there
        draft.unlink()
        fsync_directory(path.parent)
        fsync_directory(path.parent.parent)

    @classmethod
    def open(cls, path: Path, cluster_id: str) -> CoordinatorStore:
        """Open an existing file. Raises `DataMissing`, `SchemaTooNew`, or `WrongPartition` for another cluster's."""
        if not path.exists():
            raise DataMissing(
                f"{path} is missing. It held the slot map of this cluster; bring it back from a backup. "
                "A coordinator never makes a new map beside partitions that have data."
            )
        uri = f"{path.resolve().as_uri()}?mode=rw"
        connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S)
        try:
            db = Database(connection)
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version > SCHEMA_VERSION:
                raise SchemaTooNew(
                    f"{path} has schema version {version}, this Mainspring knows up to {SCHEMA_VERSION}. "
                    "Upgrade Mainspring before opening it; nothing was changed."
                )
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            coordinator_migrations.apply(db)
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            store = cls(db, path)
            if store.cluster_id != cluster_id:
                raise WrongPartition(f"{path} belongs to cluster {store.cluster_id}, not to {cluster_id}.")
        except BaseException:
            connection.close()
            raise
        return store

    @classmethod
    def ephemeral(cls, cluster_id: str, owners: Sequence[int]) -> CoordinatorStore:
        """A store in memory, for a runtime that has its data there too; `owners` is the owner of each slot."""
        db = Database(sqlite3.connect(":memory:", isolation_level=None))
        coordinator_migrations.apply(db)
        db.execute(INSERT_CLUSTER, (cluster_id, b"", 1))
        db.conn.executemany(INSERT_PARTITION, ((partition,) for partition in sorted(set(owners))))
        db.conn.executemany(INSERT_SLOT, enumerate(owners))
        return cls(db, Path(":memory:"))

    def close(self) -> None:
        """Close the file; idempotent."""
        self._db.conn.close()

    def _cluster(self) -> tuple[str, bytes, int]:
        cluster_id, secret, map_version = self._db.execute(READ_CLUSTER).fetchone()
        return cluster_id, secret, map_version

    # --- slots ----------------------------------------------------------------------------------

    def slot_map(self) -> SlotMap:
        """The current map, neighbours of one owner and one version joined."""
        _cluster_id, _secret, version = self._cluster()
        return SlotMap(version, tuple(_join(self._db.execute(LIST_SLOTS).fetchall())))

    # --- partitions -----------------------------------------------------------------------------

    def partitions(self) -> list[PartitionRecord]:
        """Every partition of the cluster, in order."""
        return [_record(row) for row in self._db.execute(LIST_PARTITIONS).fetchall()]

    def partition(self, partition: int) -> PartitionRecord:
        """One partition. Raises `WrongPartition` when the cluster has none of that number."""
        row = self._db.execute(READ_PARTITION, (partition,)).fetchone()
        if row is None:
            raise WrongPartition(f"cluster {self.cluster_id} has no partition {partition}.")
        return _record(row)

    def add_partition(self, partition: int) -> bool:
        """Make room for a partition without slots; whether it is new."""
        if self._db.execute(READ_PARTITION, (partition,)).fetchone() is not None:
            return False
        self._db.execute(INSERT_PARTITION, (partition,))
        return True

    def remove_partition(self, partition: int) -> None:
        """Forget a partition that owns nothing any more. Raises `MoveRefused` while it owns slots."""
        if self.slot_map().slots_of(partition):
            raise MoveRefused(f"partition {partition} still owns slots; it can't be removed")
        self._db.execute(DELETE_PARTITION, (partition,))

    def mark_initialised(self, partition: int) -> None:
        """Record that the partition's files exist: from now on it never starts empty."""
        self.partition(partition)
        self._db.execute(MARK_INITIALISED, (partition,))

    def raise_partition(self, partition: int, epoch: int, commit_seq: int) -> None:
        """Record an epoch and a commit number; values below what is known change nothing."""
        self._db.execute(RAISE_PARTITION, (epoch, commit_seq, partition, epoch))

    def place_partition(self, partition: int, epoch: int, node: str, directory: str) -> None:
        """Record where the partition of that epoch has its files."""
        self._db.execute(PLACE_PARTITION, (node, directory, partition, epoch))

    def assign_disk(self, partition: int, disk: str) -> None:
        """Record which disk has, or will have, the partition's files; one that has a disk keeps it."""
        self._db.execute(ASSIGN_DISK, (disk, partition))

    @property
    def engine_commit_seq(self) -> int:
        """The last commit of the engine's file that is known; 0 when none is."""
        (commit_seq,) = self._db.execute(READ_ENGINE).fetchone()
        return int(commit_seq)

    def raise_engine(self, commit_seq: int) -> None:
        """Record a commit of the engine's file; one below what is known changes nothing."""
        self._db.execute(RAISE_ENGINE, (commit_seq,))

    def forget_engine(self) -> None:
        """The engine's file is gone for good: the one that takes its place begins to count anew."""
        self._db.execute(FORGET_ENGINE)

    # --- classes --------------------------------------------------------------------------------

    def register_class(self, definition: ClassDefinition, run_id: str) -> None:
        """Record where a class comes from; the newest pickle of the same class wins.

        Raises `DuplicateTypeName` when this run of the runtime knows another class by that name. A registration of
        an earlier run gives way: code is moved and renamed between runs, and its data stays.
        """
        row = self._db.execute(READ_CLASS, (definition.type_name,)).fetchone()
        if row is not None:
            known, known_run = ClassDefinition(*row[:4]), row[4]
            same_place = (known.module, known.qualname) == (definition.module, definition.qualname)
            if known_run == run_id and not same_place:
                raise DuplicateTypeName(
                    f"two classes have the type_name {definition.type_name!r}: {known.module}.{known.qualname} and "
                    f"{definition.module}.{definition.qualname}. Give one of them another `type_name`."
                )
            if known_run == run_id and known == definition:
                return
        self._db.execute(
            PUT_CLASS,
            (definition.type_name, definition.module, definition.qualname, definition.shipped, run_id),
        )

    def class_definition(self, type_name: str) -> ClassDefinition | None:
        """Where the class comes from, or None when it was never registered."""
        row = self._db.execute(READ_CLASS, (type_name,)).fetchone()
        return None if row is None else ClassDefinition(*row[:4])

    # --- deployments ----------------------------------------------------------------------------

    def deploy_environment(self, run_id: str, runtime_env: Mapping[str, Any]) -> None:
        """Record the environment of partitions' processes; it holds for this run, as the packages in it do."""
        self._db.execute(PUT_DEPLOYED, (run_id, json.dumps(dict(runtime_env))))

    def deployed_environment(self, run_id: str) -> dict[str, Any] | None:
        """The environment that was deployed last in this run, if one was."""
        row = self._db.execute(READ_DEPLOYED, (run_id,)).fetchone()
        return None if row is None else dict(json.loads(row[0]))


def _record(row: tuple[Any, ...]) -> PartitionRecord:
    partition, initialised, *rest = row
    return PartitionRecord(partition, bool(initialised), *rest)


def _join(rows: Iterable[tuple[int, int, int]]) -> list[SlotRange]:
    ranges: list[SlotRange] = []
    for slot, partition, version in rows:
        last = ranges[-1] if ranges else None
        if last is not None and (last.partition, last.version) == (partition, version):
            ranges[-1] = SlotRange(last.first, slot, partition, version)
        else:
            ranges.append(SlotRange(slot, slot, partition, version))
    return ranges
