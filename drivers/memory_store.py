"""The store without a disk: same contract, same results, for tests and throw-away runtimes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sortedcontainers import SortedDict

from drivers.errors import Fenced, StoreClosed
from drivers.store import Counters, Header, PendingWrites
from drivers.tables import DIRECTORY, OBJECTS, TABLES, TIMERS, Clear, Key, Op, Values

__all__ = ["MemoryData", "MemoryStore"]


class MemoryData:
    """What survives when a `MemoryStore` is closed and opened again: the stand-in for the file."""

    def __init__(self, cluster_id: str, partition_id: int) -> None:
        self.header = Header(cluster_id, partition_id, 0, 0, 0, 1, True)
        self.tables: dict[str, SortedDict] = {name: SortedDict() for name in TABLES}


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
            if start_after is not None and rest[: len(start_after)] <= start_after:
                continue
            if start is not None and rest[: len(start)] < start:
                continue
            if end is not None and rest[: len(end)] >= end:
                break
            found.append(key + rows[key])
            if limit is not None and not reverse and len(found) >= limit:
                break
        if reverse:
            found.reverse()
        return found if limit is None else found[:limit]

    def find_object(self, class_name: str, key: str) -> int | None:
        for (oid,), (_slot, name, object_key) in self._table(OBJECTS).items():
            if name == class_name and object_key == key:
                return int(oid)
        return None

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

    def lanes(self) -> list[int]:
        return sorted({key[0] for key in self._table(TIMERS)})

    def next_due_ms(self, lane: int | None = None, after_ms: int | None = None) -> int | None:
        lanes = self.lanes() if lane is None else [lane]
        after = None if after_ms is None else (after_ms,)
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
            rows = self._table(table)
            for key in [key for key in rows.irange(minimum=prefix) if key[: len(prefix)] == prefix]:
                del rows[key]
        for table, changes in self._pending.rows.items():
            rows = self._table(table)
            for key, values in changes.items():
                if values is None:
                    rows.pop(key, None)
                else:
                    assert not isinstance(values, Clear)
                    rows[key] = values
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
