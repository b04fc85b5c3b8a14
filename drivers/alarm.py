"""The physical alarm: arms the earliest wake, tells the tick, and looks by itself in case a wake was lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from drivers.clock import Clock, Handle
from drivers.waker import Waker

__all__ = ["BACKSTOP_DELAY_MS", "Alarm"]

#: How late a waker may be before the clock's own call-back comes in its place. At the same instant as the waker it
#: would come first and less precisely: event loops count in milliseconds, and turn idly through the last one.
BACKSTOP_DELAY_MS = 2


class Alarm:
    """One wake-up per partition. `fire` is called when the earliest armed time has come, never before it.

    `earliest_ms` is asked every `poll_ms` whatever was armed: it is the answer to lost wakes, clock steps and a dead
    wheel. `poll_ms=None` turns that off, for clocks that can't lose a wake. `waker` wakes more precisely than the
    clock's call-backs; those stay armed behind it, in case it loses a wake.
    """

    def __init__(
        self,
        clock: Clock,
        fire: Callable[[], None],
        *,
        earliest_ms: Callable[[], int | None],
        poll_ms: int | None,
        waker: Waker | None = None,
    ) -> None:
        self._clock = clock
        self._fire = fire
        self._earliest_ms = earliest_ms
        self._poll_ms = poll_ms
        self._waker = waker
        self._handle: Handle | None = None
        self._poll_handle: Handle | None = None
        self._stopped = False
        self.armed_ms: int | None = None

    def start(self) -> None:
        """Arm for what is stored, and begin to poll."""
        if self._waker is not None:
            self._waker.start()
        self.arm(self._earliest_ms())
        self._schedule_poll()

    def arm(self, due_ms: int | None) -> None:
        """Wake at `due_ms` unless an earlier wake is armed already. None arms nothing."""
        if due_ms is None or self._stopped or (self.armed_ms is not None and self.armed_ms <= due_ms):
            return
        self._disarm()
        self.armed_ms = due_ms
        if self._waker is None or due_ms <= self._clock.wall_ms():
            self._handle = self._clock.call_at(due_ms, self._wake)
        else:
            self._handle = self._clock.call_at(due_ms + BACKSTOP_DELAY_MS, self._wake)
            self._waker.arm(due_ms, self._woken)

    def status(self) -> dict[str, Any]:
        """How wakes come, as plain data."""
        return {"backend": "event-loop"} if self._waker is None else self._waker.status()

    def _disarm(self) -> None:
        if self._waker is not None and self.armed_ms is not None:
            self._waker.disarm()
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self.armed_ms = None

    def _woken(self) -> None:
        if (
            self.armed_ms is not None and self.armed_ms <= self._clock.wall_ms()
        ):  # else too early: the clock's own comes
            self._wake()

    def _wake(self) -> None:
        self._disarm()
        if not self._stopped:
            self._fire()

    def _schedule_poll(self) -> None:
        if self._poll_ms is not None and not self._stopped:
            self._poll_handle = self._clock.call_later(self._poll_ms, self._poll)

    def _poll(self) -> None:
        self._schedule_poll()  # first: a look that fails must not be the last one
        due_ms = self._earliest_ms()
        now_ms = self._clock.wall_ms()
        # A clock step can bring the instant of a wake that still waits in monotonic time, and bars later ones.
        overtaken = self.armed_ms is not None and self.armed_ms <= now_ms
        if overtaken:
            self._disarm()
        if overtaken or (due_ms is not None and due_ms <= now_ms):
            self._fire()
        else:
            self.arm(due_ms)

    def stop(self) -> None:
        """Arm nothing and call nobody from now on."""
        self._stopped = True
        self._disarm()
        if self._waker is not None:
            self._waker.stop()
        if self._poll_handle is not None:
            self._poll_handle.cancel()
