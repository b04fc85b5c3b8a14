"""What a lease protects: the highest epoch of it that has been seen here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from timers.batch import Batch, Put

__all__ = ["GuardRow", "raise_guard"]


@dataclass(frozen=True)
class GuardRow:
    """Per object and lease, the highest epoch that came with a turn of the object."""

    table: ClassVar[str] = "lease_guards"

    oid: int
    name: str
    epoch: int

    def key(self) -> tuple[int, str]:
        return (self.oid, self.name)

    def values(self) -> tuple[int]:
        return (self.epoch,)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> GuardRow:
        return cls(*key, *values)


def raise_guard(known: GuardRow | None, seen: GuardRow) -> Batch | None:
    """What a turn that comes with this epoch writes, nothing when it is known. None: it is of an earlier grant."""
    if known is None or known.epoch < seen.epoch:
        return Batch(writes=(Put(seen),))
    return Batch() if known.epoch == seen.epoch else None
