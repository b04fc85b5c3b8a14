"""Timer kinds and the handlers that serve them. Kind numbers are permanent: they are stored in rows."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Final, Protocol

from timers.errors import DuplicateTimerKind, InvalidTimerKind
from timers.firing import DueTimer, Fired, TimerCtx
from timers.rows import USER_LANE

__all__ = [
    "FIRST_TEST_KIND",
    "LAST_TEST_KIND",
    "USER_KINDS",
    "TimerHandler",
    "TimerKind",
    "TimerRegistry",
    "lane_of",
]


@enum.unique
class TimerKind(enum.IntEnum):
    """The kinds that exist. A number that was ever in a release is never given to another kind.

    0 is invalid. 4, 6, 7, 10, 11 and 13 to 15 have a meaning in the artifact store whose numbering this one
    continues, and stay unused here.
    """

    LEASE_SWEEP = 1
    TICKET_EXPIRY = 2
    OUTBOX_RELAY = 3
    QUOTA_ROLLUP = 5
    OUTCOME_DELIVERY = 8
    RESERVATION_RECONCILE = 9
    PUBLICATION_RECHECK = 12
    OBJECT_ALARM = 32
    NAMED_TIMER = 33
    DURABLE_SLEEP = 34
    INBOX_SWEEP = 35
    PUBLICATION_NOTICE = 36


#: Kinds for tests; no release ever stores them.
FIRST_TEST_KIND: Final = 0xF0
LAST_TEST_KIND: Final = 0xFE

#: Kinds that run user code. They share one lane and are handed to turn queues instead of firing in the tick.
USER_KINDS: Final = frozenset({TimerKind.OBJECT_ALARM, TimerKind.NAMED_TIMER, TimerKind.DURABLE_SLEEP})


def lane_of(kind: int) -> int:
    """The lane that rows of this kind are stored in."""
    return USER_LANE if kind in USER_KINDS else int(kind)


class TimerHandler(Protocol):
    """Serves one kind.

    A handler may have an attribute `max_per_tick: int | None`; it only ever lowers the shared cap per kind, and
    counts as at least 1.
    """

    @property
    def kind(self) -> int: ...

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        """Decide what becomes of a due timer. Raising counts as a failure and is retried.

        It may run more than once for a row. What it puts in the batch is applied at most once; anything else it
        does must be idempotent. It leaves room in the batch for the engine's own operations (at most four).
        """
        ...


class TimerRegistry:
    """The handlers of a process, by kind. Mistakes raise at start-up, not when the first timer comes due."""

    def __init__(self, handlers: Iterable[TimerHandler] = ()) -> None:
        self._handlers: dict[int, TimerHandler] = {}
        for handler in handlers:
            self.register(handler)

    def register(self, handler: TimerHandler) -> None:
        """Add a handler. Raises `InvalidTimerKind` for a kind outside 1..254, `DuplicateTimerKind` for a taken one."""
        kind: object = handler.kind
        if not isinstance(kind, int) or isinstance(kind, bool) or not 1 <= kind <= LAST_TEST_KIND:
            raise InvalidTimerKind(f"{type(handler).__name__} has kind {kind!r}; kinds are 1..{LAST_TEST_KIND}")
        taken = self._handlers.get(kind)
        if taken is not None:
            raise DuplicateTimerKind(
                f"kind {int(kind)} is served by {type(taken).__name__} and by {type(handler).__name__}"
            )
        self._handlers[int(kind)] = handler

    def get(self, kind: int) -> TimerHandler | None:
        """The handler of this kind, or None when this process has none."""
        return self._handlers.get(kind)

    def kinds(self) -> tuple[int, ...]:
        """The kinds that are served, in ascending order."""
        return tuple(sorted(self._handlers))

    def cap_of(self, kind: int, shared_cap: int) -> int:
        """How many timers of this kind may be tried in one tick, given the cap that all kinds share."""
        own: int | None = getattr(self._handlers.get(kind), "max_per_tick", None)
        return shared_cap if own is None else min(shared_cap, max(1, own))
