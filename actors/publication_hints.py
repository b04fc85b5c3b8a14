"""Who waits for which published item, in memory: lets a recheck happen at once instead of seconds later.

Never needed: what is forgotten here (a crash, a full table, a lost message) is found by the timers' own rechecks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from drivers.tables import TIMERS
from drivers.timer_store import read_timer
from timers.batch import Absent, Batch, Delete, Equals, Put
from timers.firing import DueTimer
from timers.registry import TimerKind, lane_of
from timers.rows import TimerRow

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["PublicationHints", "Waiter"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: Entries of each table here; some hundred bytes each. The oldest leave.
_MAX_ENTRIES: Final = 20_000
#: A wake that came before its timer was where it will be is kept this long.
_WAKE_KEPT_MS: Final = 5_000


class Waiter(NamedTuple):
    """A blocked advance."""

    type_name: str
    key: str
    line: str
    sequence: int


class _Recent(Generic[K, V]):
    """A dictionary that forgets its oldest entries."""

    def __init__(self) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __setitem__(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        if len(self._entries) > _MAX_ENTRIES:
            self._entries.popitem(last=False)

    def get(self, key: K) -> V | None:
        return self._entries.get(key)

    def pop(self, key: K) -> V | None:
        return self._entries.pop(key, None)

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    def __bool__(self) -> bool:
        return bool(self._entries)


@dataclass(frozen=True)
class _Armed:
    """Where a recheck timer is, and how many remote witnesses it has seen."""

    due_ms: int
    generation: int
    position: int


class PublicationHints:
    """What one partition remembers of rechecks: of others' at its objects, and of its own timers."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        #: (type, key) of an object -> who waits, and for which of its items
        self._waiters: _Recent[tuple[str, str], dict[Waiter, str]] = _Recent()
        self._armed: _Recent[bytes, _Armed] = _Recent()
        #: timers to fire early that are not yet where they will be, and until when that is wanted
        self._wanted: _Recent[bytes, int] = _Recent()

    # --- others that wait for objects here --------------------------------------------------------

    def register(self, type_name: str, key: str, item: str, waiter: Waiter) -> None:
        """`waiter` was told that the object has not published `item`."""
        waiters = self._waiters.pop((type_name, key)) or {}
        waiters.pop(waiter, None)
        waiters[waiter] = item
        if len(waiters) > _MAX_ENTRIES:
            del waiters[next(iter(waiters))]
        self._waiters[type_name, key] = waiters

    def waiting_for(self, type_name: str, key: str) -> dict[Waiter, str]:
        """Who waits for the object, and for what."""
        return dict(self._waiters.get((type_name, key)) or {})

    def told(self, type_name: str, key: str, waiters: Iterable[Waiter]) -> None:
        """These wait no more. Should they still, they register again."""
        left = self._waiters.pop((type_name, key)) or {}
        for waiter in waiters:
            left.pop(waiter, None)
        if left:
            self._waiters[type_name, key] = left

    # --- timers of this partition -----------------------------------------------------------------

    def armed(self, timer: DueTimer, due_ms: int, position: int) -> None:
        """A recheck timer is being moved to `due_ms`."""
        self._armed[timer.reference] = _Armed(due_ms, timer.generation, position)

    def position(self, ref: bytes) -> int:
        """How many remote witnesses the timer has seen, as far as is known."""
        armed = self._armed.get(ref)
        return 0 if armed is None else armed.position

    def wanted(self, ref: bytes) -> None:
        """Fire this recheck timer as soon as possible."""
        self._wanted[ref] = self._partition.clock.wall_ms() + _WAKE_KEPT_MS

    def moves(self) -> list[Batch]:
        """Moves the wanted timers that are where they are thought to be to now. The others are kept for a while."""
        if not self._wanted:
            return []
        now_ms = self._partition.clock.wall_ms()
        batches: list[Batch] = []
        for ref in self._wanted:
            row = self._row(ref)
            if row is not None and row.due_ms > now_ms and not self._partition.gate.is_away(row):
                moved = replace(row, due_ms=now_ms, first_due_ms=now_ms)
                guards = (Equals(row), Absent(moved.table, moved.key()))
                batches.append(Batch(guards, (Delete(row.table, row.key()), Put(moved))))
                self._wanted.pop(ref)
            elif (self._wanted.get(ref) or 0) <= now_ms:
                self._wanted.pop(ref)
        return batches

    def _row(self, ref: bytes) -> TimerRow | None:
        armed = self._armed.get(ref)
        if armed is None:
            return None
        kind = TimerKind.PUBLICATION_RECHECK
        key: tuple[Any, ...] = (lane_of(kind), armed.due_ms, int(kind), ref, armed.generation)
        values = self._partition.store.get(TIMERS, key)
        row = None if values is None else read_timer((*key, *values))
        return row if isinstance(row, TimerRow) else None
