"""The durable store: one SQLite file in WAL mode, a writer and a reader connection, plain statements."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from sqlite_utils import Database

from drivers import sql
from drivers.errors import DataMissing, DataRolledBack, Fenced, PartitionBusy, StoreClosed, WrongPartition
from drivers.files import fsync_directory
from drivers.schema import check_schema, migrate
from drivers.store import Counters, Header, PendingWrites
from drivers.tables import Key, Op, Values

__all__ = ["SqliteStore", "is_disk_full"]

# sqlite3.SQLITE_FULL and its like exist from Python 3.11 on
_SQLITE_ERROR = 1
_SQLITE_BUSY = 5
_SQLITE_FULL = 13
_SYNCHRONOUS = {"full": "FULL", "normal": "NORMAL", "off": "OFF"}
#: Pages of cache per connection: 16 MiB of 4 KiB pages keeps the working set of a partition in memory.
_CACHE_KIB = 16 * 1024
#: Readers never wait for the writer in WAL mode. What they can meet (another process recovers the log) is over soon,
#: and they run on the loop, which must not stand still for the writer's busy timeout.
_READER_TIMEOUT_MS = 1_000


def is_disk_full(error: BaseException) -> bool:
    """True for SQLITE_FULL, which is certain: nothing of the transaction was applied."""
    return _is(error, _SQLITE_FULL, "disk is full")


def _is_busy(error: sqlite3.Error) -> bool:
    return _is(error, _SQLITE_BUSY, "database is locked")


def _is(error: BaseException, primary_code: int, message: str) -> bool:
    code = getattr(error, "sqlite_errorcode", None)  # Python 3.11 and later
    if code is not None:
        return bool(code & 0xFF == primary_code)
    return isinstance(error, sqlite3.OperationalError) and message in str(error)


def _connect(
    path: Path, busy_timeout_ms: int, factory: type[sqlite3.Connection] = sqlite3.Connection, mode: str = "rw"
) -> sqlite3.Connection:
    uri = f"{path.resolve().as_uri()}?mode={mode}"
    connection = sqlite3.connect(
        uri,
        uri=True,
        isolation_level=None,
        check_same_thread=False,  # the committer thread runs COMMIT and BEGIN, one thread at a time
        timeout=busy_timeout_ms / 1_000,
        cached_statements=256,
        factory=factory,
    )
    connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    return connection


def _read_header(connection: sqlite3.Connection, path: Path) -> Header:
    row = connection.execute(sql.READ_HEADER).fetchone()
    if row is None:
        raise WrongPartition(f"{path} has no partition header")
    cluster_id, partition_id, epoch, commit_seq, generation, next_id, clean = row
    return Header(cluster_id, partition_id, epoch, commit_seq, generation, next_id, bool(clean))


class SqliteStore:
    """A partition's database. Made by `create`, opened by `open`; see `drivers.store.Store` for the contract."""

    def __init__(self, path: Path, writer: sqlite3.Connection, reader: sqlite3.Connection, header: Header) -> None:
        self.path = path
        self._writer = writer
        self._reader = reader
        self._header = header
        self._pending = PendingWrites()
        self._commit_seq = header.commit_seq
        self._clean = 0
        self._closed = False
        self.counters = Counters(header.generation, header.next_id)
        self.was_clean = True

    # --- opening --------------------------------------------------------------------------------

    @classmethod
    def create(cls, path: Path, cluster_id: str, partition_id: int, *, generation: int = 0) -> None:
        """Make an empty partition file and sync it and its directory. Raises FileExistsError when there is one.

        `generation`: generations that it gives are higher.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + ".new")
        for leftover in (draft, *(draft.with_name(draft.name + end) for end in ("-journal", "-wal", "-shm"))):
            leftover.unlink(missing_ok=True)  # of a creator that died half-way
        connection = sqlite3.connect(draft, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode = DELETE")
            connection.execute("PRAGMA synchronous = FULL")
            migrate(Database(connection), path)
            connection.execute(sql.INSERT_HEADER, (cluster_id, partition_id, generation))
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()
        # link() refuses to replace, so that two creators can't overwrite each other's data.
        os.link(draft, path)
        draft.unlink()
        fsync_directory(path.parent)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        cluster_id: str | None,
        partition_id: int,
        min_commit_seq: int = 0,
        durability: str = "full",
        busy_timeout_ms: int = 30_000,
        writer_factory: type[sqlite3.Connection] = sqlite3.Connection,
    ) -> SqliteStore:
        """Open an existing file, check that it is the right one, and take the next epoch, durably.

        Raises `DataMissing`, `WrongPartition`, `DataRolledBack`, `SchemaTooNew`; nothing is written before the checks.
        Raises `PartitionBusy` when another connection keeps the file locked for `busy_timeout_ms`.
        """
        if not path.exists():
            raise DataMissing(
                f"partition {partition_id}: {path} does not exist. Bring the file back (or mount its disk); "
                "the partition looks again by itself and never starts empty."
            )
        cls._check(path, cluster_id, partition_id, min_commit_seq)
        writer = _connect(path, busy_timeout_ms, writer_factory)
        try:
            writer.execute("PRAGMA journal_mode = WAL")
            writer.execute("PRAGMA wal_autocheckpoint = 0")
            migrate(Database(writer), path)
            # The new epoch is durable whatever durability the data is given: it is what fences the old owner.
            writer.execute("PRAGMA synchronous = FULL")
            # The header is read again under the write lock: an old owner may have committed since the checks, and its
            # counters must not be given a second time.
            writer.execute(sql.BEGIN)
            header = _read_header(writer, path)
            writer.execute(sql.TAKE_EPOCH)
            writer.execute(sql.COMMIT)
            writer.execute(f"PRAGMA synchronous = {_SYNCHRONOUS[durability]}")
            reader = _connect(path, _READER_TIMEOUT_MS)
            reader.execute("PRAGMA query_only = ON")
        except BaseException as error:
            writer.close()
            if isinstance(error, sqlite3.OperationalError) and _is_busy(error):
                raise PartitionBusy(
                    f"partition {partition_id}: {path} is locked by another process (or another connection of this "
                    "one). Stop it, or wait until it ends; two owners of one partition are never allowed."
                ) from error
            raise
        store = cls(path, writer, reader, header.with_epoch(header.epoch + 1))
        store.was_clean = header.clean
        return store

    @staticmethod
    def _check(path: Path, cluster_id: str | None, partition_id: int, min_commit_seq: int) -> None:
        try:
            # Read-only: closing the last writable connection would copy the log back, into a file that may not be ours.
            with closing(_connect(path, _READER_TIMEOUT_MS, mode="ro")) as connection:
                check_schema(Database(connection), path)
                header = _read_header(connection, path)
        except sqlite3.DatabaseError as error:
            if _is_busy(error):
                raise PartitionBusy(f"partition {partition_id}: {path} is locked by another process") from error
            # the plain class is for what is no database, or a damaged one; the others are errors of the system
            if type(error) is sqlite3.DatabaseError or _is(error, _SQLITE_ERROR, "no such table"):
                raise WrongPartition(f"{path} is not a partition file, or it is damaged ({error})") from error
            raise
        if cluster_id is not None and header.cluster_id != cluster_id:
            raise WrongPartition(
                f"{path} belongs to cluster {header.cluster_id}, this runtime is {cluster_id}. "
                "Start it with the data directory it was created with."
            )
        if header.partition_id != partition_id:
            raise WrongPartition(f"{path} belongs to partition {header.partition_id}, not to {partition_id}")
        if header.commit_seq < min_commit_seq:
            raise DataRolledBack(
                f"partition {partition_id}: {path} is at commit {header.commit_seq}, the coordinator has seen "
                f"{min_commit_seq}. An older copy was put in its place: restore the newer one."
            )

    @property
    def header(self) -> Header:
        return self._header

    @property
    def commit_seq(self) -> int:
        return self._commit_seq

    # --- reads ----------------------------------------------------------------------------------

    def _read(self, statement: str, parameters: tuple[Any, ...] = ()) -> list[Any]:
        if self._closed:
            raise StoreClosed(f"{self.path} is closed")
        # fetched whole, so that no read transaction stays open and holds back checkpoints
        rows: list[Any] = self._reader.execute(statement, parameters).fetchall()
        return rows

    def get(self, table: str, key: Key) -> Values | None:
        if self._closed:
            raise StoreClosed(f"{self.path} is closed")
        row: Values | None = self._reader.execute(sql.GET_SQL[table], key).fetchone()
        return row

    def scan(
        self,
        table: str,
        prefix: Key = (),
        *,
        start: Key | None = None,
        start_after: Key | None = None,
        end: Key | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> list[Key]:
        statement = sql.scan_sql(
            table,
            len(prefix),
            len(start or ()),
            len(start_after or ()),
            len(end or ()),
            reverse,
            limit is not None,
        )
        bounds = (*prefix, *(start or ()), *(start_after or ()), *(end or ()))
        rows: list[Key] = self._read(statement, bounds if limit is None else (*bounds, limit))
        return rows

    def count(self, table: str, prefix: Key = ()) -> int:
        rows = self._read(sql.COUNT_SQL[table, len(prefix)], prefix)
        found: int = rows[0][0]
        return found

    def find_object(self, class_name: str, key: str) -> int | None:
        rows = self._read(sql.FIND_OBJECT, (class_name, key))
        return rows[0][0] if rows else None

    def list_objects(
        self, class_name: str, prefix: str, after: str | None, limit: int
    ) -> list[tuple[int, str, int | None]]:
        end = prefix_end(prefix)
        # after "" is before every key, since no key is empty
        rows = self._read(sql.LIST_OBJECTS, (class_name, prefix, after or "", end, end, limit))
        return [(oid, key, due) for oid, key, due in rows]

    def objects_in_slot(self, slot: int) -> list[tuple[int, str, str]]:
        return self._read(sql.OBJECTS_IN_SLOT, (slot,))

    def engine_timers(self, oid: int) -> list[Key]:
        return self._read(sql.ENGINE_TIMERS, (oid.to_bytes(8, "big"),))

    def unwatched_executions(self, now_ms: int, status: str, timer_prefix: str) -> list[tuple[int, str, int]]:
        return self._read(sql.UNWATCHED_EXECUTIONS, (status, now_ms, timer_prefix))

    def lanes(self) -> list[int]:
        return [lane for (lane,) in self._read(sql.LANES)]

    def next_due_ms(self, lane: int | None = None, after_ms: int | None = None) -> int | None:
        if lane is None:
            rows = self._read(sql.NEXT_DUE)
        elif after_ms is None:
            rows = self._read(sql.NEXT_DUE_IN_LANE, (lane,))
        else:
            rows = self._read(sql.NEXT_DUE_AFTER, (lane, after_ms))
        due: int | None = rows[0][0]
        return due

    # --- the open transaction -------------------------------------------------------------------

    def begin(self) -> None:
        self._writer.execute(sql.BEGIN)

    def peek(self, table: str, key: Key) -> Values | None:
        known, values = self._pending.lookup(table, key)
        if known:
            return values
        row: Values | None = self._writer.execute(sql.GET_SQL[table], key).fetchone()
        return row

    def write(self, ops: Iterable[Op]) -> None:
        self._pending.add(ops)

    def flush(self, max_rows: int | None = None) -> bool:
        pending = self._pending
        executemany = self._writer.executemany
        if pending.clears:
            for table, prefix in pending.clears:
                self._writer.execute(sql.CLEAR_SQL[table, len(prefix)], prefix)
            pending.clears.clear()
        left = max_rows
        for table in list(pending.rows):
            rows = pending.rows[table]
            if left is not None and len(rows) > left:
                chunk = {key: rows.pop(key) for key in list(islice(rows, left))}
            else:
                chunk = rows
                del pending.rows[table]
            # Sorted, so that neighbours share pages: fewer page visits and a smaller WAL.
            puts = sorted([key + values for key, values in chunk.items() if values is not None])
            if puts:
                executemany(sql.PUT_SQL[table], puts)
            if len(puts) < len(chunk):
                executemany(sql.DELETE_SQL[table], sorted([key for key, values in chunk.items() if values is None]))
            if left is not None:
                left -= len(chunk)
                if left <= 0:
                    break
        return bool(pending.rows)

    def commit(self) -> int:
        counters = self.counters
        touched = self._writer.execute(
            sql.TOUCH_HEADER,
            (self._commit_seq + 1, counters.generation, counters.next_id, self._clean, self._header.epoch),
        )
        if touched.rowcount != 1:
            raise Fenced(
                f"partition {self._header.partition_id}: epoch {self._header.epoch} is over, a newer owner has "
                f"{self.path}. Nothing was committed here; this process must stop."
            )
        self._writer.execute(sql.COMMIT)
        self._commit_seq += 1
        return self._commit_seq

    def rollback(self) -> None:
        self._pending.discard()
        if self._writer.in_transaction:  # SQLITE_FULL and SQLITE_IOERR may have rolled back already
            self._writer.execute(sql.ROLLBACK)

    def mark_clean(self) -> None:
        self._clean = 1

    # --- upkeep ---------------------------------------------------------------------------------

    def wal_bytes(self) -> int:
        """Size of the write-ahead log file."""
        try:
            return os.stat(f"{self.path}-wal").st_size
        except FileNotFoundError:
            return 0

    def truncate_wal(self) -> None:
        """Copy the whole WAL back and cut it. Only between COMMIT and the next BEGIN."""
        self._writer.execute(sql.CHECKPOINT_TRUNCATE).fetchall()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self.rollback()
        finally:
            self._reader.close()
            self._writer.close()


def prefix_end(prefix: str) -> str | None:
    """The smallest text greater than every text with this prefix, in code point order; None when there is none."""
    for index in range(len(prefix) - 1, -1, -1):
        point = ord(prefix[index])
        if point < 0x10FFFF:
            # the surrogate block is no text: step over it
            following = 0xE000 if point == 0xD7FF else point + 1
            return prefix[:index] + chr(following)
    return None
