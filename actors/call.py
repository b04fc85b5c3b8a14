"""One call that a process has made and has not been answered yet, and how it ends."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actors import pickled
from actors.address import ClassRef
from actors.codec import decode
from actors.errors import (
    CallExpired,
    CallOutcomeUnknown,
    MalformedFrame,
    RemoteError,
    ValueTypeUnavailable,
)
from actors.messages import ADMIN, CALLS, OK, OK_PICKLED, RAISED, REFUSED, outside_call_id
from actors.wire_errors import decode_error

if TYPE_CHECKING:
    from actors.lane import Lane

__all__ = ["IN_FLIGHT", "LOST", "NO_SLOT", "UNSENT", "Call", "fail", "likeness"]

#: Slot of what is addressed to a partition rather than to an object.
NO_SLOT: Final = -1

# What is known of whether a call may have run. Bits: a call that was lost once stays in doubt.
IN_FLIGHT: Final = 1  # sent, and not answered by Stale, which says that nothing ran
LOST: Final = 2  # was in flight when a connection broke

#: Seq of a call that this session has not sent.
UNSENT: Final = 0


class Call:
    """One unanswered call, question or admin request.

    `wire` is the row that goes into a frame, built once. Its first field is the seq in the session of the lane
    that sent it, 0 until then. `deadline` is on the client's clock, in seconds. `urgent` calls belong to a turn
    and do not wait for the window. `raw` ones get (partition, status, payload) instead of a decoded value.
    """

    __slots__ = (
        "deadline",
        "doubt",
        "endings",
        "future",
        "kind",
        "raw",
        "ref",
        "sent",
        "slot",
        "stales",
        "urgent",
        "wire",
    )

    def __init__(
        self,
        kind: int,
        wire: list[Any],
        future: asyncio.Future[Any],
        deadline: float,
        slot: int,
        ref: ClassRef | None,
        raw: bool,
        urgent: bool,
    ) -> None:
        self.kind = kind
        self.wire = wire
        self.future = future
        self.deadline = deadline
        self.slot = slot
        self.ref = ref
        self.raw = raw
        self.urgent = urgent
        self.sent = False
        self.doubt = 0
        #: How often it was answered Stale.
        self.stales = 0
        #: What is to be done when it has ended: it was answered, or is not sent (again) since its caller gave it up.
        self.endings: list[Callable[[], None]] | None = None

    @property
    def seq(self) -> int:
        """Its number in the session that sent it last, or 0."""
        return int(self.wire[0])

    def leave(self, lane: Lane) -> None:
        """Give up the seq in this lane's session for one in another, but keep the call's id."""
        seq = self.seq
        if seq == UNSENT:
            return
        # The lane goes on holding the seq. It is acknowledged only when the call has ended: until then its id may come
        # back to that partition, which must not have forgotten it.
        self.when_ended(partial(lane.settle, seq))
        self.wire[0] = UNSENT
        if self.kind == CALLS:
            extra = self.wire[7]
            if extra is None:
                self.wire[7] = (outside_call_id(lane.session, seq), (), None)

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call back once, when the call has ended."""
        if self.endings is None:
            self.endings = []
        self.endings.append(callback)

    def ended(self) -> None:
        """The call has ended: tell everyone who waits for that."""
        endings, self.endings = self.endings, None
        for callback in endings or ():
            callback()

    def answer(self, partition: int, status: int, payload: bytes, trusted_pickle: bool) -> None:
        """Give the caller what the partition said, unless it has given up. `status` is not STALE."""
        future = self.future
        if future.done():
            return
        if status == OK_PICKLED and not trusted_pickle:
            fail(future, MalformedFrame(f"partition {partition} sent a pickle over a link, which carries none"))
            return
        if self.raw:
            future.set_result((partition, status, payload))
            return
        try:
            if status == OK:
                value = self._decoded(payload)
            elif status in (RAISED, REFUSED):
                fail(future, decode_error(payload))
                return
            else:
                assert status == OK_PICKLED
                value = pickled.load(payload, f"the reply of {self.title}")
        except Exception as error:  # whatever decoding raised is what the caller must see
            fail(future, error)
        else:
            future.set_result(value)

    def _decoded(self, payload: bytes) -> Any:
        try:
            return decode(payload)
        except ValueTypeUnavailable:
            if self.ref is None:
                raise
            # A stub may arrive in a process that has not imported the class's module yet.
            return decode(payload, modules=(self.ref.module,))

    def expire(self, partition: int, last_error: BaseException | None) -> None:
        """The deadline has passed: tell the caller, and whether the call may have run."""
        if self.future.done():
            return
        because = f"; the last connection error was {last_error!r}" if last_error is not None else ""
        if self.doubt:
            text = f"{self.title} got no answer from partition {partition} before its deadline: it may have run, or"
            error: Exception = CallOutcomeUnknown(f"{text} may still run{because}")
        else:
            error = CallExpired(
                f"{self.title} could not be sent to partition {partition} before its deadline; nothing was run{because}"
            )
        error.__cause__ = last_error
        self.future.set_exception(error)

    @property
    def title(self) -> str:
        """What was called, for messages."""
        if self.kind == CALLS:
            return f"{self.wire[1]}({self.wire[2]!r}).{self.wire[3]}"
        return f"admin request {self.wire[1]!r}" if self.kind == ADMIN else "a question"

    def __repr__(self) -> str:
        return f"<Call {self.title} seq={self.seq}>"


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """Set the exception of a future unless it is done; also one that asyncio refuses to set."""
    if future.done():
        return
    if isinstance(error, StopIteration | asyncio.CancelledError):
        # A coroutine can't raise the first; the second would look as if the caller had been cancelled.
        name = type(error).__name__
        error = RemoteError(f"the method raised {name}: {error}", type_name=name)
    future.set_exception(error)


def likeness(error: Exception) -> Exception:
    """The same error for one more caller: raising one exception in many tasks would chain up their tracebacks."""
    try:
        twin = copy.copy(error)
    except Exception:  # a class whose arguments are not those of its __init__
        return error
    twin.__cause__ = error.__cause__
    return twin.with_traceback(None)
