"""Rows of messages between objects: those on their way, those that wait for their time, and numbers on both sides."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import msgpack

from timers.backoff import MESSAGE_RETRY, RetryPolicy
from timers.errors import CorruptRow, InvalidSchedule
from timers.rows import slot_of_ref, slot_ref

__all__ = [
    "DelayedRow",
    "OutboxRow",
    "ReceivedRow",
    "SlotNumber",
    "message_ref",
    "pack_policy",
    "pair_id",
    "pair_ref",
    "read_message_ref",
    "read_pair_ref",
    "read_policy",
]

_NUMBER_BYTES: Final = 8
_PAIR_BYTES: Final = 16


def pair_id(source_class: str, source_key: str, target_class: str, target_key: str) -> bytes:
    """Names the pair (source object, target object) for ever. Stored: it never changes."""
    text = "\0".join((source_class, source_key, target_class, target_key))
    return hashlib.blake2b(text.encode(), digest_size=_PAIR_BYTES).digest()


def message_ref(slot: int, number: int) -> bytes:
    """How a timer refers to a delayed message."""
    return slot_ref(slot, number.to_bytes(_NUMBER_BYTES, "big"))


def read_message_ref(ref: bytes) -> tuple[int, int]:
    """(slot, number) of such a reference. Raises `CorruptRow`."""
    found = slot_of_ref(ref)
    if found is None or len(found[1]) != _NUMBER_BYTES:
        raise CorruptRow(f"{ref!r} does not refer to a delayed message")
    return found[0], int.from_bytes(found[1], "big")


def pair_ref(slot: int, pair: bytes) -> bytes:
    """How a timer refers to the number that was applied last of a pair."""
    return slot_ref(slot, pair)


def read_pair_ref(ref: bytes) -> tuple[int, bytes]:
    """(slot, pair) of such a reference. Raises `CorruptRow`."""
    found = slot_of_ref(ref)
    if found is None or len(found[1]) != _PAIR_BYTES:
        raise CorruptRow(f"{ref!r} does not refer to a pair of objects")
    return found


def pack_policy(policy: RetryPolicy) -> bytes:
    """The stored form; empty for the default."""
    if policy == MESSAGE_RETRY:
        return b""
    packed: bytes = msgpack.packb([policy.max_attempts, policy.base_ms, policy.factor, policy.cap_ms, policy.jitter])
    return packed


def read_policy(packed: bytes) -> RetryPolicy:
    """Read the stored form. Raises `CorruptRow`."""
    if not packed:
        return MESSAGE_RETRY
    try:
        return RetryPolicy(*msgpack.unpackb(packed))
    except (ValueError, TypeError, InvalidSchedule, msgpack.exceptions.UnpackException) as error:
        raise CorruptRow(f"a message's retry policy can't be read: {error}") from error


@dataclass(frozen=True)
class OutboxRow:
    """One message on its way. `slot` is its sender's; `number` counts the messages of that slot and is never reused.

    Keyed by slot and not by object: so one order holds for a sender that is deleted and made again, and everything
    moves along with its slot. `attempt` counts the runs that raised, `next_ms` (epoch ms) is when it is tried next.
    """

    table: ClassVar[str] = "outbox"

    slot: int
    number: int
    source_class: str
    source_key: str
    target_class: str
    target_key: str
    method: str
    args: bytes
    retry: bytes
    created_ms: int
    attempt: int = 0
    next_ms: int = 0

    def key(self) -> tuple[int, int]:
        return (self.slot, self.number)

    def values(self) -> tuple[Any, ...]:
        return (
            self.source_class,
            self.source_key,
            self.target_class,
            self.target_key,
            self.method,
            self.args,
            self.retry,
            self.created_ms,
            self.attempt,
            self.next_ms,
        )

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> OutboxRow:
        return cls(*key, *values)

    @property
    def pair(self) -> bytes:
        return pair_id(self.source_class, self.source_key, self.target_class, self.target_key)

    @property
    def title(self) -> str:
        """What is called, for messages to people."""
        return f"{self.target_class}/{self.target_key}.{self.method}"

    def after_raise(self, now_ms: int) -> OutboxRow | None:
        """The row after one more run that raised, or None when its tries are used up."""
        policy = read_policy(self.retry)
        attempt = self.attempt + 1
        if policy.is_exhausted(attempt):
            return None
        delay_ms = policy.delay_ms(attempt, message_ref(self.slot, self.number))
        return replace(self, attempt=attempt, next_ms=now_ms + delay_ms)


@dataclass(frozen=True)
class DelayedRow:
    """A message that waits for its time. `ident` comes from the same counter as the numbers, and is not its number:
    that is given when it comes due, so that it stands where messages of that moment stand."""

    table: ClassVar[str] = "delayed"

    slot: int
    ident: int
    source_class: str
    source_key: str
    target_class: str
    target_key: str
    method: str
    args: bytes
    retry: bytes
    due_ms: int

    def key(self) -> tuple[int, int]:
        return (self.slot, self.ident)

    def values(self) -> tuple[Any, ...]:
        return (
            self.source_class,
            self.source_key,
            self.target_class,
            self.target_key,
            self.method,
            self.args,
            self.retry,
            self.due_ms,
        )

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> DelayedRow:
        return cls(*key, *values)

    def departed(self, number: int, now_ms: int) -> OutboxRow:
        """The message on its way."""
        return OutboxRow(
            self.slot,
            number,
            self.source_class,
            self.source_key,
            self.target_class,
            self.target_key,
            self.method,
            self.args,
            self.retry,
            now_ms,
        )


@dataclass(frozen=True)
class SlotNumber:
    """The last number that was given to a message of a slot. Outlives its objects, so no number comes twice."""

    table: ClassVar[str] = "slot_numbers"

    slot: int
    last: int

    def key(self) -> tuple[int]:
        return (self.slot,)

    def values(self) -> tuple[int]:
        return (self.last,)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> SlotNumber:
        return cls(*key, *values)


@dataclass(frozen=True)
class ReceivedRow:
    """The highest number that an object has applied of one sender. `slot` is the receiver's. Keyed by the names of
    both, so it holds for a receiver that is deleted and made again, and needs no receiver that has written anything."""

    table: ClassVar[str] = "received"

    slot: int
    pair: bytes
    number: int
    source_class: str
    source_key: str
    applied_ms: int

    def key(self) -> tuple[int, bytes]:
        return (self.slot, self.pair)

    def values(self) -> tuple[Any, ...]:
        return (self.number, self.source_class, self.source_key, self.applied_ms)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> ReceivedRow:
        return cls(*key, *values)
