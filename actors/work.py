"""What a turn is run for: a call, or a timer. Each knows what its end adds to the turn's write set."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgpack

from actors import pickled
from actors.codec import decode, encode
from actors.durable_object import MethodInfo
from actors.errors import UnstorableValue, ValueTooLarge
from actors.message_ids import Caller, MessageMark, read_mark
from actors.messages import OK, OK_PICKLED, PICKLED, RAISED, REFUSED
from actors.wire_errors import encode_error
from drivers.tables import CLAIMS, INTENTS, Op
from drivers.write_set import InboxEntry

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.turn import Turn

__all__ = ["MAY_PICKLE", "REPLY_LOST", "CallWork", "Reply", "Work", "call_fingerprint", "comparable_args", "raised"]

#: (status, payload)
Reply = tuple[int, bytes]


class Target(Protocol):
    """Where a reply goes."""

    def __call__(self, status: int, payload: bytes) -> None: ...

    def turn_away(self, slot: int) -> None:
        """The call was not run here, and will not be."""
        ...


_LOST_REPLY = b""
REPLY_LOST = 255  #: status of a recorded outcome whose reply was too large to keep

#: A flag of work, never on the wire: whoever made the call can be answered with a pickle.
MAY_PICKLE: Final = 1 << 8


def call_fingerprint(method: str, args: bytes) -> bytes:
    """Tells calls with one id and different arguments apart."""
    return hashlib.blake2b(args, digest_size=8, key=method.encode()[:64]).digest()


def comparable_args(args: bytes, flags: int, is_nested: bool) -> bytes:
    """The part of a call's arguments that must be the same whenever its id comes again.

    Pickles of equal values can differ from one process to the next, so those of a turn that is run again prove nothing.
    Other callers send the very bytes again.
    """
    return b"" if is_nested and flags & PICKLED else args


class Work:
    """Common to calls and timers. One is made for each, so it has slots and nothing that few need is made early."""

    __slots__ = (
        "answers",
        "attempt",
        "began_ms",
        "chain",
        "claimed",
        "host",
        "method",
        "resumed",
        "settled",
        "suspected",
        "turn_id",
    )

    def __init__(self, host: ObjectHost, method: MethodInfo, turn_id: bytes) -> None:
        self.host = host
        self.method = method
        self.turn_id = turn_id
        #: objects that wait for this turn, outermost first
        self.chain: tuple[tuple[str, str], ...] = ()
        self.attempt = 1
        #: when the turn first began, for turns that are run again
        self.began_ms: int | None = None
        #: what nobody else has a record of, by the id of what was asked: refused nested calls, the coordinator's
        #: answers. A re-run meets the same.
        self.answers: dict[bytes, bytes] | None = None
        #: a durable claim exists and must be deleted with the outcome
        self.claimed = False
        #: the turn's intent is on disk already: it is being run again after a crash
        self.resumed = False
        #: it ran when its process died, so it runs alone first
        self.suspected = False
        #: told once when the outcome is durable, or was refused
        self.settled: list[Callable[[], None]] | None = None

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call back once, when the outcome is durable or was refused."""
        if self.settled is None:
            self.settled = []
        self.settled.append(callback)

    def pack_intent(self, turn: Turn) -> bytes:
        """Everything that is needed to run the turn again without whoever asked for it."""
        raise NotImplementedError  # each kind of work has its own

    def settle(self) -> None:
        callbacks, self.settled = self.settled, None
        for callback in callbacks or ():
            callback()

    def closing_ops(self, turn: Turn) -> list[Op]:
        """Rows of the runtime's own that end with the turn: its intent and its claim."""
        ops: list[Op] = []
        if turn.recorded:
            ops.append((INTENTS, (self.host.id.type_name, self.host.id.key), None))
        if self.claimed:
            ops.append((CLAIMS, (self.turn_id,), None))
        return ops


class CallWork(Work):
    """One call of a method, from outside or from another object's turn."""

    __slots__ = ("args", "caller", "counted", "deadline_ns", "flags", "is_repeat", "message", "targets")

    def __init__(
        self, host: ObjectHost, method: MethodInfo, call_id: bytes, args: bytes, flags: int = 0, deadline_ns: int = 0
    ) -> None:
        super().__init__(host, method, call_id)
        self.args = args
        self.flags = flags
        #: on the partition's monotonic clock; 0: none
        self.deadline_ns = deadline_ns
        #: (type, key, turn id) of the turn that made the call; None: it came from outside
        self.caller: Caller | None = None
        #: which message of its caller it is; None: it is a call
        self.message: MessageMark | None = None
        self.is_repeat = False
        #: counts against the bound on calls from outside
        self.counted = False
        #: everyone who waits for the reply
        self.targets: list[Target] = []

    def made_by(self, caller: Caller | None) -> None:
        """Say who made the call, or sent the message."""
        self.caller = caller
        self.message = None if caller is None else read_mark(caller[2])

    @property
    def is_outside(self) -> bool:
        return self.caller is None

    @property
    def is_of_turn(self) -> bool:
        """Whether a turn waits for it."""
        return self.caller is not None and self.message is None

    @property
    def title(self) -> str:
        """What is called, for messages."""
        return f"{self.host.id.type_name}.{self.method.name}"

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        if self.flags & PICKLED:
            args, kwargs = pickled.load(self.args, f"the arguments of {self.title}")
        else:
            args, kwargs = decode(self.args)
        return args, kwargs

    def encode_result(self, result: Any, max_bytes: int) -> Reply:
        """The reply. Raises `UnstorableValue` or `ValueTooLarge` when the result can't travel."""
        try:
            payload = encode(result)
        except UnstorableValue as refusal:
            if not self.flags & MAY_PICKLE:
                raise UnstorableValue(f"the reply of {self.title} can't travel: {refusal}") from refusal
            return OK_PICKLED, pickled.dump(result, f"the reply of {self.title}", max_bytes, refusal)
        if len(payload) > max_bytes:
            raise ValueTooLarge(
                f"the reply of {self.title} takes {len(payload):,} bytes (limit {max_bytes:,}): return less, in pages"
            )
        return OK, payload

    def inbox_entry(self, reply: Reply, max_bytes: int) -> InboxEntry:
        """What a repeat of this call is answered with."""
        status, payload = reply
        if self.is_outside and len(payload) > max_bytes:
            status, payload = REPLY_LOST, _LOST_REPLY
        return InboxEntry(
            self.turn_id,
            self.host.id.type_name,
            self.host.id.key,
            call_fingerprint(self.method.name, comparable_args(self.args, self.flags, not self.is_outside)),
            status,
            payload,
            self.caller,
        )

    def answer(self, status: int, payload: bytes) -> None:
        """Tell everyone who waits for this call."""
        targets, self.targets = self.targets, []
        for target in targets:
            target(status, payload)
        self.settle()

    def pack_intent(self, turn: Turn) -> bytes:
        packed: bytes = msgpack.packb(
            [
                "call",
                self.method.name,
                self.args,
                self.flags,
                turn.now_ms,
                turn.attempt,
                [list(link) for link in self.chain],
                list(self.caller) if self.caller else None,
                self.answers,
            ]
        )
        return packed

    def refuse(self, error: BaseException) -> None:
        """Answer with an error of the platform: the call was not run, or nothing of it was applied."""
        self.answer(REFUSED, encode_error(error))


def raised(error: BaseException) -> Reply:
    """The reply for an exception of the turn's code."""
    return RAISED, encode_error(error)
