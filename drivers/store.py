"""The contract of a partition's storage: typed tables, reads of what is durable, one open write transaction."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from drivers.tables import CLEAR, Key, Op, Values

__all__ = ["Counters", "Header", "PendingWrites", "Store"]


@dataclass(frozen=True)
class Header:
    """Who a partition file belongs to, and the counters that every commit carries forward."""

    cluster_id: str
    partition_id: int
    epoch: int
    commit_seq: int
    generation: int
    next_id: int
    clean: bool

    def with_epoch(self, epoch: int) -> Header:
        return replace(self, epoch=epoch, clean=False)


@dataclass
class Counters:
    """Counters handed out in memory and persisted by the commit that first uses them.

    A number that was handed out to a write set which then failed is skipped, never given twice.
    """

    generation: int
    next_id: int

    def take_generation(self) -> int:
        self.generation += 1
        return self.generation

    def take_id(self) -> int:
        taken = self.next_id
        self.next_id += 1
        return taken


class Store(Protocol):
    """What a partition needs of its database.

    Reads see what is durable. Writes go to one open transaction: `write` gathers them, `peek` reads through them,
    `flush` hands some of them to the database, `commit` makes them durable. Only `commit` and `begin` may be called
    off the loop thread. `commit` raises `Fenced` when the epoch in the data is no longer ours.
    """

    @property
    def header(self) -> Header: ...

    @property
    def commit_seq(self) -> int:
        """Number of the last durable commit."""
        ...

    counters: Counters
    was_clean: bool

    # reads of durable rows
    def get(self, table: str, key: Key) -> Values | None: ...

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
        """Rows (key + value columns) whose key starts with `prefix`, in key order.

        `start`, `start_after` and `end` (exclusive) are key tuples, possibly shorter than the key, compared as
        tuples after the prefix; an empty one bounds nothing.
        """
        ...

    def count(self, table: str, prefix: Key = ()) -> int:
        """How many rows there are whose key starts with `prefix`. Reads through all of them."""
        ...

    def find_object(self, class_name: str, key: str) -> int | None: ...

    def list_objects(
        self, class_name: str, prefix: str, after: str | None, limit: int
    ) -> list[tuple[int, str, int | None]]:
        """(oid, key, earliest due or None) of the class's objects whose key starts with `prefix`, in key order."""
        ...

    def objects_in_slot(self, slot: int) -> list[tuple[int, str, str]]:
        """(oid, class, key) of the objects of a slot."""
        ...

    def engine_timers(self, oid: int) -> list[Key]:
        """Rows of the timer table outside the user lane whose reference begins with this object's number."""
        ...

    def unwatched_executions(self, now_ms: int, status: str, timer_prefix: str) -> list[tuple[int, str, int]]:
        """(oid, execution id, wake time) of executions in this status that should have been woken by `now_ms`, and
        whose object has no timer `timer_prefix` + execution id; in order of the wake time."""
        ...

    def lanes(self) -> list[int]: ...

    def next_due_ms(self, lane: int | None = None, after_ms: int | None = None) -> int | None:
        """Earliest due time, of one lane when it is given, and there strictly after `after_ms`; or None."""
        ...

    # the open transaction
    def begin(self) -> None: ...

    def peek(self, table: str, key: Key) -> Values | None: ...

    def write(self, ops: Iterable[Op]) -> None: ...

    def flush(self, max_rows: int | None = None) -> bool:
        """Hand up to `max_rows` gathered rows to the database; True when more are left."""
        ...

    def commit(self) -> int:
        """Check the epoch, persist counters, make everything flushed durable; the new commit_seq."""
        ...

    def rollback(self) -> None: ...

    def mark_clean(self) -> None:
        """The next commit says that this owner stopped in order."""
        ...

    def wal_bytes(self) -> int: ...

    def truncate_wal(self) -> None: ...

    def close(self) -> None: ...


class PendingWrites:
    """Writes of the open transaction that the database has not been given yet, the last one of each key only."""

    __slots__ = ("clears", "rows")

    def __init__(self) -> None:
        self.rows: dict[str, dict[Key, Values | None]] = {}
        self.clears: list[tuple[str, Key]] = []

    def add(self, ops: Iterable[Op]) -> None:
        rows = self.rows
        for table, key, values in ops:
            if values is CLEAR:  # there is only one; compared as an object because this loop is hot
                self._clear(table, key)
                continue
            pending = rows.get(table)
            if pending is None:
                pending = rows[table] = {}
            pending[key] = values  # type: ignore[assignment]  # not CLEAR

    def _clear(self, table: str, prefix: Key) -> None:
        # Clears run before the rows gathered after them: what was gathered earlier for the prefix is dropped here.
        pending = self.rows.get(table)
        if pending:
            size = len(prefix)
            for key in [key for key in pending if key[:size] == prefix]:
                del pending[key]
        self.clears.append((table, prefix))

    def lookup(self, table: str, key: Key) -> tuple[bool, Values | None]:
        """(known here?, values or None when deleted)."""
        pending = self.rows.get(table)
        if pending is not None and key in pending:
            return True, pending[key]
        for cleared, prefix in self.clears:
            if cleared == table and key[: len(prefix)] == prefix:
                return True, None
        return False, None

    def __len__(self) -> int:
        return len(self.clears) + sum(len(pending) for pending in self.rows.values())

    def discard(self) -> None:
        self.rows.clear()
        self.clears.clear()
