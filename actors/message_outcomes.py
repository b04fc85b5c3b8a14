"""What an answer to a message means, and how a message is kept that will not be tried again."""

from __future__ import annotations

import asyncio
import enum
import logging
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from actors.errors import (
    CallDiverged,
    ClassNotImportable,
    CorruptRow,
    CorruptValue,
    DuplicateTypeName,
    InvalidArguments,
    InvalidClassOption,
    InvalidKey,
    InvalidOption,
    MethodNotCallable,
    NoSuchMethod,
    OutOfOrder,
    PoisonCall,
    ReservedName,
    UnknownClass,
    ValueTooLarge,
)
from actors.logs import log_event
from actors.messages import OK, OK_PICKLED, RAISED
from actors.timer_work import DEAD_LETTER_CHARACTERS
from actors.wire_errors import decode_error
from drivers.tables import DEAD_LETTERS, Op
from timers.message_rows import OutboxRow
from timers.registry import TimerKind

__all__ = ["NOWHERE", "Outcome", "Verdict", "after_raise", "buried_op", "dead_message", "judge"]

#: Nothing was run, and nothing would be the next time: these use up a try as an exception of the method does.
_DEFINITE: Final = (
    CallDiverged,
    ClassNotImportable,
    DuplicateTypeName,
    InvalidArguments,
    InvalidClassOption,
    InvalidKey,
    InvalidOption,
    MethodNotCallable,
    NoSuchMethod,
    ReservedName,
    UnknownClass,
    ValueTooLarge,
)
#: Partition of a message that was never sent.
NOWHERE: Final = -1


class Verdict(enum.Enum):
    """What became of one try of a message."""

    APPLIED = "applied"
    #: its method raised, or it can't be run: one try is used up
    RAISED = "raised"
    #: it ended its process too often
    POISONED = "poisoned"
    #: its predecessor was not applied
    OUT_OF_ORDER = "out of order"
    #: it was not run, or nobody knows: no try is used up
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Outcome:
    """A verdict, who gave it, and the error."""

    verdict: Verdict
    answered_by: int
    error: BaseException | None = None

    @property
    def text(self) -> str:
        """The error for a dead letter: with its traceback where it was raised, if there is one."""
        error = self.error
        remote: str = getattr(error, "remote_traceback", "")
        return remote if remote else f"{type(error).__name__}: {error}"


def judge(future: asyncio.Future[Any]) -> Outcome:
    """What the answer says. Only what is certain counts as raised, so a dead letter was certainly not applied."""
    error = future.exception()
    if error is not None:
        return Outcome(Verdict.RAISED if isinstance(error, _DEFINITE) else Verdict.NOT_RUN, NOWHERE, error)
    number, status, payload = future.result()
    if status in (OK, OK_PICKLED):
        return Outcome(Verdict.APPLIED, number)
    error = _error(payload)
    if status == RAISED:
        return Outcome(Verdict.RAISED, number, error)
    if isinstance(error, PoisonCall):
        return Outcome(Verdict.POISONED, number, error)
    if isinstance(error, OutOfOrder):
        return Outcome(Verdict.OUT_OF_ORDER, number, error)
    return Outcome(Verdict.RAISED if isinstance(error, _DEFINITE) else Verdict.NOT_RUN, number, error)


def _error(payload: bytes) -> Exception:
    try:
        return decode_error(payload)
    except CorruptValue as corrupt:
        return corrupt


def after_raise(row: OutboxRow, now_ms: int) -> OutboxRow | None:
    """The row of the next try, or None when its tries are used up, or nobody can say how many it has."""
    try:
        return row.after_raise(now_ms)
    except CorruptRow as corrupt:
        log_event(logging.ERROR, "message_unusable", f"{row.title}: {corrupt}", number=row.number)
        return None


def buried_op(number: int, row: OutboxRow, error: str, now_ms: int, attempts: int, crashes: int) -> Op:
    """The dead letter of a message. It belongs to the sender, which alone may send it again."""
    message = msgpack.packb([row.target_class, row.target_key, row.method, row.args, row.retry])
    values = (
        row.source_class,
        row.source_key,
        int(TimerKind.OUTBOX_RELAY),
        row.title,
        row.created_ms,
        attempts,
        crashes,
        error[-DEAD_LETTER_CHARACTERS:],
        message,
        now_ms,
    )
    return (DEAD_LETTERS, (number,), values)


def dead_message(packed: bytes, slot: int, number: int, source_class: str, source_key: str, now_ms: int) -> OutboxRow:
    """The message of a dead letter as a new one, with all its tries."""
    target_class, target_key, method, args, retry = msgpack.unpackb(packed)
    return OutboxRow(slot, number, source_class, source_key, target_class, target_key, method, args, retry, now_ms)
