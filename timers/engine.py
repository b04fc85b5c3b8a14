"""The tick: find what is due, ask the handlers, commit what they decide, say when to look again.

Nothing here touches an event loop, a clock or a database. The driver passes the store, the registry and the time
in, and arms its physical alarm with `RunReport.next_wake_ms`.

A page's batches are applied together, so that a page costs one fsync. A handler therefore reads through a view of
what the earlier timers of its page will have left (`TimerCtx.store`), and what it saw of them becomes a guard of its
batch: should an earlier one not be committed, then what was built on it is not either, and both are tried again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, cast

from timers.backoff import RETRY_BACKOFF_MS
from timers.batch import Batch, Outcome, Put
from timers.budget import TickBudget, TickState
from timers.firing import (
    MAX_TIME_MS,
    Done,
    DueTimer,
    Fired,
    PartitionName,
    Reschedule,
    Retry,
    TimerCtx,
    TimerReads,
)
from timers.plan import PageView, Plan, ending, retry_plan
from timers.registry import TimerHandler, TimerRegistry
from timers.rows import USER_LANE, MalformedTimer, TimerKey, TimerRow

__all__ = [
    "MAX_TIME_MS",
    "PAGE_SIZE",
    "Done",
    "DueTimer",
    "Fired",
    "Reschedule",
    "Retry",
    "RunReport",
    "TimerCtx",
    "TimerFault",
    "TimerStore",
    "earliest_timer_put",
    "log_fault",
    "run_due",
    "run_due_with_state",
]

#: Rows fetched at a time, and so batches per commit at most: a commit of this size is about 1 ms.
PAGE_SIZE: Final = 64

#: A page that has been in the hands of slow handlers for this long commits what it has before it goes on, so that
#: a handler that waits for a remote side does not let its neighbours' plans and deadlines go stale.
PAGE_HOLD_MS: Final = 100

#: What looking for the earliest future row of a lane is charged: the row and the look-ahead.
FUTURE_LOOKUP_CHARGE: Final = 2

_log = logging.getLogger(__name__)


class TimerStore(TimerReads, Protocol):
    """What the engine needs of a store. Errors of the three reads below end the tick; those of `apply` do not."""

    async def lanes(self) -> Sequence[int]:
        """The lanes that hold rows, except the user lane."""
        ...

    async def scan_due(
        self, lane: int, now_ms: int, after: TimerKey | None, limit: int
    ) -> Sequence[TimerRow | MalformedTimer]:
        """At most `limit` rows of the lane with `due_ms <= now_ms` and a key above `after`, in key order."""
        ...

    async def next_due_ms(self, lane: int, after_ms: int) -> int | None:
        """The earliest `due_ms` in the lane above `after_ms`, or None."""
        ...

    async def apply(self, batches: Sequence[Batch]) -> Sequence[Outcome]:
        """Apply the batches in order in one transaction, each judged on its own; an error means: none applied."""
        ...


@dataclass(frozen=True)
class TimerFault:
    """Something about one timer that an operator should know. The row is kept or retried; nothing is lost by it."""

    partition: PartitionName
    reason: str
    timer: TimerRow | MalformedTimer
    error: Exception | None = None


def log_fault(fault: TimerFault) -> None:
    """The default receiver of faults: the logger `timers.engine`, at level WARNING."""
    where = f"{fault.partition.role.value} {fault.partition.number}"
    _log.warning("%s: %s: %r", where, fault.reason, fault.timer, exc_info=fault.error)


@dataclass(frozen=True)
class RunReport:
    """What one run over one timer table did.

    `fired`: timers ended or rescheduled by their handler. `raced`: lost a guard, untouched. `failed`: handler or
    commit failed. `unknown`: no handler, or an unreadable row. `deferred`: due rows seen over their kind's cap; a
    lane is left at its cap, so there may be more. `scanned`: rows read. `stopped_on_budget`: something was not
    looked at. `stalled`: due rows were left and nothing of the tick was committed. `next_wake_ms`: when to run again
    at the latest (epoch ms), None when there is nothing to wait for.
    """

    fired: int = 0
    raced: int = 0
    failed: int = 0
    unknown: int = 0
    deferred: int = 0
    scanned: int = 0
    stopped_on_budget: bool = False
    stalled: bool = False
    next_wake_ms: int | None = None


def earliest_timer_put(batch: Batch) -> int | None:
    """The smallest due time (epoch ms) among the timers that the batch puts, or None."""
    return min(
        (write.row.due_ms for write in batch.writes if isinstance(write, Put) and isinstance(write.row, TimerRow)),
        default=None,
    )


async def run_due(
    store: TimerStore,
    registry: TimerRegistry,
    now_ms: int,
    budget: TickBudget | None = None,
    *,
    monotonic_ms: Callable[[], int],
    partition: PartitionName,
    rotation: int = 0,
    warn: Callable[[TimerFault], None] = log_fault,
) -> RunReport:
    """Run what is due in one table with a budget of its own. Otherwise as `run_due_with_state`.

    Because no other table needs the rest of the scan allowance, it is used to count what was deferred.
    """
    state = TickState.new(budget or TickBudget(), monotonic_ms, rotation)
    return await _Run(store, registry, now_ms, state, partition, warn).run(count_deferred=True)


async def run_due_with_state(
    store: TimerStore,
    registry: TimerRegistry,
    now_ms: int,
    state: TickState,
    *,
    partition: PartitionName,
    warn: Callable[[TimerFault], None] = log_fault,
) -> RunReport:
    """Run what is due (`due_ms <= now_ms`) in one table, within what the shared `state` has left.

    Lanes are visited in rotation, oldest row first in each. `warn` hears of every failure as it happens and must
    not raise. Only errors of the store's reads are raised; whatever was committed before them stays committed.
    """
    return await _Run(store, registry, now_ms, state, partition, warn).run(count_deferred=False)


class _Run:
    """One run over one table."""

    def __init__(
        self,
        store: TimerStore,
        registry: TimerRegistry,
        now_ms: int,
        state: TickState,
        partition: PartitionName,
        warn: Callable[[TimerFault], None],
    ) -> None:
        self._store = store
        self._registry = registry
        self._now_ms = now_ms
        self._state = state
        self._view = PageView(store)
        self._ctx = TimerCtx(self._view, partition, now_ms)
        self._warn = warn
        self._fired = self._raced = self._failed = self._unknown = self._deferred = self._scanned = 0
        self._stopped = False
        self._page: list[Plan] = []
        self._page_since_ms = 0
        self._retained = False
        self._earliest_put_ms: int | None = None
        self._unknown_kinds: set[int] = set()

    async def run(self, *, count_deferred: bool) -> RunReport:
        lanes = sorted(lane for lane in await self._store.lanes() if lane != USER_LANE)
        first = self._state.rotation % len(lanes) if lanes else 0
        lanes = lanes[first:] + lanes[:first]
        left: list[tuple[int, TimerKey]] = []
        for lane in lanes:
            left_at = await self._visit(lane, None, leave_at_cap=True)
            if left_at is not None:
                left.append((lane, left_at))
        if count_deferred:
            for lane, left_at in left:
                await self._visit(lane, left_at, leave_at_cap=False)
        future_ms = await self._earliest_future_ms(lanes)
        return RunReport(
            fired=self._fired,
            raced=self._raced,
            failed=self._failed,
            unknown=self._unknown,
            deferred=self._deferred,
            scanned=self._scanned,
            stopped_on_budget=self._stopped,
            stalled=(self._retained or self._stopped) and not self._state.committed,
            next_wake_ms=self._next_wake_ms(future_ms),
        )

    # --- reading ----------------------------------------------------------------------------------

    async def _visit(self, lane: int, after: TimerKey | None, *, leave_at_cap: bool) -> TimerKey | None:
        """Work through a lane: the key that it was left at because of its cap, None when it ended or the budget did."""
        deferred_before = self._deferred
        while True:
            if self._state.remaining_scanned < 2 or self._state.work_exhausted():
                self._stopped = True
                return None
            limit = min(PAGE_SIZE, self._state.remaining_scanned - 1)
            if leave_at_cap and self._is_capped(lane):
                limit = 1  # only asks whether anything is due
            page = await self._store.scan_due(lane, self._now_ms, after, limit)
            self._state.charge_scan(len(page) + 1)
            self._scanned += len(page)
            if not await self._run_page(page) or len(page) < limit:
                return None
            after = _key_of(page[-1])
            if leave_at_cap and self._is_capped(lane) and self._deferred > deferred_before:
                return after

    async def _run_page(self, page: Sequence[TimerRow | MalformedTimer]) -> bool:
        """Handle the rows of a page; False when the budget ended before the page did."""
        self._page_since_ms = self._state.elapsed_ms()
        for timer in page:
            await self._commit_early()
            if self._state.work_exhausted():
                self._stopped = True
                break
            await self._run_timer(timer)
        await self._commit_page()
        return not self._stopped

    async def _earliest_future_ms(self, lanes: Sequence[int]) -> int | None:
        found: list[int] = []
        if self._now_ms >= MAX_TIME_MS:
            return None
        for lane in lanes:
            if self._state.work_exhausted() or not self._state.charge_scan(FUTURE_LOOKUP_CHARGE):
                self._stopped = True  # a future row may be there unseen: the next wake must not skip it
                break
            due_ms = await self._store.next_due_ms(lane, self._now_ms)
            if due_ms is not None:
                found.append(due_ms)
        return min(found, default=None)

    # --- deciding ---------------------------------------------------------------------------------

    async def _run_timer(self, timer: TimerRow | MalformedTimer) -> None:
        if isinstance(timer, MalformedTimer):
            self._unknown += 1
            self._retained = True
            self._fault("unreadable timer row, left in place", timer)
            return
        handler = self._registry.get(timer.kind)
        if handler is None:
            self._unknown += 1
            if timer.kind not in self._unknown_kinds:
                self._unknown_kinds.add(timer.kind)
                self._fault(f"no handler for timer kind {timer.kind}, retried later", timer)
            self._plan_retry(timer)
            return
        if not self._state.claim_attempt(timer.kind, self._cap_of(timer.kind)):
            self._deferred += 1
            self._retained = True
            return
        batch = await self._ask(handler, timer)
        if batch is None:
            self._failed += 1
            self._plan_retry(timer)
        else:
            self._plan(Plan(timer, batch, is_retry=False))

    async def _ask(self, handler: TimerHandler, row: TimerRow) -> Batch | None:
        """The batch that ends or moves the row as its handler decides; None when it failed or wants a retry."""
        self._view.forget_seen()
        due = DueTimer(row.first_due_ms, row.kind, row.ref, row.payload, row.generation, row.attempt)
        try:
            batch = ending(row, await handler.fire(self._ctx, due))
            return None if batch is None else self._view.guarded(batch)
        except Exception as error:
            self._fault("timer handler failed, retried later", row, error)
            return None

    def _plan(self, plan: Plan) -> None:
        self._page.append(plan)
        self._view.add(plan.batch)

    def _plan_retry(self, row: TimerRow) -> None:
        self._plan(retry_plan(row, self._now_ms))

    # --- committing -------------------------------------------------------------------------------

    async def _commit_early(self) -> None:
        """Commit before the page's end when its plans may use up the commits, or have waited too long."""
        if not self._page:
            return
        may_fill_budget = self._state.committed + len(self._page) >= self._state.budget.max_fired
        if may_fill_budget or self._state.elapsed_ms() - self._page_since_ms >= PAGE_HOLD_MS:
            await self._commit_page()

    async def _commit_page(self) -> None:
        plans, self._page = self._page, []
        self._view.clear()
        retries: list[Plan] = []
        for plan, outcome in await self._apply(plans):
            if outcome is Outcome.COMMITTED:
                self._committed(plan)
            elif plan.is_retry:
                self._retry_kept(plan, outcome)
            elif outcome is Outcome.PRECONDITION_FAILED:
                self._raced += 1
                self._retained = True
            else:
                self._failed += 1
                error = outcome if isinstance(outcome, Exception) else None
                self._fault("timer's commit failed or came too late, retried later", plan.row, error)
                retries.append(retry_plan(plan.row, self._now_ms))
        for plan, outcome in await self._apply(retries):
            if outcome is Outcome.COMMITTED:
                self._committed(plan)
            else:
                self._retry_kept(plan, outcome)
        self._page_since_ms = self._state.elapsed_ms()

    async def _apply(self, plans: Sequence[Plan]) -> list[tuple[Plan, Outcome | Exception]]:
        if not plans:
            return []
        try:
            outcomes = await self._store.apply([plan.batch for plan in plans])
        except Exception as error:
            if len(plans) == 1:
                return [(plans[0], error)]
            # One batch that the store chokes on must not fail its page, so each is tried alone. Should the store
            # have applied them after all, their guards now fail: nothing is applied twice.
            judged: list[tuple[Plan, Outcome | Exception]] = []
            for plan in plans:
                judged += [(plan, error)] if self._state.clock_exhausted() else await self._apply([plan])
            return judged
        return list(zip(plans, outcomes, strict=True))

    def _committed(self, plan: Plan) -> None:
        self._state.record_commit()
        if not plan.is_retry:
            self._fired += 1
        put_ms = earliest_timer_put(plan.batch)
        if put_ms is not None and (self._earliest_put_ms is None or put_ms < self._earliest_put_ms):
            self._earliest_put_ms = put_ms

    def _retry_kept(self, plan: Plan, outcome: Outcome | Exception) -> None:
        self._retained = True
        if isinstance(outcome, Exception):
            self._fault("timer could not be moved to its retry time, left in place", plan.row, outcome)

    # --- reporting --------------------------------------------------------------------------------

    def _next_wake_ms(self, future_ms: int | None) -> int | None:
        candidates = [due for due in (future_ms, self._earliest_put_ms) if due is not None]
        if self._retained or self._stopped:
            # Progress anywhere in the tick counts: the tables share one budget, so what stopped this one may be
            # what another one did, and the next tick begins with a full budget.
            candidates.append(self._now_ms if self._state.committed else self._now_ms + RETRY_BACKOFF_MS)
        return max(self._now_ms, min(candidates)) if candidates else None

    def _cap_of(self, kind: int) -> int:
        return self._registry.cap_of(kind, self._state.budget.max_per_kind)

    def _is_capped(self, lane: int) -> bool:
        return self._state.attempted_for(lane) >= self._cap_of(lane)

    def _fault(self, reason: str, timer: TimerRow | MalformedTimer, error: Exception | None = None) -> None:
        self._warn(TimerFault(self._ctx.partition, reason, timer, error))


def _key_of(timer: TimerRow | MalformedTimer) -> TimerKey:
    # An unreadable row still has its place in the table's order; the store understands its own raw key.
    return cast(TimerKey, timer.raw_key) if isinstance(timer, MalformedTimer) else timer.key()
