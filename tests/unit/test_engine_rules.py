"""The engine's rules, one by one. Key order means order within a lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.timer_store import Note, StoreBroke, make_timer_store
from tests.support.timer_table import NOW, A, B, C, Handler, Table, done_after, fail, timer, write_note
from timers.backoff import RETRY_BACKOFF_MS
from timers.batch import Absent, Batch, Delete, Equals, NotAfter, Present, Put
from timers.budget import TickBudget, TickState
from timers.engine import MAX_TIME_MS, PAGE_SIZE, earliest_timer_put
from timers.firing import Done, DueTimer, Fired, Reschedule, Retry, TimerCtx
from timers.rows import USER_LANE, MalformedTimer, TimerRow

WIDE = TickBudget(max_fired=1_000, max_per_kind=1_000, max_scanned=5_000)
LATER = NOW + RETRY_BACKOFF_MS


def refs(count: int) -> list[bytes]:
    return [b"%04d" % number for number in range(count)]


def rows(count: int, **more: Any) -> list[TimerRow]:
    return [timer(NOW - 1, ref=ref, **more) for ref in refs(count)]


def malformed(due_ms: int, lane: int = A) -> MalformedTimer:
    return MalformedTimer(lane, due_ms, (lane, due_ms, -1, b"", 0), "kind -1")


# --- 1: due ---------------------------------------------------------------------------------------


async def test_rule_01_row_at_now_fires_and_row_one_ms_later_does_not(table: Table) -> None:
    await table.put(timer(NOW), timer(NOW + 1))
    handler = Handler()
    report = await table.run(handler)
    assert [call.due_at_ms for call in handler.calls] == [NOW]
    assert report.fired == 1
    assert await table.timers() == [timer(NOW + 1)]


# --- 2: order and pages ---------------------------------------------------------------------------


async def test_rule_02_rows_of_a_lane_fire_in_key_order(table: Table) -> None:
    in_order = [
        timer(NOW - 2, ref=b"z"),
        timer(NOW - 1, ref=b"a", generation=1),
        timer(NOW - 1, ref=b"a", generation=2),
        timer(NOW - 1, ref=b"b", generation=0),
    ]
    await table.put(*reversed(in_order))
    handler = Handler()
    await table.run(handler)
    assert [(call.due_at_ms, call.reference, call.generation) for call in handler.calls] == [
        (row.due_ms, row.ref, row.generation) for row in in_order
    ]


async def test_rule_02_pages_have_at_most_64_rows(table: Table) -> None:
    await table.put(*rows(130))
    handler = Handler()
    await table.run(handler, budget=WIDE)
    assert table.store.scan_limits == [64, 64, 64]
    assert [call.reference for call in handler.calls] == refs(130)


async def test_rule_02_a_page_leaves_one_scan_unit_for_the_look_ahead(table: Table) -> None:
    await table.put(*rows(20))
    await table.run(Handler(), budget=TickBudget(max_scanned=10))
    assert table.store.scan_limits == [9]


# --- 3: what a page costs -------------------------------------------------------------------------


async def test_rule_03_a_page_is_charged_its_rows_plus_one_before_any_is_processed(table: Table) -> None:
    await table.put(*rows(3))
    state = table.state()
    seen: list[int] = []
    await table.run_shared(state, Handler(done_after(lambda ctx: seen.append(state.examined))))
    assert seen == [4, 4, 4]


async def test_rule_03_fetched_rows_are_processed_when_the_scan_allowance_is_spent(table: Table) -> None:
    await table.put(*rows(5))
    report = await table.run(Handler(), budget=TickBudget(max_scanned=4))
    assert (report.fired, report.scanned, report.stopped_on_budget) == (3, 3, True)


async def test_rule_03_fetched_rows_stop_at_the_commit_limit(table: Table) -> None:
    await table.put(*rows(5))
    handler = Handler()
    report = await table.run(handler, budget=TickBudget(max_fired=2))
    assert (report.fired, len(handler.calls), report.stopped_on_budget) == (2, 2, True)
    assert [row.ref for row in await table.timers()] == refs(5)[2:]


async def test_rule_03_fetched_rows_stop_at_the_clock_limit(table: Table) -> None:
    await table.put(*rows(5))
    handler = Handler(done_after(lambda ctx: table.clock.step_monotonic(5_000)))
    report = await table.run(handler, budget=TickBudget(max_elapsed_ms=10_000))
    assert (report.fired, len(handler.calls), report.stopped_on_budget) == (2, 2, True)


# --- 4: too little left for a page ----------------------------------------------------------------


async def test_rule_04_a_scan_budget_of_one_does_no_work_at_all(table: Table) -> None:
    await table.put(timer(NOW))
    report = await table.run(Handler(), budget=TickBudget(max_scanned=1))
    assert table.store.scan_limits == []
    assert (report.fired, report.scanned, report.stopped_on_budget) == (0, 0, True)
    assert report.next_wake_ms == LATER


@pytest.mark.parametrize(("allowance", "pages"), [(66, 1), (67, 2)])
async def test_rule_04_no_page_is_fetched_with_less_than_two_units(table: Table, allowance: int, pages: int) -> None:
    await table.put(*rows(100))
    report = await table.run(Handler(), budget=TickBudget(1_000, 1_000, allowance))
    assert len(table.store.scan_limits) == pages
    assert report.stopped_on_budget


# --- 5: Done --------------------------------------------------------------------------------------


async def test_rule_05_done_applies_the_effects_and_deletes_the_timer_in_one_batch(table: Table) -> None:
    await table.put(timer(NOW))
    report = await table.run(Handler(write_note("effect")))
    [[batch]] = table.store.applied
    assert batch.preconditions == (Equals(timer(NOW)),)
    assert batch.writes == (Put(Note("effect", 1)), Delete("timers", timer(NOW).key()))
    assert (report.fired, await table.timers(), await table.store.note("effect")) == (1, [], 1)


async def test_rule_05_a_timer_changed_meanwhile_races_and_has_no_effect(table: Table) -> None:
    await table.put(timer(NOW, payload=b"old"))

    async def replace_payload() -> None:
        await table.put(timer(NOW, payload=b"new"))

    table.store.before_apply = replace_payload
    report = await table.run(Handler(write_note("effect")))
    assert (report.fired, report.raced, report.failed) == (0, 1, 0)
    assert await table.timers() == [timer(NOW, payload=b"new")]
    assert await table.store.note("effect") is None


async def test_rule_05_a_timer_cancelled_meanwhile_races_and_does_not_come_back(table: Table) -> None:
    await table.put(timer(NOW))

    async def cancel() -> None:
        await table.store.inner.apply([Batch(writes=(Delete("timers", timer(NOW).key()),))])

    table.store.before_apply = cancel
    report = await table.run(Handler(write_note("effect")))
    assert (report.raced, await table.timers(), await table.store.note("effect")) == (1, [], None)


async def test_rule_05_a_failed_guard_of_the_handler_races_and_keeps_the_timer(table: Table) -> None:
    await table.put(timer(NOW))
    batch = Batch((Present("notes", ("missing",)),), (Put(Note("effect", 1)),))
    report = await table.run(Handler(lambda ctx, timer: Done(batch)))
    assert (report.raced, report.failed) == (1, 0)
    assert await table.timers() == [timer(NOW)]
    assert await table.store.note("effect") is None


# --- 6: Reschedule --------------------------------------------------------------------------------


async def test_rule_06_reschedule_moves_the_timer_with_its_effects_and_starts_its_attempts_anew(table: Table) -> None:
    await table.put(timer(NOW, generation=4, first_due_ms=NOW - 90, attempt=3, payload=b"old"))
    effects = Batch(writes=(Put(Note("effect", 1)),))
    report = await table.run(Handler(lambda ctx, timer: Reschedule(NOW + 50, b"new", effects)))
    assert (report.fired, report.next_wake_ms) == (1, NOW + 50)
    assert await table.timers() == [timer(NOW + 50, generation=4, payload=b"new")]
    assert await table.store.note("effect") == 1


async def test_rule_06_reschedule_requires_the_new_key_to_be_absent(table: Table) -> None:
    taken = timer(NOW + 50, payload=b"other")
    await table.put(timer(NOW), taken)
    effects = Batch(writes=(Put(Note("effect", 1)),))
    report = await table.run(Handler(lambda ctx, timer: Reschedule(NOW + 50, b"new", effects)))
    assert (report.fired, report.raced) == (0, 1)
    assert await table.timers() == [timer(NOW), taken]
    assert await table.store.note("effect") is None


@pytest.mark.parametrize("to", [NOW - 90, NOW], ids=["the same due as the original", "the same key"])
async def test_rule_06_reschedule_to_where_the_timer_is_fails(table: Table, to: int) -> None:
    await table.put(timer(NOW, first_due_ms=NOW - 90, attempt=1))
    report = await table.run(Handler(lambda ctx, timer: Reschedule(to, b"new")))
    assert (report.fired, report.failed) == (0, 1)
    assert await table.timers() == [timer(NOW + 10_000, first_due_ms=NOW - 90, attempt=2)]


# --- 7: failures ----------------------------------------------------------------------------------


def late(ctx: TimerCtx, timer: DueTimer) -> Fired:
    return Done(Batch((NotAfter(ctx.now_ms - 1),), (Put(Note("effect", 1)),)))


@pytest.mark.parametrize(
    ("decide", "faults"),
    [
        (lambda ctx, timer: Retry(), 0),
        (fail, 1),
        (late, 1),
        (lambda ctx, timer: "not a decision", 1),
        (lambda ctx, timer: Reschedule(-1, b""), 1),
        (lambda ctx, timer: Reschedule(MAX_TIME_MS + 1, b""), 1),
        (lambda ctx, timer: Done(Batch(writes=tuple(Put(Note(f"{n}")) for n in range(99)))), 1),
        (lambda ctx, timer: Done(Batch(writes=(Put(TimerRow(A, NOW, A, b"r", 0, NOW)),))), 1),
        (lambda ctx, timer: Reschedule(NOW + 9, b"", Batch(writes=(Delete("timers", (A, NOW + 9, A, b"r", 0)),))), 1),
    ],
    ids=[
        "retry",
        "raises",
        "deadline passed",
        "wrong type",
        "no time",
        "past the end of time",
        "no room",
        "writes its own timer",
        "writes where it moves",
    ],
)
async def test_rule_07_a_failure_discards_the_effects_and_moves_the_timer_up_the_ladder(
    table: Table, decide: Callable[[TimerCtx, DueTimer], Any], faults: int
) -> None:
    await table.put(timer(NOW, first_due_ms=NOW - 1_000, attempt=2, payload=b"kept"))
    report = await table.run(Handler(decide))
    assert (report.fired, report.raced, report.failed) == (0, 0, 1)
    assert await table.timers() == [timer(NOW + 20_000, first_due_ms=NOW - 1_000, attempt=3, payload=b"kept")]
    assert await table.store.note("effect") is None
    assert len(table.faults) == faults  # a handler that asks for a retry is no fault; everything else is told


async def test_rule_07_an_error_of_the_commit_is_a_failure_and_is_told(table: Table) -> None:
    await table.put(timer(NOW))
    table.store.refuse = lambda batch: Put(Note("effect", 1)) in batch.writes
    report = await table.run(Handler(write_note("effect")))
    assert report.failed == 1
    assert await table.timers() == [timer(LATER, first_due_ms=NOW, attempt=1)]
    assert [type(fault.error) for fault in table.faults] == [StoreBroke]


async def test_rule_07_the_retry_move_guards_the_old_row_and_the_new_key(table: Table) -> None:
    await table.put(timer(NOW))
    await table.run(Handler(fail))
    moved = timer(LATER, first_due_ms=NOW, attempt=1)
    [[batch]] = table.store.applied
    assert batch.preconditions == (Equals(timer(NOW)), Absent("timers", moved.key()))
    assert batch.writes == (Delete("timers", timer(NOW).key()), Put(moved))


async def test_rule_07_the_handler_sees_the_original_due_time_and_attempt_on_each_retry(table: Table) -> None:
    await table.put(timer(NOW))
    handler = Handler(fail)
    now_ms: int | None = NOW
    waits: list[int] = []
    for _ in range(9):
        assert now_ms is not None
        report = await table.run(handler, now_ms=now_ms)
        assert report.next_wake_ms is not None
        waits.append((report.next_wake_ms - now_ms) // 1_000)
        now_ms = report.next_wake_ms
    assert waits == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    assert {call.due_at_ms for call in handler.calls} == {NOW}
    assert [call.attempt for call in handler.calls] == list(range(9))


async def test_rule_07_a_retry_move_never_passes_the_end_of_time(table: Table) -> None:
    await table.put(timer(NOW))
    await table.run(Handler(fail), now_ms=MAX_TIME_MS)
    assert await table.timers() == [timer(MAX_TIME_MS, first_due_ms=NOW, attempt=1)]


# --- 8: unknown kinds -----------------------------------------------------------------------------


async def test_rule_08_an_unknown_kind_is_moved_up_the_ladder_and_kept_for_a_newer_release(table: Table) -> None:
    await table.put(timer(NOW, kind=C, payload=b"kept"))
    report = await table.run(Handler(kind=A))
    assert (report.unknown, report.fired, report.failed) == (1, 0, 0)
    assert await table.timers() == [timer(LATER, kind=C, first_due_ms=NOW, attempt=1, payload=b"kept")]
    handler = Handler(kind=C)
    assert (await table.run(handler, now_ms=LATER)).fired == 1
    assert [call.due_at_ms for call in handler.calls] == [NOW]


async def test_rule_08_an_unknown_kind_is_warned_of_once_per_kind_and_run(table: Table) -> None:
    await table.put(*rows(3, kind=B), *rows(3, kind=C))
    report = await table.run()
    assert report.unknown == 6
    assert sorted(fault.timer.kind for fault in table.faults if isinstance(fault.timer, TimerRow)) == [B, C]
    assert [row.attempt for row in await table.timers()] == [1] * 6


async def test_rule_08_the_move_of_an_unknown_kind_uses_up_a_commit_but_is_not_fired(table: Table) -> None:
    await table.put(*rows(5, kind=C))
    state = table.state(TickBudget(max_fired=2))
    report = await table.run_shared(state)
    assert (state.committed, report.fired, report.unknown, report.stopped_on_budget) == (2, 0, 2, True)


# --- 9: unreadable rows ---------------------------------------------------------------------------


async def test_rule_09_an_unreadable_row_is_counted_unknown_and_left_in_place(table: Table) -> None:
    table.store.malformed = [malformed(NOW - 1)]
    await table.put(timer(NOW))
    report = await table.run(Handler())
    assert (report.unknown, report.fired) == (1, 1)
    assert [len(batches) for batches in table.store.applied] == [1]
    assert [fault.timer for fault in table.faults] == table.store.malformed


async def test_rule_09_rows_after_a_page_of_unreadable_ones_still_fire(table: Table) -> None:
    table.store.malformed = [malformed(NOW - 100 + n) for n in range(PAGE_SIZE)]
    await table.put(timer(NOW))
    assert (await table.run(Handler())).fired == 1


# --- 10: the cap per kind -------------------------------------------------------------------------


async def test_rule_10_over_the_cap_of_its_kind_a_row_is_deferred_and_untouched(table: Table) -> None:
    await table.put(*rows(5))
    handler = Handler()
    report = await table.run(handler, budget=TickBudget(max_per_kind=3))
    assert (report.fired, report.deferred, len(handler.calls)) == (3, 2, 3)
    assert await table.timers() == rows(5)[3:]


@pytest.mark.parametrize(("own", "fired"), [(2, 2), (0, 1), (50, 3)])
async def test_rule_10_a_handlers_own_cap_only_lowers_the_shared_one(table: Table, own: int, fired: int) -> None:
    await table.put(*rows(5))
    report = await table.run(Handler(max_per_tick=own), budget=TickBudget(max_per_kind=3))
    assert (report.fired, report.deferred) == (fired, 5 - fired)


# --- 11: attempts ---------------------------------------------------------------------------------


async def test_rule_11_failures_use_up_the_cap(table: Table) -> None:
    await table.put(*rows(5))
    handler = Handler(fail)
    report = await table.run(handler, budget=TickBudget(max_per_kind=3))
    assert (len(handler.calls), report.failed, report.deferred) == (3, 3, 2)


async def test_rule_11_sixteen_tables_of_32_failing_rows_are_tried_32_times_in_one_tick(clock: ManualClock) -> None:
    tables = [Table(make_timer_store(clock), clock) for _ in range(16)]
    for table in tables:
        await table.put(*rows(32))
    handler = Handler(fail)
    state = TickState.new(TickBudget(), clock.monotonic_ms)
    reports = [await table.run_shared(state, handler) for table in tables]
    assert len(handler.calls) == 32
    assert [report.failed for report in reports] == [32] + [0] * 15
    assert all(report.next_wake_ms == NOW for report in reports[1:])


# --- 12: errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["lanes", "scan_due", "next_due_ms"])
async def test_rule_12_errors_of_the_stores_reads_escape(table: Table, read: str) -> None:
    await table.put(timer(NOW))
    table.store.broken_reads = {read}
    with pytest.raises(StoreBroke, match=read):
        await table.run(Handler())


async def test_rule_12_a_failed_retry_move_keeps_the_original_row_and_is_told(table: Table) -> None:
    await table.put(timer(NOW))
    table.store.refuse = lambda batch: True
    report = await table.run(Handler())
    assert (report.fired, report.failed, report.next_wake_ms) == (0, 1, LATER)
    assert await table.timers() == [timer(NOW)]
    assert len(table.faults) == 2  # the commit, and the move


async def test_rule_12_a_retry_move_whose_place_is_taken_keeps_the_original_row(table: Table) -> None:
    taken = timer(LATER, payload=b"other")
    await table.put(timer(NOW), taken)
    report = await table.run(Handler(fail))
    assert (report.failed, report.raced, report.next_wake_ms) == (1, 0, LATER)
    assert await table.timers() == [timer(NOW), taken]


async def test_rule_12_a_handler_that_fails_in_a_store_that_fails_has_failed_once(table: Table) -> None:
    await table.put(timer(NOW))
    table.store.refuse = lambda batch: True
    report = await table.run(Handler(fail))
    assert (report.failed, report.raced) == (1, 0)
    assert await table.timers() == [timer(NOW)]


# --- 13: the next wake ----------------------------------------------------------------------------


async def test_rule_13_nothing_left_means_no_wake(table: Table) -> None:
    assert (await table.run(Handler())).next_wake_ms is None
    await table.put(timer(NOW))
    assert (await table.run(Handler())).next_wake_ms is None


async def test_rule_13_the_earliest_future_row_of_all_lanes_is_the_wake(table: Table) -> None:
    await table.put(timer(NOW), timer(NOW + 900), timer(NOW + 70, kind=B), timer(NOW + 800, kind=C))
    assert (await table.run(Handler(kind=A), Handler(kind=B))).next_wake_ms == NOW + 70


async def test_rule_13_pending_with_progress_wakes_now(table: Table) -> None:
    table.store.malformed = [malformed(NOW)]
    await table.put(timer(NOW))
    assert (await table.run(Handler())).next_wake_ms == NOW


async def test_rule_13_pending_without_progress_wakes_after_5_s(table: Table) -> None:
    table.store.malformed = [malformed(NOW)]
    assert (await table.run(Handler())).next_wake_ms == LATER


async def test_rule_13_pending_without_progress_wakes_earlier_for_an_earlier_future_row(table: Table) -> None:
    table.store.malformed = [malformed(NOW)]
    await table.put(timer(NOW + 30))
    assert (await table.run(Handler())).next_wake_ms == NOW + 30


async def test_rule_13_a_raced_row_is_pending(table: Table) -> None:
    await table.put(timer(NOW))
    report = await table.run(Handler(lambda ctx, timer: Done(Batch((Present("notes", ("missing",)),)))))
    assert (report.raced, report.next_wake_ms) == (1, LATER)


async def test_rule_13_the_earliest_timer_put_of_a_committed_batch_is_a_wake(table: Table) -> None:
    await table.put(timer(NOW), timer(NOW + 500))
    armed = Batch(writes=(Put(timer(NOW + 20, kind=C)), Put(timer(NOW + 10, kind=B))))
    assert (await table.run(Handler(lambda ctx, timer: Done(armed)))).next_wake_ms == NOW + 10


async def test_rule_13_a_timer_put_by_a_batch_that_raced_is_no_wake(table: Table) -> None:
    await table.put(timer(NOW))
    armed = Batch((Present("notes", ("missing",)),), (Put(timer(NOW + 10, kind=B)),))
    assert (await table.run(Handler(lambda ctx, timer: Done(armed)))).next_wake_ms == LATER


async def test_rule_13_the_wake_is_never_before_now(table: Table) -> None:
    await table.put(timer(NOW))
    armed = Batch(writes=(Put(timer(NOW - 500, kind=B)),))
    assert (await table.run(Handler(lambda ctx, timer: Done(armed)))).next_wake_ms == NOW


async def test_rule_13_a_table_stopped_by_another_ones_progress_wakes_now(table: Table, clock: ManualClock) -> None:
    other = Table(make_timer_store(clock), clock)
    await table.put(*rows(2))
    await other.put(*rows(2))
    state = table.state(TickBudget(max_fired=2))
    await table.run_shared(state, Handler())
    report = await other.run_shared(state, Handler())
    assert (report.scanned, report.stopped_on_budget, report.next_wake_ms) == (0, True, NOW)


# --- 14: looking for the future row ---------------------------------------------------------------


async def test_rule_14_the_future_row_costs_two_scan_units_a_lane(table: Table) -> None:
    await table.put(timer(NOW + 10))
    state = table.state()
    report = await table.run_shared(state, Handler())
    assert (state.examined, report.scanned, report.next_wake_ms) == (1 + 2, 0, NOW + 10)


async def test_rule_14_without_scan_units_for_it_the_tick_says_that_it_stopped(table: Table) -> None:
    await table.put(timer(NOW), timer(NOW + 10_000_000))
    report = await table.run(Handler(), budget=TickBudget(max_scanned=3))
    assert (report.fired, table.store.future_lookups) == (1, 0)
    assert (report.stopped_on_budget, report.next_wake_ms) == (True, NOW)


async def test_rule_14_without_commits_for_it_the_tick_says_that_it_stopped(table: Table) -> None:
    await table.put(timer(NOW), timer(NOW + 10_000_000))
    report = await table.run(Handler(), budget=TickBudget(max_fired=1))
    assert (report.fired, table.store.future_lookups) == (1, 0)
    assert (report.stopped_on_budget, report.next_wake_ms) == (True, NOW)


async def test_rule_14_without_time_for_it_the_tick_says_that_it_stopped(table: Table) -> None:
    await table.put(timer(NOW), timer(NOW + 10_000_000))
    handler = Handler(done_after(lambda ctx: table.clock.step_monotonic(10_000)))
    report = await table.run(handler)
    assert (report.fired, table.store.future_lookups) == (1, 0)
    assert (report.stopped_on_budget, report.next_wake_ms) == (True, NOW)


async def test_rule_14_at_the_end_of_time_there_is_no_future_to_look_for(table: Table) -> None:
    await table.put(timer(NOW))
    report = await table.run(Handler(), now_ms=MAX_TIME_MS)
    assert (report.fired, table.store.future_lookups, report.stopped_on_budget) == (1, 0, False)
    assert report.next_wake_ms is None


# --- 15: the earliest timer put -------------------------------------------------------------------


def test_rule_15_the_earliest_timer_put_ignores_deletes_and_other_rows() -> None:
    batch = Batch(
        (Equals(timer(1)),),
        (Put(timer(30)), Put(timer(20, kind=B)), Delete("timers", timer(10).key()), Put(Note("5", 5))),
    )
    assert earliest_timer_put(batch) == 20


def test_rule_15_a_batch_that_puts_no_timer_has_none() -> None:
    assert earliest_timer_put(Batch()) is None
    assert earliest_timer_put(Batch(writes=(Delete("timers", timer(10).key()), Put(Note("n"))))) is None


# --- 16: whose budget -----------------------------------------------------------------------------


async def test_rule_16_run_due_has_a_budget_of_its_own_each_time(table: Table) -> None:
    await table.put(*rows(4))
    budget = TickBudget(max_fired=2)
    assert [(await table.run(Handler(), budget=budget)).fired for _ in range(3)] == [2, 2, 0]


async def test_rule_16_run_due_with_state_goes_on_with_what_is_left(table: Table, clock: ManualClock) -> None:
    other = Table(make_timer_store(clock), clock)
    await table.put(*rows(2))
    await other.put(*rows(2))
    state = table.state(TickBudget(max_fired=3))
    fired = [(await each.run_shared(state, Handler())).fired for each in (table, other)]
    assert fired == [2, 1]


# --- 17: fairness ---------------------------------------------------------------------------------


async def test_rule_17_a_capped_kind_does_not_hide_another_and_repeated_ticks_drain_both(table: Table) -> None:
    await table.put(*rows(100, kind=A), *(timer(NOW, kind=B, ref=ref) for ref in refs(5)))
    a, b = Handler(kind=A), Handler(kind=B)
    budget = TickBudget(max_per_kind=10)
    report = await table.run(a, b, budget=budget)
    assert (report.fired, report.deferred, report.next_wake_ms) == (15, 90, NOW)
    ticks = 1
    while report.next_wake_ms is not None:
        report = await table.run(a, b, budget=budget, now_ms=report.next_wake_ms)
        ticks += 1
    assert (len(a.calls), len(b.calls), ticks) == (100, 5, 10)
    assert await table.timers() == []


async def test_rule_17_the_lane_of_a_capped_kind_is_left_without_scanning_it_through(table: Table) -> None:
    await table.put(*rows(1_000, kind=A), timer(NOW, kind=B))
    state = table.state()
    report = await table.run_shared(state, Handler(kind=A), Handler(kind=B))
    assert (report.fired, report.stopped_on_budget, report.next_wake_ms) == (33, False, NOW)
    assert state.examined <= (PAGE_SIZE + 1) + (1 + 1) + 2 * 2


async def test_rule_17_a_lane_whose_cap_another_table_used_up_is_only_asked_whether_it_has_rows(
    table: Table, clock: ManualClock
) -> None:
    other = Table(make_timer_store(clock), clock)
    await table.put(*rows(32))
    await other.put(*rows(32))
    state = table.state()
    await table.run_shared(state, Handler())
    report = await other.run_shared(state, Handler())
    assert other.store.scan_limits == [1]
    assert (report.scanned, report.deferred, report.next_wake_ms) == (1, 1, NOW)


async def test_rule_17_a_cap_reached_at_the_last_row_of_a_page_forgets_nothing_behind_it(table: Table) -> None:
    await table.put(*rows(PAGE_SIZE + 1))
    state = table.state(TickBudget(max_per_kind=PAGE_SIZE))
    report = await table.run_shared(state, Handler())
    assert (report.fired, report.deferred, report.next_wake_ms) == (PAGE_SIZE, 1, NOW)


async def test_rule_17_lanes_take_turns_at_being_first(table: Table) -> None:
    await table.put(*rows(9, kind=A), *rows(9, kind=B), *rows(9, kind=C))
    handlers = [Handler(kind=kind) for kind in (A, B, C)]
    budget = TickBudget(max_fired=1)
    for rotation in range(3):
        await table.run(*handlers, budget=budget, rotation=rotation)
    assert [len(handler.calls) for handler in handlers] == [1, 1, 1]


async def test_rule_17_the_lane_of_user_code_is_never_visited(table: Table) -> None:
    alarm = timer(NOW, kind=33, lane=USER_LANE)
    table.store.malformed = [malformed(NOW, USER_LANE)]  # makes the store name the lane
    await table.put(alarm, timer(NOW))
    report = await table.run(Handler(), Handler(kind=33))
    assert (report.fired, report.unknown, USER_LANE in table.store.scanned_lanes) == (1, 0, False)
    assert await table.store.get(TimerRow, alarm.key()) == alarm
