"""`loop.call_later` on a clock that stands still until a test moves it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

__all__ = ["ManualTimers"]


class ManualHandle:
    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ManualTimers:
    """Seconds, call-backs that are due at them, and nothing that moves by itself."""

    def __init__(self) -> None:
        self._now = 1_000.0
        self._order = count()
        self._heap: list[tuple[float, int, ManualHandle]] = []

    def now(self) -> float:
        return self._now

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> ManualHandle:
        handle = ManualHandle(callback, args)
        heapq.heappush(self._heap, (self._now + delay, next(self._order), handle))
        return handle

    def pending(self) -> int:
        """Timers that are armed."""
        return sum(not handle.is_cancelled for _, _, handle in self._heap)

    def next_due(self) -> float | None:
        """When the next timer is due."""
        while self._heap and self._heap[0][2].is_cancelled:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def advance(self, seconds: float) -> None:
        """Move the clock and run what is due on the way, each at its time."""
        end = self._now + seconds
        while (due := self.next_due()) is not None and due <= end:
            self._now = max(self._now, due)
            handle = heapq.heappop(self._heap)[2]
            handle.callback(*handle.args)
        self._now = end
