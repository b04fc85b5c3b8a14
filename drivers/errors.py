"""Errors of storage, ownership and commit."""

from __future__ import annotations

from timers.errors import MainspringError

__all__ = [
    "CommitFailed",
    "CommitOutcomeUnknown",
    "DataMissing",
    "DataRolledBack",
    "Fenced",
    "PartitionBusy",
    "SchemaTooNew",
    "SnapshotRefused",
    "StoreClosed",
    "UnsupportedFilesystem",
    "WriteSetRejected",
    "WriteSetTooLarge",
    "WrongPartition",
]


class PartitionBusy(MainspringError):
    """Another process holds the partition's files. Stop it, or wait until it ends."""


class DataMissing(MainspringError):
    """A partition that has had data does not find its files. It never starts empty instead."""


class DataRolledBack(MainspringError):
    """A partition's file is older than the state its coordinator has seen. Restore the newer file."""


class WrongPartition(MainspringError):
    """A data file belongs to another cluster or to another partition."""


class SchemaTooNew(MainspringError):
    """A data file was written by a newer Mainspring than this one. Upgrade before opening it."""


class UnsupportedFilesystem(MainspringError):
    """The data directory is on a network file system, where SQLite's WAL does not work."""


class StoreClosed(MainspringError):
    """The store was closed and takes no more reads or writes."""


class Fenced(MainspringError):
    """A newer owner has taken this partition; nothing more is committed here."""


class CommitFailed(MainspringError):
    """The write set was *not applied*: the object is back at its last durable state and may be called again.

    An interleaved turn commits in parts, each between two awaits: of such a turn only the last part was not applied.
    """


class CommitOutcomeUnknown(MainspringError):
    """COMMIT failed in a way that does not tell whether it is durable; the partition exits and its successor looks."""


class WriteSetRejected(CommitFailed):
    """A guard of the write set no longer holds, or an earlier write set of the same object was rejected."""


class WriteSetTooLarge(MainspringError):
    """One turn wrote more operations or bytes than a commit may carry; nothing of it was applied."""


class SnapshotRefused(MainspringError):
    """A copy was not made, because something is at its place already."""
