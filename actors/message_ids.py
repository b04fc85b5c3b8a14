"""How messages between objects are named on the wire, beside the ids of calls.

A message travels as a call whose caller is its sender, with a mark where other callers have a turn's id.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

__all__ = ["Caller", "MessageMark", "message_call_id", "pair_question", "read_mark", "read_pair_question"]

#: (type, key, turn id or mark)
Caller = tuple[str, str, bytes]

_CALL_TAG: Final = b"m"
_MARK_TAG: Final = b"n"
_PAIR_TAG: Final = b"p"
_NUMBER_BYTES: Final = 8
_ATTEMPT_BYTES: Final = 4
_MARK_BYTES: Final = 1 + _NUMBER_BYTES + _ATTEMPT_BYTES + _NUMBER_BYTES


def message_call_id(pair: bytes, number: int, attempt: int) -> bytes:
    """Id of one try of a message: the same whenever it is sent again, and another after its run has raised."""
    hasher = hashlib.blake2b(pair, digest_size=16)
    hasher.update(number.to_bytes(_NUMBER_BYTES, "big") + attempt.to_bytes(_ATTEMPT_BYTES, "big"))
    return _CALL_TAG + hasher.digest()


@dataclass(frozen=True)
class MessageMark:
    """Which message of its sender this is. It is run once `predecessor` has been applied; 0: nothing is before it."""

    number: int
    attempt: int
    predecessor: int

    def to_bytes(self) -> bytes:
        return (
            _MARK_TAG
            + self.number.to_bytes(_NUMBER_BYTES, "big")
            + self.attempt.to_bytes(_ATTEMPT_BYTES, "big")
            + self.predecessor.to_bytes(_NUMBER_BYTES, "big")
        )


def read_mark(caller_id: bytes) -> MessageMark | None:
    """The mark, or None for the id of a turn."""
    if caller_id[:1] != _MARK_TAG or len(caller_id) != _MARK_BYTES:
        return None
    attempt_at, predecessor_at = 1 + _NUMBER_BYTES, 1 + _NUMBER_BYTES + _ATTEMPT_BYTES
    return MessageMark(
        int.from_bytes(caller_id[1:attempt_at], "big"),
        int.from_bytes(caller_id[attempt_at:predecessor_at], "big"),
        int.from_bytes(caller_id[predecessor_at:], "big"),
    )


def pair_question(pair: bytes) -> bytes:
    """Stands for a pair where its source's partition is asked whether it has messages left."""
    return _PAIR_TAG + pair


def read_pair_question(caller_id: bytes) -> bytes | None:
    """The pair that is asked about, or None."""
    return caller_id[1:] if caller_id[:1] == _PAIR_TAG else None
