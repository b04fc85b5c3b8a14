"""The release wheel of this process: made by the first deadline in the future, and never dropped."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import threading
import time

from timers.release_timer import ReleaseTimer, ReleaseToken, TimerBackend

__all__ = [
    "BACKEND_VARIABLE",
    "arm_at",
    "new_release_timer",
    "release_timer_backend",
    "release_timer_started",
]

logger = logging.getLogger("mainspring.release_timer")

#: Environment variable that chooses how wheels wait: `slice` (also when unset) or `condvar`. Read once per wheel.
BACKEND_VARIABLE = "MAINSPRING_RELEASE_TIMER"
_KNOWN = ("slice", "condvar")

_PR_SET_TIMERSLACK = 29
#: How late the kernel may end a sleep of the wheel's thread in order to save wake-ups. By default 50 µs, which would
#: be most of its lateness.
_TIMER_SLACK_NS = 1


def new_release_timer() -> ReleaseTimer:
    """A wheel of its own on the machine's monotonic clock; close it."""
    asked = os.environ.get(BACKEND_VARIABLE)
    if asked is not None and asked.strip().lower() not in _KNOWN:
        logger.warning("%s=%s: must be one of %s; slice is used", BACKEND_VARIABLE, asked, ", ".join(_KNOWN))
    return ReleaseTimer(
        monotonic_ns=time.monotonic_ns,
        sleep=time.sleep,
        backend=TimerBackend.of_variable(asked),
        thread_started=_sharpen_this_thread,
    )


def arm_at(at_ns: int) -> ReleaseToken:
    """A token of this process's wheel, released once `time.monotonic_ns()` has reached `at_ns`. Keep it."""
    wheel = _wheel
    if wheel is None:
        if at_ns <= time.monotonic_ns():
            return ReleaseToken.of_the_past(at_ns)
        wheel = _make_wheel()
    return wheel.arm_at(at_ns)


def release_timer_started() -> bool:
    """Whether this process has needed its wheel."""
    return _wheel is not None


def release_timer_backend() -> TimerBackend | None:
    """How this process's wheel waits; None before it was needed."""
    return None if _wheel is None else _wheel.backend


_wheel: ReleaseTimer | None = None
_lock = threading.Lock()


def _make_wheel() -> ReleaseTimer:
    global _wheel
    with _lock:
        if _wheel is None:
            _wheel = new_release_timer()
        return _wheel


def _forget_wheel() -> None:
    """In a forked child: threads are not inherited, and the parent's locks may be held for ever."""
    global _wheel, _lock
    _wheel, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_wheel)


def _sharpen_this_thread() -> None:
    """Linux: let sleeps of the calling thread end on time. Without it they end up to 50 µs later, and that is all."""
    if not sys.platform.startswith("linux"):
        return
    try:
        failed = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, _TIMER_SLACK_NS, 0, 0, 0)
    except (OSError, AttributeError):  # a C library without prctl
        failed = -1
    if failed:
        logger.info("the timer slack of the wheel's thread could not be set (errno %d)", ctypes.get_errno())
