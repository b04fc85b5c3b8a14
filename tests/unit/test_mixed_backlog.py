"""A hundred thousand timers of mixed kinds that came due at once: drained tick by tick, and no kind has to wait."""

from __future__ import annotations

from collections import defaultdict

from drivers.executor import InlineExecutor
from drivers.group_commit import GroupCommitter
from drivers.timer_store import CommittingTimerStore
from drivers.write_set import WriteSet
from tests.support.manual_clock import ManualClock
from tests.support.stores import MemoryPlace
from timers.budget import TickBudget, TickState
from timers.engine import run_due_with_state
from timers.firing import Done, DueTimer, Fired, PartitionName, PartitionRole, TimerCtx
from timers.registry import TimerKind, TimerRegistry
from timers.rows import TimerRow

KINDS = (
    TimerKind.LEASE_SWEEP,
    TimerKind.TICKET_EXPIRY,
    TimerKind.OUTBOX_RELAY,
    TimerKind.QUOTA_ROLLUP,
    TimerKind.OUTCOME_DELIVERY,
    TimerKind.RESERVATION_RECONCILE,
    TimerKind.PUBLICATION_RECHECK,
)
TIMERS = 100_000
NOW = 10_000_000
#: With seven kinds, 32 of each and 128 in all a tick, a kind is passed over three times in a row at most.
MOST_TICKS_WITHOUT = 4


class Recorder:
    """Serves one kind and remembers in which tick each timer fired, and in which order."""

    def __init__(self, kind: int, tick: list[int]) -> None:
        self.kind = kind
        self._tick = tick
        self.fired: list[tuple[int, int]] = []

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        self.fired.append((self._tick[0], timer.due_at_ms))
        return Done()


async def test_a_backlog_of_mixed_kinds_drains_fairly_and_oldest_first_under_the_default_budget() -> None:
    clock = ManualClock()
    store = MemoryPlace().open()
    committer = GroupCommitter(store, InlineExecutor(), wall_ms=clock.wall_ms, on_fatal=lambda error: None)
    committer.start()
    # The first kind has most of them, and the oldest: it must not shut the others out.
    for number in range(TIMERS):
        kind = KINDS[0] if number < TIMERS // 2 else KINDS[number % len(KINDS)]
        row = TimerRow(int(kind), NOW - TIMERS + number, int(kind), number.to_bytes(8, "big"), 0, NOW - TIMERS + number)
        committer.submit(WriteSet([("timers", row.key(), row.values())]))
    await committer.drain()
    tick = [0]
    recorders = [Recorder(int(kind), tick) for kind in KINDS]
    timers = CommittingTimerStore(store, committer)
    budget = TickBudget()
    while store.next_due_ms() is not None:
        tick[0] += 1
        state = TickState.new(budget, clock.monotonic_ms, rotation=tick[0])
        report = await run_due_with_state(
            timers, TimerRegistry(recorders), NOW, state, partition=PartitionName(PartitionRole.PARTITION, 0)
        )
        assert 0 < report.fired <= budget.max_fired
        assert report.scanned <= budget.max_scanned
        assert report.next_wake_ms == (None if store.next_due_ms() is None else NOW)
    assert sum(len(recorder.fired) for recorder in recorders) == TIMERS
    for recorder in recorders:
        dues = [due_ms for _, due_ms in recorder.fired]
        assert dues == sorted(dues), "oldest first inside a kind"
        ticks = sorted({number for number, _ in recorder.fired})
        gaps = [later - earlier for earlier, later in zip([0, *ticks], ticks, strict=False)]
        assert max(gaps) <= MOST_TICKS_WITHOUT, "no kind waits more than a few ticks"
        per_tick: dict[int, int] = defaultdict(int)
        for number, _ in recorder.fired:
            per_tick[number] += 1
        assert max(per_tick.values()) <= budget.max_per_kind
    store.close()
