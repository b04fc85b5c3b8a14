"""Durable sleep as the core decides it: ids, the sleeper, the service. Each test names its statement, B.3.n."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drivers.clock import VirtualClock
from drivers.loop_event import LoopEvent
from tests.support.sleeps import Process, SleepTable, pass_time
from timers.durable_sleep import DEFAULT_POLL_MS, Sleep, StepCounter, Waits, promise_id, timer_id
from timers.errors import SleepDropped, TooManySteps

EXECUTION = b"order-1"


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def table() -> SleepTable:
    return SleepTable()


MakeProcess = Callable[..., Process]


@pytest.fixture
async def process(table: SleepTable, clock: VirtualClock) -> AsyncIterator[MakeProcess]:
    """Makes processes at the table; they end with the test."""
    made: list[Process] = []

    def make(*, poll_ms: int = DEFAULT_POLL_MS) -> Process:
        made.append(Process(table, clock, poll_ms=poll_ms))
        return made[-1]

    yield make
    for each in made:
        await each.crash()


def sleep_for(clock: VirtualClock, ms: int, step: int = 0) -> Sleep:
    return Sleep(timer_id(EXECUTION, step), EXECUTION, clock.wall_ms() + ms)


# --- ids and steps ------------------------------------------------------------------------------------


def test_a_sleep_takes_the_next_step_and_over_the_cap_nothing_is_taken() -> None:
    """B.3.1; that nothing is armed then is shown end to end in test_workflow."""
    steps = StepCounter(2)
    assert [steps.take(), steps.take()] == [0, 1]
    with pytest.raises(TooManySteps, match="made 2 steps"):
        steps.take()
    assert steps.taken == 2


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@settings(max_examples=200)
def test_the_same_execution_and_step_have_the_same_timer_id_and_others_another(
    one: bytes, other: bytes, step: int, other_step: int
) -> None:
    """B.3.2"""
    is_same = (one, step) == (other, other_step)
    assert (timer_id(one, step) == timer_id(other, other_step)) is is_same


@given(st.binary(max_size=40), st.integers(0, 2**32 - 1))
def test_ids_of_timers_and_promises_are_uuids_of_version_8_from_separate_domains(execution: bytes, step: int) -> None:
    """B.1: derived from (execution, step) under separate hash contexts, packed as UUIDv8."""
    ids = timer_id(execution, step), promise_id(execution, step)
    assert ids[0] != ids[1]
    assert [(each.version, each.variant) for each in ids] == [(8, uuid.RFC_4122)] * 2


def test_the_ids_of_a_release_stay_what_they_are() -> None:
    """Rows outlive versions: another hash would lose every sleep that is armed."""
    assert str(timer_id(b"order-1", 3)) == "f882e85e-01cd-8b2b-b3d6-993127e08716"
    assert str(promise_id(b"order-1", 3)) == "372b2d1d-0bab-83cf-99ae-432184c8c404"


# --- the sleeper --------------------------------------------------------------------------------------


async def test_without_a_row_the_sleep_is_armed_unfired_with_its_due_time(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.3, first part."""
    sleep = sleep_for(clock, 10_000)
    task = process().sleep(sleep)
    await pass_time(clock, 0)
    assert table.rows == {sleep.timer_id: sleep}
    assert not sleep.fired
    assert not task.done()


async def test_an_armed_row_is_attached_to_and_no_second_one_is_made(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.3, second part."""
    sleep = sleep_for(clock, 10_000)
    one, other = process().sleep(sleep), process().sleep(sleep)
    await pass_time(clock, 9_999)
    assert [one.done(), other.done()] == [False, False]
    await pass_time(clock, 1)
    assert one.done()
    assert other.done()
    assert list(table.rows) == [sleep.timer_id]


async def test_a_fired_row_lets_the_sleeper_return_at_once(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.3, third part."""
    sleep = sleep_for(clock, 10_000)
    table.rows[sleep.timer_id] = Sleep(sleep.timer_id, EXECUTION, sleep.due_ms, fired=True)
    task = process().sleep(sleep)
    await pass_time(clock, 0)
    assert task.done()
    assert "arm" not in table.calls


async def test_the_sleeper_fires_its_own_timer_once_it_is_due_and_needs_no_service(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.4"""
    sleep = sleep_for(clock, 10_000)
    task = process().sleep(sleep)
    await pass_time(clock, 9_999)
    assert table.marked == []
    await pass_time(clock, 1)
    assert task.done()
    assert table.marked == [sleep.timer_id]


async def test_a_sleep_whose_time_has_passed_already_is_armed_and_fired_at_once(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.4: now >= due holds at once."""
    task = process().sleep(sleep_for(clock, 0))
    await pass_time(clock, 0)
    assert task.done()
    assert [row.fired for row in table.rows.values()] == [True]


async def test_each_wait_is_the_poll_interval_or_what_is_left_if_that_is_shorter(
    process: MakeProcess, clock: VirtualClock
) -> None:
    """B.3.5, first part."""
    sleeper = process(poll_ms=2_000)
    sleeper.sleep(sleep_for(clock, 5_000))
    await pass_time(clock, 5_000)
    assert sleeper.waited == [2_000, 2_000, 1_000]


async def test_a_wait_ends_early_when_the_timer_is_notified(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.5, second part."""
    sleeper = process(poll_ms=60_000)
    sleep = sleep_for(clock, 50_000)
    task = sleeper.sleep(sleep)
    await pass_time(clock, 1_000)
    await table.mark_fired(sleep.timer_id)  # an administrator, say
    sleeper.waits.notify(sleep.timer_id)
    await pass_time(clock, 0)
    assert task.done()


async def test_interest_is_registered_before_the_state_is_looked_at_again(
    process: MakeProcess, table: SleepTable, clock: VirtualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B.3.6: a timer that fires between the look and the wait wakes the sleeper all the same."""
    sleeper = process(poll_ms=60_000)
    sleep = sleep_for(clock, 50_000)
    look = table.state

    async def look_and_fire_behind_its_back(timer: uuid.UUID) -> Sleep | None:
        seen = await look(timer)
        if table.calls.count("state") == 2:
            await table.mark_fired(timer)
            sleeper.waits.notify(timer)
        return seen

    monkeypatch.setattr(table, "state", look_and_fire_behind_its_back)
    task = sleeper.sleep(sleep)
    await pass_time(clock, 0)
    assert table.calls[:4] == ["state", "arm", "register", "state"]
    assert task.done()


def test_sleepers_have_no_bound_and_promise_waiters_beyond_theirs_only_poll(clock: VirtualClock) -> None:
    """B.3.7"""
    waits = Waits(lambda: LoopEvent(clock), max_promise_waiters=3)
    told = []

    async def wait(name: str, waiter_of: Callable[[uuid.UUID], object], number: int) -> None:
        waiter = waiter_of(uuid.UUID(int=number))
        await waiter.wait(60_000)  # type: ignore[attr-defined]
        told.append((name, number, clock.wall_ms() - start))

    async def run() -> None:
        tasks = [asyncio.ensure_future(wait("timer", waits.timer, number)) for number in range(10)]
        tasks += [asyncio.ensure_future(wait("promise", waits.promise, 100 + number)) for number in range(5)]
        await pass_time(clock, 1_000)
        for number in (*range(10), *range(100, 105)):
            waits.notify(uuid.UUID(int=number))
        await pass_time(clock, 60_000)
        await asyncio.gather(*tasks)

    start = clock.wall_ms()
    asyncio.run(run())
    assert [each for each in told if each[0] == "timer"] == [("timer", number, 1_000) for number in range(10)]
    promised = [("promise", number, 1_000) for number in (100, 101, 102)]
    polled = [("promise", number, 60_000) for number in (103, 104)]
    assert [each for each in told if each[0] == "promise"] == promised + polled


def test_a_promise_waiter_that_has_gone_makes_room_for_another(clock: VirtualClock) -> None:
    """B.3.7: the bound is on those who wait now."""
    waits = Waits(lambda: LoopEvent(clock), max_promise_waiters=1)
    for _ in range(3):
        waiter = waits.promise(uuid.UUID(int=1))
        assert waits.promise_waiters == 1
        waiter.close()
        waiter.close()
        assert waits.promise_waiters == 0


async def test_marking_fired_changes_an_unfired_row_only_and_has_one_winner(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.8: sleeper and services race; one changes the row, for the others there is nothing to do."""
    sleep = sleep_for(clock, 1_000)
    processes = [process() for _ in range(3)]
    sleepers = [each.sleep(sleep) for each in processes]
    ended = []
    await pass_time(clock, 999)
    clock.move_to(clock.wall_ms() + 1)
    ended = await asyncio.gather(*(each.service().poll() for each in processes))
    await pass_time(clock, 0)
    assert all(task.done() for task in sleepers)
    assert sum(ended) == 1
    assert table.marked == [sleep.timer_id]


# --- the service --------------------------------------------------------------------------------------


async def test_the_interval_is_at_least_1_ms_and_0_is_taken_as_that(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.9, first part."""
    service = process().service(interval_ms=0)
    assert service.interval_ms == 1
    assert process().service(interval_ms=-5).interval_ms == 1
    process().run(service)
    await pass_time(clock, 3)
    assert table.calls == ["due"] * 4


async def test_the_first_poll_is_immediate_and_the_others_follow_at_the_interval(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.9, second part."""
    here = process()
    here.run(here.service(interval_ms=2_000))
    await pass_time(clock, 0)
    assert table.calls == ["due"]
    await pass_time(clock, 1_999)
    assert table.calls == ["due"]
    await pass_time(clock, 1)
    assert table.calls == ["due"] * 2


async def test_ticks_that_were_missed_are_delayed_and_not_made_up_for(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.9, third part: after a poll of three and a half intervals one comes at once, the next an interval later."""
    here, polls = process(), []

    def slow_first_poll(call: str, _: uuid.UUID | None) -> None:
        polls.append(clock.wall_ms() - start)
        if len(polls) == 1:
            clock.move_to(clock.wall_ms() + 7_000)

    start = clock.wall_ms()
    table.before = slow_first_poll
    here.run(here.service(interval_ms=2_000))
    await pass_time(clock, 0)
    assert polls == [0, 7_000]
    await pass_time(clock, 4_000)
    assert polls == [0, 7_000, 9_000, 11_000]


async def test_every_due_sleep_is_ended_in_one_poll_in_order_of_due_time_without_a_limit(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.10"""
    count = 3_000
    for step in range(count):
        sleep = sleep_for(clock, (step * 7_919) % count - count + 1, step)
        table.rows[sleep.timer_id] = sleep
    later, fired = sleep_for(clock, 1, count), sleep_for(clock, -1, count + 1)
    table.rows[later.timer_id] = later
    table.rows[fired.timer_id] = Sleep(fired.timer_id, EXECUTION, fired.due_ms, fired=True)
    assert await process().service().poll() == count
    dues = [table.rows[each].due_ms for each in table.marked]
    assert dues == sorted(dues)
    assert not table.rows[later.timer_id].fired


async def test_a_poll_that_fails_is_logged_as_a_warning_and_tried_again_at_the_next_tick(
    process: MakeProcess, table: SleepTable, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """B.3.11, first part."""
    here = process()
    sleep = sleep_for(clock, 0)
    table.rows[sleep.timer_id] = sleep

    def fail_once(call: str, _: uuid.UUID | None) -> None:
        if call == "due" and table.calls.count("due") == 1:
            raise OSError("the disk is away")

    table.before = fail_once
    service = here.run(here.service(interval_ms=2_000))
    with caplog.at_level(logging.WARNING):
        await pass_time(clock, 1_999)
        assert table.marked == []
        await pass_time(clock, 1)
    assert table.marked == [sleep.timer_id]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not service.done()


async def test_a_mark_that_fails_is_logged_as_a_warning_and_the_rest_is_ended_all_the_same(
    process: MakeProcess, table: SleepTable, clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    """B.3.11, second part."""
    sleeps = [sleep_for(clock, step - 5, step) for step in range(5)]
    table.rows.update({sleep.timer_id: sleep for sleep in sleeps})

    def fail_for_the_second(call: str, timer: uuid.UUID | None) -> None:
        if call == "mark" and timer == sleeps[1].timer_id:
            raise OSError("the row is locked")

    table.before = fail_for_the_second
    service = process().service()
    with caplog.at_level(logging.WARNING):
        assert await service.poll() == 4
    assert [str(sleeps[1].timer_id) in record.message for record in caplog.records] == [True]
    table.before = lambda call, timer: None
    assert await service.poll() == 1


async def test_the_service_holds_no_state_so_it_may_be_stopped_and_started_and_run_several_times(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.12"""
    sleeps = [sleep_for(clock, 1_000 * step, step) for step in range(10)]
    table.rows.update({sleep.timer_id: sleep for sleep in sleeps})
    for _ in range(10):
        two = [process(), process()]
        for each in two:
            each.run(each.service(interval_ms=300))
        await pass_time(clock, 1_100)
        for each in two:
            await each.crash()
    assert table.marked == [sleep.timer_id for sleep in sleeps]


async def test_a_sleeper_elsewhere_is_late_by_at_most_the_poll_interval(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.13: another process ends the sleep and can't tell the sleeper, whose clock is behind."""
    assert DEFAULT_POLL_MS == 2_000
    elsewhere, here = process(), process()
    sleep = sleep_for(clock, 5_500)
    behind = VirtualClock(clock.wall_ms() - 3_600_000)  # an hour
    here.clock, here.waits = behind, Waits(lambda: LoopEvent(clock))
    task = here.sleep(sleep)
    elsewhere.run(elsewhere.service(interval_ms=100))
    await pass_time(clock, 5_499)
    assert not table.rows[sleep.timer_id].fired
    await pass_time(clock, 1 + 100)
    assert table.rows[sleep.timer_id].fired
    await pass_time(clock, DEFAULT_POLL_MS)
    assert task.done()


# --- crashes, clocks, traps ---------------------------------------------------------------------------


async def test_a_crash_before_the_sleep_is_armed_lets_the_next_run_arm_it_afresh(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.14, first part."""
    first = process()

    def die(call: str, _: uuid.UUID | None) -> None:
        if call == "arm":
            raise ConnectionError("killed")

    table.before = die
    task = first.sleep(sleep_for(clock, 10_000))
    await pass_time(clock, 5_000)
    assert isinstance(task.exception(), ConnectionError)
    assert table.rows == {}
    table.before = lambda call, timer: None
    again = sleep_for(clock, 10_000)
    process().sleep(again)
    await pass_time(clock, 0)
    assert table.rows == {again.timer_id: again}


async def test_a_crash_after_the_sleep_has_fired_lets_its_replay_return_at_once(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.14, second part."""
    first, sleep = process(), sleep_for(clock, 10_000)
    first.sleep(sleep)
    await pass_time(clock, 10_000)
    await first.crash()
    again = process().sleep(sleep)
    await pass_time(clock, 0)
    assert again.done()
    assert table.marked == [sleep.timer_id]


@pytest.mark.parametrize("has_service", [False, True])
async def test_on_attaching_again_the_stored_due_time_wins(
    process: MakeProcess, table: SleepTable, clock: VirtualClock, has_service: bool
) -> None:
    """B.3.15: "in ten seconds", computed again after a crash, sleeps no longer, with the service and without."""
    first = process()
    first.sleep(sleep_for(clock, 10_000))
    await pass_time(clock, 6_000)
    await first.crash()
    second = process()
    if has_service:
        second.run(second.service())
    recomputed = sleep_for(clock, 10_000)
    task = second.sleep(recomputed)
    await pass_time(clock, 3_999)
    assert not task.done()
    await pass_time(clock, 1)
    assert task.done()
    assert table.rows[recomputed.timer_id].due_ms == recomputed.due_ms - 6_000


async def test_a_step_of_the_wall_clock_moves_the_end_of_the_sleep_and_never_makes_it_early(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.16: due times are wall-clock milliseconds."""
    sleep = sleep_for(clock, 10_000)
    task = process().sleep(sleep)
    await pass_time(clock, 5_000)
    clock.step_wall(-3_600_000)
    await pass_time(clock, 3_600_000)
    assert not task.done()
    clock.step_wall(4_000)
    await pass_time(clock, DEFAULT_POLL_MS)
    assert task.done()
    assert clock.wall_ms() >= sleep.due_ms


async def test_a_sleep_whose_row_is_removed_ends_with_a_typed_error(
    process: MakeProcess, table: SleepTable, clock: VirtualClock
) -> None:
    """B.3.17: the reference has no cancel call; here a cancelled execution takes its sleeps along."""
    sleep = sleep_for(clock, 10_000)
    task = process().sleep(sleep)
    await pass_time(clock, 1_000)
    del table.rows[sleep.timer_id]
    await pass_time(clock, DEFAULT_POLL_MS)
    assert isinstance(task.exception(), SleepDropped)
