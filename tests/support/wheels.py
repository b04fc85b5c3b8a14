"""Release wheels for tests: on the machine's clock, closed at the end, and the pure part on a clock moved by hand."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

from timers.deadlines import Deadlines, Fire, Idle, Sleep, Wait, plan
from timers.release_timer import ReleaseTimer, ReleaseToken, TimerBackend

__all__ = ["MS", "SECOND", "SimulatedWheel", "wheel"]

MS = 1_000_000
SECOND = 1_000 * MS


@contextmanager
def wheel(backend: TimerBackend = TimerBackend.SLICE) -> Iterator[ReleaseTimer]:
    """A wheel on the machine's clock."""
    timer = ReleaseTimer(monotonic_ns=time.monotonic_ns, sleep=time.sleep, backend=backend)
    try:
        yield timer
    finally:
        timer.close()


class SimulatedWheel:
    """What the wheel's thread does, step by step, on a clock that only its own waits move: they end late at random."""

    def __init__(self, seed: int, *, most_late_ns: int) -> None:
        self.now_ns = 0
        self.deadlines: Deadlines[ReleaseToken] = Deadlines()
        self.steps = 0
        self.released: list[ReleaseToken] = []
        self._random = random.Random(seed)
        self._most_late_ns = most_late_ns

    def arm(self, at_ns: int) -> ReleaseToken:
        token = ReleaseToken(at_ns)
        self.deadlines.add(at_ns, token)
        return token

    def step(self) -> bool:
        """One look at the heap; False when there is nothing left."""
        self.steps += 1
        self.deadlines.sweep(self.now_ns)
        step = plan(self.deadlines.head_ns, self.now_ns)
        if isinstance(step, Idle):
            return False
        if isinstance(step, Fire):
            for token in self.deadlines.pop_due(self.now_ns):
                assert token.at_ns <= self.now_ns, "released early"
                self.released.append(token)
        else:
            assert isinstance(step, (Wait, Sleep))
            head_ns = self.deadlines.head_ns
            assert head_ns is not None
            assert 0 < step.ns <= head_ns - self.now_ns, "a step past the deadline"
            self.now_ns += step.ns + self._random.randint(0, self._most_late_ns)
        return True
