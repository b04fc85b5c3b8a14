"""The Ray driver: a partition that has a process to itself."""

from __future__ import annotations

import sys

from drivers.native import NativeDriver

__all__ = ["SWITCH_INTERVAL_S", "DurableObjectDriver", "tune_process"]

#: How long a thread may keep the GIL from another: with Python's default of 5 ms a committed group waits 17.5 ms
#: for its turn beside a busy loop, with this 2.8 ms (measured).
SWITCH_INTERVAL_S = 0.0005


def tune_process() -> None:
    """Settings of a process that hosts one partition and nothing else."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class DurableObjectDriver(NativeDriver):
    """Files, clock and commits of one partition actor. The alarm is the process's own; a release wheel on the node
    will take its place, and the look each second stays as the backstop."""

    def __init__(
        self, *, durability: str, poll_ms: int, lock_wait_ms: int, busy_timeout_ms: int, checkpoint_interval_ms: int
    ) -> None:
        super().__init__(
            durability=durability,
            poll_ms=poll_ms,
            lock_wait_ms=lock_wait_ms,
            busy_timeout_ms=busy_timeout_ms,
            checkpoint_interval_ms=checkpoint_interval_ms,
        )
