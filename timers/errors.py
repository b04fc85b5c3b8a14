"""The one base class of every error Mainspring raises, and the errors of the timer core."""

from __future__ import annotations

__all__ = [
    "BatchTooLarge",
    "CorruptRow",
    "DuplicateTimerKind",
    "InvalidSchedule",
    "InvalidTimerKind",
    "MainspringError",
    "ReleaseTimerClosed",
    "SinkRaised",
    "SleepDropped",
    "TooManySteps",
    "UndeliverableOutcome",
]


class MainspringError(Exception):
    """Base class of every error that Mainspring raises on purpose."""


class BatchTooLarge(MainspringError):
    """A batch has more operations than one commit may carry."""


class CorruptRow(MainspringError):
    """A row or a timer of the runtime's own makes no sense. Nothing is done with it; it is kept and tried again."""


class DuplicateTimerKind(MainspringError):
    """Two timer handlers claim the same kind number."""


class InvalidTimerKind(MainspringError):
    """A timer kind number is outside 1..254."""


class InvalidSchedule(MainspringError):
    """A timer's time, interval, cron expression or policy makes no sense."""


class ReleaseTimerClosed(MainspringError):
    """A release timer was closed: it takes no more deadlines, and what was armed has been abandoned."""


class SleepDropped(MainspringError):
    """A durable sleep was removed while its program slept."""


class TooManySteps(MainspringError):
    """An execution has made as many steps as the limit allows; nothing was done for the one that is too many."""


class SinkRaised(MainspringError):
    """The sink of an outcome ran and raised, and what it did is undone. `retry_after_ms` is when it wants the next."""

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class UndeliverableOutcome(MainspringError):
    """An outcome is stored in a way that no sink can ever take it. It is kept."""
