"""The classes that are measured: ours, and a plain Ray actor that does the same work with a commit per call."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from actors.durable_object import DurableObject

__all__ = ["Counter", "PlainCounter"]


class Counter(DurableObject):
    """A read-modify-write per call."""

    type_name = "BenchCounter"

    def add(self, count: int) -> int:
        total: int = self.storage.get("total", 0) + count
        self.storage.put("total", total)
        return total

    def total(self) -> int:
        total: int = self.storage.get("total", 0)
        return total


class PlainCounter:
    """What one writes by hand with Ray: an actor, a table, the same read-modify-write, one durable commit per call."""

    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(Path(path), isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(
            "CREATE TABLE IF NOT EXISTS totals (key TEXT PRIMARY KEY, total INTEGER) WITHOUT ROWID"
        )

    def add(self, key: str, count: int) -> int:
        self._connection.execute("BEGIN IMMEDIATE")
        row = self._connection.execute("SELECT total FROM totals WHERE key = ?", (key,)).fetchone()
        total = (row[0] if row else 0) + count
        self._connection.execute("INSERT OR REPLACE INTO totals VALUES (?, ?)", (key, total))
        self._connection.execute("COMMIT")
        return total

    def sum(self) -> int:
        (total,) = self._connection.execute("SELECT coalesce(sum(total), 0) FROM totals").fetchone()
        return int(total)
