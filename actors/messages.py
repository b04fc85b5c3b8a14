"""The messages between a process and a partition: msgpack arrays, one a frame.

Client to partition::

    [1, acks, calls]           acks: flat inclusive ranges [lo, hi, ...] of seqs that need no reply any more
        call = [seq, type_name, key, method, args, flags, timeout_ms, extra]
        extra = None | [call_id, chain, caller]    chain = [[type, key], ...], caller = [type, key, turn_id] | None
    [2, classes]               class = [type_name, module, qualname, shipped | None, digest | None]
    [3, call_ids]              release of inside call ids: the outcome of the calling turn is durable
    [4, seq, callers]          sweep question, caller = [type, key, turn_id]
    [5, seq, op, args]         admin request

Partition to client::

    [101, replies]             reply = [seq, status, payload]; answers calls and admin requests
    [104, seq, unfinished]     one bool for each caller asked about

Calls, questions and admin requests share one numbering per session, which starts at 1 and has no gaps. Decoding
gives tuples and checks every type; whatever does not fit raises `MalformedFrame`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgpack

from actors.address import ClassRef
from actors.channel import SESSION_BYTES
from actors.errors import MalformedFrame

__all__ = [
    "ADMIN",
    "ANSWER",
    "CALLS",
    "CLASSES",
    "DELETE",
    "OK",
    "OK_PICKLED",
    "PICKLED",
    "QUESTION",
    "RAISED",
    "REFUSED",
    "RELEASE",
    "REPEAT",
    "REPLIES",
    "RESUMED",
    "STALE",
    "Admin",
    "Answer",
    "CallExtra",
    "CallRow",
    "Calls",
    "Classes",
    "ClientMessage",
    "Question",
    "Release",
    "Replies",
    "ReplyRow",
    "ServerMessage",
    "decode_from_client",
    "decode_from_partition",
    "encode_admin",
    "encode_answer",
    "encode_calls",
    "encode_classes",
    "encode_question",
    "encode_release",
    "encode_replies",
    "is_keyed",
    "keyed_call_id",
    "lane_session",
    "outside_call_id",
    "pickled_session",
]

# Message numbers.
CALLS: Final = 1
CLASSES: Final = 2
RELEASE: Final = 3
QUESTION: Final = 4
ADMIN: Final = 5
REPLIES: Final = 101
ANSWER: Final = 104

# Reply statuses.
OK: Final = 0  # payload: the value, by the codec
RAISED: Final = 1  # payload: the application's exception
REFUSED: Final = 2  # payload: an error of the platform
STALE: Final = 3  # not the owner of the slot; nothing ran; payload empty
OK_PICKLED: Final = 4  # payload: the value as a pickle, only on channels with `trusted_pickle`

# Call flags.
REPEAT: Final = 1  # was sent before, on another connection or to another partition
PICKLED: Final = 2  # args are a pickle of (args, kwargs), only on channels with `trusted_pickle`
RESUMED: Final = 4
"""The client has every answer to what it sent of this slot on this connection, and starts over with this call.

After a `STALE` answer a partition answers `STALE` to everything of that slot on that connection until a call with
this flag comes. Without it a partition that becomes the owner between two calls that were sent together would run
the second before the first.
"""

#: In the place of a method: the object is deleted. The name of no method that a class can have.
DELETE: Final = "(delete)"

_STATUSES = frozenset({OK, RAISED, REFUSED, STALE, OK_PICKLED})
_KEYED = b"k"
_OUTSIDE = b"o"

#: (call id or None, chain of (type, key), caller (type, key, turn id) or None)
CallExtra = tuple[bytes | None, tuple[tuple[str, str], ...], tuple[str, str, bytes] | None]
#: (seq, type name, key, method, args, flags, remaining timeout in ms, extra)
CallRow = tuple[int, str, str, str, bytes, int, int, CallExtra | None]
#: (seq, status, payload)
ReplyRow = tuple[int, int, bytes]


class Calls(NamedTuple):
    """Calls, and acknowledgements of replies."""

    acks: tuple[int, ...]
    calls: tuple[CallRow, ...]


class Classes(NamedTuple):
    """Classes that the calls after this will name."""

    classes: tuple[ClassRef, ...]


class Release(NamedTuple):
    """Inside call ids whose replies nobody will ask for again."""

    call_ids: tuple[bytes, ...]


class Question(NamedTuple):
    """Which of these callers (type, key, turn id) are not finished yet?"""

    seq: int
    callers: tuple[tuple[str, str, bytes], ...]


class Admin(NamedTuple):
    """A request that is not a call of an object's method; `args` are by the codec."""

    seq: int
    op: str
    args: bytes


class Replies(NamedTuple):
    """Answers to calls and admin requests, in the order in which they became ready."""

    replies: tuple[ReplyRow, ...]


class Answer(NamedTuple):
    """The answer to a question."""

    seq: int
    unfinished: tuple[bool, ...]


ClientMessage = Calls | Classes | Release | Question | Admin
ServerMessage = Replies | Answer


# --- sessions and call ids --------------------------------------------------------------------------


def lane_session(session: bytes, partition: int) -> bytes:
    """The session of one lane: each has its own numbering without gaps, so acknowledgements are few ranges."""
    return blake2b(session + partition.to_bytes(8, "big"), digest_size=SESSION_BYTES).digest()


def pickled_session(session: bytes) -> bytes:
    """What the sessions of the lanes for pickled calls are derived from."""
    return blake2b(b"pickled" + session, digest_size=SESSION_BYTES).digest()


def outside_call_id(session: bytes, seq: int) -> bytes:
    """The id of call `seq` of a session. Both sides derive it, so it travels only when a call changes sessions."""
    return _OUTSIDE + session + seq.to_bytes(8, "big")


def keyed_call_id(type_name: str, key: str, method: str, idempotency_key: str) -> bytes:
    """The id of a call that its caller named with an idempotency key: the same for every process and session."""
    text = "\0".join((type_name, key, method, idempotency_key))
    return _KEYED + blake2b(text.encode(), digest_size=16).digest()


def is_keyed(call_id: bytes) -> bool:
    """Whether the id comes from an idempotency key.

    Such a call comes from outside, so it waits like all those. Its reply must outlive its acknowledgement (another
    process may make the call again): it is forgotten by age only.
    """
    return call_id[:1] == _KEYED


# --- encoding ---------------------------------------------------------------------------------------


def encode_calls(acks: Sequence[int], calls: Sequence[Any]) -> bytes:
    """`acks`: flat inclusive ranges. `calls`: rows of eight, lists or tuples."""
    return _pack((CALLS, acks, calls))


def encode_classes(refs: Sequence[ClassRef]) -> bytes:
    """Tell a partition where to find classes."""
    rows = [(ref.type_name, ref.module, ref.qualname, ref.shipped, ref.digest) for ref in refs]
    return _pack((CLASSES, rows))


def encode_release(call_ids: Sequence[bytes]) -> bytes:
    """Release inside call ids."""
    return _pack((RELEASE, call_ids))


def encode_question(seq: int, callers: Sequence[Sequence[Any]]) -> bytes:
    """Ask which callers are unfinished."""
    return _pack((QUESTION, seq, callers))


def encode_admin(seq: int, op: str, args: bytes) -> bytes:
    """Make an admin request."""
    return _pack((ADMIN, seq, op, args))


def encode_replies(replies: Sequence[Any]) -> bytes:
    """`replies`: rows of three, lists or tuples."""
    return _pack((REPLIES, replies))


def encode_answer(seq: int, unfinished: Sequence[bool]) -> bytes:
    """Answer a question."""
    return _pack((ANSWER, seq, unfinished))


def _pack(message: tuple[Any, ...]) -> bytes:
    frame: bytes = msgpack.packb(message, use_bin_type=True)
    return frame


# --- decoding ---------------------------------------------------------------------------------------


def decode_from_client(frame: bytes) -> ClientMessage:
    """The message in a frame that a client sent. Raises `MalformedFrame`."""
    message = _unpack(frame)
    try:
        number = message[0]
        if number == CALLS:
            _, acks, calls = message
            _check_ranges(acks)
            for call in calls:
                _check_call(call)
            return Calls(acks, calls)
        if number == CLASSES:
            return Classes(tuple(_class_ref(row) for row in message[1]))
        if number == RELEASE:
            _, call_ids = message
            _check_all(call_ids, bytes)
            return Release(call_ids)
        if number == QUESTION:
            _, seq, callers = message
            _check_seq(seq)
            for caller in callers:
                _check_row(caller, (str, str, bytes))
            return Question(seq, callers)
        if number == ADMIN:
            _, seq, op, args = message
            _check_seq(seq)
            _check_row((op, args), (str, bytes))
            return Admin(seq, op, args)
    except (TypeError, ValueError, LookupError) as error:
        raise MalformedFrame(f"a frame of {len(frame)} bytes is no message of a client: {error}") from error
    raise MalformedFrame(f"message number {number!r} is none that a client sends")


def decode_from_partition(frame: bytes) -> ServerMessage:
    """The message in a frame that a partition sent. Raises `MalformedFrame`."""
    message = _unpack(frame)
    try:
        number = message[0]
        if number == REPLIES:
            _, replies = message
            for seq, status, payload in replies:
                if type(seq) is not int or status not in _STATUSES or type(payload) is not bytes:
                    raise ValueError(f"a reply is [seq, status, payload], not {_shown((seq, status, payload))}")
            return Replies(replies)
        if number == ANSWER:
            _, seq, unfinished = message
            _check_seq(seq)
            _check_all(unfinished, bool)
            return Answer(seq, unfinished)
    except (TypeError, ValueError, LookupError) as error:
        raise MalformedFrame(f"a frame of {len(frame)} bytes is no message of a partition: {error}") from error
    raise MalformedFrame(f"message number {number!r} is none that a partition sends")


def _unpack(frame: bytes) -> tuple[Any, ...]:
    try:
        message = msgpack.unpackb(frame, raw=False, use_list=False, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException) as error:
        raise MalformedFrame(f"a frame of {len(frame)} bytes is not msgpack: {error!r}") from error
    if type(message) is not tuple or not message:
        raise MalformedFrame(f"a message is an array that begins with its number, not {_shown(message)}")
    return message


def _check_call(call: Any) -> None:
    seq, type_name, key, method, args, flags, timeout_ms, extra = call
    if (
        type(seq) is not int
        or seq < 1
        or type(type_name) is not str
        or type(key) is not str
        or type(method) is not str
        or type(args) is not bytes
        or type(flags) is not int
        or type(timeout_ms) is not int
    ):
        raise ValueError(f"a call with a field of a wrong type: {_shown(call)}")
    if extra is None:
        return
    call_id, chain, caller = extra
    if call_id is not None and type(call_id) is not bytes:
        raise ValueError(f"a call id is bytes, not {_shown(call_id)}")
    for link in chain:
        _check_row(link, (str, str))
    if caller is not None:
        _check_row(caller, (str, str, bytes))


def _class_ref(row: Any) -> ClassRef:
    type_name, module, qualname, shipped, digest = row
    _check_row((type_name, module, qualname), (str, str, str))
    if shipped is not None and type(shipped) is not bytes:
        raise ValueError(f"a shipped class is bytes, not {_shown(shipped)}")
    if digest is not None and type(digest) is not bytes:
        raise ValueError(f"a digest is bytes, not {_shown(digest)}")
    return ClassRef(type_name, module, qualname, shipped, digest=digest)


def _check_ranges(flat: Any) -> None:
    _check_all(flat, int)
    if len(flat) % 2:
        raise ValueError(f"ranges come in pairs, these are {len(flat)} numbers")
    for low, high in zip(flat[::2], flat[1::2], strict=True):
        if not 1 <= low <= high:
            raise ValueError(f"not a range: {low} to {high}")


def _check_seq(seq: Any) -> None:
    if type(seq) is not int or seq < 1:
        raise ValueError(f"a seq is a whole number of at least 1, not {_shown(seq)}")


def _check_all(items: Any, wanted: type) -> None:
    if type(items) is not tuple:
        raise ValueError(f"an array is wanted, not {_shown(items)}")
    for item in items:
        if type(item) is not wanted:
            raise ValueError(f"an array of {wanted.__name__} holds {_shown(item)}")


def _check_row(row: Any, wanted: tuple[type, ...]) -> None:
    if type(row) is not tuple or tuple(type(field) for field in row) != wanted:
        raise ValueError(f"wanted is [{', '.join(t.__name__ for t in wanted)}], not {_shown(row)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
