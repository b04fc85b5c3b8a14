"""What is stored of an execution of a durable function: its row, its journal, and the timer that wakes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from actors.object_timers import EXECUTION_TIMER, shown_name
from actors.write_buffer import DirectoryRow
from drivers.tables import EXECUTIONS, JOURNAL
from timers.backoff import RetryPolicy
from timers.registry import TimerKind
from timers.schedule import TimerSpec

__all__ = [
    "ABORTED",
    "ARGUMENTS",
    "BURIED",
    "CANCELED",
    "COMPLETED",
    "DONE",
    "EARLY",
    "EXECUTION_TALLY",
    "FAILED",
    "FAILED_STEP",
    "INTENT",
    "NEXT_ARGUMENTS",
    "OUTCOME",
    "PENDING",
    "PRUNE_TIMER",
    "RESUMABLE",
    "RETRY",
    "RUNNING",
    "STARTED_WITH",
    "STEP_BITS",
    "ExecutionRow",
    "JournalRow",
    "buried",
    "execution_id_of",
    "execution_name",
    "execution_timer",
    "is_execution_timer",
    "is_text",
    "retention_ms",
    "timer_name",
    "told",
]

# Status of an execution. Stored, so permanent.
RUNNING: Final = "running"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
ABORTED: Final = "aborted"
CANCELED: Final = "canceled"
#: Its segments used up their tries; it goes on when it is resumed, or its dead letter redriven.
BURIED: Final = "buried"
#: Their journal is whole, so they can go on once what stopped them is repaired.
RESUMABLE: Final = (ABORTED, BURIED)

# State of a journal row. Stored, so permanent.
#: A sleep or a promise that has not ended.
PENDING: Final = "pending"
#: A guarded step has begun, and nothing is known of its end.
INTENT: Final = "intent"
#: A step failed and is run again at `due_ms`.
RETRY: Final = "retry"
DONE: Final = "done"
#: A promise was resolved by its token before the function has come to it again: the process died in between.
EARLY: Final = "early"
#: A step failed for good, or a promise timed out.
FAILED_STEP: Final = "failed"

#: Journal rows beside those of the steps, which count from 0: the arguments, and the result or the error; the arguments
#: that the function starts over with, and, once it did, those that it was started with.
ARGUMENTS: Final = -1
OUTCOME: Final = -2
NEXT_ARGUMENTS: Final = -3
STARTED_WITH: Final = -4

#: The lower bits of a step's number count the steps of its branch, the upper ones name the branch; 0: the function's.
STEP_BITS: Final = 20

#: Counts the executions of an object.
EXECUTION_TALLY: Final = "executions"
#: What keeps segments from running (code that is not there, an `on_start` that fails) is mostly repaired by people: two
#: hours and a quarter, rather than the two minutes that timers get.
EXECUTION_RETRY: Final = RetryPolicy(max_attempts=20)

#: Wakes the object to forget executions whose time of retention is over.
PRUNE_TIMER: Final = "\0executions"


def is_text(value: str) -> bool:
    """Whether UTF-8, and so a database, can keep the text: it can't keep lone surrogates."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def timer_name(execution_id: str) -> str:
    """Name of the timer that wakes the execution."""
    return EXECUTION_TIMER + execution_id


def execution_id_of(timer_name: str) -> str:
    """The execution that a timer wakes, also one that runs again as a dead letter."""
    return shown_name(timer_name)


def is_execution_timer(row: DirectoryRow) -> bool:
    """Whether the timer belongs to executions and not to the application."""
    return row.kind == TimerKind.DURABLE_SLEEP


def execution_name(type_name: str, key: str, execution_id: str) -> bytes:
    """Names the execution among all there are; ids of timers and promises are derived from it."""
    return f"{type_name}\0{key}\0{execution_id}".encode()


def execution_timer(name: str, due_ms: int, generation: int, method: str = "") -> DirectoryRow:
    """A timer of kind durable sleep, due at `due_ms`."""
    spec = TimerSpec(mode="at", start_ms=max(due_ms, 1), method=method, retry=EXECUTION_RETRY)
    return DirectoryRow(0, name, int(TimerKind.DURABLE_SLEEP), due_ms, generation, due_ms, 0, 0, 0, spec.to_bytes())


def retention_ms(status: str, kept_ms: int, failed_kept_ms: int) -> int:
    """How long an execution that ended like this is kept."""
    return kept_ms if status in (COMPLETED, CANCELED) else failed_kept_ms


@dataclass(frozen=True)
class ExecutionRow:
    """One execution. `seed` is random and secret: tokens of promises and random numbers are drawn from it. `wake_ms` is
    when its timer is due, None while only a promise can wake it; `waits_for` says for what, in words."""

    table: ClassVar[str] = EXECUTIONS

    oid: int
    execution_id: str
    method: str
    status: str
    seed: bytes
    began_ms: int
    ended_ms: int | None = None
    steps: int = 0
    wake_ms: int | None = None
    waits_for: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it has an outcome. A buried one has none yet."""
        return self.status not in (RUNNING, BURIED)

    def key(self) -> tuple[int, str]:
        return (self.oid, self.execution_id)

    def values(self) -> tuple[Any, ...]:
        return (
            self.method,
            self.status,
            self.seed,
            self.began_ms,
            self.ended_ms,
            self.steps,
            self.wake_ms,
            self.waits_for,
        )

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> ExecutionRow:
        return cls(*key, *values)


@dataclass(frozen=True)
class JournalRow:
    """One step of an execution, as far as it is known. `attempt` counts its failed runs. `at_ms` is the time that the
    function sees once it has the step's outcome."""

    table: ClassVar[str] = JOURNAL

    oid: int
    execution_id: str
    step: int
    kind: str
    name: str = ""
    fingerprint: bytes = b""
    state: str = DONE
    attempt: int = 0
    due_ms: int | None = None
    at_ms: int = 0
    payload: bytes = b""

    def key(self) -> tuple[int, str, int]:
        return (self.oid, self.execution_id, self.step)

    def values(self) -> tuple[Any, ...]:
        return (
            self.kind,
            self.name,
            self.fingerprint,
            self.state,
            self.attempt,
            self.due_ms,
            self.at_ms,
            self.payload,
        )

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> JournalRow:
        return cls(*key, *values)


def buried(row: ExecutionRow) -> ExecutionRow | None:
    """The execution as it is shown when its timer has become a dead letter; None for one that has ended."""
    return None if row.has_ended else replace(row, status=BURIED, wake_ms=None, waits_for="to be resumed")


def told(row: ExecutionRow, outcome: JournalRow | None) -> dict[str, Any]:
    """What is told of an execution: plain facts, with its outcome once it has ended."""
    return {
        "execution_id": row.execution_id,
        "method": row.method,
        "status": row.status,
        "began_ms": row.began_ms,
        "ended_ms": row.ended_ms,
        "steps": row.steps,
        "wake_ms": row.wake_ms,
        "waits_for": row.waits_for,
        "outcome": None if outcome is None else (outcome.state, outcome.payload),
    }
