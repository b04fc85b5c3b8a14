"""Lanes to all partitions: which one the calls of a slot go to, and how they stay in order while its owner changes."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Final

from actors.address import SLOTS
from actors.call import IN_FLIGHT, Call, fail
from actors.connector import back_off_s
from actors.errors import MainspringError, Overloaded
from actors.lane import Lane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from actors.client import Cancellable, Client, Connect

__all__ = ["Detour", "Routes"]

_REFRESH_ERRORS: Final = (MainspringError, OSError, asyncio.TimeoutError)


class Detour:
    """The one queue of a slot while its calls can't simply go to its owner.

    It begins when a partition answers Stale, or when a newer map names another owner while calls are still under
    way to the old one. From then on later calls of the slot wait here. When every call under way has been answered
    or lost, those that were not run and those that waited are sent to the owner in their original order.
    """

    __slots__ = ("in_flight", "lane", "may_probe", "refused", "routes", "sent", "slot", "timer", "waiting")

    def __init__(self, routes: Routes, slot: int, lane: Lane) -> None:
        self.routes = routes
        self.slot = slot
        #: The lane in which the calls under way are, or were.
        self.lane = lane
        #: Calls under way there.
        self.in_flight = 0
        #: Calls with a seq of that lane: answered Stale, or lost.
        self.sent: list[Call] = []
        #: Calls that came later, or were not sent by that lane.
        self.waiting: deque[Call] = deque()
        #: The partition has said Stale: do not ask it again before a newer map or a pause.
        self.refused = False
        self.may_probe = False
        self.timer: Cancellable | None = None

    def put(self, call: Call) -> None:
        """Take a new call. Raises `Overloaded` when too many wait."""
        self.routes.check_room(call)
        self.routes.waiting += 1
        self.waiting.append(call)

    def calls(self) -> list[Call]:
        """All calls that wait here, in their order."""
        return [*sorted(self.sent, key=_seq), *self.waiting]


def _seq(call: Call) -> int:
    return call.seq


class Routes:
    """The lanes of one way of connecting, and a table: per slot a lane, a detour, or nothing yet."""

    def __init__(self, client: Client, connect: Connect, session: bytes) -> None:
        """`connect` opens the channels of its lanes; `session` is what their sessions are derived from."""
        self._client = client
        self.connect = connect
        self.session = session
        self.lanes: dict[int, Lane] = {}
        self._directory = client.directory
        self._max_waiting = client.settings.max_queued_calls
        self.table: list[Lane | Detour | None] = [None] * SLOTS
        self.detours: dict[int, Detour] = {}
        #: The map version that the table follows.
        self.version = client.directory.map_version
        #: Calls in the `waiting` queues of all detours.
        self.waiting = 0
        #: Why the map could not be refreshed the last time.
        self.last_error: Exception | None = None
        self._refresh_wanted = False
        self._refresh_task: asyncio.Task[None] | None = None

    def lane(self, partition: int) -> Lane:
        """The lane to a partition."""
        lane = self.lanes.get(partition)
        if lane is None:
            lane = self.lanes[partition] = Lane(self._client, self, partition)
        return lane

    def current(self, slot: int) -> Lane | Detour:
        """Where a call of this slot goes now."""
        if self._directory.map_version != self.version:
            self.follow_map()
        found = self.table[slot]
        if found is None:
            found = self.table[slot] = self.lane(self.owner(slot))
        return found

    def owner(self, slot: int) -> int:
        """The partition that owns a slot by the map."""
        return self._directory.partition_of(slot)

    def unended(self, slot: int) -> Iterator[Call]:
        """The calls of a slot that were put here and have not ended. Looks at every call under way."""
        for lane in self.lanes.values():
            # One that was given up while it is under way may still be running.
            yield from (call for call in lane.in_flight.values() if call.slot == slot)
            yield from (call for call in lane.waiting if call.slot == slot and not call.future.done())
        detour = self.detours.get(slot)
        if detour is not None:
            yield from (call for call in detour.calls() if not call.future.done())

    def follow_map(self) -> None:
        """Follow the directory's map if it is a newer one."""
        version = self._directory.map_version
        if version == self.version:
            return
        self.version = version
        moved: dict[Lane, set[int]] = {}
        for slot, route in enumerate(self.table):
            if route is None or isinstance(route, Detour):
                continue
            if route.partition != self._directory.partition_of(slot):
                moved.setdefault(route, set()).add(slot)
        for lane, slots in moved.items():
            for slot in slots:
                self.table[slot] = None
            self._divert(lane, slots)
        self._resume_ready(list(self.detours.values()))

    def _divert(self, lane: Lane, slots: set[int]) -> None:
        """Move the calls of these slots out of the lane, into one detour per slot that has any."""
        for call in lane.in_flight.values():
            if call.slot in slots:
                self._detour(call.slot, lane).in_flight += 1
        for call in lane.waiting.take(slots):
            detour = self._detour(call.slot, lane)
            if call.seq:
                lane.held.add(call.seq)
                detour.sent.append(call)
            else:
                detour.waiting.append(call)
                self.waiting += 1

    def _detour(self, slot: int, lane: Lane) -> Detour:
        detour = self.detours.get(slot)
        if detour is None:
            detour = self.detours[slot] = self.table[slot] = Detour(self, slot, lane)
        return detour

    # --- what becomes of the calls under way --------------------------------------------------------

    def stale(self, lane: Lane, calls: list[Call]) -> None:
        """The lane's partition does not own the slots of these calls, which are no longer in flight there."""
        new = set()
        for call in calls:
            if call.slot in self.detours:
                self.detours[call.slot].in_flight -= 1
            else:
                new.add(call.slot)
        self._divert(lane, new)
        touched: dict[int, Detour] = {}
        for call in calls:
            detour = touched[call.slot] = self._detour(call.slot, lane)
            detour.refused = True
            call.stales += 1
            call.doubt &= ~IN_FLIGHT
            if call.future.done():
                lane.drop(call)
            else:
                lane.held.add(call.seq)
                detour.sent.append(call)
        for detour in touched.values():
            if detour.timer is None:
                stales = max((call.stales for call in detour.sent), default=1)
                delay = back_off_s(stales, self._client.jitter())
                detour.timer = self._client.call_later(delay, self._probe, detour)
        self.refresh_soon()
        self._resume_ready(touched.values())

    def answered(self, slot: int) -> None:
        """A call of a detoured slot was answered by the partition that it was sent to."""
        detour = self.detours[slot]
        detour.in_flight -= 1
        self._resume_ready((detour,))

    def keep_lost(self, lane: Lane, call: Call) -> bool:
        """Whether a lost call belongs to a detour, which takes it then."""
        detour = self.detours.get(call.slot)
        if detour is None:
            return False
        lane.held.add(call.seq)
        detour.sent.append(call)
        return True

    def lane_lost(self, lane: Lane) -> None:
        """The lane has no connection any more, so nothing is in flight in it."""
        ready = [detour for detour in self.detours.values() if detour.lane is lane]
        for detour in ready:
            detour.in_flight = 0
        self._resume_ready(ready)

    # --- going on -----------------------------------------------------------------------------------

    def _probe(self, detour: Detour) -> None:
        detour.timer = None
        detour.may_probe = True
        if self.detours.get(detour.slot) is detour:
            self._resume_ready((detour,))

    def _resume_ready(self, detours: Iterable[Detour]) -> None:
        for detour in detours:
            if detour.in_flight:
                continue
            owner = self._directory.partition_of(detour.slot)
            if owner != detour.lane.partition or not detour.refused or detour.may_probe:
                self._resume(detour, self.lane(owner))

    def _resume(self, detour: Detour, target: Lane) -> None:
        calls = detour.calls()
        self._remove(detour)
        self.table[detour.slot] = target
        again: list[Call] = []
        fresh: list[Call] = []
        for call in calls:
            if call.future.done():
                detour.lane.drop(call)
                continue
            if target is detour.lane:
                target.held.discard(call.seq)
            else:
                call.leave(detour.lane)
            (again if call.sent else fresh).append(call)
        if again or fresh:
            target.readmit(detour.slot, again, fresh)

    def _remove(self, detour: Detour) -> None:
        if detour.timer is not None:
            detour.timer.cancel()
        self.waiting -= len(detour.waiting)
        del self.detours[detour.slot]
        self.table[detour.slot] = None

    # --- the map ------------------------------------------------------------------------------------

    def refresh_soon(self) -> None:
        """Ask the directory for a newer map; once more if it is being asked already."""
        self._refresh_wanted = True
        if self._refresh_task is None and not self._client.is_closed:
            self._refresh_task = self._client.spawn(self._refresh())
            self._refresh_task.add_done_callback(self._refreshed)

    async def refresh(self, limit_s: float) -> None:
        """Ask for a newer map and wait for the answer, but not longer than `limit_s`."""
        self.refresh_soon()
        if self._refresh_task is not None:
            pause = self._client.spawn(self._client.sleep(limit_s))
            try:
                await asyncio.wait({self._refresh_task, pause}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                pause.cancel()

    async def _refresh(self) -> None:
        while self._refresh_wanted:
            self._refresh_wanted = False
            try:
                await self._directory.refresh(self.version)
            except _REFRESH_ERRORS as error:
                # Calls go on with the map there is, and a detour asks again after each pause.
                self.last_error = error
            else:
                self.last_error = None
            self.follow_map()

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        self._refresh_task = None
        if not task.cancelled() and task.exception() is not None:
            self._client.report("refreshing the slot map failed unexpectedly", task.exception())

    # --- limits and ends ----------------------------------------------------------------------------

    def check_room(self, call: Call) -> None:
        """Raise `Overloaded` when a call from outside finds too many others waiting."""
        if not call.urgent and self.waiting >= self._max_waiting:
            raise Overloaded(
                f"{self.waiting} calls already wait in this process for objects that are being moved"
                " (`max_queued_calls`); nothing was run: wait for answers before you make more calls"
            )

    def sweep(self, now: float) -> float:
        """End the calls whose deadline has passed. Returns the earliest deadline of those that are left."""
        earliest = min((lane.sweep(now) for lane in list(self.lanes.values())), default=float("inf"))
        for detour in self.detours.values():
            for call in chain(detour.sent, detour.waiting):
                if call.deadline <= now:
                    call.expire(detour.lane.partition, self.last_error)
                elif call.deadline < earliest and not call.future.done():
                    earliest = call.deadline
        return earliest

    def close(self, describe: Callable[[Call], Exception]) -> list[asyncio.Task[None]]:
        """End every call and close every connection; returns the tasks that are ending."""
        for detour in list(self.detours.values()):
            for call in detour.calls():
                fail(call.future, describe(call))
            self._remove(detour)
        if self._refresh_task is not None:
            self._refresh_task.cancel()
        endings = [self._refresh_task, *(lane.close(describe) for lane in self.lanes.values())]
        return [task for task in endings if task is not None]
