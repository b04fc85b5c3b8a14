"""What passes between the engine and a timer handler: the due timer, what it may read, and what it decides."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from timers.batch import Batch
from timers.errors import InvalidSchedule
from timers.rows import Row

__all__ = [
    "MAX_TIME_MS",
    "NO_EFFECTS",
    "Done",
    "DueTimer",
    "Fired",
    "PartitionName",
    "PartitionRole",
    "Reschedule",
    "Retry",
    "TimerCtx",
    "TimerReads",
]

R = TypeVar("R", bound=Row)

#: The largest epoch ms that a row can carry (a signed 64-bit column). As `now_ms` it means "everything is due".
MAX_TIME_MS: Final = 2**63 - 1

#: The batch of a handler that has nothing to write.
NO_EFFECTS: Final = Batch()


class PartitionRole(enum.Enum):
    """What a timer table belongs to; some kinds act only in one of them."""

    COORDINATOR = "coordinator"
    PARTITION = "partition"
    OBJECT = "object"


@dataclass(frozen=True)
class PartitionName:
    """Whose timers are being run. `number` is the partition's; for an object's own file, its partition's."""

    role: PartitionRole
    number: int = 0


class TimerReads(Protocol):
    """What a handler may read. It sees the rows as the earlier timers of its page will have left them."""

    async def get(self, row_type: type[R], key: tuple[Any, ...]) -> R | None:
        """The row with this key, or None."""
        ...

    async def scan(
        self, row_type: type[R], prefix: tuple[Any, ...], *, after: tuple[Any, ...] | None = None, limit: int
    ) -> Sequence[R]:
        """At most `limit` rows whose key begins with `prefix`, in key order, and comes after `prefix + after`."""
        ...


@dataclass(frozen=True)
class DueTimer:
    """A timer that has come due. `due_at_ms` (epoch ms) is what it was armed for, also after retries."""

    due_at_ms: int
    kind: int
    reference: bytes
    value: bytes
    generation: int = 0
    attempt: int = 0


@dataclass(frozen=True)
class TimerCtx:
    """Where and when a handler runs: reads, partition, and the tick's business time in epoch ms."""

    store: TimerReads
    partition: PartitionName
    now_ms: int


@dataclass(frozen=True)
class Done:
    """Apply the effects and delete the timer, in one batch."""

    batch: Batch = NO_EFFECTS


@dataclass(frozen=True)
class Reschedule:
    """Apply the effects and move the timer to `due_at_ms` (epoch ms) with a new payload, in one batch.

    Raises `InvalidSchedule` when the time is not an int in 0..`MAX_TIME_MS`.
    """

    due_at_ms: int
    value: bytes
    batch: Batch = NO_EFFECTS

    def __post_init__(self) -> None:
        due: object = self.due_at_ms
        if not isinstance(due, int) or isinstance(due, bool) or not 0 <= due <= MAX_TIME_MS:
            raise InvalidSchedule(f"a timer can't be moved to {due!r}; it needs epoch milliseconds")


@dataclass(frozen=True)
class Retry:
    """Nothing can be done now: count a failure and try again after the engine's retry delay."""


Fired = Done | Reschedule | Retry
