"""Clocks: the only place that knows what time it is, and that can be asked to call back later."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "Handle", "SystemClock", "VirtualClock"]

#: Where virtual time starts: a round instant well away from zero, so that "in the past" can be expressed.
VIRTUAL_START_MS = 1_800_000_000_000
#: The loop is asked for at most this; a longer wait re-arms, which also bounds the harm of a suspended machine.
_LONGEST_WAIT_S = 3_600.0


class Handle(Protocol):
    """A callback that was asked for and can be called off."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Wall time for due times, monotonic time for durations; both can call back on the partition's thread."""

    def wall_ms(self) -> int:
        """Epoch milliseconds, cut and never rounded, so that nothing looks due before it is."""
        ...

    def monotonic_ns(self) -> int: ...

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Handle:
        """Call back once, `delay_ms` of monotonic time from now."""
        ...

    def call_at(self, due_ms: int, callback: Callable[[], None]) -> Handle:
        """Call back once, when wall time has reached `due_ms`; never earlier, also when the clock is set back."""
        ...


class _WallHandle:
    """Waits for an instant of wall time in steps of monotonic time, and looks again before it calls."""

    __slots__ = ("_callback", "_clock", "_due_ms", "_handle")

    def __init__(self, clock: SystemClock, due_ms: int, callback: Callable[[], None]) -> None:
        self._clock = clock
        self._due_ms = due_ms
        self._callback = callback
        self._handle: asyncio.Handle = clock.loop.call_soon(self._look)

    def _look(self) -> None:
        # ns instead of ms: the millisecond that contains the due time must have begun, and no wait is too short
        wait_s = (self._due_ms * 1_000_000 - time.time_ns()) / 1e9
        if wait_s <= 0:
            self._callback()
        else:
            self._handle = self._clock.loop.call_later(min(wait_s, _LONGEST_WAIT_S), self._look)

    def cancel(self) -> None:
        self._handle.cancel()


class SystemClock:
    """The machine's clocks and the running event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Handle:
        return self.loop.call_later(delay_ms / 1_000, callback)

    def call_at(self, due_ms: int, callback: Callable[[], None]) -> Handle:
        return _WallHandle(self, due_ms, callback)


class _VirtualHandle:
    __slots__ = ("callback", "is_wall")

    def __init__(self, callback: Callable[[], None], is_wall: bool) -> None:
        self.callback: Callable[[], None] | None = callback
        self.is_wall = is_wall

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """Time that moves only when it is told to: `move_to` runs what is due on the way, in order.

    Wall and monotonic time move together; `step_wall` moves wall time alone, as an administrator or NTP would.
    """

    def __init__(self, start_ms: int = VIRTUAL_START_MS) -> None:
        self._wall_ms = start_ms
        self._monotonic_ms = 0.0
        self._order = itertools.count()
        self._later: list[tuple[float, int, _VirtualHandle]] = []
        self._at: list[tuple[int, int, _VirtualHandle]] = []

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic_ns(self) -> int:
        return int(self._monotonic_ms * 1_000_000)

    def call_later(self, delay_ms: float, callback: Callable[[], None]) -> Handle:
        handle = _VirtualHandle(callback, is_wall=False)
        heapq.heappush(self._later, (self._monotonic_ms + max(0.0, delay_ms), next(self._order), handle))
        return handle

    def call_at(self, due_ms: int, callback: Callable[[], None]) -> Handle:
        handle = _VirtualHandle(callback, is_wall=True)
        heapq.heappush(self._at, (due_ms, next(self._order), handle))
        return handle

    def next_ms(self) -> int | None:
        """Wall time of the earliest callback that was asked for, not before now; None when there is none."""
        self._drop_cancelled()
        waits: list[float] = []
        if self._later:
            waits.append(self._later[0][0] - self._monotonic_ms)
        if self._at:
            waits.append(self._at[0][0] - self._wall_ms)
        if not waits:
            return None
        return self._wall_ms + max(0, int(-(-min(waits) // 1)))

    def move_to(self, wall_ms: int) -> None:
        """Move both clocks forward to this wall time. Raises ValueError when it is in the past."""
        if wall_ms < self._wall_ms:
            raise ValueError(f"virtual time can't move back from {self._wall_ms} to {wall_ms}; use step_wall")
        self._monotonic_ms += wall_ms - self._wall_ms
        self._wall_ms = wall_ms

    def step_wall(self, delta_ms: int) -> None:
        """Set the wall clock forward or back without letting monotonic time pass."""
        self._wall_ms += delta_ms

    def run_due(self) -> int:
        """Run the callbacks that are due now, in order; how many ran."""
        ran = 0
        while True:
            self._drop_cancelled()
            if self._at and self._at[0][0] <= self._wall_ms:
                handle = heapq.heappop(self._at)[2]
            elif self._later and self._later[0][0] <= self._monotonic_ms:
                handle = heapq.heappop(self._later)[2]
            else:
                return ran
            callback, handle.callback = handle.callback, None
            if callback is not None:
                callback()
                ran += 1

    def _drop_cancelled(self) -> None:
        while self._later and self._later[0][2].callback is None:
            heapq.heappop(self._later)
        while self._at and self._at[0][2].callback is None:
            heapq.heappop(self._at)
