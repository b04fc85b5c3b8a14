"""What wakes an alarm to the fraction of a millisecond: a port, and the release wheel of this process behind it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from drivers.process_wheel import arm_at, release_timer_backend
from timers.lateness import LatenessRecorder
from timers.release_timer import ReleaseToken

__all__ = ["ProcessWaker", "Waker", "lateness_status"]

logger = logging.getLogger("mainspring.alarm")

_MS_NS = 1_000_000


class Waker(Protocol):
    """Wakes one alarm. It may be late and may lose a wake: the alarm has a slower way of its own beside it.

    Belongs to one event loop, on whose thread `wake` is called.
    """

    def start(self) -> None: ...

    def arm(self, due_ms: int, wake: Callable[[], None]) -> None:
        """Call `wake` once wall time has reached `due_ms`, not before. Takes the place of what was armed."""
        ...

    def disarm(self) -> None: ...

    def stop(self) -> None: ...

    def status(self) -> dict[str, Any]:
        """Which way wakes come, and how late they have been, as plain data."""
        ...


class ProcessWaker:
    """Wakes through the release wheel of this process: its thread, then the loop.

    A wake is late by the two hops, and nothing else; `lateness` is measured from the deadline to the call.
    """

    def __init__(
        self,
        *,
        arm_at: Callable[[int], ReleaseToken] = arm_at,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._arm_at = arm_at
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns
        self._generation = 0
        self._armed: tuple[int, Callable[[], None]] | None = None
        self._token: ReleaseToken | None = None
        self._has_warned = False
        self.lateness = LatenessRecorder()

    def start(self) -> None:
        return None

    def arm(self, due_ms: int, wake: Callable[[], None]) -> None:
        self._armed = (due_ms, wake)
        self._aim(due_ms)

    def disarm(self) -> None:
        self._armed = self._token = None  # the wheel holds the token weakly

    def stop(self) -> None:
        self.disarm()

    def status(self) -> dict[str, Any]:
        backend = release_timer_backend()
        return {
            "backend": "process",
            "release_timer": None if backend is None else backend.value,
            "lateness": lateness_status(self.lateness),
        }

    def _aim(self, due_ms: int) -> None:
        self._generation += 1
        generation = self._generation
        # The wall clock is read first: what passes between the two readings makes the wake later, not earlier.
        remaining_ns = due_ms * _MS_NS - self._wall_ns()
        try:
            self._token = self._arm_at(self._monotonic_ns() + remaining_ns)
        except RuntimeError as error:  # the system gives no thread: the alarm's own way is left
            self._token = None
            if not self._has_warned:
                self._has_warned = True
                logger.warning("no release timer, wakes are as precise as the event loop: %s", error)
            return
        self._token.when_ended(lambda: self._post(generation))

    def _post(self, generation: int) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: there is nobody to wake
            self._loop.call_soon_threadsafe(self._released, generation)

    def _released(self, generation: int) -> None:
        if generation != self._generation or self._armed is None or self._token is None:
            return  # armed again or disarmed since
        due_ms, wake = self._armed
        if self._wall_ns() < due_ms * _MS_NS:
            self._aim(due_ms)  # the wall clock was set back
            return
        self.lateness.record(self._monotonic_ns() - self._token.at_ns)
        self.disarm()
        wake()


def lateness_status(recorder: LatenessRecorder) -> dict[str, int]:
    """A summary as plain data, in microseconds, rounded up."""
    found = recorder.summary()
    return {
        "count": found.count,
        "p50_us": -(-found.p50_ns // 1_000),
        "p95_us": -(-found.p95_ns // 1_000),
        "p99_us": -(-found.p99_ns // 1_000),
        "max_us": -(-found.max_ns // 1_000),
    }
