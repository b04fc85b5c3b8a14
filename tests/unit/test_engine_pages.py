"""Timers of one page commit together, and are still judged one by one."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.timer_memory import MemoryTimerStore
from tests.support.timer_store import Note, StoreBroke
from tests.support.timer_table import NOW, PARTITION, A, Handler, Table, count_up, done_after, fail, timer, write_note
from timers.batch import Absent, Batch, Delete, Equals, Present, Put
from timers.budget import TickBudget
from timers.engine import PAGE_HOLD_MS, PAGE_SIZE, run_due
from timers.firing import Done, DueTimer, Fired, TimerCtx
from timers.registry import TimerRegistry
from timers.rows import TimerRow


def rows(count: int) -> list[TimerRow]:
    return [timer(NOW, ref=b"%04d" % number) for number in range(count)]


async def test_a_page_is_applied_together_whatever_its_timers_decide(table: Table) -> None:
    await table.put(*rows(6))
    handler = Handler(lambda ctx, timer: fail(ctx, timer) if timer.reference in (b"0001", b"0004") else Done())
    report = await table.run(handler)
    assert [len(batches) for batches in table.store.applied] == [6]
    assert (report.fired, report.failed) == (4, 2)


async def test_each_page_is_applied_before_the_next_is_fetched(table: Table) -> None:
    await table.put(*rows(PAGE_SIZE + 2))
    await table.run(Handler(), budget=TickBudget(1_000, 1_000))
    assert [len(batches) for batches in table.store.applied] == [PAGE_SIZE, 2]


async def test_a_timer_that_loses_its_guard_leaves_the_rest_of_its_page_alone(table: Table) -> None:
    await table.put(*rows(3))
    lost = Batch((Present("notes", ("missing",)),))
    report = await table.run(Handler(lambda ctx, timer: Done(lost if timer.reference == b"0001" else Batch())))
    assert (report.fired, report.raced) == (2, 1)
    assert await table.timers() == rows(3)[1:2]


async def test_a_batch_that_the_store_chokes_on_fails_alone(table: Table) -> None:
    await table.put(*rows(3))
    table.store.refuse = lambda batch: Put(Note("poison", 1)) in batch.writes
    poison = write_note("poison")
    report = await table.run(Handler(lambda ctx, timer: poison(ctx, timer) if timer.reference == b"0001" else Done()))
    assert (report.fired, report.failed) == (2, 1)
    assert [(row.ref, row.attempt) for row in await table.timers()] == [(b"0001", 1)]
    assert [type(fault.error) for fault in table.faults] == [StoreBroke]


async def test_a_store_that_fails_slowly_is_not_asked_for_each_row_past_the_time_limit(table: Table) -> None:
    await table.put(*rows(50))

    def refuse(batch: Batch) -> bool:
        table.clock.step_monotonic(4_000)
        return True

    table.store.refuse = refuse
    report = await table.run(Handler(), budget=TickBudget(1_000, 1_000))
    assert (report.failed, await table.timers()) == (50, rows(50))
    # the page, two rows alone until the time is up, and once the retry moves
    assert len(table.store.applied) == 4


async def test_a_timer_sees_what_the_earlier_ones_of_its_page_will_have_done(table: Table) -> None:
    await table.put(*rows(8))
    report = await table.run(Handler(count_up))
    assert (report.fired, report.raced) == (8, 0)
    assert await table.store.note("count") == 8
    assert len(table.store.applied) == 1


async def test_a_timer_that_was_deleted_by_an_earlier_one_of_its_page_has_no_effect(table: Table) -> None:
    await table.put(*rows(2))
    drop_second = Batch(writes=(Delete("timers", rows(2)[1].key()),))
    effect = Batch(writes=(Put(Note("effect", 1)),))
    report = await table.run(Handler(lambda ctx, timer: Done(drop_second if timer.reference == b"0000" else effect)))
    assert (report.fired, report.raced) == (1, 1)
    assert (await table.timers(), await table.store.note("effect")) == ([], None)


async def test_a_decision_that_rests_on_a_batch_that_was_not_committed_is_not_committed_either(table: Table) -> None:
    """The second timer ends because its note is gone; but the batch that removes the note loses its guard."""
    await table.put(*rows(2), Note("lease", 1))

    async def decide(ctx: TimerCtx, timer: DueTimer) -> Fired:
        if timer.reference == b"0000":
            return Done(Batch((Present("notes", ("missing",)),), (Delete("notes", ("lease",)),)))
        assert await ctx.store.get(Note, ("lease",)) is None
        return Done()

    report = await table.run(Handler(decide))
    assert (report.fired, report.raced) == (0, 2)
    assert await table.timers() == rows(2)


async def test_what_a_timer_saw_of_its_page_is_guarded_once_and_in_its_own_batch_only(table: Table) -> None:
    await table.put(*rows(4))

    async def decide(ctx: TimerCtx, timer: DueTimer) -> Fired:
        if timer.reference == b"0003":
            return Done()
        if timer.reference == b"0002":
            await ctx.store.get(Note, ("count",))
            return Done()
        return await count_up(ctx, timer)

    await table.run(Handler(decide))
    first, second, third, fourth = rows(4)
    [batches] = table.store.applied
    assert [batch.preconditions for batch in batches] == [
        (Absent("notes", ("count",)), Equals(first)),
        (Equals(Note("count", 1)), Equals(second)),
        (Equals(third), Equals(Note("count", 2))),
        (Equals(fourth),),
    ]


async def test_after_a_commit_timers_see_what_it_left_and_not_what_it_was_to_leave(table: Table) -> None:
    await table.put(*rows(2), Note("lease", 1))
    seen: list[Note | None] = []

    async def decide(ctx: TimerCtx, timer: DueTimer) -> Fired:
        seen.append(await ctx.store.get(Note, ("lease",)))
        table.clock.step_monotonic(PAGE_HOLD_MS)
        return Done(Batch((Present("notes", ("missing",)),), (Delete("notes", ("lease",)),)))

    await table.run(Handler(decide))
    assert seen == [Note("lease", 1), Note("lease", 1)]


async def test_a_slow_handler_does_not_hold_back_the_commit_of_the_timers_before_it(table: Table) -> None:
    await table.put(*rows(3))
    await table.run(Handler(done_after(lambda ctx: table.clock.step_monotonic(PAGE_HOLD_MS))))
    assert [len(batches) for batches in table.store.applied] == [1, 1, 1]


async def test_commits_never_pass_their_limit_when_timers_race(table: Table) -> None:
    await table.put(*rows(6))
    lost = Batch((Present("notes", ("missing",)),))
    state = table.state(TickBudget(max_fired=3))
    even = (b"0000", b"0002", b"0004")
    handler = Handler(lambda ctx, timer: Done(lost if timer.reference in even else Batch()))
    report = await table.run_shared(state, handler)
    assert (report.fired, report.raced, state.committed) == (3, 3, 3)


async def test_an_error_that_stops_the_process_is_not_swallowed(table: Table) -> None:
    await table.put(timer(NOW))

    def stop(ctx: TimerCtx, timer: DueTimer) -> Fired:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await table.run(Handler(stop))
    assert await table.timers() == [timer(NOW)]


async def test_without_a_receiver_faults_are_logged(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    await table.put(timer(NOW))
    with caplog.at_level(logging.WARNING, logger="timers.engine"):
        await run_due(
            table.store,
            TimerRegistry([Handler(fail)]),
            NOW,
            monotonic_ms=table.clock.monotonic_ms,
            partition=PARTITION,
        )
    [record] = caplog.records
    assert "partition 7: timer handler failed" in record.getMessage()
    assert record.exc_info is not None


async def test_the_handler_is_told_where_and_when_it_runs(table: Table) -> None:
    await table.put(timer(NOW - 5, generation=3, payload=b"value"))
    seen: list[TimerCtx] = []
    handler = Handler(done_after(seen.append))
    await table.run(handler)
    assert [(ctx.partition, ctx.now_ms) for ctx in seen] == [(PARTITION, NOW)]
    assert handler.calls == [DueTimer(NOW - 5, A, b"r", b"value", 3, 0)]


def test_a_run_needs_no_event_loop(clock: ManualClock) -> None:
    def finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
        with pytest.raises(StopIteration) as finished:
            coroutine.send(None)
        return finished.value.value

    store = MemoryTimerStore(clock.wall_ms)
    finish(store.apply([Batch(writes=(Put(timer(NOW)),))]))
    registry = TimerRegistry([Handler(count_up)])
    report = finish(run_due(store, registry, NOW, monotonic_ms=clock.monotonic_ms, partition=PARTITION))
    assert report.fired == 1
