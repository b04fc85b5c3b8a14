"""Both stores of a partition behind one face: made empty, opened again, as the shared suites need them."""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Protocol

from drivers import sql
from drivers.memory_store import MemoryData, MemoryStore
from drivers.sqlite_store import SqliteStore
from drivers.store import Store
from drivers.tables import TABLES, TableSpec

#: Where syncing costs nothing; these files need not outlive the machine. None: the ordinary place.
_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
CLUSTER = "test-cluster"
PARTITION = 3


class Place(Protocol):
    """Where a partition's data is: what stays when its store is closed."""

    def open(self) -> Store:
        """Open the data as a new owner."""
        ...

    def add_table(self, spec: TableSpec) -> None:
        """Make a table that `extra_table` has told the stores of."""
        ...

    def remove(self) -> None: ...


class MemoryPlace:
    """Data in this process."""

    def __init__(self) -> None:
        self._data = MemoryData(CLUSTER, PARTITION)

    def open(self) -> Store:
        return MemoryStore(self._data)

    def add_table(self, spec: TableSpec) -> None:
        return None  # made with the data, from the tables there are

    def remove(self) -> None:
        return None


class FaultyConnection(sqlite3.Connection):
    """A writer whose statements fail when `fault` says so."""

    fault: ClassVar[Callable[[str], Exception | None] | None] = None

    def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
        fault = type(self).fault
        error = None if fault is None else fault(statement)
        if error is not None:
            raise error
        return super().execute(statement, *parameters)


def sqlite_error(code: int, message: str) -> sqlite3.OperationalError:
    """The error as sqlite3 raises it, with its code from Python 3.11 on."""
    error = sqlite3.OperationalError(message)
    if sys.version_info >= (3, 11):
        error.sqlite_errorcode = code
    return error


class FilePlace:
    """A database file in a directory of its own, not synced: these tests do not cut the power."""

    def __init__(self, writer_factory: type[sqlite3.Connection] = sqlite3.Connection) -> None:
        self._writer_factory = writer_factory
        self._directory = TemporaryDirectory(prefix="mainspring-store-", dir=_MEMORY)
        self.path = Path(self._directory.name) / "partition.sqlite"
        shutil.copyfile(Path(_template().name) / "partition.sqlite", self.path)

    def open(self) -> SqliteStore:
        return SqliteStore.open(
            self.path,
            cluster_id=CLUSTER,
            partition_id=PARTITION,
            durability="off",
            busy_timeout_ms=0,
            writer_factory=self._writer_factory,
        )

    def add_table(self, spec: TableSpec) -> None:
        connection = sqlite3.connect(self.path)
        columns = ", ".join(spec.columns)
        connection.execute(f"CREATE TABLE {spec.name} ({columns}, PRIMARY KEY ({', '.join(spec.key)})) WITHOUT ROWID")
        connection.commit()
        connection.close()

    def remove(self) -> None:
        self._directory.cleanup()


#: Every kind of store that must keep the contract, by name.
PLACES: dict[str, Callable[[], Place]] = {"memory": MemoryPlace, "sqlite": FilePlace}


@cache
def _template() -> TemporaryDirectory[str]:
    # made once: creating a partition syncs its file, which costs more than most tests
    directory = TemporaryDirectory(prefix="mainspring-template-", dir=_MEMORY)
    SqliteStore.create(Path(directory.name) / "partition.sqlite", CLUSTER, PARTITION)
    return directory


@contextmanager
def extra_table(spec: TableSpec) -> Iterator[None]:
    """While this lasts, the stores know one more table: rows of tests beside those of production."""
    maps: tuple[tuple[dict[Any, Any], object, object], ...] = (
        (TABLES, spec.name, spec),
        (sql.PUT_SQL, spec.name, sql.put_sql(spec)),
        (sql.GET_SQL, spec.name, sql.get_sql(spec)),
        (sql.DELETE_SQL, spec.name, sql.delete_sql(spec)),
        *((sql.CLEAR_SQL, (spec.name, size), sql.clear_sql(spec, size)) for size in range(len(spec.key) + 1)),
    )
    for known, name, value in maps:
        assert name not in known, f"there is a table {spec.name} already"
        known[name] = value
    try:
        yield
    finally:
        for known, name, _ in maps:
            del known[name]
