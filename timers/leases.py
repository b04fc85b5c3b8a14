"""Leases: who holds a name until when, and the batches that grant, renew and end them.

They live with the coordinator. A grant has an *epoch*, a number that no later grant of the name has or goes below: what
the lease protects remembers the highest that it has seen and refuses lower ones. The row and its one sweep timer are
always written together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from timers.batch import Absent, Batch, Delete, Equals, NotAfter, Precondition, Put, Write
from timers.errors import CorruptRow
from timers.registry import TimerKind, lane_of
from timers.rows import TimerRow

__all__ = [
    "GRANT_WINDOW_MS",
    "MAX_LEASE_NAME_BYTES",
    "Holder",
    "LeaseRow",
    "end_lease",
    "grant_lease",
    "lease_name",
    "lease_ref",
    "renew_lease",
    "sweep_timer",
]

#: UTF-8 bytes of a lease's name: it is part of the timer table's key.
MAX_LEASE_NAME_BYTES: Final = 512

#: A grant or a renewal is written within this of being decided or not at all: its expiry counts from the decision.
GRANT_WINDOW_MS: Final = 10_000


@dataclass(frozen=True)
class Holder:
    """The object that holds a lease."""

    type_name: str
    object_key: str

    def __str__(self) -> str:
        return f"{self.type_name}/{self.object_key}"


@dataclass(frozen=True)
class LeaseRow:
    """One lease. Times are epoch ms.

    `request_id` names the request that it was granted to, so that a repeat of that gets the same. `sweep_due_ms` is
    what its timer is armed for. `watermark_ms`, once it has been kept past its expiry: what its holder sent before then
    has arrived.
    """

    table: ClassVar[str] = "leases"

    name: str
    epoch: int
    holder: Holder
    request_id: str
    expires_ms: int
    sweep_due_ms: int
    watermark_ms: int = 0

    def key(self) -> tuple[str]:
        return (self.name,)

    def values(self) -> tuple[int, str, str, str, int, int, int]:
        holder = self.holder
        return (
            self.epoch,
            holder.type_name,
            holder.object_key,
            self.request_id,
            self.expires_ms,
            self.sweep_due_ms,
            self.watermark_ms,
        )

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> LeaseRow:
        (name,) = key
        epoch, type_name, object_key, request_id, expires_ms, sweep_due_ms, watermark_ms = values
        holder = Holder(type_name, object_key)
        return cls(name, epoch, holder, request_id, expires_ms, sweep_due_ms, watermark_ms)

    def is_expired(self, now_ms: int) -> bool:
        """The lease ends at the very instant of its expiry."""
        return now_ms >= self.expires_ms

    def check(self) -> None:
        """Raise `CorruptRow` unless the row can be read: the database does not check the types of its columns."""
        numbers = {
            "epoch": self.epoch,
            "expires_ms": self.expires_ms,
            "sweep_due_ms": self.sweep_due_ms,
            "watermark_ms": self.watermark_ms,
        }
        for name, number in numbers.items():
            if not isinstance(number, int) or number < 0:
                raise CorruptRow(f"lease {self.name!r}: {name} is {number!r}; it is kept as it is")
        for name, text in {"holder_class": self.holder.type_name, "holder_key": self.holder.object_key}.items():
            if not isinstance(text, str) or not text:
                raise CorruptRow(f"lease {self.name!r}: {name} is {text!r}; it is kept as it is")


def lease_ref(name: str) -> bytes:
    """How the sweep timer refers to its lease."""
    return name.encode()


def lease_name(ref: bytes) -> str | None:
    """The name in such a reference, or None when it is none."""
    if not 0 < len(ref) <= MAX_LEASE_NAME_BYTES or 0 in ref:
        return None
    try:
        return ref.decode()
    except UnicodeDecodeError:
        return None


def sweep_timer(row: LeaseRow) -> TimerRow:
    """The one timer of a lease."""
    kind, due_ms = TimerKind.LEASE_SWEEP, row.sweep_due_ms
    return TimerRow(lane_of(kind), due_ms, int(kind), lease_ref(row.name), 0, due_ms)


def grant_lease(old: LeaseRow | None, new: LeaseRow, now_ms: int) -> Batch:
    """Put the new grant in the place of what there is. Whether it may be granted is for the caller to decide."""
    guard: Precondition = Absent(new.table, new.key()) if old is None else Equals(old)
    return Batch((guard, NotAfter(now_ms + GRANT_WINDOW_MS)), (*_timer_end(old), Put(new), Put(sweep_timer(new))))


def renew_lease(row: LeaseRow, expires_ms: int, now_ms: int) -> tuple[LeaseRow, Batch]:
    """The lease with a later expiry; its timer moves along."""
    renewed = replace(row, expires_ms=expires_ms, sweep_due_ms=expires_ms)
    return renewed, grant_lease(row, renewed, now_ms)


def end_lease(row: LeaseRow) -> Batch:
    """Release: nobody holds the name any more."""
    return Batch((Equals(row),), (Delete(row.table, row.key()), *_timer_end(row)))


def _timer_end(row: LeaseRow | None) -> tuple[Write, ...]:
    # one that failed and was moved to its retry time stays: it finds a lease that is not its own, and ends
    return () if row is None else (Delete(TimerRow.table, sweep_timer(row).key()),)
