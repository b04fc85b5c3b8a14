"""Finds an event loop that has stopped turning: tells where it stands, and in the end ends the process."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType

from actors.logs import log_event

__all__ = ["HANG_EXIT_CODE", "Watchdog"]

#: What the process of a hung loop exits with; told apart from crashes in Ray's logs.
HANG_EXIT_CODE = 87
#: Looks per `blocked_ms`: a block is found at most a quarter late, at the price of four loop turns.
_LOOKS_PER_BLOCK = 4
#: The C-level backstop goes off this much later than the watchdog itself: only when it could not run at all,
#: because an extension keeps the interpreter lock.
_BACKSTOP_FACTOR = 2


class Watchdog:
    """Watches one event loop from a thread of its own.

    It asks the loop to run a callback and looks whether it did. A loop that has not turned for `blocked_ms` is
    reported once per block as `loop_blocked`, with the stack of its thread; after `hang_ms` the process exits with
    `HANG_EXIT_CODE`, and Ray starts it again. Time in which the watchdog itself did not run (a stopped process, a
    suspended machine) does not count.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread_id: int,
        *,
        name: str,
        blocked_ms: int,
        hang_ms: int,
        clock: Callable[[], float] = time.monotonic,
        exit_process: Callable[[int], object] = os._exit,
        frames: Callable[[], dict[int, FrameType]] = sys._current_frames,
    ) -> None:
        """`thread_id` is the loop's thread (`threading.get_ident()` there); `clock` gives seconds."""
        self._loop = loop
        self._thread_id = thread_id
        self._name = name
        self._blocked_s = blocked_ms / 1_000
        self._hang_s = hang_ms / 1_000
        self._clock = clock
        self._exit_process = exit_process
        self._frames = frames
        self._period_s = min(self._blocked_s, self._hang_s) / _LOOKS_PER_BLOCK
        self._turned = threading.Event()
        self._turned.set()
        self._stopped = threading.Event()
        self._looked_at = clock()
        self._still_s = 0.0
        self._reported = False
        self._backstop = False
        self._thread: threading.Thread | None = None

    def start(self, *, backstop: bool = False) -> None:
        """Start the thread. `backstop`: also let the C runtime end the process when no Python thread can run."""
        self._backstop = backstop
        self._looked_at = self._clock()
        self._thread = threading.Thread(target=self._run, name=f"mainspring-watchdog-{self._name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching; idempotent, waits for the thread."""
        self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._backstop:
            faulthandler.cancel_dump_traceback_later()
            self._backstop = False

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            if self._backstop:
                faulthandler.dump_traceback_later(self._hang_s * _BACKSTOP_FACTOR, exit=True)
            if not self.look():
                return

    def look(self) -> bool:
        """Look once, as the thread does each period. False when there is nothing left to watch."""
        now = self._clock()
        elapsed = min(now - self._looked_at, 2 * self._period_s)
        self._looked_at = now
        if self._turned.is_set():
            if self._reported:
                log_event(
                    logging.WARNING,
                    "loop_unblocked",
                    f"The loop of {self._name} turns again after about {self._still_s:.1f} s.",
                    loop=self._name,
                    blocked_ms=round(self._still_s * 1_000),
                )
            self._still_s, self._reported = 0.0, False
            self._turned.clear()
            try:
                self._loop.call_soon_threadsafe(self._turned.set)
            except RuntimeError:  # the loop is closed
                return False
            return True
        self._still_s += elapsed
        if self._still_s >= self._hang_s:
            self._report("loop_hung", logging.CRITICAL, "The process ends, so that it is started again.")
            sys.stderr.flush()
            self._exit_process(HANG_EXIT_CODE)
            return False
        if self._still_s >= self._blocked_s and not self._reported:
            self._reported = True
            self._report("loop_blocked", logging.WARNING, "Use `await asyncio.to_thread(...)` for what blocks.")
        return True

    def _report(self, event: str, level: int, advice: str) -> None:
        frame = self._frames().get(self._thread_id)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "(the thread has no stack)"
        log_event(
            level,
            event,
            f"The loop of {self._name} has not turned for {self._still_s:.1f} s. {advice}",
            loop=self._name,
            blocked_ms=round(self._still_s * 1_000),
            stack=stack,
        )
