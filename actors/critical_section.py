"""Sections of an interleaved object that one turn has for itself while no other turn may start."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.turn import Turn

__all__ = ["CriticalSection"]


class CriticalSection:
    """Held by one turn at a time, which may enter it again; others wait in order of arrival.

    A turn that is cut short gives it up, whatever its code goes on to do.
    """

    def __init__(self) -> None:
        self._holder: Turn | None = None
        self._depth = 0
        self._waiting: deque[tuple[Turn, asyncio.Future[None]]] = deque()

    @property
    def held(self) -> bool:
        return self._holder is not None

    async def enter(self, turn: Turn) -> None:
        """Wait until the section is free, and hold it."""
        if self._holder is None or self._holder is turn:
            self._holder = turn
            self._depth += 1
            return
        entered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, entered))
        try:
            await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled():
                self.leave(turn)  # it was given in the moment in which the waiting was cancelled
            raise

    def leave(self, turn: Turn) -> None:
        """Leave once; the last leave lets the next waiting turn in. Nothing for a turn that does not hold it."""
        if self._holder is not turn:
            return
        self._depth -= 1
        if self._depth == 0:
            self._pass_on()

    def drop(self, turn: Turn) -> None:
        """The turn no longer counts."""
        if self._holder is turn:
            self._pass_on()

    def _pass_on(self) -> None:
        self._holder, self._depth = None, 0
        while self._waiting:
            turn, entered = self._waiting.popleft()
            if not entered.done() and turn.running:
                self._holder, self._depth = turn, 1
                entered.set_result(None)
                return
