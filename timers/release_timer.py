"""The release wheel: one thread and one heap of deadlines that release tokens at their instant, never before.

The clock and the sleep are arguments, and there is no event loop here: `drivers.process_wheel` has the wheel of the
process, `drivers.release_token` lets asyncio wait for a token.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum

from timers.deadlines import SWEEP_INTERVAL_NS, SWEEP_MIN_LEN, Deadlines, Fire, Idle, Sleep, Step, plan
from timers.errors import ReleaseTimerClosed

__all__ = ["ReleaseTimer", "ReleaseToken", "TimerBackend"]

logger = logging.getLogger("mainspring.release_timer")

THREAD_NAME = "mainspring-release"
_SECOND_NS = 1_000_000_000


class TimerBackend(Enum):
    """How the wheel's thread waits for a deadline. The value is its name in status and logs."""

    #: A wait until shortly before the deadline, then short sleeps: precise wherever a sleep of 0.5 ms is.
    SLICE = "sleep-slice"
    #: One wait for the whole remainder: as precise as the system's timed waits are; for comparison.
    CONDVAR = "condvar"

    @classmethod
    def of_variable(cls, value: str | None) -> TimerBackend:
        """The backend that an environment variable asks for: `condvar`, or `slice`, which is also everything else."""
        return cls.CONDVAR if value is not None and value.strip().lower() == "condvar" else cls.SLICE

    def is_precise_on(self, os_name: str) -> bool:
        """Whether it keeps to well under a millisecond on this system (`os.name`) when the machine is idle."""
        return self is TimerBackend.SLICE or os_name == "posix"


class ReleaseToken:
    """What a deadline releases. Level-triggered: who looks or waits later sees at once that it was released.

    The wheel holds it weakly: a token that nobody keeps is abandoned, and releases nothing. Closing the wheel abandons
    tokens that are kept, too: their waiters wake, and `released` stays False. Thread-safe.
    """

    __slots__ = ("__weakref__", "_callbacks", "_ended", "_lock", "_released", "at_ns")

    def __init__(self, at_ns: int) -> None:
        #: The deadline, on the wheel's clock.
        self.at_ns = at_ns
        self._released = False
        self._ended = threading.Event()
        self._lock = threading.RLock()  # a callback may be added by what the garbage collector runs under the lock
        self._callbacks: list[Callable[[], None]] = []

    @classmethod
    def of_the_past(cls, at_ns: int) -> ReleaseToken:
        """A token whose deadline has passed: released from the start."""
        token = cls(at_ns)
        token._end(released=True)
        return token

    @property
    def released(self) -> bool:
        """The deadline has passed and the wheel has said so."""
        return self._released

    @property
    def abandoned(self) -> bool:
        """The wheel was closed before the deadline."""
        return self._ended.is_set() and not self._released

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block this thread until the token is released; False when the time is over or the token is abandoned."""
        self._ended.wait(timeout_s)
        return self._released

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call back once, when the token is released or abandoned; at once if it is.

        Otherwise on the wheel's thread, where it must not block: all later deadlines wait for it. Arming is fine.
        """
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def forget(self, callback: Callable[[], None]) -> None:
        """Don't call this one; nothing happens if it has been called."""
        with self._lock:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

    def _end(self, *, released: bool) -> None:
        with self._lock:
            self._released = released
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:  # one waiter's fault must not end the thread that serves all others
                logger.exception("a release callback failed", extra={"event": "release_callback_failed"})


class ReleaseTimer:
    """A wheel. Its thread starts with the first deadline in the future, and parks without a time-out when idle.

    Tokens are released in the order of their deadlines, those of one instant in the order of arming. Thread-safe.
    """

    def __init__(
        self,
        *,
        monotonic_ns: Callable[[], int],
        sleep: Callable[[float], None],
        backend: TimerBackend = TimerBackend.SLICE,
        thread_started: Callable[[], None] = lambda: None,
    ) -> None:
        """`sleep` takes seconds; `thread_started` is called on the wheel's thread before anything else."""
        self.backend = backend
        self._monotonic_ns = monotonic_ns
        self._sleep = sleep
        self._thread_started = thread_started
        # Its lock may be taken twice by one thread: the garbage collector can run code that arms, under the lock.
        self._changed = threading.Condition()
        self._deadlines: Deadlines[ReleaseToken] = Deadlines()
        self._thread: threading.Thread | None = None
        self._closed = False
        #: How often the thread has looked at the heap.
        self.wakes = 0

    def __len__(self) -> int:
        """Slots in the heap, abandoned ones included until they are due or swept."""
        return len(self._deadlines)

    @property
    def started(self) -> bool:
        """Whether there is, or was, a thread."""
        return self._thread is not None

    def arm_at(self, at_ns: int) -> ReleaseToken:
        """A token that is released once the clock has reached `at_ns`. Keep it: a dropped token is abandoned.

        One that is due already is released at once and touches nothing. Raises `ReleaseTimerClosed`, and RuntimeError
        when the system gives no thread.
        """
        if at_ns <= self._monotonic_ns():
            return ReleaseToken.of_the_past(at_ns)
        token = ReleaseToken(at_ns)
        with self._changed:
            if self._closed:
                raise ReleaseTimerClosed("a release timer that was closed takes no more deadlines; make a new one")
            self._ensure_thread()
            is_head = self._deadlines.add(at_ns, token)
            if is_head or len(self._deadlines) == SWEEP_MIN_LEN + 1:  # from there on the thread looks more often
                self._changed.notify()  # lost while the thread sleeps, harmlessly: it looks again after the slice
        return token

    def close(self) -> None:
        """Abandon what is armed and end the thread; idempotent. From a callback of the wheel it does not wait."""
        with self._changed:
            self._closed = True
            pending = self._deadlines.pop_all()
            self._changed.notify()
        for token in pending:
            token._end(released=False)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _ensure_thread(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
            thread.start()
            self._thread = thread

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        self._thread_started()
        while not self._closed:
            for token in self._next_due():
                token._end(released=True)  # outside the lock: whoever it wakes may arm again
            # and from the top, with a fresh reading of the clock: releasing took time

    def _next_due(self) -> list[ReleaseToken]:
        """What is due now; else nothing, after one wait or sleep."""
        with self._changed:
            if self._closed:
                return []
            self.wakes += 1
            now_ns = self._monotonic_ns()
            self._deadlines.sweep(now_ns)
            step = self._plan(now_ns)
            if isinstance(step, Fire):
                return self._deadlines.pop_due(now_ns)
            if not isinstance(step, Sleep):
                self._changed.wait(None if isinstance(step, Idle) else step.ns / _SECOND_NS)
                return []
        self._sleep(step.ns / _SECOND_NS)
        return []

    def _plan(self, now_ns: int) -> Step:
        if self.backend is TimerBackend.CONDVAR:
            return plan(self._deadlines.head_ns, now_ns, slice_lead_ns=0)
        if len(self._deadlines) > SWEEP_MIN_LEN:  # nobody says that slots were abandoned, so it has to look
            return plan(self._deadlines.head_ns, now_ns, max_wait_ns=SWEEP_INTERVAL_NS)
        return plan(self._deadlines.head_ns, now_ns)
