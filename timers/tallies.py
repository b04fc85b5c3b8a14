"""Counts that are kept beside what they count, so that a limit costs one read: of rows, and of their sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from timers.batch import Absent, Batch, Delete, Equals, Put
from timers.errors import CorruptRow

__all__ = ["Tally", "count_one", "discount_one"]


@dataclass(frozen=True)
class Tally:
    """How many rows of an object are in a scope, and the sum of their sizes. There is no row for nothing."""

    table: ClassVar[str] = "tallies"

    oid: int
    scope: str
    rows: int
    size: int

    def key(self) -> tuple[int, str]:
        return (self.oid, self.scope)

    def values(self) -> tuple[int, int]:
        return (self.rows, self.size)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> Tally:
        return cls(*key, *values)


def count_one(tally: Tally | None, oid: int, scope: str, size: int) -> Batch:
    """A batch that counts one row more. Raises `CorruptRow` for a stored count of nothing."""
    if tally is None:
        return Batch((Absent(Tally.table, (oid, scope)),), (Put(Tally(oid, scope, 1, size)),))
    _check(tally)
    return Batch((Equals(tally),), (Put(replace(tally, rows=tally.rows + 1, size=tally.size + size)),))


def discount_one(tally: Tally | None, oid: int, scope: str, size: int) -> Batch:
    """A batch that counts one row less; the last one takes the count along. Raises `CorruptRow` when it can't."""
    if tally is None:
        raise CorruptRow(f"object {oid} has no count of {scope!r}, and something to take off it")
    _check(tally)
    left = replace(tally, rows=tally.rows - 1, size=tally.size - size)
    if left.rows < 0 or left.size < 0 or (left.rows == 0) is not (left.size == 0):
        raise CorruptRow(f"{tally} can't do with one less of size {size}")
    write = Put(left) if left.rows else Delete(tally.table, tally.key())
    return Batch((Equals(tally),), (write,))


def _check(tally: Tally) -> None:
    if tally.rows < 1 or tally.size < 1:
        raise CorruptRow(f"{tally} counts nothing, and should not be there")
