"""The timer core: it decides, and does nothing else. No storage, event loop or clock of its own; a thread only in the
release timer."""

from timers.backoff import MAX_RETRY_BACKOFF_MS, RETRY_BACKOFF_MS, RetryPolicy, retry_delay_ms
from timers.batch import Absent, Batch, Delete, Equals, NotAfter, Outcome, Present, Put
from timers.budget import TickBudget, TickState
from timers.engine import (
    RunReport,
    TimerFault,
    TimerStore,
    earliest_timer_put,
    run_due,
    run_due_with_state,
)
from timers.errors import (
    BatchTooLarge,
    DuplicateTimerKind,
    InvalidSchedule,
    InvalidTimerKind,
    MainspringError,
    ReleaseTimerClosed,
)
from timers.firing import (
    Done,
    DueTimer,
    Fired,
    PartitionName,
    PartitionRole,
    Reschedule,
    Retry,
    TimerCtx,
)
from timers.registry import TimerHandler, TimerKind, TimerRegistry, lane_of
from timers.release_timer import ReleaseTimer, ReleaseToken, TimerBackend
from timers.rows import USER_LANE, MalformedTimer, TimerKey, TimerRow

__all__ = [
    "MAX_RETRY_BACKOFF_MS",
    "RETRY_BACKOFF_MS",
    "USER_LANE",
    "Absent",
    "Batch",
    "BatchTooLarge",
    "Delete",
    "Done",
    "DueTimer",
    "DuplicateTimerKind",
    "Equals",
    "Fired",
    "InvalidSchedule",
    "InvalidTimerKind",
    "MainspringError",
    "MalformedTimer",
    "NotAfter",
    "Outcome",
    "PartitionName",
    "PartitionRole",
    "Present",
    "Put",
    "ReleaseTimer",
    "ReleaseTimerClosed",
    "ReleaseToken",
    "Reschedule",
    "Retry",
    "RetryPolicy",
    "RunReport",
    "TickBudget",
    "TickState",
    "TimerBackend",
    "TimerCtx",
    "TimerFault",
    "TimerHandler",
    "TimerKey",
    "TimerKind",
    "TimerRegistry",
    "TimerRow",
    "TimerStore",
    "earliest_timer_put",
    "lane_of",
    "retry_delay_ms",
    "run_due",
    "run_due_with_state",
]

#: Lets `actors` tell this package from another one of the same plain name.
__mainspring__ = True
