"""Batches: what the core decides, as data. Preconditions and writes that commit together or not at all."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from timers.errors import BatchTooLarge
from timers.rows import Row

__all__ = [
    "MAX_BATCH_OPERATIONS",
    "Absent",
    "Batch",
    "Delete",
    "Equals",
    "NotAfter",
    "Outcome",
    "Precondition",
    "Present",
    "Put",
    "Write",
]

#: Preconditions and writes of one batch, counted together, so that a batch is always a short slice of a commit.
MAX_BATCH_OPERATIONS = 100


@dataclass(frozen=True)
class Equals:
    """The stored row must equal this one, column by column."""

    row: Row


@dataclass(frozen=True)
class Absent:
    """No row with this key may exist in the table."""

    table: str
    key: tuple[Any, ...]


@dataclass(frozen=True)
class Present:
    """A row with this key must exist in the table."""

    table: str
    key: tuple[Any, ...]


@dataclass(frozen=True)
class NotAfter:
    """The store's own clock must read at most this (epoch ms) when the batch is judged."""

    deadline_ms: int


@dataclass(frozen=True)
class Put:
    """Insert the row, or replace the one with the same key."""

    row: Row


@dataclass(frozen=True)
class Delete:
    """Remove the row with this key; no error if there is none."""

    table: str
    key: tuple[Any, ...]


Precondition = Equals | Absent | Present | NotAfter
Write = Put | Delete


class Outcome(enum.Enum):
    """How the store judged one batch."""

    COMMITTED = "committed"
    PRECONDITION_FAILED = "precondition_failed"
    DEADLINE_PASSED = "deadline_passed"


@dataclass(frozen=True)
class Batch:
    """Preconditions and writes, judged and applied as one. An empty batch always commits and writes nothing.

    Raises `BatchTooLarge` when it holds more than `MAX_BATCH_OPERATIONS` operations.
    """

    preconditions: tuple[Precondition, ...] = field(default=())
    writes: tuple[Write, ...] = field(default=())

    def __post_init__(self) -> None:
        if len(self) > MAX_BATCH_OPERATIONS:
            raise BatchTooLarge(
                f"a batch of {len(self)} operations (limit {MAX_BATCH_OPERATIONS}); split the work over several ticks"
            )

    def __len__(self) -> int:
        return len(self.preconditions) + len(self.writes)

    def plus(self, preconditions: Sequence[Precondition] = (), writes: Sequence[Write] = ()) -> Batch:
        """This batch with more preconditions and writes after its own."""
        return Batch((*self.preconditions, *preconditions), (*self.writes, *writes))
