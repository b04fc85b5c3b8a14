"""Hands due timers that run user code to their objects: oldest first, bounded, so one slow object delays nobody."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from actors.address import ObjectId
from actors.durable_object import ClassInfo
from actors.logs import log_event
from actors.timer_work import TimerWork
from actors.write_buffer import WriteBuffer
from drivers.tables import OBJECTS, TIMERS, Key
from drivers.timer_store import read_timer
from timers.rows import USER_LANE, MalformedTimer, TimerRow

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["TimerDispatcher"]

#: Rows fetched at a time.
_PAGE = 128
#: A timer whose turn failed for a reason of the platform is looked at again after this.
PLATFORM_RETRY_MS = 1_000
#: A timer whose class can't be loaded is tried again after this; it uses up no attempt.
CLASS_RETRY_MS = 60_000
_REF_NAME = 8


class TimerDispatcher:
    """A cursor over the user lane. Rows of an object or class at its bound are passed once; when it frees, the
    object's next rows come from its own directory, in due order."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._after: Key | None = None  # the last row looked at; None: start from the front
        self._in_flight: dict[tuple[int, str], Key] = {}  # -> the row that the turn runs for
        #: due times of rows that took the place of one in flight and were passed: looked at again when that has ended
        self._passed: dict[tuple[int, str], int] = {}
        self._by_object: Counter[int] = Counter()
        self._by_class: Counter[str] = Counter()
        self._parked: dict[int, ObjectId] = {}
        #: the parked ones that wait for their class and not for themselves, in order
        self._waiting: dict[str, OrderedDict[int, None]] = {}
        self._full = False
        #: what has had a turn end since the last look for parked ones: classes, and objects with their class
        self._freed: dict[str, dict[int, None]] = {}
        self._warned: set[object] = set()
        #: (class, whether it is being loaded) -> the earliest due time of what waits for it: however many rows those
        #: are, they are looked at again once
        self._classless: dict[tuple[str, bool], int] = {}
        #: (class, key, name) of timers that ran when the process died: they run one at a time
        self.suspects: set[tuple[str, str, str]] = set()

    @property
    def in_flight(self) -> int:
        """Timer turns that are queued or running."""
        return len(self._in_flight)

    # --- the tick ---------------------------------------------------------------------------------

    def tick(self) -> int | None:
        """Dispatch what is due. Returns when to look again (epoch ms), None when an event will say so."""
        partition = self._partition
        now_ms = partition.clock.wall_ms()
        most = partition.settings.max_timer_turns
        self._full = False
        while True:
            room = most - len(self._in_flight)
            if room <= 0:
                self._full = True  # the next turn that ends looks again
                return None
            after = None if self._after is None else self._after[1:]
            rows = partition.store.scan(
                TIMERS, (USER_LANE,), start_after=after, end=(now_ms + 1,), limit=min(_PAGE, room)
            )
            for columns in rows:
                self._after = tuple(columns[:5])
                self._look(read_timer(columns), now_ms)
            if len(rows) < min(_PAGE, room):
                break
        following = partition.store.scan(
            TIMERS, (USER_LANE,), start_after=None if self._after is None else self._after[1:], limit=1
        )
        return following[0][1] if following else None

    def rewind(self, due_ms: int) -> None:
        """A row was put at `due_ms`: if the cursor has passed that place, go back to it."""
        if self._after is not None and due_ms <= self._after[1]:
            self._after = (USER_LANE, due_ms, 0, b"", 0)

    def _look(self, row: TimerRow | MalformedTimer, now_ms: int) -> None:
        if isinstance(row, MalformedTimer):
            self._warn(row.raw_key, f"a timer row makes no sense and is left where it is: {row.reason}")
            return
        try:
            oid, name = int.from_bytes(row.ref[:_REF_NAME], "big"), row.ref[_REF_NAME:].decode()
        except UnicodeDecodeError:
            self._warn(row.key(), "a timer row names no timer and is left where it is")
            return
        flying = self._in_flight.get((oid, name))
        if flying is not None and flying != row.key():
            self._passed[oid, name] = row.due_ms
        if flying is not None or oid in self._parked:
            return
        object_id = self._object(oid)
        if object_id is None:
            self._partition.drop_pointer(row.key())  # its object was deleted
            return
        self._dispatch(oid, object_id, name, row.due_ms, row.key())

    def _object(self, oid: int) -> ObjectId | None:
        values = self._partition.store.get(OBJECTS, (oid,))
        return None if values is None else ObjectId(values[1], values[2], values[0])

    def _dispatch(self, oid: int, object_id: ObjectId, name: str, due_ms: int, pointer: Key) -> bool:
        """Queue one timer at its object; False when the object or its class is at its bound (it is parked then)."""
        partition = self._partition
        if not partition.starts_timers(object_id.slot):
            return True
        info = partition.classes.get(object_id.type_name)
        if info is None:
            self._wait_for_class(object_id.type_name, due_ms, is_loading=True)
            return True
        if not isinstance(info, ClassInfo):
            self._warn(object_id.type_name, f"timers of {object_id.type_name} can't run: {info}")
            self._wait_for_class(object_id.type_name, due_ms, is_loading=False)
            return True
        settings = partition.settings
        if self._by_object[oid] >= settings.max_timer_turns_per_object:
            self._parked[oid] = object_id
            return False
        if self._by_class[object_id.type_name] >= settings.max_timer_turns_per_class:
            self._parked[oid] = object_id
            self._waiting.setdefault(object_id.type_name, OrderedDict())[oid] = None
            return False
        host = partition.host(info, object_id)
        row = host.directory().get(name)
        if row is None or row.timer_key() != pointer:
            # The directory is the truth. While something of the object is on its way to disk, that commit removes
            # the pointer; dropping it here could lose a timer that comes back when the commit fails.
            if host.state.settled:
                host.state.hand_over(WriteBuffer().top, extra=[(TIMERS, pointer, None)])
            return True
        self._start(object_id, TimerWork(host, row))
        return True

    def _start(self, object_id: ObjectId, work: TimerWork) -> None:
        self.adopt(work)
        suspect = (object_id.type_name, object_id.key, work.row.name)
        if suspect in self.suspects:
            self.suspects.discard(suspect)
            work.suspected = True
        self._partition.start_timer(work)

    def adopt(self, work: TimerWork) -> None:
        """Count a timer's turn as in flight, so that the tick does not start it a second time."""
        oid = work.row.oid
        self._in_flight[oid, work.row.name] = work.row.timer_key()
        self._by_object[oid] += 1
        self._by_class[work.host.id.type_name] += 1

    # --- when turns end ---------------------------------------------------------------------------

    def ended(self, work: TimerWork, *, retry: bool) -> None:
        """A timer's turn is over; `retry` when the platform and not the handler failed it."""
        oid, name = work.row.oid, work.row.name
        if (oid, name) not in self._in_flight:
            return
        del self._in_flight[oid, name]
        self._by_object[oid] -= 1
        if not self._by_object[oid]:
            del self._by_object[oid]
        self._by_class[work.host.id.type_name] -= 1
        if retry:
            due_ms = work.row.due_ms
            self._partition.clock.call_later(PLATFORM_RETRY_MS, lambda: self._again(due_ms))
        self._unpark_soon(work.host.id.type_name, oid)
        passed_ms = self._passed.pop((oid, name), None)
        if passed_ms is not None:
            self._partition.timer_armed(passed_ms)
        if self._full:
            self._full = False
            self._partition.loop.call_soon(self._partition.tick)

    def _unpark_soon(self, type_name: str, oid: int) -> None:
        """Turns end together, with their commit: one look refills the room of them all. Each look at an object goes
        through its whole directory."""
        if not self._parked:
            return
        if not self._freed:
            self._partition.loop.call_soon(self._unpark_freed)
        self._freed.setdefault(type_name, {})[oid] = None

    def _unpark_freed(self) -> None:
        freed, self._freed = self._freed, {}
        if self._partition.stopped:
            return
        for type_name, oids in freed.items():
            self._unpark(type_name, oids)

    def _unpark(self, type_name: str, freed: Iterable[int]) -> None:
        settings = self._partition.settings
        waiting = self._waiting.get(type_name, OrderedDict[int, None]())
        half = settings.max_timer_turns_per_object // 2
        for oid in freed:
            if oid in self._parked and oid not in waiting and self._by_object[oid] <= half:
                self._dispatch_due(oid, self._parked.pop(oid))
        # as many as there is room for: one that has nothing due any more must not use up the turn of the next
        for _ in range(len(waiting)):
            if self._by_class[type_name] >= settings.max_timer_turns_per_class:
                return
            each, _none = waiting.popitem(last=False)
            self._dispatch_due(each, self._parked.pop(each))

    def _dispatch_due(self, oid: int, object_id: ObjectId) -> None:
        """Queue what is due of an object that was parked, from its directory."""
        info = self._partition.classes.get(object_id.type_name)
        if not isinstance(info, ClassInfo):
            return
        now_ms = self._partition.clock.wall_ms()
        rows = self._partition.host(info, object_id).directory().values()
        due = [row for row in rows if row.due_ms <= now_ms and (oid, row.name) not in self._in_flight]
        for row in sorted(due, key=lambda row: (row.due_ms, row.kind, row.name)):
            if not self._dispatch(oid, object_id, row.name, row.due_ms, row.timer_key()):
                return

    def _again(self, due_ms: int) -> None:
        self.rewind(due_ms)
        self._partition.tick()

    def _wait_for_class(self, type_name: str, due_ms: int, *, is_loading: bool) -> None:
        """Look at the timers of this class again when it has been loaded, or when loading may be tried again."""
        place = type_name, is_loading
        earliest_ms = self._classless.get(place)
        self._classless[place] = due_ms if earliest_ms is None else min(earliest_ms, due_ms)
        if earliest_ms is not None:
            return
        if is_loading:
            self._partition.classes.when_loaded(type_name, lambda: self._again(self._classless.pop(place)))
        else:
            self._partition.clock.call_later(CLASS_RETRY_MS, lambda: self._retry_class(type_name))

    def _retry_class(self, type_name: str) -> None:
        self._partition.classes.forget_failure(type_name)
        self._again(self._classless.pop((type_name, False)))

    def _warn(self, what: object, message: str) -> None:
        if what not in self._warned:  # once per run: the row is met again at every tick
            self._warned.add(what)
            log_event(logging.WARNING, "timer_unusable", message)
