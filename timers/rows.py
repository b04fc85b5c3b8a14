"""Typed rows: what the core reads and writes. Each row type knows its table, its columns and its key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

__all__ = [
    "USER_LANE",
    "MalformedTimer",
    "Row",
    "TimerKey",
    "TimerRow",
    "oid_of",
    "owned_ref",
    "slot_of_ref",
    "slot_owner",
    "slot_ref",
]

#: All kinds that run user code share one lane, so that an object's alarm and its named timers keep one order.
#: Engine kinds use their own kind number as lane.
USER_LANE = 32

TimerKey = tuple[int, int, int, bytes, int]
_OID_BYTES = 8
#: Begins what refers to a slot in the place of an object: no object has such a number.
_SLOT_OWNER = 1 << 63
R = TypeVar("R", bound="Row")


class Row(Protocol):
    """A frozen dataclass stored in one table. `key()` + `values()` are its columns in schema order."""

    table: ClassVar[str]

    def key(self) -> tuple[Any, ...]: ...

    def values(self) -> tuple[Any, ...]: ...

    @classmethod
    def from_columns(cls: type[R], key: tuple[Any, ...], values: tuple[Any, ...]) -> R: ...


@dataclass(frozen=True)
class TimerRow:
    """One row of the timer table. Times are epoch milliseconds.

    `due_ms` is when the row is looked at next; `first_due_ms` is what it was armed for and stays the same while
    `attempt` (failed tries so far) moves it along the retry ladder.
    """

    table: ClassVar[str] = "timers"

    lane: int
    due_ms: int
    kind: int
    ref: bytes
    generation: int
    first_due_ms: int
    attempt: int = 0
    payload: bytes = b""

    def key(self) -> TimerKey:
        return (self.lane, self.due_ms, self.kind, self.ref, self.generation)

    def values(self) -> tuple[int, int, bytes]:
        return (self.first_due_ms, self.attempt, self.payload)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> TimerRow:
        return cls(*key, *values)


@dataclass(frozen=True)
class MalformedTimer:
    """A timer row whose columns make no sense. It is counted and left where it is: moving it is not safe."""

    lane: int
    due_ms: int
    raw_key: tuple[Any, ...]
    reason: str


def owned_ref(oid: int, name: bytes = b"") -> bytes:
    """How an engine's timer refers to what it serves: 8 bytes of object number, then the name of the row."""
    return oid.to_bytes(_OID_BYTES, "big") + name


def oid_of(ref: bytes) -> tuple[int, bytes] | None:
    """(object number, name) of such a reference, or None when it is none."""
    number = int.from_bytes(ref[:_OID_BYTES], "big")
    return None if len(ref) < _OID_BYTES or number >= _SLOT_OWNER else (number, ref[_OID_BYTES:])


def slot_owner(slot: int) -> int:
    """Stands for a slot where timers have the number of their object."""
    return _SLOT_OWNER + slot


def slot_ref(slot: int, name: bytes) -> bytes:
    """How an engine's timer refers to a row that belongs to a slot, whatever becomes of its objects."""
    return slot_owner(slot).to_bytes(_OID_BYTES, "big") + name


def slot_of_ref(ref: bytes) -> tuple[int, bytes] | None:
    """(slot, name) of such a reference, or None when it is none."""
    number = int.from_bytes(ref[:_OID_BYTES], "big")
    return None if len(ref) < _OID_BYTES or number < _SLOT_OWNER else (number - _SLOT_OWNER, ref[_OID_BYTES:])
