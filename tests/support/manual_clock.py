"""A clock that stands still until a test moves it."""

from __future__ import annotations


class ManualClock:
    """Wall and monotonic time in ms, moved by hand; each can be moved alone."""

    def __init__(self, wall_ms: int = 0) -> None:
        self._wall_ms = wall_ms
        self._monotonic_ms = 0

    def wall_ms(self) -> int:
        return self._wall_ms

    def monotonic_ms(self) -> int:
        return self._monotonic_ms

    def monotonic_ns(self) -> int:
        return self._monotonic_ms * 1_000_000

    def advance(self, ms: int) -> None:
        self._wall_ms += ms
        self._monotonic_ms += ms

    def step_monotonic(self, ms: int) -> None:
        self._monotonic_ms += ms

    def set_wall(self, wall_ms: int) -> None:
        self._wall_ms = wall_ms
