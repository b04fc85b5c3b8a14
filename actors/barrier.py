"""Keeps the calls of one object in order while some of them travel in another lane than the rest."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from actors.call import Call, fail
from actors.errors import Overloaded
from actors.messages import CALLS, PICKLED

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.routes import Routes

__all__ = ["Barriers", "Place"]

#: Type and key of an object, and the turn that makes the calls (None: they come from outside). Calls of a turn never
#: wait for those of others, which may be waiting for this very turn.
Place = tuple[str, str, bytes | None]


def _is_pickled(call: Call) -> bool:
    return call.kind == CALLS and bool(call.wire[5] & PICKLED)


def _place(call: Call) -> Place:
    _, type_name, key, _, _, _, _, extra = call.wire
    caller = extra[2] if extra is not None else None
    return type_name, key, caller[2] if caller is not None else None


class Barrier:
    """The calls of one place: those of one kind go on only when all of the other kind have ended.

    Two lanes keep no common order, so it is made here. Calls of the same kind follow each other without waiting, as
    their lane keeps their order. The price: a call can't be what lets an earlier one of the other kind end, which
    would otherwise work with an interleaved class; it waits until that one has timed out.
    """

    __slots__ = ("_barriers", "_is_pickled", "_out", "place", "queue")

    def __init__(self, barriers: Barriers, place: Place, before: list[Call]) -> None:
        """`before`: plain calls of the place that have not ended."""
        self._barriers = barriers
        self.place = place
        self.queue: deque[Call] = deque()
        #: Calls that have been passed on and have not ended, and of which kind they are.
        self._out = len(before)
        self._is_pickled = False
        for call in before:
            call.when_ended(self._ended)

    def put(self, call: Call) -> None:
        """Take the next call of the place. Raises `Overloaded` when too many wait."""
        self._barriers.check_room(call)
        self._barriers.waiting += 1
        self.queue.append(call)
        self.pump()

    def _ended(self) -> None:
        self._out -= 1
        if not self._out:
            self.pump()

    def pump(self) -> None:
        """Pass on what may go; with nothing left to keep in order the barrier is gone."""
        queue = self.queue
        while queue:
            call = queue[0]
            is_pickled = _is_pickled(call)
            if self._out and is_pickled != self._is_pickled and not call.future.done():
                return
            queue.popleft()
            self._barriers.waiting -= 1
            if call.future.done():
                continue  # given up, and never sent
            self._is_pickled = is_pickled
            self._out += 1
            call.when_ended(self._ended)
            try:
                self._barriers.pass_on(call, is_pickled)
            except Overloaded as error:
                self._out -= 1
                fail(call.future, error)
        if not (self._out and self._is_pickled):
            self._barriers.remove(self)

    def drop_given_up(self) -> None:
        """Forget the calls whose callers do not wait any more."""
        kept = [call for call in self.queue if not call.future.done()]
        self._barriers.waiting -= len(self.queue) - len(kept)
        self.queue.clear()
        self.queue.extend(kept)
        self.pump()


class Barriers:
    """The barriers of a client. One stands where pickled calls are under way, which is rare, so plain calls elsewhere
    pay nothing for them."""

    def __init__(self, plain: Routes, pickled: Routes, max_waiting: int) -> None:
        self._plain = plain
        self._pickled = pickled
        self._max_waiting = max_waiting
        self.by_place: dict[Place, Barrier] = {}
        #: Calls in the queues of all barriers.
        self.waiting = 0

    def put(self, call: Call) -> None:
        """Take a call while there are barriers, or one that begins one. Raises `Overloaded`."""
        place = _place(call)
        barrier = self.by_place.get(place)
        if barrier is None:
            if not _is_pickled(call):
                self.pass_on(call, False)
                return
            self.check_room(call)
            barrier = self.by_place[place] = Barrier(self, place, list(self._before(place, call.slot)))
        barrier.put(call)

    def of_object(self, type_name: str, key: str) -> Barrier | None:
        """The barrier of the calls from outside to this object, if there is one."""
        return self.by_place.get((type_name, key, None))

    def _before(self, place: Place, slot: int) -> Iterator[Call]:
        for call in self._plain.unended(slot):
            # An admin request about an object does not say in the open about which.
            if call.kind != CALLS or _place(call) == place:
                yield call

    def pass_on(self, call: Call, is_pickled: bool) -> None:
        """Send the call by the lane of its kind. Raises `Overloaded`."""
        routes = self._pickled if is_pickled else self._plain
        routes.current(call.slot).put(call)

    def remove(self, barrier: Barrier) -> None:
        """Nothing is left that the barrier would have to keep in order."""
        if self.by_place.get(barrier.place) is barrier:
            del self.by_place[barrier.place]

    def check_room(self, call: Call) -> None:
        """Raise `Overloaded` when a call from outside finds too many others waiting."""
        if not call.urgent and self.waiting >= self._max_waiting:
            raise Overloaded(
                f"{self.waiting} calls already wait in this process for others with pickled arguments"
                " (`max_queued_calls`); nothing was run: wait for answers before you make more calls"
            )

    def sweep(self, now: float) -> float:
        """End the calls whose deadline has passed. Returns the earliest deadline of those that are left."""
        earliest = float("inf")
        for barrier in list(self.by_place.values()):
            for call in barrier.queue:
                if call.deadline <= now:
                    call.expire(self._plain.owner(call.slot), None)
                elif call.deadline < earliest and not call.future.done():
                    earliest = call.deadline
            barrier.drop_given_up()
        return earliest

    def close(self, describe: Callable[[Call], Exception]) -> None:
        """End every call that waits."""
        for barrier in self.by_place.values():
            for call in barrier.queue:
                fail(call.future, describe(call))
        self.by_place.clear()
        self.waiting = 0
