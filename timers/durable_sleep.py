"""Durable sleep: a program sleeps until an instant, across restarts, and whoever sees the instant first ends it.

The row of a sleep is the truth; everything in memory only saves waiting. All of it is pure: reads and writes go
through a small store, and clocks, sleeping and events are arguments.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from timers.errors import SleepDropped, TooManySteps

__all__ = [
    "DEFAULT_POLL_MS",
    "MAX_PROMISE_WAITERS",
    "DueSleeps",
    "DurableTimerService",
    "Sleep",
    "SleepStore",
    "StepCounter",
    "TimerId",
    "WaitEvent",
    "Waiter",
    "Waits",
    "promise_id",
    "sleep_until",
    "timer_id",
]

_log = logging.getLogger(__name__)

#: How often a sleeper looks again by itself, and how often the service does: the most that a sleep whose end was seen
#: elsewhere lasts too long.
DEFAULT_POLL_MS: Final = 2_000
#: Shortest interval of the service: 0 would poll without a pause.
MIN_POLL_MS: Final = 1
#: Waiters for promises that are told at once; each costs memory for as long as a person may take to answer, so those
#: beyond it look by themselves every poll interval. Sleepers have no such bound: their row says when they end.
MAX_PROMISE_WAITERS: Final = 1_000

#: The name of one sleep, derived from its execution and step.
TimerId: TypeAlias = uuid.UUID

_ID_BYTES: Final = 16
_STEP_BYTES: Final = 4
_TIMER_CONTEXT: Final = b"ms-timer-id"
_PROMISE_CONTEXT: Final = b"ms-promise-id"


def timer_id(execution: bytes, step: int) -> TimerId:
    """Names the sleep that is this step of the execution: the same whenever the step is run again."""
    return _derived(_TIMER_CONTEXT, execution, step)


def promise_id(execution: bytes, step: int) -> uuid.UUID:
    """Names the promise that is this step of the execution. Never the id of a timer, also for the same step."""
    return _derived(_PROMISE_CONTEXT, execution, step)


def _derived(context: bytes, execution: bytes, step: int) -> uuid.UUID:
    """A hash under a context of its own, in the form of a UUIDv8. The step has a fixed length, so it can't be mistaken
    for a part of the execution's name."""
    digest = bytearray(
        hashlib.blake2b(step.to_bytes(_STEP_BYTES, "big") + execution, digest_size=_ID_BYTES, person=context).digest()
    )
    digest[6] = digest[6] & 0x0F | 0x80  # version 8
    digest[8] = digest[8] & 0x3F | 0x80  # the variant of RFC 9562
    return uuid.UUID(bytes=bytes(digest))


class StepCounter:
    """Numbers the steps of one run of an execution, in the order in which the program makes them, from 0."""

    __slots__ = ("_limit", "taken")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        #: steps so far; also the number of the next one
        self.taken = 0

    def take(self) -> int:
        """The next step's number. Raises `TooManySteps`, and then no number was taken."""
        if self.taken >= self._limit:
            raise TooManySteps(
                f"the execution has made {self.taken:,} steps, which is its limit: let it end and start another one"
                " with what is left to do"
            )
        step = self.taken
        self.taken += 1
        return step


@dataclass(frozen=True)
class Sleep:
    """One sleep, as it is stored. `due_ms` is epoch milliseconds of wall time."""

    timer_id: TimerId
    execution: bytes
    due_ms: int
    fired: bool = False


class SleepStore(Protocol):
    """Where a sleeper keeps its sleep."""

    async def state(self, timer_id: TimerId) -> Sleep | None:
        """The stored sleep, or None when it was never armed, or was dropped."""
        ...

    async def arm(self, sleep: Sleep) -> None:
        """Store the sleep if there is none of its id; one that is there stays as it is."""
        ...

    async def mark_fired(self, timer_id: TimerId) -> bool:
        """Change an unfired sleep to fired. True for the one who did; False when there was nothing to change."""
        ...


class Waiter(Protocol):
    """Interest in one id. What happens to the id from now on is not missed."""

    async def wait(self, timeout_ms: int) -> None:
        """Return when the id was notified since the interest was registered, or after `timeout_ms`."""
        ...

    def close(self) -> None:
        """The interest has ended."""
        ...


async def sleep_until(
    store: SleepStore,
    sleep: Sleep,
    *,
    now_ms: Callable[[], int],
    register: Callable[[uuid.UUID], Waiter],
    poll_ms: int = DEFAULT_POLL_MS,
) -> None:
    """Return once the sleep is over; never before its due time on the wall clock.

    A sleep that is stored already is attached to, and its stored due time counts, whatever `sleep` says now: a program
    that computes "in ten seconds" again after a crash does not sleep longer. The sleeper ends its sleep itself when it
    sees the time come, so it needs no service. `register` is called before the state is looked at, so that an end that
    comes in between is not missed. Raises `SleepDropped` when the row is removed under the sleeper.
    """
    if await store.state(sleep.timer_id) is None:
        await store.arm(sleep)
    while True:
        waiter = register(sleep.timer_id)
        try:
            stored = await store.state(sleep.timer_id)
            if stored is None:
                raise SleepDropped(f"the sleep {sleep.timer_id} was removed while its program slept")
            if stored.fired:
                return
            left_ms = stored.due_ms - now_ms()
            if left_ms <= 0:
                await store.mark_fired(sleep.timer_id)  # False: somebody was faster, which is as good
                return
            await waiter.wait(min(poll_ms, left_ms))
        finally:
            waiter.close()


class WaitEvent(Protocol):
    """An event of whatever loop the waiters run on."""

    def set(self) -> None: ...

    async def wait(self, timeout_ms: int) -> None:
        """Return once it is set, or after `timeout_ms`."""
        ...


class Waits:
    """Who waits for which timer or promise, in one process. Nothing depends on it but how soon a waiter looks again."""

    def __init__(self, make_event: Callable[[], WaitEvent], max_promise_waiters: int = MAX_PROMISE_WAITERS) -> None:
        self._make_event = make_event
        self._max_promise_waiters = max_promise_waiters
        self._waiting: dict[uuid.UUID, set[_Interest]] = {}
        self.promise_waiters = 0

    def timer(self, timer_id: TimerId) -> Waiter:
        """Interest in a sleep; there may be any number."""
        return self._register(timer_id, is_promise=False)

    def promise(self, promise_id: uuid.UUID) -> Waiter:
        """Interest in a promise; beyond the bound the waiter is told nothing and only polls."""
        if self.promise_waiters >= self._max_promise_waiters:
            return _Polling(self._make_event())
        self.promise_waiters += 1
        return self._register(promise_id, is_promise=True)

    def notify(self, any_id: uuid.UUID) -> None:
        """Wake everyone who waits for this id."""
        for interest in self._waiting.get(any_id, ()):
            interest.event.set()

    def _register(self, any_id: uuid.UUID, *, is_promise: bool) -> Waiter:
        interest = _Interest(self, any_id, self._make_event(), is_promise)
        self._waiting.setdefault(any_id, set()).add(interest)
        return interest

    def drop(self, interest: _Interest) -> None:
        """The interest has ended; again does nothing."""
        interests = self._waiting.get(interest.any_id, set())
        if interest not in interests:
            return
        interests.discard(interest)
        self.promise_waiters -= interest.is_promise
        if not interests:
            del self._waiting[interest.any_id]


class _Interest:
    __slots__ = ("_waits", "any_id", "event", "is_promise")

    def __init__(self, waits: Waits, any_id: uuid.UUID, event: WaitEvent, is_promise: bool) -> None:
        self._waits = waits
        self.any_id = any_id
        self.event = event
        self.is_promise = is_promise

    async def wait(self, timeout_ms: int) -> None:
        await self.event.wait(timeout_ms)

    def close(self) -> None:
        self._waits.drop(self)


class _Polling:
    """Waits for time alone."""

    __slots__ = ("_event",)

    def __init__(self, event: WaitEvent) -> None:
        self._event = event

    async def wait(self, timeout_ms: int) -> None:
        await self._event.wait(timeout_ms)

    def close(self) -> None:
        return None


class DueSleeps(Protocol):
    """What the service needs of a store."""

    async def due(self, now_ms: int) -> Sequence[Sleep]:
        """Every unfired sleep with `due_ms <= now_ms`, in order of `due_ms`. No limit: an overdue sleep that waits for
        a later page would be late by a whole interval."""
        ...

    async def mark_fired(self, timer_id: TimerId) -> bool: ...


class DurableTimerService:
    """Ends sleeps whose sleepers run elsewhere, or nowhere yet. Optional, and safe to run several times at once.

    It holds no state: what it knows is in the store, so stopping and starting it loses nothing.
    """

    def __init__(
        self,
        store: DueSleeps,
        *,
        now_ms: Callable[[], int],
        monotonic_ms: Callable[[], int],
        sleep: Callable[[int], Awaitable[None]],
        notify: Callable[[uuid.UUID], None],
        interval_ms: int = DEFAULT_POLL_MS,
    ) -> None:
        self._store = store
        self._now_ms = now_ms
        self._monotonic_ms = monotonic_ms
        self._sleep = sleep
        self._notify = notify
        self.interval_ms = max(interval_ms, MIN_POLL_MS)

    async def run(self) -> None:
        """Poll until cancelled: at once, then each interval. After a poll that took longer than the interval the next
        one comes at once, and the interval counts from there: polls that were missed are not made up for."""
        due_ms = self._monotonic_ms()
        while True:
            left_ms = due_ms - self._monotonic_ms()
            if left_ms > 0:
                await self._sleep(left_ms)
            due_ms = self._monotonic_ms() + self.interval_ms
            await self.poll()

    async def poll(self) -> int:
        """End every sleep that is over; how many this service ended. Errors are logged and cost no other sleep."""
        try:
            sleeps = await self._store.due(self._now_ms())
        except Exception:
            _log.warning("due sleeps can't be read; they are looked for again at the next tick", exc_info=True)
            return 0
        ended = 0
        for sleep in sleeps:
            try:
                won = await self._store.mark_fired(sleep.timer_id)
            except Exception:
                _log.warning("sleep %s can't be ended; it is tried again", sleep.timer_id, exc_info=True)
                continue
            if won:  # else it was ended by somebody else, who has told its sleeper
                ended += 1
                self._notify(sleep.timer_id)
        return ended
