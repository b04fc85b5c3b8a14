"""Quotas: what an object has charged to a name in a window of time, and what all objects together have.

Windows are aligned to the epoch: window number `n` of length `w` ms is [n*w, (n+1)*w). Each object counts exactly what
it charges. Its counts so far are pushed to the coordinator, which remembers of each *source* what it has been told and
adds the difference to the total: a push that comes twice adds nothing. What the total was is kept beside the counter,
with what had been pushed by then, as a *view*.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from timers.batch import Absent, Batch, Delete, Equals, Precondition, Put, Write
from timers.errors import CorruptRow
from timers.firing import MAX_TIME_MS
from timers.registry import TimerKind, lane_of
from timers.rows import Row, TimerRow, oid_of, owned_ref

__all__ = [
    "CLOCK_GRACE_MS",
    "MAX_COUNT",
    "NO_USAGE",
    "ROLLUP_MS",
    "VIEW_MAX_AGE_MS",
    "CounterRow",
    "QuotaPush",
    "QuotaWindow",
    "SourceRow",
    "TotalRow",
    "Usage",
    "ViewRow",
    "charge",
    "drop_source",
    "guard_on",
    "push_usage",
    "read_ref",
    "total_timer",
    "window_ref",
]

#: How often an object's counts go to the coordinator, unless it is said otherwise; and the longest that may be said.
ROLLUP_MS: Final = 60_000

#: A view that is older than this says too little: two pushes have failed.
VIEW_MAX_AGE_MS: Final = 2 * ROLLUP_MS

#: A window is over for everybody so long after its end: clocks of nodes differ, and a turn charges by the time at which
#: it began. Not less than `ROLLUP_MS`, so that what was charged last is pushed before the window's rows are removed.
CLOCK_GRACE_MS: Final = 60_000

#: The largest count that a column can hold.
MAX_COUNT: Final = 2**63 - 1

_NUMBER_BYTES: Final = 8


@dataclass(frozen=True)
class QuotaWindow:
    """One window of one quota."""

    name: str
    window_ms: int
    number: int

    @classmethod
    def at(cls, name: str, window_ms: int, now_ms: int) -> QuotaWindow:
        """The window that this instant lies in."""
        return cls(name, window_ms, now_ms // window_ms)

    @property
    def end_ms(self) -> int:
        """The first instant of the next window, epoch ms."""
        return (self.number + 1) * self.window_ms

    @property
    def expiry_ms(self) -> int:
        """When its rows may go: nobody charges to it any more, whatever clock they go by."""
        return min(self.end_ms + CLOCK_GRACE_MS, MAX_TIME_MS)

    def key(self) -> tuple[str, int, int]:
        return (self.name, self.window_ms, self.number)


@dataclass(frozen=True)
class Usage:
    """How much was charged."""

    operations: int
    bytes: int

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.operations + other.operations, self.bytes + other.bytes)

    def __sub__(self, other: Usage) -> Usage:
        return Usage(self.operations - other.operations, self.bytes - other.bytes)

    def check(self, what: str) -> None:
        """Raise `CorruptRow` unless both are counts that a column can hold."""
        for name, number in {"operations": self.operations, "bytes": self.bytes}.items():
            if not isinstance(number, int) or not 0 <= number <= MAX_COUNT:
                raise CorruptRow(f"{what}: {name} would be {number!r}; nothing was changed")


NO_USAGE: Final = Usage(0, 0)


@dataclass(frozen=True)
class CounterRow:
    """What an object has charged in a window. `source` names it at the coordinator, for ever: an object that is deleted
    and made again counts from zero, as another source."""

    table: ClassVar[str] = "quota_counters"

    oid: int
    window: QuotaWindow
    source: str
    usage: Usage

    def key(self) -> tuple[int, str, int, int]:
        return (self.oid, *self.window.key())

    def values(self) -> tuple[str, int, int]:
        return (self.source, self.usage.operations, self.usage.bytes)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> CounterRow:
        oid, *window = key
        source, operations, size = values
        return cls(oid, QuotaWindow(*window), source, Usage(operations, size))


@dataclass(frozen=True)
class ViewRow:
    """What all objects had charged together when the coordinator was last told, and what this one had told by then."""

    table: ClassVar[str] = "quota_views"

    oid: int
    window: QuotaWindow
    total: Usage
    pushed: Usage
    observed_ms: int

    def key(self) -> tuple[int, str, int, int]:
        return (self.oid, *self.window.key())

    def values(self) -> tuple[int, int, int, int, int]:
        total, pushed = self.total, self.pushed
        return (total.operations, total.bytes, pushed.operations, pushed.bytes, self.observed_ms)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> ViewRow:
        oid, *window = key
        total_operations, total_bytes, pushed_operations, pushed_bytes, observed_ms = values
        total, pushed = Usage(total_operations, total_bytes), Usage(pushed_operations, pushed_bytes)
        return cls(oid, QuotaWindow(*window), total, pushed, observed_ms)


@dataclass(frozen=True)
class TotalRow:
    """The coordinator's: what all sources have told together, and how many there are."""

    table: ClassVar[str] = "quota_totals"

    window: QuotaWindow
    usage: Usage
    sources: int

    def key(self) -> tuple[str, int, int]:
        return self.window.key()

    def values(self) -> tuple[int, int, int]:
        return (self.usage.operations, self.usage.bytes, self.sources)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> TotalRow:
        operations, size, sources = values
        return cls(QuotaWindow(*key), Usage(operations, size), sources)


@dataclass(frozen=True)
class SourceRow:
    """The coordinator's: what one source has told so far."""

    table: ClassVar[str] = "quota_sources"

    window: QuotaWindow
    source: str
    usage: Usage

    def key(self) -> tuple[str, int, int, str]:
        return (*self.window.key(), self.source)

    def values(self) -> tuple[int, int]:
        return (self.usage.operations, self.usage.bytes)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> SourceRow:
        *window, source = key
        return cls(QuotaWindow(*window), source, Usage(*values))


@dataclass(frozen=True)
class QuotaPush:
    """A source tells all that it has charged in a window so far."""

    window: QuotaWindow
    source: str
    usage: Usage


# --- timers -------------------------------------------------------------------------------------------


def window_ref(window: QuotaWindow, oid: int = 0) -> bytes:
    """How a timer refers to an object's counter; without an object, to the coordinator's total.

    Length and number of the window are both in it: windows of different lengths may be due at the same instant.
    """
    numbers = window.number.to_bytes(_NUMBER_BYTES, "big") + window.window_ms.to_bytes(_NUMBER_BYTES, "big")
    return owned_ref(oid, numbers + window.name.encode())


def read_ref(ref: bytes) -> tuple[int, QuotaWindow] | None:
    """(object, window) of such a reference, or None when it is none. Raises `CorruptRow` for a window of length 0."""
    owned = oid_of(ref)
    if owned is None or len(owned[1]) <= 2 * _NUMBER_BYTES:
        return None
    oid, rest = owned
    number = int.from_bytes(rest[:_NUMBER_BYTES], "big")
    window_ms = int.from_bytes(rest[_NUMBER_BYTES : 2 * _NUMBER_BYTES], "big")
    try:
        name = rest[2 * _NUMBER_BYTES :].decode()
    except UnicodeDecodeError:
        return None
    if window_ms == 0:
        raise CorruptRow(f"the timer of quota {name!r} has a window of length 0")
    return oid, QuotaWindow(name, window_ms, number)


def _timer(window: QuotaWindow, oid: int, due_ms: int) -> TimerRow:
    kind = TimerKind.QUOTA_ROLLUP
    return TimerRow(lane_of(kind), due_ms, int(kind), window_ref(window, oid), 0, due_ms)


def total_timer(window: QuotaWindow) -> TimerRow:
    """The timer of a total: it ends the window at the coordinator."""
    return _timer(window, 0, window.expiry_ms)


# --- what is written ----------------------------------------------------------------------------------


def guard_on(old: Row | None, new: Row) -> Precondition:
    """The row must still be what was read: this one, or not there."""
    return Absent(new.table, new.key()) if old is None else Equals(old)


def charge(old: CounterRow | None, new: CounterRow, now_ms: int, rollup_ms: int = ROLLUP_MS) -> Batch:
    """Count. The first charge of a window arms its timer."""
    new.usage.check(f"quota {new.window.name!r}")
    arming = (Put(_timer(new.window, new.oid, now_ms + rollup_ms)),) if old is None else ()
    return Batch((guard_on(old, new),), (Put(new), *arming))


def push_usage(total: TotalRow | None, source: SourceRow | None, push: QuotaPush) -> tuple[Batch | None, Usage]:
    """Take a source's counts into the total. The batch is None when they are in it already; the total with them.

    Raises `CorruptRow` when the counts have become less, or the total would be more than can be counted.
    """
    known = NO_USAGE if source is None else source.usage
    before = NO_USAGE if total is None else total.usage
    delta = push.usage - known
    delta.check(f"quota {push.window.name!r}: what {push.source} has charged since its last push")
    after = before + delta
    after.check(f"quota {push.window.name!r}: the total")
    if delta == NO_USAGE:
        return None, before
    sources = (0 if total is None else total.sources) + (source is None)
    new_total = TotalRow(push.window, after, sources)
    new_source = SourceRow(push.window, push.source, push.usage)
    arming = (Put(total_timer(push.window)),) if total is None else ()
    guards = (guard_on(total, new_total), guard_on(source, new_source))
    return Batch(guards, (Put(new_total), Put(new_source), *arming)), after


def drop_source(total: TotalRow | None, source: SourceRow | None) -> Batch | None:
    """Forget a source, and what it has added; with the last one the total goes. None when it is not known.

    Raises `CorruptRow` when the total is less than the source's part of it.
    """
    if source is None:
        return None
    guards: list[Precondition] = [Equals(source)]
    writes: list[Write] = [Delete(source.table, source.key())]
    if total is not None:
        guards.append(Equals(total))
        if total.sources <= 1:
            writes += [Delete(total.table, total.key()), Delete(TimerRow.table, total_timer(total.window).key())]
        else:
            left = total.usage - source.usage
            left.check(f"quota {total.window.name!r}: the total without {source.source}")
            writes.append(Put(replace(total, usage=left, sources=total.sources - 1)))
    return Batch(tuple(guards), tuple(writes))
