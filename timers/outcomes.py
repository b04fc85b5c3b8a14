"""Terminal outcomes that wait to be delivered: their rows, and how they are queued and acknowledged.

An outcome is queued in the batch of what caused it, so there is one exactly when the cause is durable. Two rows of an
object count: `Backlog` what was queued, `Delivered` what is done with. The first is changed only by who queues, the
second only by who delivers, so that neither makes the other lose a guard, however busy the object is. As long as there
is a backlog there is one timer of kind `OUTCOME_DELIVERY`; both rows end with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from timers.batch import Absent, Batch, Delete, Equals, Precondition, Present, Put, Write
from timers.errors import CorruptRow
from timers.firing import MAX_TIME_MS, TimerCtx
from timers.registry import TimerKind, lane_of
from timers.rows import TimerRow, owned_ref

__all__ = [
    "SYNTHETIC",
    "Backlog",
    "Delivered",
    "NewOutcome",
    "ObjectPlace",
    "OutcomeRow",
    "Waiting",
    "acknowledge",
    "close_backlog",
    "queue_outcome",
    "queued_with",
    "tagged_id",
    "waiting",
]

#: Begins the id of an outcome that goes the whole way except for the call of its sink: for probes.
SYNTHETIC: Final = "s:"

#: Bytes that the two numbers of a row's key count with.
_KEY_BYTES: Final = 16

#: The largest number that a column can hold.
_MAX_NUMBER: Final = MAX_TIME_MS

#: 128 bits: ids that are made in different places never meet.
_ID_BYTES: Final = 16


def tagged_id(tag: str, *parts: bytes | str) -> str:
    """A hash of the parts as hexadecimal text. The tag keeps ids of different things apart."""
    hasher = hashlib.blake2b(tag.encode(), digest_size=_ID_BYTES)
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        hasher.update(len(data).to_bytes(8, "big") + data)
    return hasher.hexdigest()


@dataclass(frozen=True)
class ObjectPlace:
    """Class and key of an object, by its number."""

    table: ClassVar[str] = "objects"

    oid: int
    slot: int
    type_name: str
    object_key: str

    def key(self) -> tuple[int]:
        return (self.oid,)

    def values(self) -> tuple[int, str, str]:
        return (self.slot, self.type_name, self.object_key)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> ObjectPlace:
        return cls(*key, *values)


@dataclass(frozen=True)
class OutcomeRow:
    """One outcome that waits. `tries` counts the runs of its sink that ended with an exception for certain."""

    table: ClassVar[str] = "outcomes"

    oid: int
    seq: int
    outcome_id: str
    kind: str
    subject: str
    reason: str
    detail: str
    sink: str
    payload: bytes
    created_ms: int
    tries: int = 0

    def key(self) -> tuple[int, int]:
        return (self.oid, self.seq)

    def values(self) -> tuple[str, str, str, str, str, str, bytes, int, int]:
        return (
            self.outcome_id,
            self.kind,
            self.subject,
            self.reason,
            self.detail,
            self.sink,
            self.payload,
            self.created_ms,
            self.tries,
        )

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> OutcomeRow:
        return cls(*key, *values)

    def fault(self) -> str | None:
        """Why the row can't be read as an outcome, or None. The database does not check the types of its columns."""
        texts = {"kind": self.kind, "subject": self.subject, "reason": self.reason, "detail": self.detail}
        for name, value in ({"outcome_id": self.outcome_id, "sink": self.sink} | texts).items():
            if not isinstance(value, str):
                return f"{name} is {value!r}"
        if not self.outcome_id:
            return "outcome_id is empty"
        if not isinstance(self.payload, bytes):
            return f"payload is {self.payload!r}"
        for name, number in {"created_ms": self.created_ms, "tries": self.tries}.items():
            if not isinstance(number, int) or number < 0:
                return f"{name} is {number!r}"
        return None

    @property
    def is_synthetic(self) -> bool:
        return self.outcome_id.startswith(SYNTHETIC)

    @property
    def size(self) -> int:
        """Bytes of key and values, as the backlog counts them."""
        texts = (self.outcome_id, self.kind, self.subject, self.reason, self.detail, self.sink)
        # not `tries`: it changes, and what is counted when it is delivered must be what was counted when it was queued
        return _KEY_BYTES + sum(len(text.encode()) for text in texts) + len(self.payload) + 8


@dataclass(frozen=True)
class Backlog:
    """What was queued of an object, and whose it is: the object itself may have been deleted.

    `next_seq` is 1 more than the number of outcomes queued, `bytes` their size, `first_ms` the time of the first one.
    """

    table: ClassVar[str] = "backlogs"

    oid: int
    type_name: str
    object_key: str
    next_seq: int
    bytes: int
    first_ms: int

    def key(self) -> tuple[int]:
        return (self.oid,)

    def values(self) -> tuple[str, str, int, int, int]:
        return (self.type_name, self.object_key, self.next_seq, self.bytes, self.first_ms)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> Backlog:
        return cls(*key, *values)


@dataclass(frozen=True)
class Delivered:
    """What of a backlog is done with. `oldest_ms` is the time of the oldest outcome left, None when none was."""

    table: ClassVar[str] = "delivered"

    oid: int
    rows: int = 0
    bytes: int = 0
    oldest_ms: int | None = None

    def key(self) -> tuple[int]:
        return (self.oid,)

    def values(self) -> tuple[int, int, int | None]:
        return (self.rows, self.bytes, self.oldest_ms)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> Delivered:
        return cls(*key, *values)


@dataclass(frozen=True)
class Waiting:
    """How many outcomes wait, and their size in bytes."""

    rows: int
    bytes: int


def waiting(backlog: Backlog | None, delivered: Delivered | None) -> Waiting:
    """What is queued and not delivered. Raises `CorruptRow` when the two rows do not fit together."""
    if backlog is None:
        return Waiting(0, 0)
    done = delivered or Delivered(backlog.oid)
    left = Waiting(backlog.next_seq - 1 - done.rows, backlog.bytes - done.bytes)
    if min(left.rows, left.bytes, done.rows, done.bytes) < 0:
        raise CorruptRow(f"{backlog} and {delivered} do not fit together")
    return left


@dataclass(frozen=True)
class NewOutcome:
    """What is to be queued. `sink` says where it goes, `payload` is the application's, encoded."""

    outcome_id: str
    kind: str
    sink: str
    payload: bytes
    subject: str = ""
    reason: str = ""
    detail: str = ""


def queue_outcome(backlog: Backlog | None, place: ObjectPlace, new: NewOutcome, now_ms: int) -> Batch:
    """A batch that queues one outcome; the first one arms the timer, due at the outcome's own time.

    `backlog` is the object's, as read, and is guarded. Raises `CorruptRow` when its numbers would overflow.
    """
    guard: Precondition
    if backlog is None:
        guard = Absent(Backlog.table, (place.oid,))
        backlog = Backlog(place.oid, place.type_name, place.object_key, 1, 0, now_ms)
        timer = [Put(_timer(place.oid, now_ms))]
    else:
        guard, timer = Equals(backlog), []
    row = OutcomeRow(
        place.oid,
        backlog.next_seq,
        new.outcome_id,
        new.kind,
        new.subject,
        new.reason,
        new.detail,
        new.sink,
        new.payload,
        now_ms,
    )
    longer = replace(backlog, next_seq=backlog.next_seq + 1, bytes=backlog.bytes + row.size)
    if backlog.next_seq < 1 or backlog.bytes < 0 or max(longer.next_seq, longer.bytes) > _MAX_NUMBER:
        raise CorruptRow(f"{backlog} can't count one more outcome")
    return Batch((guard,), (Put(row), Put(longer), *timer))


async def queued_with(ctx: TimerCtx, oid: int, batch: Batch, new: NewOutcome) -> Batch:
    """A handler's batch, with the outcome of what it does. Raises `CorruptRow` for an object that is not there."""
    place = await ctx.store.get(ObjectPlace, (oid,))
    if place is None:
        raise CorruptRow(f"there is no object {oid}, whose outcome {new} would be")
    queued = queue_outcome(await ctx.store.get(Backlog, (oid,)), place, new, ctx.now_ms)
    return batch.plus(queued.preconditions, queued.writes)


def acknowledge(
    oid: int, delivered: Delivered | None, taken: Sequence[OutcomeRow], oldest_left: OutcomeRow | None
) -> Batch:
    """A batch that removes delivered outcomes. `delivered` is the row as read, `oldest_left` the first that stays."""
    old = delivered or Delivered(oid)
    new = Delivered(
        oid,
        old.rows + len(taken),
        old.bytes + sum(row.size for row in taken),
        None if oldest_left is None else oldest_left.created_ms,
    )
    guards: list[Precondition] = [Absent(Delivered.table, (oid,)) if delivered is None else Equals(delivered)]
    writes: list[Write] = [Put(new)]
    for row in taken:
        guards.append(Present(row.table, row.key()))
        writes.append(Delete(row.table, row.key()))
    return Batch(tuple(guards), tuple(writes))


def close_backlog(backlog: Backlog, delivered: Delivered | None) -> Batch:
    """A batch that removes what counts, once nothing waits. An outcome that is queued meanwhile makes it fail."""
    writes = [Delete(backlog.table, backlog.key())]
    if delivered is None:
        return Batch((Equals(backlog),), tuple(writes))
    return Batch((Equals(backlog), Equals(delivered)), (*writes, Delete(delivered.table, delivered.key())))


def _timer(oid: int, due_ms: int) -> TimerRow:
    kind = TimerKind.OUTCOME_DELIVERY
    return TimerRow(lane_of(kind), due_ms, int(kind), owned_ref(oid), 0, due_ms)
