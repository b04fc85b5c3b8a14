"""A turn that a timer starts: checked again when it starts, ended by its own commit."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgpack

from actors.codec import decode
from actors.durable_object import MethodInfo
from actors.object_timers import EXHAUSTED_TIMER, TimerInfo, failed_row, shown_name, timer_info
from actors.work import Work
from actors.write_buffer import DirectoryRow
from drivers.tables import DEAD_LETTERS, DIRECTORY, Op
from drivers.write_set import FieldEquals
from timers.registry import TimerKind
from timers.schedule import Advance, TimerSpec, advance

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.turn import Turn

__all__ = ["DEAD_LETTER_CHARACTERS", "TimerWork", "dead_letter_op", "timer_turn_id"]

_GENERATION_COLUMN = 2
#: A dead letter keeps the end of the error, which says what went wrong where.
DEAD_LETTER_CHARACTERS = 4_000


def timer_turn_id(class_name: str, key: str, row: DirectoryRow) -> bytes:
    """Names one try of one occurrence for ever: a re-run by the platform has the same id, a retry has its own."""
    hasher = hashlib.blake2b(f"{class_name}\0{key}\0{row.kind}\0{row.name}".encode(), digest_size=16)
    hasher.update(msgpack.packb([row.generation, row.first_due_ms, row.attempt]))
    return b"t" + hasher.digest()


def dead_letter_op(
    dead_letter_id: int, class_name: str, key: str, row: DirectoryRow, error: str, now_ms: int, attempts: int
) -> Op:
    """The row that keeps a timer whose tries are used up."""
    values = (
        class_name,
        key,
        row.kind,
        shown_name(row.name),
        row.first_due_ms,
        attempts,
        row.crashes,
        error[-DEAD_LETTER_CHARACTERS:],
        row.spec,
        now_ms,
    )
    return (DEAD_LETTERS, (dead_letter_id,), values)


class TimerWork(Work):
    """One try of one occurrence of a timer. Its method is looked up when its turn starts: classes change between
    versions, and rows live longer."""

    __slots__ = ("fired_ms", "row", "spec", "step")

    def __init__(self, host: ObjectHost, row: DirectoryRow) -> None:
        super().__init__(host, _LATE, timer_turn_id(host.id.type_name, host.id.key, row))
        self.row = row
        self.spec = TimerSpec.from_bytes(row.spec)
        self.fired_ms = 0
        self.step: Advance | None = None

    @property
    def is_alarm(self) -> bool:
        return self.row.kind == TimerKind.OBJECT_ALARM

    def begin(self, now_ms: int, misfire_limit: int) -> None:
        """Fix what this run stands for: when it fired, and what comes after it."""
        self.fired_ms = now_ms
        step = advance(self.spec, self.row.first_due_ms, now_ms, misfire_limit)
        # a retry and what a crash cut short always run: the occurrence was begun, so it is not skipped any more
        was_begun = self.row.attempt > 0 or self.resumed
        self.step = replace(step, run=True, missed=step.missed - 1) if was_begun and not step.run else step

    def following(self) -> DirectoryRow | None:
        """The row of the next occurrence, or None when this was the last."""
        assert self.step is not None
        due_ms = self.step.next_due_ms
        if due_ms is None:
            return None
        return replace(
            self.row,
            due_ms=self.spec.wake_ms(due_ms, self.host.timers.seed(self.row.name)),
            first_due_ms=due_ms,
            attempt=0,
            crashes=0,
            missed=0 if self.step.run else self.row.missed + self.step.missed,
        )

    def info(self) -> TimerInfo:
        assert self.step is not None
        return timer_info(self.row, self.spec, self.fired_ms, self.row.missed + self.step.missed)

    def handler_argument(self) -> TimerInfo:
        """What the handler is called with. `on_alarm_exhausted` is told about the alarm, not about its own timer."""
        if self.row.name == EXHAUSTED_TIMER:
            told: TimerInfo = decode(self.spec.payload)
            return told
        return self.info()

    def guards(self) -> list[FieldEquals]:
        """The commit holds only while the timer is the one that fired."""
        return [FieldEquals(DIRECTORY, (self.row.oid, self.row.name), _GENERATION_COLUMN, self.row.generation)]

    def after_failure(self, now_ms: int) -> DirectoryRow | None:
        """The row of the retry, or None when the tries are used up."""
        return failed_row(self.row, self.spec, now_ms, self.turn_id)

    def pack_intent(self, turn: Turn) -> bytes:
        fields = ["timer", self.row.name, self.row.generation, turn.now_ms, turn.attempt, self.answers]
        packed: bytes = msgpack.packb(fields)
        return packed


def _not_yet(*_: Any) -> Any:
    raise AssertionError("a timer's method is looked up when its turn starts")


_LATE = MethodInfo("", _not_yet, _not_yet, False)
