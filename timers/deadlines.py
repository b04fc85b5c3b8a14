"""The heap of a release wheel, and what its thread does next. Pure: the clock's reading comes in."""

from __future__ import annotations

import heapq
import itertools
import weakref
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = [
    "MAX_WAIT_NS",
    "SLICE_LEAD_NS",
    "SLICE_NS",
    "SWEEP_INTERVAL_NS",
    "SWEEP_MIN_LEN",
    "Deadlines",
    "Fire",
    "Idle",
    "Sleep",
    "Step",
    "Wait",
    "plan",
]

T = TypeVar("T")

#: Longest sleep just before a deadline. A sleep of this length ends within tens of microseconds of its time, and a
#: nearer deadline that is armed meanwhile (nothing interrupts a sleep) is noticed after it at the latest.
SLICE_NS = 500_000
#: Slices begin this long before a deadline; until then one wait, which can be interrupted, is enough. Waits of this
#: length end late by less than this, also where the system's timers are coarse.
SLICE_LEAD_NS = 2_000_000
#: Longest single wait. Python 3.10 waits by the wall clock, so this bounds what a clock set back can delay; it is also
#: well below the longest time-out that a lock takes.
MAX_WAIT_NS = 10_000_000_000
#: Up to this many slots a sweep is not worth it: the abandoned ones leave when they are due.
SWEEP_MIN_LEN = 64
#: Least time between two sweeps, each of which looks at every slot: their share of the time stays small.
SWEEP_INTERVAL_NS = 250_000_000


@dataclass(frozen=True)
class Idle:
    """Nothing is armed: wait until something is."""


@dataclass(frozen=True)
class Fire:
    """The head is due."""


@dataclass(frozen=True)
class Wait:
    """The head is far: wait this long, or until an earlier deadline is armed."""

    ns: int


@dataclass(frozen=True)
class Sleep:
    """The head is near: sleep this long, and look again."""

    ns: int


Step = Idle | Fire | Wait | Sleep
_IDLE, _FIRE = Idle(), Fire()


def plan(
    head_ns: int | None,
    now_ns: int,
    *,
    slice_ns: int = SLICE_NS,
    slice_lead_ns: int = SLICE_LEAD_NS,
    max_wait_ns: int = MAX_WAIT_NS,
) -> Step:
    """What to do with this head at this instant. No step leads past the head's deadline.

    With `slice_lead_ns=0` there are no slices: the whole remainder is one wait.
    """
    if head_ns is None:
        return _IDLE
    remaining_ns = head_ns - now_ns
    if remaining_ns <= 0:
        return _FIRE
    if remaining_ns <= slice_lead_ns:
        return Sleep(min(remaining_ns, slice_ns))
    return Wait(min(remaining_ns - slice_lead_ns, max_wait_ns))


class Deadlines(Generic[T]):
    """A heap of slots in the order (deadline, registration number). Not thread-safe.

    A slot refers to its item weakly: an item that nobody holds any more is abandoned, and its slot stays behind until
    it is due or swept.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, weakref.ref[T]]] = []
        self._numbers = itertools.count()
        self._last_sweep_ns: int | None = None
        self._some_abandoned = False

    def __len__(self) -> int:
        """Slots, abandoned ones included."""
        return len(self._heap)

    @property
    def head_ns(self) -> int | None:
        """The earliest deadline; None when nothing is armed."""
        return self._heap[0][0] if self._heap else None

    def add(self, at_ns: int, item: T) -> bool:
        """Put a slot in; whether it is the new head."""
        number = next(self._numbers)
        heapq.heappush(self._heap, (at_ns, number, weakref.ref(item, self._abandoned)))
        return self._heap[0][1] == number

    def _abandoned(self, _: weakref.ref[T]) -> None:
        self._some_abandoned = True  # no more than this: it may run in any thread, in the middle of anything

    def pop_due(self, now_ns: int) -> list[T]:
        """Take out every slot that is due, in order; the items that are still held."""
        due: list[T] = []
        while self._heap and self._heap[0][0] <= now_ns:
            item = heapq.heappop(self._heap)[2]()
            if item is not None:
                due.append(item)
        return due

    def pop_all(self) -> list[T]:
        """Take out everything; the items that are still held."""
        held = [item for _, _, ref in sorted(self._heap, key=lambda slot: slot[:2]) if (item := ref()) is not None]
        self._heap.clear()
        return held

    def sweep(self, now_ns: int) -> int:
        """Remove abandoned slots, if it is worth it and not too soon; how many went."""
        if self._last_sweep_ns is None:
            self._last_sweep_ns = now_ns
        if (
            len(self._heap) <= SWEEP_MIN_LEN
            or now_ns - self._last_sweep_ns < SWEEP_INTERVAL_NS
            or not self._some_abandoned
        ):
            return 0
        self._last_sweep_ns = now_ns
        self._some_abandoned = False  # before the look: what is abandoned during it is found by the next one
        before = len(self._heap)
        self._heap = [slot for slot in self._heap if slot[2]() is not None]
        heapq.heapify(self._heap)
        return before - len(self._heap)
