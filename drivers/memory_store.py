"""The store without a disk: same contract, same results, for tests and throw-away runtimes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sortedcontainers import SortedDict

from drivers.errors import Fenced, StoreClosed
from drivers.store import Counters, Header, PendingWrites
from drivers.tables import DIRECTORY, EXECUTIONS, OBJECTS, TABLES, TIMERS, Key, Op, Values
from timers.rows import USER_LANE

_EXECUTION = (*TABLES[EXECUTIONS].key, *TABLES[EXECUTIONS].values)
_STATUS_COLUMN, _WAKE_COLUMN = _EXECUTION.index("status"), _EXECUTION.index("wake_ms")

__all__ = ["MemoryData", "MemoryStore"]


class MemoryData:
    """What survives when a `MemoryStore` is closed and opened again: the stand-in for the file."""

    def __init__(self, cluster_id: str, partition_id: int) -> None:
        self.header = Header(cluster_id, partition_id, 0, 0, 0, 1, True)
        self.tables: dict[str, SortedDict] = {name: SortedDict() for name in TABLES}
        #: (class, key) -> oid: what the unique index of the objects table is in a file
        self.names: dict[tuple[str, str], int] = {}


class MemoryStore:
    """A partition's tables in sorted dictionaries. See `drivers.store.Store` for the contract."""

    def __init__(self, data: MemoryData) -> None:
        self._data = data
        self.was_clean = data.header.clean
        data.header = data.header.with_epoch(data.header.epoch + 1)
        self._header = data.header
        self._commit_seq = data.header.commit_seq
        self._clean = False
        self._pending = PendingWrites()
        self._closed = False
        self.counters = Counters(data.header.generation, data.header.next_id)

    @property
    def header(self) -> Header:
        return self._header

    @property
    def commit_seq(self) -> int:
        return self._commit_seq

    def _table(self, table: str) -> SortedDict:
        if self._closed:
            raise StoreClosed(f"the in-memory store of partition {self._header.partition_id} is closed")
        return self._data.tables[table]

    def get(self, table: str, key: Key) -> Values | None:
        values: Values | None = self._table(table).get(key)
        return values

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
        rows = self._table(table)
        size = len(prefix)
        found: list[Key] = []
        first = prefix + (start or start_after or ())
        for key in rows.irange(minimum=first or None):
            if key[:size] != prefix:
                break
            rest = key[size:]
            if start_after and rest[: len(start_after)] <= start_after:
                continue
            if start and rest[: len(start)] < start:
                continue
            if end and rest[: len(end)] >= end:
                break
            found.append(key + rows[key])
            if limit is not None and not reverse and len(found) >= limit:
                break
        if reverse:
            found.reverse()
        return found if limit is None else found[:limit]

    def count(self, table: str, prefix: Key = ()) -> int:
        return len(self.scan(table, prefix))

    def find_object(self, class_name: str, key: str) -> int | None:
        self._table(OBJECTS)  # raises when closed
        return self._data.names.get((class_name, key))

    def list_objects(
        self, class_name: str, prefix: str, after: str | None, limit: int
    ) -> list[tuple[int, str, int | None]]:
        found = sorted(
            (key, oid)
            for (oid,), (_slot, name, key) in self._table(OBJECTS).items()
            if name == class_name and key.startswith(prefix) and (after is None or key > after)
        )
        return [(oid, key, self._earliest(oid)) for key, oid in found[:limit]]

    def _earliest(self, oid: int) -> int | None:
        return min((row[3] for row in self.scan(DIRECTORY, (oid,))), default=None)

    def objects_in_slot(self, slot: int) -> list[tuple[int, str, str]]:
        rows = self._table(OBJECTS).items()
        found = sorted((name, key, oid) for (oid,), (its_slot, name, key) in rows if its_slot == slot)
        return [(oid, name, key) for name, key, oid in found]

    def engine_timers(self, oid: int) -> list[Key]:
        owner = oid.to_bytes(8, "big")
        return [
            key + values for key, values in self._table(TIMERS).items() if key[0] != USER_LANE and key[3][:8] == owner
        ]

    def unwatched_executions(self, now_ms: int, status: str, timer_prefix: str) -> list[tuple[int, str, int]]:
        waiting = [row for row in self.scan(EXECUTIONS) if row[_STATUS_COLUMN] == status]
        due = [row for row in waiting if row[_WAKE_COLUMN] is not None and row[_WAKE_COLUMN] <= now_ms]
        found = [row for row in due if self.get(DIRECTORY, (row[0], timer_prefix + row[1])) is None]
        return sorted(((row[0], row[1], row[_WAKE_COLUMN]) for row in found), key=lambda each: each[2])

    def lanes(self) -> list[int]:
        rows = self._table(TIMERS)
        lanes: list[int] = []
        key = next(rows.irange(), None)
        while key is not None:
            lanes.append(key[0])
            key = next(rows.irange(minimum=(key[0] + 1,)), None)  # skips from lane to lane, as the SQL does
        return lanes

    def next_due_ms(self, lane: int | None = None, after_ms: int | None = None) -> int | None:
        lanes = self.lanes() if lane is None else [lane]
        after = None if after_ms is None or lane is None else (after_ms,)
        firsts = [self.scan(TIMERS, (each,), start_after=after, limit=1) for each in lanes]
        return min((int(rows[0][1]) for rows in firsts if rows), default=None)

    def begin(self) -> None:
        self._pending.discard()

    def peek(self, table: str, key: Key) -> Values | None:
        known, values = self._pending.lookup(table, key)
        return values if known else self.get(table, key)

    def write(self, ops: Iterable[Op]) -> None:
        self._pending.add(ops)

    def flush(self, max_rows: int | None = None) -> bool:
        return False  # applied by commit in one go: there is no database to hand rows to

    def commit(self) -> int:
        data = self._data
        if data.header.epoch != self._header.epoch:
            raise Fenced(f"partition {self._header.partition_id}: epoch {self._header.epoch} is over")
        for table, prefix in self._pending.clears:
            for row in self.scan(table, prefix):
                self._change(table, row[: len(TABLES[table].key)], None)
        for table, changes in self._pending.rows.items():
            for key, values in changes.items():
                self._change(table, key, values)
        self._pending.discard()
        self._commit_seq += 1
        counters = self.counters
        data.header = replace(
            data.header,
            commit_seq=self._commit_seq,
            generation=counters.generation,
            next_id=counters.next_id,
            clean=self._clean,
        )
        return self._commit_seq

    def _change(self, table: str, key: Key, values: Values | None) -> None:
        rows = self._table(table)
        old = rows.pop(key, None) if values is None else rows.get(key)
        if values is not None:
            rows[key] = values
        if table == OBJECTS:
            names = self._data.names
            if old is not None and names.get(old[1:]) == key[0]:
                del names[old[1:]]
            if values is not None:
                names[values[1:]] = key[0]

    def rollback(self) -> None:
        self._pending.discard()

    def mark_clean(self) -> None:
        self._clean = True

    def wal_bytes(self) -> int:
        return 0

    def truncate_wal(self) -> None:
        return None

    def close(self) -> None:
        self._pending.discard()
        self._closed = True
