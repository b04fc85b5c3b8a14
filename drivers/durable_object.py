"""The Ray driver: a partition that has a process to itself."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

from drivers.native import NativeDriver
from drivers.waker import Waker

__all__ = ["GC_THRESHOLDS", "SWITCH_INTERVAL_S", "DurableObjectDriver", "tune_process"]

#: How long a thread may keep the GIL from another: with Python's default of 5 ms a committed group waits 17.5 ms
#: for its turn beside a busy loop, with this 2.8 ms (measured).
SWITCH_INTERVAL_S = 0.0005


#: Allocations between two passes of the cycle collector. With Python's default (700) the collector walks the whole
#: heap of calls in flight several times per group commit: 78 µs of CPU per call against 58 µs with this (measured).
#: What a call leaves behind is freed by reference counts, cycles come from application code only.
GC_THRESHOLDS = (50_000, 20, 50)


def tune_process() -> None:
    """Settings of a process that hosts one partition and nothing else."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # what was imported lives for ever: it need not be looked at again
    gc.set_threshold(*GC_THRESHOLDS)


class DurableObjectDriver(NativeDriver):
    """Files, clock and commits of one partition actor. `make_waker` gives the way to the release wheel of the node;
    without it the alarm is woken by the release wheel of the process. The look each second is the backstop of both."""

    def __init__(
        self,
        *,
        durability: str,
        poll_ms: int,
        lock_wait_ms: int,
        busy_timeout_ms: int,
        checkpoint_interval_ms: int,
        make_waker: Callable[[], Waker] | None = None,
    ) -> None:
        super().__init__(
            durability=durability,
            poll_ms=poll_ms,
            lock_wait_ms=lock_wait_ms,
            busy_timeout_ms=busy_timeout_ms,
            checkpoint_interval_ms=checkpoint_interval_ms,
        )
        self._make_waker = make_waker

    def waker(self) -> Waker | None:
        return super().waker() if self._make_waker is None else self._make_waker()
