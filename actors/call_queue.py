"""The calls of one lane that wait to be sent."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from actors.call import Call

__all__ = ["CallQueue"]


class CallQueue:
    """Three queues, emptied in this order: what was sent before, calls of turns, calls from outside.

    Only calls from outside wait for the window, so only they can pile up.
    """

    __slots__ = ("again", "outside", "urgent")

    def __init__(self) -> None:
        self.again: deque[Call] = deque()
        self.urgent: deque[Call] = deque()
        self.outside: deque[Call] = deque()

    def __bool__(self) -> bool:
        return bool(self.again or self.urgent or self.outside)

    def __iter__(self) -> Iterator[Call]:
        return chain(self.again, self.urgent, self.outside)

    def readmit(self, again: Iterable[Call], fresh: Iterable[Call]) -> None:
        """Add calls that waited elsewhere, each kind in its order."""
        self.again.extend(again)
        for call in fresh:
            (self.urgent if call.urgent else self.outside).append(call)

    def take(self, slots: set[int]) -> list[Call]:
        """Remove and return all calls of these slots, in the order in which they would be sent."""
        taken: list[Call] = []
        for queue in (self.again, self.urgent, self.outside):
            found = [call for call in queue if call.slot in slots]
            if found:
                taken += found
                _keep(queue, [call for call in queue if call.slot not in slots])
        return taken

    def take_given_up(self) -> list[Call]:
        """Remove and return all calls that their callers do not wait for any more."""
        taken: list[Call] = []
        for queue in (self.again, self.urgent, self.outside):
            found = [call for call in queue if call.future.done()]
            if found:
                taken += found
                _keep(queue, [call for call in queue if not call.future.done()])
        return taken

    def take_all(self) -> list[Call]:
        """Remove and return all calls."""
        taken = list(self)
        for queue in (self.again, self.urgent, self.outside):
            queue.clear()
        return taken


def _keep(queue: deque[Call], calls: list[Call]) -> None:
    queue.clear()
    queue.extend(calls)
