"""Every error an application can meet. All derive from `MainspringError`."""

from __future__ import annotations

from drivers.errors import (
    CommitFailed,
    CommitOutcomeUnknown,
    DataMissing,
    DataRolledBack,
    Fenced,
    PartitionBusy,
    SchemaTooNew,
    SnapshotRefused,
    StoreClosed,
    UnsupportedFilesystem,
    WriteSetRejected,
    WriteSetTooLarge,
    WrongPartition,
)
from timers.errors import (
    BatchTooLarge,
    CorruptRow,
    DuplicateTimerKind,
    InvalidSchedule,
    InvalidTimerKind,
    MainspringError,
    ReleaseTimerClosed,
    SinkRaised,
    SleepDropped,
    TooManySteps,
    UndeliverableOutcome,
)

__all__ = [
    "ActorUnreachable",
    "AdvanceConflict",
    "AdvanceTooLarge",
    "AmbiguousEffect",
    "AuthenticationFailed",
    "BatchTooLarge",
    "CallDiverged",
    "CallExpired",
    "CallOutcomeUnknown",
    "ChannelClosed",
    "ClassNotImportable",
    "CommitFailed",
    "CommitOutcomeUnknown",
    "CoordinatorUnavailable",
    "CorruptRow",
    "CorruptValue",
    "DataMissing",
    "DataRolledBack",
    "DuplicateItem",
    "DuplicateReservation",
    "DuplicateTimerKind",
    "DuplicateTypeName",
    "ExecutionCanceled",
    "ExecutionDiverged",
    "ExecutionExists",
    "ExecutionUnfinished",
    "Fenced",
    "FrameTooLarge",
    "IllegalTransition",
    "InvalidArguments",
    "InvalidClassOption",
    "InvalidKey",
    "InvalidOption",
    "InvalidPromiseToken",
    "InvalidSchedule",
    "InvalidTimerKind",
    "LeaseHeld",
    "LeaseLost",
    "MainspringError",
    "MalformedFrame",
    "MethodNotCallable",
    "MoveRefused",
    "NoRunningLoop",
    "NoSuchMethod",
    "NoSuchReservation",
    "ObjectReset",
    "ObjectTooNew",
    "OutOfOrder",
    "OutboxFull",
    "Overloaded",
    "PartitionAbsent",
    "PartitionBusy",
    "PartitionStopped",
    "PoisonCall",
    "PromiseTimeout",
    "QuotaExceeded",
    "ReadOnlyTurn",
    "ReentrantCall",
    "Rejected",
    "ReleaseTimerClosed",
    "RemoteError",
    "ReplyLost",
    "ReservedName",
    "RowConflict",
    "RuntimeNotStarted",
    "ScaleSuperseded",
    "ScaleTimeout",
    "SchemaTooNew",
    "SerialTurnsNeeded",
    "SinkFailed",
    "SinkRaised",
    "SinkTimeout",
    "SleepDropped",
    "SnapshotRefused",
    "StaleLease",
    "StoreClosed",
    "SyncCallInLoop",
    "TicketConflict",
    "TicketGone",
    "TicketHeld",
    "TooManyAdvances",
    "TooManyExecutions",
    "TooManyOutcomes",
    "TooManyReservations",
    "TooManySteps",
    "TooManyTickets",
    "TooManyTimers",
    "TransactionClosed",
    "TurnOver",
    "TurnTimeout",
    "UndeliverableOutcome",
    "UnknownAdvance",
    "UnknownClass",
    "UnknownExecution",
    "UnstorableValue",
    "UnsupportedFilesystem",
    "ValueTooLarge",
    "ValueTypeUnavailable",
    "WriteOutsideStep",
    "WriteSetRejected",
    "WriteSetTooLarge",
    "WrongPartition",
    "WrongThread",
]


# --- addressing and class definition -------------------------------------------------------------


class InvalidKey(MainspringError, ValueError):
    """An object key or storage key is empty, too long, not text, or holds a NUL."""


class InvalidOption(MainspringError, ValueError):
    """An argument of a storage, timer or runtime method has a value that makes no sense."""


class ObjectTooNew(MainspringError):
    """The object was written by newer code of its class than this process has. Run that; nothing was changed."""


class InvalidClassOption(MainspringError, TypeError):
    """A durable object class declares an option that does not exist or has a wrong value."""


class DuplicateTypeName(MainspringError, TypeError):
    """Two different classes in one runtime have the same `type_name`."""


class ReservedName(MainspringError, AttributeError):
    """The method name belongs to the runtime and can't be called from outside."""


class MethodNotCallable(MainspringError, AttributeError):
    """The name is private or is not a method, so it can't be called from outside."""


class NoSuchMethod(MainspringError, AttributeError):
    """The class has no method of that name."""


class UnknownClass(MainspringError, LookupError):
    """The partition was asked for a class that it has never been told of."""


class ClassNotImportable(MainspringError, ImportError):
    """The partition's process can't import the class; the message gives module, class and reason."""


class InvalidArguments(MainspringError, TypeError):
    """The arguments do not fit the method's signature; nothing was run."""


# --- values ---------------------------------------------------------------------------------------


class UnstorableValue(MainspringError, TypeError):
    """A value holds something the codec can't carry; the message names the path inside the value."""


class ValueTooLarge(MainspringError, ValueError):
    """An encoded value is larger than the limit."""


class CorruptValue(MainspringError, ValueError):
    """Bytes can't be decoded: they were not made by the codec, or were damaged since."""


class ValueTypeUnavailable(CorruptValue):
    """Bytes name a class that this process does not have, or that no longer fits what was stored."""


# --- calls ----------------------------------------------------------------------------------------


class Rejected(MainspringError):
    """Base class for an application's own "no": the turn rolls back, the instance is kept."""


class RemoteError(MainspringError):
    """A method raised an exception whose type this process can't rebuild; it carries type, text and traceback."""

    def __init__(self, message: str, type_name: str = "", remote_traceback: str = "") -> None:
        super().__init__(message)
        self.type_name = type_name
        self.remote_traceback = remote_traceback


class ReentrantCall(MainspringError):
    """The call would re-enter an object that is already waiting in the same chain of calls."""


class Overloaded(MainspringError):
    """A bounded queue is full; the message says which. Nothing was run: slow down and call again."""


class OutboxFull(Overloaded):
    """The object has as many undelivered messages as the limit allows; nothing was sent."""


class OutOfOrder(MainspringError):
    """A message came before its predecessor was applied; nothing was run, and it comes again."""


class CallExpired(MainspringError):
    """The call's deadline passed before it started; nothing was run."""


class CallOutcomeUnknown(MainspringError):
    """No answer came before the deadline: the call may have run, or may still run."""


class CallDiverged(MainspringError):
    """A call id was used again with other arguments; nothing was run."""


class ReplyLost(MainspringError):
    """The turn ran and is durable, but its reply was too large to be kept for a repeated call."""


class PoisonCall(MainspringError):
    """The call ended its process each time it ran alone; it is not run again."""


class TurnTimeout(MainspringError):
    """The turn ran longer than `turn_timeout_ms`; it was cancelled and rolled back."""


class ObjectReset(MainspringError):
    """The object went back to its last durable state under this turn; nothing of the turn was applied."""


class MoveRefused(MainspringError):
    """A step of a slot's move can't be done now. The move is called off or begun again; nothing is lost by it."""


class ScaleSuperseded(MainspringError):
    """Somebody else has asked for other partitions meanwhile; the newest wish counts. Nothing was lost."""


class ScaleTimeout(MainspringError):
    """The number of partitions was not changed in the time given. What was begun goes on."""


class PartitionStopped(MainspringError):
    """The partition is stopping and takes no new work."""


class RuntimeNotStarted(MainspringError, RuntimeError):
    """The runtime has not been started, or was stopped."""


class ActorUnreachable(MainspringError):
    """An actor of the runtime does not exist, has died, or does not answer; it may come back."""


class SyncCallInLoop(MainspringError, RuntimeError):
    """`.sync` was used on a thread that runs an event loop, which it would block; await the call instead."""


class NoRunningLoop(MainspringError, RuntimeError):
    """A call was started on a thread that runs no event loop; in plain code use `stub.method.sync(...)`."""


# --- inside a turn --------------------------------------------------------------------------------


class TurnOver(MainspringError, RuntimeError):
    """Storage, timers or stubs were used in a turn that has ended, timed out or been superseded."""


class WrongThread(MainspringError, RuntimeError):
    """Storage, timers or stubs were used off the partition's thread."""


class ReadOnlyTurn(MainspringError, RuntimeError):
    """A `@shared` method tried to write."""


class TransactionClosed(MainspringError, RuntimeError):
    """A storage transaction was used after it ended."""


class RowConflict(MainspringError, RuntimeError):
    """A row of the runtime's own is not what the turn's code took it for. Nothing of the change was made."""


class TooManyTimers(MainspringError):
    """The object already has as many timers as the limit allows."""


# --- outcomes -------------------------------------------------------------------------------------


class SerialTurnsNeeded(MainspringError, TypeError):
    """A capability was used in an interleaved class, whose turns commit between awaits."""


class TooManyOutcomes(MainspringError):
    """As many outcomes of the object wait as may. Nothing was queued."""


class SinkFailed(MainspringError):
    """A sink did not take an outcome; it gets it again. Functions raise it to say when: `retry_after_ms`."""

    def __init__(self, message: str, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class SinkTimeout(SinkFailed):
    """A sink took longer than it may for one outcome; whether it took it is not known. It gets it again."""


# --- tickets and reservations ---------------------------------------------------------------------


class TicketGone(Rejected):
    """The ticket was consumed, has expired, or never was."""


class TicketConflict(Rejected):
    """There is a live ticket of this name with another size, holder or payload."""


class TicketHeld(Rejected):
    """The ticket belongs to a reservation: it ends with that."""


class TooManyTickets(Rejected):
    """The object, or one holder in it, has as many tickets as the limit allows."""


class DuplicateReservation(Rejected):
    """There is a reservation of this id, or one that ended not long ago."""


class NoSuchReservation(Rejected):
    """There is no reservation of this id: it never was, or it ended long ago."""


class IllegalTransition(Rejected):
    """The reservation can't come into this state from the one that it is in, `state`; why it is there is `reason`."""

    def __init__(self, message: str, state: str = "", reason: str = "") -> None:
        super().__init__(message)
        self.state = state
        self.reason = reason


class TooManyReservations(Rejected):
    """The object has as many reservations as the limit allows, ended ones that are remembered too."""


# --- coordinator, leases, quotas ------------------------------------------------------------------


class CoordinatorUnavailable(MainspringError):
    """The coordinator did not answer in time. What it was asked may have been done; asking again is safe."""


class LeaseHeld(Rejected):
    """Another object holds the lease: `holder` (class, key), until `until_ms` (epoch ms) unless it renews it."""

    def __init__(self, message: str, holder: tuple[str, str] = ("", ""), until_ms: int = 0) -> None:
        super().__init__(message)
        self.holder = holder
        self.until_ms = until_ms


class LeaseLost(Rejected):
    """The lease is not held any more: it expired and was taken or removed, or it was released. Acquire it again."""


class QuotaExceeded(Rejected):
    """A charge is over a limit of its quota; nothing was charged. What is left of each kind (None: without limit), when
    the window ends (`resets_ms`, epoch ms), and whether only the object's own counts were looked at (`metered`)."""

    def __init__(
        self,
        message: str,
        remaining_operations: int | None = None,
        remaining_bytes: int | None = None,
        resets_ms: int = 0,
        metered: bool = False,
    ) -> None:
        super().__init__(message)
        self.remaining_operations = remaining_operations
        self.remaining_bytes = remaining_bytes
        self.resets_ms = resets_ms
        self.metered = metered


class StaleLease(Rejected):
    """What a lease protects has seen a later grant of it: who comes with this one does not hold it any more."""


# --- publications ---------------------------------------------------------------------------------


class TooManyAdvances(MainspringError):
    """The publication line has as many unpublished advances as it may have."""


class AdvanceTooLarge(MainspringError, ValueError):
    """An advance adds or needs more items, or takes more bytes, than one may."""


class DuplicateItem(MainspringError, ValueError):
    """An item was added by an advance of this object before: an item is published once."""


class UnknownAdvance(MainspringError, LookupError):
    """The publication line has no advance of this number."""


class AdvanceConflict(MainspringError):
    """The advance is not in a state in which this can be done with it; nothing was changed."""


# --- durable functions ------------------------------------------------------------------------------


class WriteOutsideStep(MainspringError, RuntimeError):
    """A durable function wrote, set a timer or called an object outside its steps, where a replay would repeat it."""


class ExecutionExists(MainspringError):
    """An execution of this id was started with other arguments or another function; nothing was started."""


class UnknownExecution(MainspringError, LookupError):
    """The object has no execution of this id: it was never started, or its time of retention is over."""


class TooManyExecutions(MainspringError):
    """The object keeps as many executions as the limit allows; nothing was started."""


class ExecutionUnfinished(MainspringError):
    """The execution has not ended in the time given; it goes on."""


class ExecutionDiverged(MainspringError):
    """The function did not make the steps that its journal has; the execution was aborted."""


class ExecutionCanceled(MainspringError):
    """The execution was canceled, so it has no result."""


class AmbiguousEffect(MainspringError):
    """The process died between the begin and the end of a guarded step: its effect may have happened."""


class PromiseTimeout(MainspringError):
    """Nobody resolved the promise in time."""


class ExecutionBuried(MainspringError):
    """The execution could not be run on, time and again; it waits, and goes on when it is resumed."""


class JournalFull(MainspringError):
    """The journal of the execution has no room for this result; the step was undone."""


class NestedStep(MainspringError, RuntimeError):
    """A step used what only its durable function may: steps do not contain steps, sleeps or promises."""


class StepNotAwaited(MainspringError, RuntimeError):
    """The durable function made a step and ended without having awaited it; the step never ran."""


class InvalidPromiseToken(Rejected):
    """The token is not that of a promise of this object; nothing was resolved."""


# --- link -----------------------------------------------------------------------------------------


class ChannelClosed(MainspringError, ConnectionError):
    """The connection to a partition is gone."""


class PartitionAbsent(DataMissing, ChannelClosed):
    """The node with the partition's files is not in the cluster. Calls wait until it is back, or for their deadline."""


class AuthenticationFailed(ChannelClosed):
    """A peer could not prove that it knows the cluster's secret."""


class MalformedFrame(ChannelClosed):
    """A peer sent bytes that are not a valid frame; the connection is closed."""


class FrameTooLarge(ChannelClosed):
    """A frame is larger than `max_frame_bytes`."""
