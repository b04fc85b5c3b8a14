"""The timer that delivers an object's outcomes to their sinks: at least once, in order, a page at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from timers.batch import Batch, Equals, Put
from timers.errors import CorruptRow, SinkRaised, UndeliverableOutcome
from timers.firing import Done, DueTimer, Fired, Reschedule, TimerCtx
from timers.outcomes import Backlog, Delivered, OutcomeRow, Waiting, acknowledge, close_backlog, waiting
from timers.registry import TimerKind
from timers.rows import oid_of

__all__ = ["SINK_TIMEOUT_MS", "DeliveryWatch", "OutcomeDelivery", "OutcomeSinks", "Progress", "backoff_ms"]

#: Outcomes per fire: a fire with a sink that takes its time ends before others wait long.
ROWS_PER_FIRE: Final = 16

#: Most of them: each may need four operations, and 4 x 23 + 6 still fit one batch.
MAX_ROWS_PER_FIRE: Final = 23

#: A sink gets this long for one outcome; whoever keeps the time cuts the call off then.
SINK_TIMEOUT_MS: Final = 5_000

#: No call is begun later than this in a fire: two sinks at their limit, and it is the others' turn.
FIRE_BUDGET_MS: Final = 2 * SINK_TIMEOUT_MS

#: The first pause after a failing sink; it doubles each time.
BASE_BACKOFF_MS: Final = 1_000

#: The longest pause, jitter and the sink's own wishes included: a sink that is back gets its outcomes within 15 min.
MAX_BACKOFF_MS: Final = 900_000

#: The shortest pause when all that waits can't be delivered as it is stored: nothing but an operator will change that.
JUNK_PAUSE_MS: Final = 60_000

#: Up to this fraction (as a divisor) of a pause is added, so that objects that failed together spread out.
_JITTER_DIVISOR: Final = 5

#: From this many doublings on the pause is at its cap (1 s x 2^10 > 900 s); bounds the shift for any attempt.
_DOUBLINGS_TO_CAP: Final = 10

_MAX_ATTEMPT: Final = 2**32 - 1
_HEAD_BYTES: Final = 6  # u32 attempt, u16 length of the cursor
_CURSOR_BYTES: Final = 8  # the sequence number after which the next page begins


class OutcomeSinks(Protocol):
    """Where outcomes go."""

    async def deliver(self, outcome: OutcomeRow, source: Backlog) -> None:
        """Give one outcome to its sink. It may have got it before, and knows it by its id.

        Raises `UndeliverableOutcome` when the row is such that no sink can ever take it, `SinkRaised` when the sink
        ran and refused, anything else when nobody knows. An attribute `retry_after_ms` of the error is a wish.
        """
        ...


class DeliveryWatch(Protocol):
    """Is told what an operator may want to know."""

    def backlog_seen(self, backlog: Backlog, left: Waiting) -> None:
        """A fire begins: the gauge of what waits."""
        ...

    def delivered(self, outcome: OutcomeRow) -> None: ...

    def synthetic(self, outcome: OutcomeRow) -> None:
        """Acknowledged without a call."""
        ...

    def sink_failed(self, outcome: OutcomeRow, error: Exception) -> None: ...

    def retained(self, outcome: OutcomeRow, reason: str) -> None:
        """Can't be delivered as it is stored; it is kept, and passed over."""
        ...


@dataclass(frozen=True)
class Progress:
    """The timer's payload: failed fires in a row, and where the next page begins (0: at the head)."""

    attempt: int = 0
    cursor: int = 0

    def to_bytes(self) -> bytes:
        cursor = self.cursor.to_bytes(_CURSOR_BYTES, "big") if self.cursor else b""
        return self.attempt.to_bytes(4, "big") + len(cursor).to_bytes(2, "big") + cursor

    @classmethod
    def from_bytes(cls, payload: bytes) -> Progress:
        """Read a payload; an empty one is a beginning. Raises `CorruptRow`."""
        if not payload:
            return cls()
        cursor = payload[_HEAD_BYTES:]
        length = int.from_bytes(payload[4:_HEAD_BYTES], "big")
        if len(payload) < _HEAD_BYTES or length != len(cursor) or length not in (0, _CURSOR_BYTES):
            raise CorruptRow(f"the payload {payload.hex()} of an outcome timer can't be read")
        return cls(int.from_bytes(payload[:4], "big"), int.from_bytes(cursor, "big"))


def backoff_ms(reference: bytes, attempt: int) -> int:
    """The pause after `attempt` + 1 failures in a row: the same whoever computes it."""
    pause = min(BASE_BACKOFF_MS << min(attempt, _DOUBLINGS_TO_CAP), MAX_BACKOFF_MS)
    digest = hashlib.sha256(b"outcome backoff\0%d\0" % attempt + reference).digest()
    jitter = (pause // _JITTER_DIVISOR + 1) * int.from_bytes(digest[:8], "big") >> 64
    return min(pause + jitter, MAX_BACKOFF_MS)


@dataclass
class _Page:
    """What has become of the rows of one page."""

    cursor: int
    taken: list[OutcomeRow] = field(default_factory=list)
    failed: OutcomeRow | None = None
    #: the sink ran for certain, so its next run must be a new one
    has_run: bool = False
    wish_ms: int = 0


class OutcomeDelivery:
    """Serves kind `OUTCOME_DELIVERY`; a timer's reference is the object's number.

    `monotonic_ms` bounds a fire; without it only the number of rows does.
    """

    kind = int(TimerKind.OUTCOME_DELIVERY)

    def __init__(
        self,
        sinks: OutcomeSinks,
        watch: DeliveryWatch,
        *,
        monotonic_ms: Callable[[], int] | None = None,
        rows_per_fire: int = ROWS_PER_FIRE,
        budget_ms: int = FIRE_BUDGET_MS,
    ) -> None:
        self._sinks = sinks
        self._watch = watch
        self._monotonic_ms = monotonic_ms or (lambda: 0)
        self._rows_per_fire = min(max(1, rows_per_fire), MAX_ROWS_PER_FIRE)
        self._budget_ms = budget_ms

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        owner = oid_of(timer.reference)
        if owner is None or owner[1]:
            raise CorruptRow(f"the reference {timer.reference.hex()} of an outcome timer names no object")
        progress = Progress.from_bytes(timer.value)
        backlog = await ctx.store.get(Backlog, (owner[0],))
        if backlog is None:
            return Done()
        delivered = await ctx.store.get(Delivered, (owner[0],))
        left = waiting(backlog, delivered)
        self._watch.backlog_seen(backlog, left)
        if not left.rows:
            return Done(close_backlog(backlog, delivered))
        rows = await self._read_page(ctx, backlog, progress.cursor)
        page = await self._work_through(rows, backlog, progress.cursor)
        if page.taken:
            return await self._advance(ctx, timer, backlog, page)
        least_ms = JUNK_PAUSE_MS if page.failed is None and len(rows) == left.rows else 0
        return self._wait(ctx, timer, progress, page, least_ms)

    async def _read_page(self, ctx: TimerCtx, backlog: Backlog, cursor: int) -> Sequence[OutcomeRow]:
        limit = self._rows_per_fire
        page = await ctx.store.scan(OutcomeRow, (backlog.oid,), after=(cursor,) if cursor else None, limit=limit)
        if not page and cursor:  # the tail is done: once more from the head
            page = await ctx.store.scan(OutcomeRow, (backlog.oid,), limit=limit)
        if not page:
            raise CorruptRow(f"{backlog} counts outcomes and there are none")
        return page

    async def _work_through(self, rows: Sequence[OutcomeRow], backlog: Backlog, cursor: int) -> _Page:
        page = _Page(cursor)
        began_ms = self._monotonic_ms()
        for row in rows:
            fault = row.fault()
            if fault is not None:
                self._watch.retained(row, fault)
            elif row.is_synthetic:
                self._watch.synthetic(row)
                page.taken.append(row)
            elif self._monotonic_ms() - began_ms >= self._budget_ms:
                return page
            elif not await self._call(row, backlog, page):
                page.cursor = row.seq  # the rows behind this one are not held up by it
                return page
            page.cursor = row.seq
        return page

    async def _call(self, row: OutcomeRow, backlog: Backlog, page: _Page) -> bool:
        """Whether the fire goes on: after a failure it does not."""
        try:
            await self._sinks.deliver(row, backlog)
        except UndeliverableOutcome as error:
            self._watch.retained(row, str(error))
            return True
        except Exception as error:
            self._watch.sink_failed(row, error)
            page.failed, page.has_run, page.wish_ms = row, isinstance(error, SinkRaised), _wish_ms(error)
            return False
        self._watch.delivered(row)
        page.taken.append(row)
        return True

    async def _advance(self, ctx: TimerCtx, timer: DueTimer, backlog: Backlog, page: _Page) -> Fired:
        """Something was delivered: acknowledge it, and go on at once.

        The calls took their time, so what is written is decided by the rows as they are now. When nothing is left the
        next fire ends the backlog: an outcome queued meanwhile then makes a batch fail that acknowledges nothing.
        """
        taken = {row.seq for row in page.taken}
        head = await ctx.store.scan(OutcomeRow, (backlog.oid,), limit=len(taken) + 1)
        left = next((row for row in head if row.seq not in taken), None)
        delivered = await ctx.store.get(Delivered, (backlog.oid,))
        batch = _count_run(acknowledge(backlog.oid, delivered, page.taken, left), page)
        # after a retry the timer stands at a time that is not the one it was armed for, and may be this very one
        due_ms = max(ctx.now_ms, timer.due_at_ms + 1) if timer.attempt == 0 else ctx.now_ms + 1
        return Reschedule(due_ms, Progress(0, page.cursor).to_bytes(), batch)

    def _wait(self, ctx: TimerCtx, timer: DueTimer, progress: Progress, page: _Page, least_ms: int) -> Fired:
        """Nothing was delivered: pause. Only a sink's failure makes the next pause longer."""
        delay_ms = min(MAX_BACKOFF_MS, max(backoff_ms(timer.reference, progress.attempt), page.wish_ms, least_ms))
        attempt = progress.attempt if page.failed is None else min(progress.attempt + 1, _MAX_ATTEMPT)
        value = Progress(attempt, page.cursor).to_bytes()
        return Reschedule(ctx.now_ms + delay_ms, value, _count_run(Batch(), page))


def _count_run(batch: Batch, page: _Page) -> Batch:
    """A sink's run that ended with an exception is recorded: the next one goes by another number."""
    if page.failed is None or not page.has_run:
        return batch
    return batch.plus([Equals(page.failed)], [Put(replace(page.failed, tries=page.failed.tries + 1))])


def _wish_ms(error: Exception) -> int:
    wish = getattr(error, "retry_after_ms", None)
    return wish if isinstance(wish, int) and not isinstance(wish, bool) and wish > 0 else 0
