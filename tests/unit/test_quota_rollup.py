"""The timer kind that carries quotas to the coordinator: its rules, one by one (A.8), on every timer store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.manual_clock import ManualClock
from tests.support.timer_memory import MemoryTimerStore
from tests.support.timer_store import make_timer_store
from tests.support.timer_table import NOW, PARTITION, Table
from timers.batch import Absent, Batch, Delete, Equals, Outcome, Put
from timers.engine import RunReport, run_due
from timers.errors import CorruptRow
from timers.firing import PartitionName, PartitionRole
from timers.quota_admission import Caps, admit, is_fresh
from timers.quota_rollup import PRUNED_ROWS, SOURCE_PAGE, QuotaRollup
from timers.quotas import (
    CLOCK_GRACE_MS,
    MAX_COUNT,
    NO_USAGE,
    ROLLUP_MS,
    VIEW_MAX_AGE_MS,
    CounterRow,
    QuotaPush,
    QuotaWindow,
    SourceRow,
    TotalRow,
    Usage,
    ViewRow,
    charge,
    drop_source,
    push_usage,
    read_ref,
    total_timer,
    window_ref,
)
from timers.registry import TimerKind, TimerRegistry
from timers.rows import TimerRow

KIND = int(TimerKind.QUOTA_ROLLUP)
COORDINATOR = PartitionName(PartitionRole.COORDINATOR, -1)
OID = 7
HOUR_MS = 3_600_000
WINDOW = QuotaWindow.at("uploads", HOUR_MS, NOW)


class Coordinator:
    """The totals, in a plain store; fails or is interrupted on request."""

    def __init__(self) -> None:
        self.store = MemoryTimerStore(lambda: NOW)
        self.pushes: list[QuotaPush] = []
        self.error: Exception | None = None
        self.error_of_drop: Exception | None = None
        self.meanwhile: Callable[[], Any] | None = None
        self.writes = 0

    async def apply_quota(self, push: QuotaPush) -> Usage:
        self.pushes.append(push)
        if self.error is not None:
            raise self.error
        batch, total = push_usage(await self.total(push.window), await self.source(push.window, push.source), push)
        await self._apply(batch)
        if self.meanwhile is not None:
            action, self.meanwhile = self.meanwhile, None
            await action()
        return total

    async def drop_quota_source(self, window: QuotaWindow, source: str) -> None:
        await self._apply(drop_source(await self.total(window), await self.source(window, source)))
        if self.error_of_drop is not None:
            error, self.error_of_drop = self.error_of_drop, None
            raise error

    async def _apply(self, batch: Batch | None) -> None:
        if batch is not None:
            self.writes += 1
            assert await self.store.apply([batch]) == [Outcome.COMMITTED]

    async def total(self, window: QuotaWindow = WINDOW) -> TotalRow | None:
        return await self.store.get(TotalRow, window.key())

    async def source(self, window: QuotaWindow, source: str) -> SourceRow | None:
        return await self.store.get(SourceRow, (*window.key(), source))


class Quota:
    """An object's counters and the kind that serves them."""

    def __init__(self, table: Table, clock: ManualClock) -> None:
        self.table = table
        self.clock = clock
        self.coordinator = Coordinator()
        self.connected = True

    async def charge(
        self, operations: int, size: int = 0, *, oid: int = OID, window: QuotaWindow = WINDOW, now_ms: int = NOW
    ) -> CounterRow:
        old = await self.counter(oid, window)
        usage = Usage(operations, size) + (NO_USAGE if old is None else old.usage)
        new = CounterRow(oid, window, f"source {oid}", usage)
        assert await self.table.store.inner.apply([charge(old, new, now_ms)]) == [Outcome.COMMITTED]
        return new

    async def run(self, now_ms: int = NOW + ROLLUP_MS, where: PartitionName = PARTITION) -> RunReport:
        return await run_due(
            self.table.store,
            TimerRegistry([QuotaRollup(self.coordinator if self.connected else None)]),
            now_ms,
            monotonic_ms=self.clock.monotonic_ms,
            partition=where,
            warn=self.table.faults.append,
        )

    async def counter(self, oid: int = OID, window: QuotaWindow = WINDOW) -> CounterRow | None:
        return await self.table.store.get(CounterRow, (oid, *window.key()))

    async def view(self, oid: int = OID, window: QuotaWindow = WINDOW) -> ViewRow | None:
        return await self.table.store.get(ViewRow, (oid, *window.key()))

    async def timer(self) -> TimerRow:
        (timer,) = await self.table.timers()
        return timer


@pytest.fixture
def quota(table: Table, clock: ManualClock) -> Quota:
    return Quota(table, clock)


# --- windows ------------------------------------------------------------------------------------------


def test_windows_are_aligned_to_the_epoch() -> None:
    assert QuotaWindow.at("q", 1_000, 0) == QuotaWindow.at("q", 1_000, 999) == QuotaWindow("q", 1_000, 0)
    assert QuotaWindow.at("q", 1_000, 1_000).number == 1
    assert QuotaWindow("q", 1_000, 7).end_ms == 8_000


@given(st.text(min_size=1, max_size=50), st.integers(1, 2**40), st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_reference_is_read_back(name: str, window_ms: int, number: int, oid: int) -> None:
    window = QuotaWindow(name, window_ms, number)
    assert read_ref(window_ref(window, oid)) == (oid, window)


# --- 1 to 4 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ref", [b"", b"short", bytes(24), bytes(24) + b"\xff"])
async def test_1_a_reference_that_is_no_window_ends_its_timer_with_a_warning(
    quota: Quota, ref: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await quota.table.put(TimerRow(KIND, NOW, KIND, ref, 0, NOW))
    with caplog.at_level(logging.WARNING, "timers.quota_rollup"):
        assert (await quota.run(NOW)).fired == 1
    assert "no window" in caplog.text
    assert await quota.table.timers() == []


@pytest.mark.parametrize("where", [PARTITION, COORDINATOR])
async def test_2_a_window_without_length_is_corrupt(quota: Quota, where: PartitionName) -> None:
    await quota.table.put(TimerRow(KIND, NOW, KIND, window_ref(replace(WINDOW, window_ms=0), OID), 0, NOW))
    assert (await quota.run(NOW, where)).failed == 1
    assert isinstance(quota.table.faults[0].error, CorruptRow)


async def test_3_a_window_is_over_after_its_end_and_what_clocks_may_differ(quota: Quota) -> None:
    assert WINDOW.expiry_ms == WINDOW.end_ms + CLOCK_GRACE_MS
    await quota.charge(1, now_ms=WINDOW.end_ms - 1)
    await quota.run(WINDOW.expiry_ms - 1)
    assert await quota.counter() is not None
    await quota.run(WINDOW.expiry_ms - 1 + ROLLUP_MS)
    assert await quota.counter() is None


async def test_3_what_is_charged_last_is_pushed_before_the_window_ends(quota: Quota) -> None:
    """The grace is not shorter than the time between two pushes."""
    assert CLOCK_GRACE_MS >= ROLLUP_MS
    await quota.charge(5, now_ms=WINDOW.end_ms - 1)
    await quota.run(WINDOW.end_ms - 1 + ROLLUP_MS)
    total = await quota.coordinator.total()
    assert total is not None
    assert total.usage == Usage(5, 0)


async def test_4_without_a_counter_the_view_goes_too(quota: Quota) -> None:
    counter = await quota.charge(1)
    await quota.run()
    assert await quota.view() is not None
    await quota.table.store.inner.apply([Batch(writes=(Delete(counter.table, counter.key()),))])
    assert (await quota.run(NOW + 2 * ROLLUP_MS)).fired == 1
    assert await quota.view() is None
    assert await quota.table.timers() == []


# --- 5 to 8: the push ---------------------------------------------------------------------------------


async def test_5_the_difference_goes_to_the_coordinator_first(quota: Quota) -> None:
    counter = await quota.charge(3, 100)

    async def look() -> None:
        assert await quota.view() is None  # not yet: the coordinator has it, durably

    quota.coordinator.meanwhile = look
    await quota.run()
    assert quota.coordinator.pushes == [QuotaPush(WINDOW, counter.source, Usage(3, 100))]
    await quota.charge(2, 11)
    await quota.run(NOW + 2 * ROLLUP_MS)
    assert quota.coordinator.pushes[1].usage == Usage(5, 111)
    assert await quota.coordinator.total() == TotalRow(WINDOW, Usage(5, 111), 1)
    assert await quota.coordinator.source(WINDOW, counter.source) == SourceRow(WINDOW, counter.source, Usage(5, 111))


def test_5_a_push_is_guarded_on_both_rows_that_it_rests_on() -> None:
    push = QuotaPush(WINDOW, "s", Usage(3, 3))
    first, _ = push_usage(None, None, push)
    assert first is not None
    assert set(first.preconditions) == {
        Absent(TotalRow.table, WINDOW.key()),
        Absent(SourceRow.table, (*WINDOW.key(), "s")),
    }
    total, source = TotalRow(WINDOW, Usage(9, 9), 2), SourceRow(WINDOW, "s", Usage(1, 1))
    second, after = push_usage(total, source, push)
    assert second is not None
    assert set(second.preconditions) == {Equals(total), Equals(source)}
    assert after == Usage(11, 11)


def test_5_the_first_push_of_a_window_arms_its_end() -> None:
    first, _ = push_usage(None, None, QuotaPush(WINDOW, "s", Usage(1, 0)))
    assert first is not None
    assert Put(total_timer(WINDOW)) in first.writes
    assert total_timer(WINDOW).due_ms == WINDOW.expiry_ms
    second, _ = push_usage(TotalRow(WINDOW, Usage(1, 0), 1), None, QuotaPush(WINDOW, "t", Usage(1, 0)))
    assert second is not None
    assert not any(isinstance(write, Put) and isinstance(write.row, TimerRow) for write in second.writes)


async def test_6_nothing_new_is_no_write_for_the_coordinator(quota: Quota) -> None:
    await quota.charge(3)
    await quota.run()
    await quota.run(NOW + 2 * ROLLUP_MS)
    assert len(quota.coordinator.pushes) == 2
    assert quota.coordinator.writes == 1


@pytest.mark.parametrize(
    ("known", "told"), [(Usage(5, 0), Usage(4, 0)), (Usage(0, 5), Usage(9, 4)), (NO_USAGE, Usage(MAX_COUNT + 1, 0))]
)
def test_7_counts_that_have_become_less_are_corrupt(known: Usage, told: Usage) -> None:
    with pytest.raises(CorruptRow):
        push_usage(TotalRow(WINDOW, known, 1), SourceRow(WINDOW, "s", known), QuotaPush(WINDOW, "s", told))


def test_7_a_total_that_cannot_be_counted_is_corrupt() -> None:
    with pytest.raises(CorruptRow):
        push_usage(TotalRow(WINDOW, Usage(MAX_COUNT, 0), 1), None, QuotaPush(WINDOW, "s", Usage(1, 0)))
    with pytest.raises(CorruptRow):
        drop_source(TotalRow(WINDOW, Usage(1, 0), 2), SourceRow(WINDOW, "s", Usage(2, 0)))
    with pytest.raises(CorruptRow):
        charge(None, CounterRow(OID, WINDOW, "s", Usage(MAX_COUNT + 1, 0)), NOW)


async def test_7_a_corrupt_counter_is_kept_and_retried(clock: ManualClock) -> None:
    quota = Quota(Table(make_timer_store(clock), clock), clock)
    counter = await quota.charge(1)
    await quota.table.put(replace(counter, usage=Usage(-1, 0)))
    assert (await quota.run()).failed == 1
    assert quota.coordinator.pushes == []
    assert isinstance(quota.table.faults[0].error, CorruptRow)


async def test_8_a_crash_after_the_coordinator_took_it_adds_nothing_the_second_time(quota: Quota) -> None:
    await quota.charge(3, 7)

    def die(batch: Batch) -> bool:
        return True

    quota.table.store.refuse = die
    await quota.run()
    assert await quota.view() is None
    quota.table.store.refuse = lambda batch: False
    await quota.run(NOW + 10 * ROLLUP_MS)
    assert await quota.coordinator.total() == TotalRow(WINDOW, Usage(3, 7), 1)
    assert await quota.view() is not None


# --- 9: the view --------------------------------------------------------------------------------------


async def test_9_what_comes_back_is_kept_as_a_view_and_the_timer_goes_on_a_minute_later(quota: Quota) -> None:
    await quota.charge(3, 7)
    await quota.charge(10, 1, oid=8)
    await quota.run()
    now_ms = NOW + ROLLUP_MS
    assert await quota.view(7) == ViewRow(7, WINDOW, Usage(3, 7), Usage(3, 7), now_ms)
    assert await quota.view(8) == ViewRow(8, WINDOW, Usage(13, 8), Usage(10, 1), now_ms)
    assert [timer.due_ms for timer in await quota.table.timers()] == [now_ms + ROLLUP_MS] * 2


async def test_9_a_charge_meanwhile_is_pushed_the_next_time_and_the_view_says_what_was(quota: Quota) -> None:
    """Guarded on the counter being there: a busy object would never get a view if each charge got in its way."""
    await quota.charge(3)

    async def charge_more() -> None:
        await quota.charge(4)

    quota.coordinator.meanwhile = charge_more
    assert (await quota.run()).fired == 1
    assert await quota.view() == ViewRow(OID, WINDOW, Usage(3, 0), Usage(3, 0), NOW + ROLLUP_MS)
    await quota.run(NOW + 2 * ROLLUP_MS)
    assert await quota.view() == ViewRow(OID, WINDOW, Usage(7, 0), Usage(7, 0), NOW + 2 * ROLLUP_MS)


async def test_9_a_counter_that_is_gone_meanwhile_makes_it_race(quota: Quota) -> None:
    counter = await quota.charge(3)

    async def remove() -> None:
        await quota.table.store.inner.apply([Batch(writes=(Delete(counter.table, counter.key()),))])

    quota.coordinator.meanwhile = remove
    assert (await quota.run()).raced == 1
    assert await quota.view() is None


async def test_9_a_coordinator_that_does_not_answer_is_tried_again(quota: Quota) -> None:
    await quota.charge(3)
    quota.coordinator.error = ConnectionError("away")
    assert (await quota.run()).failed == 1
    assert await quota.view() is None
    quota.connected = False
    assert (await quota.run(NOW + 10 * ROLLUP_MS)).failed == 1
    quota.connected, quota.coordinator.error = True, None
    assert (await quota.run(NOW + 30 * ROLLUP_MS)).fired == 1
    assert await quota.view() is not None


async def test_9_the_first_charge_of_a_window_arms_the_timer(quota: Quota) -> None:
    await quota.charge(1)
    await quota.charge(1, now_ms=NOW + 5)
    assert (await quota.timer()).due_ms == NOW + ROLLUP_MS


async def test_9_windows_of_different_lengths_have_timers_of_their_own(quota: Quota) -> None:
    await quota.charge(1, window=QuotaWindow("q", 1_000_000, 1))
    await quota.charge(1, window=QuotaWindow("q", 2_000_000, 1))
    assert len(await quota.table.timers()) == 2


# --- 10 to 12: the end --------------------------------------------------------------------------------


async def test_10_a_window_that_is_over_leaves_nothing(quota: Quota) -> None:
    first, second = await quota.charge(3, 7), await quota.charge(1, oid=8)
    await quota.run()
    await quota.table.store.inner.apply([Batch(writes=(Put(replace(second, oid=9)),))])  # counts without a timer
    await quota.run(WINDOW.expiry_ms + ROLLUP_MS)
    for oid in (7, 8):
        assert await quota.counter(oid) is None
        assert await quota.view(oid) is None
    assert await quota.table.timers() == []
    assert await quota.coordinator.total() is None
    assert await quota.coordinator.source(WINDOW, first.source) is None


def test_10_the_last_source_takes_the_total_and_its_timer_with_it() -> None:
    source = SourceRow(WINDOW, "s", Usage(3, 3))
    shared = drop_source(TotalRow(WINDOW, Usage(9, 9), 2), source)
    assert shared is not None
    assert Put(TotalRow(WINDOW, Usage(6, 6), 1)) in shared.writes
    alone = drop_source(TotalRow(WINDOW, Usage(3, 3), 1), source)
    assert alone is not None
    assert Delete(TotalRow.table, WINDOW.key()) in alone.writes
    assert Delete(TimerRow.table, total_timer(WINDOW).key()) in alone.writes
    assert drop_source(TotalRow(WINDOW, Usage(3, 3), 1), None) is None
    assert drop_source(None, source) == Batch((Equals(source),), (Delete(source.table, source.key()),))


async def test_10_a_charge_at_the_last_moment_is_not_removed_unpushed(quota: Quota) -> None:
    await quota.charge(3)

    async def charge_more() -> None:
        await quota.charge(4)

    quota.coordinator.meanwhile = charge_more
    assert (await quota.run(WINDOW.expiry_ms)).raced == 1
    counter = await quota.counter()
    assert counter is not None
    assert counter.usage == Usage(7, 0)


@pytest.mark.parametrize("others", [0, 2])
async def test_11_a_crash_after_the_source_was_dropped_adds_it_again_and_removes_it_again(
    quota: Quota, others: int
) -> None:
    await quota.charge(3, 5)
    for oid in range(others):
        await quota.charge(10, 10, oid=100 + oid)
    await quota.run()
    for oid in range(others):  # they go on: only one object ends its window here
        await quota.table.store.inner.apply(
            [
                Batch(writes=(Delete(TimerRow.table, timer.key()),))
                for timer in await quota.table.timers()
                if read_ref(timer.ref) == (100 + oid, WINDOW)
            ]
        )
    quota.coordinator.error_of_drop = ConnectionError("died after it was dropped")
    assert (await quota.run(WINDOW.expiry_ms)).failed == 1
    left = TotalRow(WINDOW, Usage(10 * others, 10 * others), others) if others else None
    assert await quota.coordinator.total() == left
    assert (await quota.run(WINDOW.expiry_ms + ROLLUP_MS)).fired == 1
    assert await quota.coordinator.total() == left
    assert await quota.counter() is None


async def test_11_a_window_that_is_over_ends_even_if_its_last_push_is_refused(
    quota: Quota, caplog: pytest.LogCaptureFixture
) -> None:
    await quota.charge(3)
    quota.coordinator.error = CorruptRow("less than before")
    with caplog.at_level(logging.WARNING, "timers.quota_rollup"):
        assert (await quota.run(WINDOW.expiry_ms)).fired == 1
    assert "refused" in caplog.text
    assert await quota.counter() is None


async def test_12_the_end_of_a_window_removes_some_rows_of_older_ones(quota: Quota) -> None:
    """A few at a time, each only if it is still what it was. (In the fire that ends a window, not in each.)"""
    current = QuotaWindow.at("uploads", 50_000, NOW)
    older = [replace(current, number=number) for number in range(10)]
    for window in older:
        await quota.table.put(CounterRow(OID, window, "s", Usage(1, 1)), ViewRow(OID, window, NO_USAGE, NO_USAGE, 0))
    later = replace(current, number=current.number + 1)
    other = replace(current, name="other", number=0)
    await quota.charge(1, window=current)
    await quota.table.put(CounterRow(OID, later, "s", NO_USAGE), CounterRow(OID, other, "s", NO_USAGE))
    await quota.run(current.expiry_ms)
    kept = [window for window in (*older, current, later, other) if await quota.counter(window=window) is not None]
    assert kept == [*older[PRUNED_ROWS:], later, other]
    views = [window for window in older if await quota.view(window=window) is not None]
    assert views == older[PRUNED_ROWS:]


# --- 13 and 14: where ---------------------------------------------------------------------------------


async def test_13_the_coordinator_keeps_exact_totals_until_the_window_is_over(quota: Quota) -> None:
    batch, _ = push_usage(None, None, QuotaPush(WINDOW, "s", Usage(3, 3)))
    assert batch is not None
    await quota.table.store.inner.apply([batch])
    early = replace(total_timer(WINDOW), due_ms=NOW, first_due_ms=NOW)
    await quota.table.store.inner.apply([Batch(writes=(Delete(early.table, total_timer(WINDOW).key()), Put(early)))])
    assert (await quota.run(NOW, COORDINATOR)).fired == 1
    assert (await quota.timer()).due_ms == WINDOW.expiry_ms
    assert await quota.table.store.get(TotalRow, WINDOW.key()) is not None
    assert (await quota.run(WINDOW.expiry_ms, COORDINATOR)).fired == 1
    assert await quota.table.store.get(TotalRow, WINDOW.key()) is None
    assert await quota.table.store.get(SourceRow, (*WINDOW.key(), "s")) is None
    assert await quota.table.timers() == []


async def test_13_sources_that_never_came_back_go_with_the_total_a_page_at_a_time(quota: Quota) -> None:
    count = 2 * SOURCE_PAGE + 5
    await quota.table.put(
        TotalRow(WINDOW, Usage(count, 0), count),
        total_timer(WINDOW),
        *(SourceRow(WINDOW, f"s{number:04d}", Usage(1, 0)) for number in range(count)),
    )
    fires = 0
    while await quota.table.timers():
        fires += (await quota.run(WINDOW.expiry_ms + fires, COORDINATOR)).fired
        assert fires < 10
    assert fires == 3
    assert await quota.table.store.scan(SourceRow, WINDOW.key(), limit=10) == []
    assert await quota.table.store.get(TotalRow, WINDOW.key()) is None


async def test_13_a_push_while_the_total_is_removed_keeps_it(quota: Quota) -> None:
    total, source = TotalRow(WINDOW, Usage(3, 0), 1), SourceRow(WINDOW, "s", Usage(3, 0))
    await quota.table.put(total, source, total_timer(WINDOW))
    batch, _ = push_usage(total, source, QuotaPush(WINDOW, "s", Usage(4, 0)))

    async def push() -> None:
        assert batch is not None
        await quota.table.store.inner.apply([batch])

    quota.table.store.before_apply = push
    assert (await quota.run(WINDOW.expiry_ms, COORDINATOR)).raced == 1
    assert await quota.table.store.get(TotalRow, WINDOW.key()) == replace(total, usage=Usage(4, 0))
    assert (await quota.run(WINDOW.expiry_ms, COORDINATOR)).fired == 1


async def test_14_in_an_object_s_own_file_it_is_retried(quota: Quota) -> None:
    await quota.charge(3)
    assert (await quota.run(where=PartitionName(PartitionRole.OBJECT, 1))).failed == 1
    assert quota.coordinator.pushes == []


async def test_15_four_sources_with_1_to_4_operations_and_0_to_3_bytes_are_10_and_6(quota: Quota) -> None:
    for number in range(4):
        await quota.charge(number + 1, number, oid=number)
    for minute in range(3):
        await quota.run(NOW + (minute + 1) * ROLLUP_MS)
    assert await quota.coordinator.total() == TotalRow(WINDOW, Usage(10, 6), 4)
    for number in range(4):
        view = await quota.view(number)
        assert view is not None
        assert view.total == Usage(10, 6)


# --- admission ----------------------------------------------------------------------------------------


def view(total: int, pushed: int, observed_ms: int = NOW) -> ViewRow:
    return ViewRow(OID, WINDOW, Usage(total, total), Usage(pushed, pushed), observed_ms)


def test_exactly_at_the_limit_is_allowed() -> None:
    assert admit(Usage(9, 0), None, Caps(operations=10), Usage(1, 0), NOW).denied_by is None
    assert admit(Usage(9, 0), None, Caps(operations=10), Usage(2, 0), NOW).denied_by == "local operations"
    assert admit(Usage(0, 9), None, Caps(bytes=10), Usage(1, 1), NOW).denied_by is None
    assert admit(Usage(0, 9), None, Caps(bytes=10), Usage(1, 2), NOW).denied_by == "local bytes"


def test_operations_are_looked_at_before_bytes_and_the_object_before_all_others() -> None:
    caps = Caps(operations=10, bytes=10, local_operations=5, local_bytes=5)
    fresh = view(100, 0)
    assert admit(Usage(5, 5), fresh, caps, Usage(1, 1), NOW).denied_by == "local operations"
    assert admit(Usage(0, 5), fresh, caps, Usage(1, 1), NOW).denied_by == "local bytes"
    assert admit(Usage(0, 0), fresh, caps, Usage(1, 1), NOW).denied_by == "cluster operations"
    assert admit(Usage(0, 0), fresh, replace(caps, operations=None), Usage(1, 1), NOW).denied_by == "cluster bytes"


def test_what_the_object_has_charged_since_its_push_counts_too() -> None:
    fresh = view(total=60, pushed=10)
    assert admit(Usage(40, 0), fresh, Caps(operations=100), Usage(10, 0), NOW).denied_by is None  # 60 - 10 + 40 + 10
    assert admit(Usage(40, 0), fresh, Caps(operations=100), Usage(11, 0), NOW).denied_by == "cluster operations"


def test_a_view_older_than_two_minutes_or_missing_leaves_the_object_s_own_counts() -> None:
    caps, amount = Caps(operations=100), Usage(1, 0)
    old_ms = NOW + VIEW_MAX_AGE_MS
    assert admit(NO_USAGE, view(100, 0), caps, amount, old_ms).denied_by == "cluster operations"
    stale = admit(NO_USAGE, view(100, 0), caps, amount, old_ms + 1)
    assert (stale.denied_by, stale.metered, stale.left_operations) == (None, True, 100)
    assert admit(NO_USAGE, None, caps, amount, NOW).metered
    assert not admit(NO_USAGE, None, Caps(local_operations=5), amount, NOW).metered  # nothing to know of others


def test_a_view_from_the_future_is_of_before_a_clock_was_set_back() -> None:
    assert is_fresh(view(1, 1, NOW + CLOCK_GRACE_MS), NOW)
    assert not is_fresh(view(1, 1, NOW + CLOCK_GRACE_MS + 1), NOW)


def test_what_is_left_is_the_least_of_all_limits_and_never_less_than_nothing() -> None:
    caps = Caps(operations=100, bytes=None, local_operations=30, local_bytes=50)
    left = admit(Usage(10, 60), view(95, 5), caps, NO_USAGE, NOW)
    assert (left.left_operations, left.left_bytes) == (0, 0)
    left = admit(Usage(10, 20), view(60, 5), caps, NO_USAGE, NOW)
    assert (left.left_operations, left.left_bytes) == (20, 30)
    assert admit(NO_USAGE, None, Caps(), NO_USAGE, NOW).left_operations is None


counts = st.integers(0, 50)


@given(st.lists(st.tuples(st.integers(0, 3), counts, counts), max_size=40), st.randoms(use_true_random=False))
def test_the_total_is_the_sum_of_what_was_pushed_whatever_is_repeated_dropped_and_added_again(
    steps: list[tuple[int, int, int]], chance: Any
) -> None:
    """Each source charges and pushes, pushes again, or is dropped and pushed again."""
    total: TotalRow | None = None
    sources: dict[str, SourceRow] = {}
    told: dict[str, Usage] = {}

    def write(batch: Batch | None) -> None:
        nonlocal total
        for each in () if batch is None else batch.writes:
            if isinstance(each, Put) and isinstance(each.row, TotalRow):
                total = each.row
            elif isinstance(each, Put) and isinstance(each.row, SourceRow):
                sources[each.row.source] = each.row
            elif isinstance(each, Delete) and each.table == TotalRow.table:
                total = None
            elif isinstance(each, Delete) and each.table == SourceRow.table:
                del sources[each.key[-1]]

    for number, operations, size in steps:
        name = f"s{number}"
        told[name] = told.get(name, NO_USAGE) + Usage(operations, size)
        for _ in range(chance.randint(1, 2)):
            write(push_usage(total, sources.get(name), QuotaPush(WINDOW, name, told[name]))[0])
        if chance.random() < 0.3:
            write(drop_source(total, sources.get(name)))
            write(push_usage(total, sources.get(name), QuotaPush(WINDOW, name, told[name]))[0])
    expected = sum(told.values(), NO_USAGE)
    assert (NO_USAGE if total is None else total.usage) == expected
    assert (0 if total is None else total.sources) == len(sources)
    for name in list(sources):
        write(drop_source(total, sources.get(name)))
    assert total is None
