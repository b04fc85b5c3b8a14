"""What is stored of an execution of a durable function: its row, its journal, and the timer that wakes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from actors.object_timers import EXECUTION_TIMER, shown_name
from actors.write_buffer import DirectoryRow
from drivers.tables import EXECUTIONS, JOURNAL
from timers.backoff import NAMED_TIMER_RETRY
from timers.registry import TimerKind
from timers.schedule import TimerSpec

__all__ = [
    "ABORTED",
    "ARGUMENTS",
    "BURIED",
    "CANCELED",
    "COMPLETED",
    "DONE",
    "FAILED",
    "FAILED_STEP",
    "INTENT",
    "OUTCOME",
    "PENDING",
    "PRUNE_TIMER",
    "RETRY",
    "RUNNING",
    "ExecutionRow",
    "JournalRow",
    "execution_id_of",
    "execution_name",
    "execution_timer",
    "is_execution_timer",
    "retention_ms",
    "timer_name",
]

# Status of an execution. Stored, so permanent.
RUNNING: Final = "running"
COMPLETED: Final = "completed"
FAILED: Final = "failed"
ABORTED: Final = "aborted"
CANCELED: Final = "canceled"
#: Shown as failed: its segments used up their tries, and it goes on when its dead letter is redriven.
BURIED: Final = "buried"

# State of a journal row. Stored, so permanent.
#: A sleep or a promise that has not ended.
PENDING: Final = "pending"
#: A guarded step has begun, and nothing is known of its end.
INTENT: Final = "intent"
#: A step failed and is run again at `due_ms`.
RETRY: Final = "retry"
DONE: Final = "done"
#: A step failed for good, or a promise timed out.
FAILED_STEP: Final = "failed"

#: Journal rows beside those of the steps, which count from 0: the arguments, and the result or the error.
ARGUMENTS: Final = -1
OUTCOME: Final = -2

#: Wakes the object to forget executions whose time of retention is over.
PRUNE_TIMER: Final = "\0executions"


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
    spec = TimerSpec(mode="at", start_ms=max(due_ms, 1), method=method, retry=NAMED_TIMER_RETRY)
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
        return self.status != RUNNING

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
