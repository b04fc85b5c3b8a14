"""Reading partition files at rest, or beside their running owner: read-only, nothing is locked or changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from drivers.errors import DataMissing
from drivers.files import COORDINATOR, PARTITION_FILE, store_files
from drivers.schema import check_schema
from drivers.sql import READ_HEADER

__all__ = [
    "DEAD_LETTERS",
    "LOST_TIMERS",
    "OBJECTS",
    "TIMERS",
    "PartitionFacts",
    "coordinator_integrity",
    "find_partitions",
    "integrity",
    "partition_facts",
    "read_all",
    "read_one",
]

OBJECTS = (
    "SELECT class, key, slot, (SELECT min(due_ms) FROM directory WHERE directory.oid = objects.oid) AS next_due,"
    " (SELECT count(*) FROM kv WHERE kv.oid = objects.oid) AS keys FROM objects"
    " WHERE (:class IS NULL OR class = :class) ORDER BY class, key LIMIT :limit"
)
TIMERS = (
    "SELECT objects.class, objects.key, directory.name, directory.kind, directory.due_ms, directory.first_due_ms,"
    " directory.attempt, directory.crashes FROM directory JOIN objects ON objects.oid = directory.oid"
    " ORDER BY directory.due_ms LIMIT :limit"
)
DEAD_LETTERS = (
    "SELECT id, class, key, kind, name, due_ms, attempts, crashes, error, created_ms FROM dead_letters"
    " ORDER BY id LIMIT :limit"
)
#: Timers that no tick would find: the directory has them, the timer table does not.
LOST_TIMERS = (
    "SELECT count(*) AS lost FROM directory WHERE NOT EXISTS (SELECT 1 FROM timers"
    " WHERE timers.due_ms = directory.due_ms AND timers.kind = directory.kind"
    " AND timers.generation = directory.generation)"
)
_INTEGRITY = "PRAGMA integrity_check"
_SLOTS = "SELECT slot, state, version FROM slots"
_LEASE_EPOCH = "SELECT coalesce(max(epoch), 0) FROM lease_guards"
_CLASSES = "SELECT type_name, module, qualname FROM classes"


def find_partitions(data_dir: Path) -> list[tuple[int, Path]]:
    """(number, file) of each partition. Raises `DataMissing` when there is none."""
    files = sorted(data_dir.glob(f"partitions/*/{PARTITION_FILE}"))
    if not files:
        raise DataMissing(f"{data_dir} holds no partitions: give the directory that the runtime was started with")
    return [(int(path.parent.name), path) for path in files]


@contextmanager
def _opened(path: Path) -> Iterator[Database]:
    database = Database(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True))
    try:
        check_schema(database, path)
        yield database
    finally:
        database.close()


def read_all(data_dir: Path, query: str, **parameters: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """(partition, row) of a query on every partition. Raises `DataMissing` and `SchemaTooNew`."""
    for number, path in find_partitions(data_dir):
        with _opened(path) as database:
            for row in database.query(query, parameters):
                yield number, row


def read_one(path: Path, query: str, parameters: dict[str, Any], limit: int) -> list[dict[str, Any]]:
    """The first `limit` rows of a query on one partition file. Raises `SchemaTooNew`."""
    with _opened(path) as database:
        return list(islice(database.query(query, parameters), limit))


def integrity(path: Path) -> tuple[str, int]:
    """(what SQLite's integrity check says, how many timers no tick would find) of one partition file. Of a file that is
    damaged so that it can't be read, why, and no timers."""
    try:
        with _opened(path) as database:
            (verdict,) = database.execute(_INTEGRITY).fetchone()
            (lost,) = database.execute(LOST_TIMERS).fetchone()
    except sqlite3.DatabaseError as error:
        return str(error), 0
    return str(verdict), int(lost)


def coordinator_integrity(data_dir: Path) -> list[tuple[str, str]]:
    """(name, what SQLite's integrity check says) of each file of the coordinator that is there."""
    found: list[tuple[str, str]] = []
    for path in sorted(store_files(data_dir, COORDINATOR).directory.glob("*.sqlite")):
        try:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
                (verdict,) = connection.execute(_INTEGRITY).fetchone()
        except sqlite3.DatabaseError as error:
            verdict = error
        found.append((f"{path.parent.name}/{path.name}", str(verdict)))
    return found


@dataclass(frozen=True)
class PartitionFacts:
    """What a partition's file says of itself: `slots` are (slot, state, version), `classes` (type, module, name), and
    `highest_lease_epoch` is that of any lease which a guard has seen."""

    partition: int
    cluster_id: str
    epoch: int
    commit_seq: int
    slots: tuple[tuple[int, str, int], ...]
    classes: tuple[tuple[str, str, str], ...]
    highest_lease_epoch: int


def partition_facts(data_dir: Path) -> list[PartitionFacts]:
    """The facts of each partition, by number. Raises `DataMissing`, `SchemaTooNew`."""
    facts: list[PartitionFacts] = []
    for number, path in find_partitions(data_dir):
        with _opened(path) as database:
            cluster_id, _partition, epoch, commit_seq, *_ = database.execute(READ_HEADER).fetchone()
            slots = tuple(database.execute(_SLOTS).fetchall())
            classes = tuple(database.execute(_CLASSES).fetchall())
            # files that no newer version has opened yet have no such table
            lease_epoch = database.execute(_LEASE_EPOCH).fetchone()[0] if database["lease_guards"].exists() else 0
            facts.append(PartitionFacts(number, cluster_id, epoch, commit_seq, slots, classes, lease_epoch))
    return facts
