"""The release wheel, statement by statement (C.2): one thread, one heap, never early, nothing lost."""

from __future__ import annotations

import gc
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers import process_wheel
from tests.support.wheels import MS, SECOND, SimulatedWheel, wheel
from timers.deadlines import (
    MAX_WAIT_NS,
    SLICE_LEAD_NS,
    SLICE_NS,
    SWEEP_INTERVAL_NS,
    SWEEP_MIN_LEN,
    Deadlines,
    Fire,
    Idle,
    Sleep,
    Wait,
    plan,
)
from timers.errors import ReleaseTimerClosed
from timers.lateness import LatenessRecorder, bucket_of, upper_bound_ns
from timers.release_timer import THREAD_NAME, ReleaseTimer, ReleaseToken, TimerBackend

#: How long anything may take that a test waits for: only a bound, never waited out.
PATIENCE_S = 30.0
FAR = 10 * SECOND


def wait_for(what: threading.Event) -> None:
    assert what.wait(PATIENCE_S)


def until(look: object) -> None:
    """Wait until `look()` is true."""
    assert callable(look)
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class ManualClock:
    """Moved by sleeping, once it is let go."""

    def __init__(self) -> None:
        self._now_ns = 0
        self.sleeps = 0
        self.go = threading.Event()

    def read(self) -> int:
        return self._now_ns

    def move(self, ns: int) -> None:
        self._now_ns += ns

    def sleep(self, seconds: float) -> None:
        assert self.go.wait(PATIENCE_S)
        self.sleeps += 1
        self._now_ns += round(seconds * SECOND)


@contextmanager
def held_wheel() -> Iterator[tuple[ReleaseTimer, ManualClock]]:
    """A wheel at time 0, whose thread sleeps before the first deadline until `clock.go` is set."""
    clock = ManualClock()
    timer = ReleaseTimer(monotonic_ns=clock.read, sleep=clock.sleep)
    try:
        yield timer, clock
    finally:
        clock.go.set()
        timer.close()


# --- arming -------------------------------------------------------------------------------------------


def test_c_2_1_a_deadline_that_is_due_is_released_at_once_and_touches_neither_heap_nor_thread() -> None:
    """C.2.1"""
    with wheel() as timer:
        for at_ns in (0, time.monotonic_ns() - 1, time.monotonic_ns()):
            assert timer.arm_at(at_ns).released
        assert len(timer) == 0
        assert not timer.started
        assert timer.wakes == 0


def in_a_new_process(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env={**os.environ, **environment}
    )
    return done.stdout.strip()


def test_c_2_1_and_2_the_wheel_of_the_process_is_built_by_the_first_deadline_in_the_future_and_stays() -> None:
    """C.2.1, C.2.2"""
    program = """
import gc, threading, time
from drivers.process_wheel import arm_at, release_timer_backend, release_timer_started
assert arm_at(time.monotonic_ns()).released
assert not release_timer_started() and release_timer_backend() is None and threading.active_count() == 1
token = arm_at(time.monotonic_ns() + 1_000_000)
assert release_timer_started()
assert token.wait(30)
wheel = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
del token
gc.collect()
assert arm_at(time.monotonic_ns() + 1_000_000).wait(30)
assert [thread for thread in threading.enumerate() if thread is not threading.main_thread()] == wheel
print(release_timer_backend().value, *(thread.name for thread in wheel))
"""
    assert in_a_new_process(program) == f"sleep-slice {THREAD_NAME}"


def test_c_2_3_a_token_is_level_triggered_who_waits_or_registers_late_is_served_at_once() -> None:
    """C.2.3"""
    with wheel() as timer:
        token = timer.arm_at(time.monotonic_ns() + MS)
        assert token.wait(PATIENCE_S)
        called: list[int] = []
        token.when_ended(lambda: called.append(1))
        assert called == [1]
        assert token.wait(0)
        assert token.wait()
        assert token.released
        assert not token.abandoned


def test_a_token_that_is_not_due_does_not_keep_its_waiter_beyond_the_time_it_gave() -> None:
    with wheel() as timer:
        token = timer.arm_at(time.monotonic_ns() + 3_600 * SECOND)
        assert not token.wait(0.001)
        assert not token.released
        assert not token.abandoned


def test_a_forgotten_callback_is_not_called_and_the_others_are() -> None:
    called: list[str] = []
    token = ReleaseToken(0)

    def unwanted() -> None:
        called.append("unwanted")

    token.when_ended(unwanted)
    token.when_ended(lambda: called.append("wanted"))
    token.forget(unwanted)
    token.forget(unwanted)
    token._end(released=True)
    assert called == ["wanted"]


# --- never early --------------------------------------------------------------------------------------


def test_c_2_4_300_deadlines_of_the_real_thread_are_never_early() -> None:
    """C.2.4"""
    chance = random.Random(4)
    with wheel() as timer:
        seen: list[tuple[int, int]] = []
        all_seen = threading.Event()
        tokens = []

        def look(at_ns: int) -> None:
            seen.append((at_ns, time.monotonic_ns()))
            if len(seen) == 300:
                all_seen.set()

        for _ in range(300):
            at_ns = time.monotonic_ns() + chance.randint(MS // 5, 5 * MS)
            token = timer.arm_at(at_ns)
            token.when_ended(lambda at_ns=at_ns: look(at_ns))  # type: ignore[misc]
            tokens.append(token)
        wait_for(all_seen)
    assert [(at_ns, now_ns) for at_ns, now_ns in seen if now_ns < at_ns] == []


@pytest.mark.parametrize("most_late_ns", [0, 60_000, pytest.param(3 * MS, marks=pytest.mark.soak)])
def test_c_2_4_100_000_random_deadlines_are_never_early_and_all_released(most_late_ns: int) -> None:
    """C.2.4, in bulk: the wheel's steps on a clock moved by its own waits, which end late by up to `most_late_ns`."""
    chance = random.Random(most_late_ns)
    simulated = SimulatedWheel(7, most_late_ns=most_late_ns)
    tokens: list[ReleaseToken] = []
    while len(tokens) < 100_000 or simulated.deadlines.head_ns is not None:
        if len(tokens) < 100_000:  # some at a time, so that nearer ones come while the wheel waits for farther ones
            tokens += [simulated.arm(simulated.now_ns + chance.randint(1, 20 * MS)) for _ in range(100)]
        simulated.step()  # asserts that nothing is early, and that no step leads past a deadline
    assert len(simulated.released) == 100_000
    assert set(map(id, simulated.released)) == set(map(id, tokens))


@given(
    deadlines=st.lists(st.integers(1, 50 * MS), min_size=1, max_size=60),
    late_ns=st.integers(0, 5 * MS),
    seed=st.integers(0, 1_000),
)
def test_whatever_is_armed_together_is_released_in_order_and_never_early(
    deadlines: list[int], late_ns: int, seed: int
) -> None:
    simulated = SimulatedWheel(seed, most_late_ns=late_ns)
    tokens = [simulated.arm(at_ns) for at_ns in deadlines]
    while simulated.step():
        pass
    assert simulated.released == sorted(tokens, key=lambda token: token.at_ns)


# --- what the thread does next ------------------------------------------------------------------------


def test_c_2_5_plan_is_idle_with_nothing_armed_and_fires_what_is_due() -> None:
    """C.2.5"""
    assert plan(None, 5) == Idle()
    assert plan(5, 5) == Fire()
    assert plan(4, 5) == Fire()


def test_c_2_5_plan_sleeps_at_most_a_slice_and_never_past_the_deadline() -> None:
    """C.2.5: slices only in the last 2 ms; before them one wait that can be interrupted (protocol 12)."""
    assert plan(100_000, 0) == Sleep(100_000)
    assert plan(SLICE_LEAD_NS, 0) == Sleep(SLICE_NS)
    assert (SLICE_NS, SLICE_LEAD_NS) == (500_000, 2_000_000)
    assert plan(5 * MS, 0) == Wait(5 * MS - SLICE_LEAD_NS)
    assert plan(3_600 * SECOND, 0) == Wait(MAX_WAIT_NS)
    assert plan(5 * MS, 0, slice_lead_ns=0) == Wait(5 * MS), "condvar: the whole remainder"


@given(head_ns=st.integers(0, 10**19), now_ns=st.integers(0, 10**19), lead_ns=st.sampled_from([0, SLICE_LEAD_NS]))
def test_c_2_5_no_step_leads_past_the_deadline_and_every_step_leads_on(head_ns: int, now_ns: int, lead_ns: int) -> None:
    """C.2.5"""
    step = plan(head_ns, now_ns, slice_lead_ns=lead_ns)
    if head_ns <= now_ns:
        assert step == Fire()
    else:
        assert isinstance(step, (Wait, Sleep))
        assert 0 < step.ns <= head_ns - now_ns
        assert step.ns <= (SLICE_NS if isinstance(step, Sleep) else MAX_WAIT_NS)


def test_a_far_deadline_costs_no_2000_wakes_a_second() -> None:
    """Protocol 12: one wait until 2 ms before the deadline, then four slices."""
    simulated = SimulatedWheel(1, most_late_ns=0)
    simulated.arm(9 * SECOND)
    while simulated.step():
        pass
    assert simulated.steps == 1 + SLICE_LEAD_NS // SLICE_NS + 1 + 1


def test_c_2_6_order_is_the_deadline_then_the_order_of_arming() -> None:
    """C.2.6"""
    deadlines: Deadlines[ReleaseToken] = Deadlines()
    tokens = [ReleaseToken(at_ns) for at_ns in (30, 10, 20, 10, 30, 10)]
    for token in tokens:
        deadlines.add(token.at_ns, token)
    assert deadlines.pop_due(20) == [tokens[1], tokens[3], tokens[5], tokens[2]]
    assert deadlines.pop_due(30) == [tokens[0], tokens[4]]


def test_c_2_6_ties_are_released_by_the_thread_in_arming_order() -> None:
    """C.2.6"""
    with held_wheel() as (timer, clock):
        order: list[int] = []
        done = threading.Event()
        tokens = [timer.arm_at(SLICE_NS) for _ in range(50)]
        for number, token in enumerate(tokens):
            token.when_ended(lambda number=number: order.append(number))  # type: ignore[misc]
        tokens[-1].when_ended(done.set)
        clock.go.set()
        wait_for(done)
    assert order == list(range(50))


def test_c_2_7_a_nearer_deadline_that_is_armed_during_a_wait_is_noticed() -> None:
    """C.2.7: the nearer one, armed later, is released while the far one is far from due."""
    with wheel() as timer:
        far = timer.arm_at(time.monotonic_ns() + 3_600 * SECOND)
        until(lambda: timer.wakes > 0)
        near = timer.arm_at(time.monotonic_ns() + 5 * MS)
        assert near.wait(PATIENCE_S)
        assert not far.released


def test_c_2_8_an_empty_wheel_parks_without_a_time_out() -> None:
    """C.2.8"""
    with wheel() as timer:
        tokens = [timer.arm_at(time.monotonic_ns() + MS) for _ in range(100)]
        assert all(token.wait(PATIENCE_S) for token in tokens)
        until(lambda: parked(timer))
        before = timer.wakes
        time.sleep(0.2)  # no wait for an event: that nothing happens is the statement
        assert timer.wakes - before <= 1


def parked(timer: ReleaseTimer) -> bool:
    """Whether the thread waits and nothing is armed."""
    return len(timer) == 0 and bool(timer._changed._waiters)  # type: ignore[attr-defined]


# --- abandoned slots ----------------------------------------------------------------------------------


def test_c_2_9_a_token_that_nobody_holds_is_abandoned_and_its_callback_is_never_called() -> None:
    """C.2.9: the slot holds it weakly."""
    with held_wheel() as (timer, clock):
        called: list[str] = []
        dropped = timer.arm_at(SLICE_NS)
        dropped.when_ended(lambda: called.append("dropped"))
        del dropped
        gc.collect()
        kept = timer.arm_at(2 * SLICE_NS)
        clock.go.set()
        assert kept.wait(PATIENCE_S)
        assert called == []
        assert len(timer) == 0


def deadlines_with(count: int, dead: int) -> tuple[Deadlines[ReleaseToken], list[ReleaseToken]]:
    """A heap whose every slot is far, `dead` of them abandoned, in between the others."""
    deadlines: Deadlines[ReleaseToken] = Deadlines()
    deadlines.sweep(0)  # the clock of sweeps starts
    held = []
    for number in range(count):
        token = ReleaseToken(1_000 * SECOND + number)
        deadlines.add(token.at_ns, token)
        if number * dead // count == (number + 1) * dead // count:
            held.append(token)
    return deadlines, held


def test_c_2_10_a_sweep_needs_more_than_64_slots_and_250_ms_since_the_last() -> None:
    """C.2.10"""
    assert (SWEEP_MIN_LEN, SWEEP_INTERVAL_NS) == (64, 250 * MS)
    few, _ = deadlines_with(64, 64)
    assert few.sweep(SECOND) == 0
    many, _held = deadlines_with(65, 65)
    assert many.sweep(SWEEP_INTERVAL_NS - 1) == 0
    assert many.sweep(SWEEP_INTERVAL_NS) == 65
    more, _held = deadlines_with(200, 100)
    assert more.sweep(SECOND) == 100
    del _held[:100]
    assert more.sweep(SECOND + SWEEP_INTERVAL_NS - 1) == 0
    assert more.sweep(SECOND + SWEEP_INTERVAL_NS) == 100


def test_c_2_10_a_sweep_keeps_every_live_slot() -> None:
    """C.2.10: 128 live and 128 dead, and all live ones are released, in order."""
    deadlines, live = deadlines_with(256, 128)
    assert len(live) == 128
    assert deadlines.sweep(SECOND) == 128
    assert len(deadlines) == 128
    assert deadlines.pop_due(2_000 * SECOND) == live


def test_a_sweep_that_would_find_nothing_is_not_made() -> None:
    deadlines, live = deadlines_with(200, 0)
    assert deadlines.sweep(SECOND) == 0
    del live[:100]
    assert deadlines.sweep(SECOND + 1) == 100, "the look before was none: it does not count as the last sweep"


def test_c_2_11_10_000_abandoned_slots_are_swept_while_the_wheel_waits() -> None:
    """C.2.11: they are 30 s away, and leave long before."""
    with wheel() as timer:
        tokens = [timer.arm_at(time.monotonic_ns() + 30 * SECOND) for _ in range(10_000)]
        armed_by = time.monotonic()
        assert len(timer) == 10_000
        tokens.clear()
        until(lambda: len(timer) < 64)
        assert time.monotonic() < armed_by + 8, "far before their time, and before the longest wait is over"


# --- callbacks ----------------------------------------------------------------------------------------


def test_c_2_12_tokens_are_released_outside_the_lock_so_a_callback_may_arm_again() -> None:
    """C.2.12: also when it waits for another thread that arms."""
    with wheel() as timer:
        again: list[ReleaseToken] = []
        done = threading.Event()

        def arm_again() -> None:
            other = threading.Thread(target=lambda: again.append(timer.arm_at(time.monotonic_ns() + MS)))
            other.start()
            other.join(PATIENCE_S)
            again.append(timer.arm_at(time.monotonic_ns() + 2 * MS))
            again[1].when_ended(done.set)

        first = timer.arm_at(time.monotonic_ns() + MS)
        first.when_ended(arm_again)
        wait_for(done)
        assert [token.released for token in again] == [True, True]


def test_c_2_13_after_releasing_the_clock_is_read_again() -> None:
    """C.2.13: what came due while a callback ran is released right after it, on a clock that only callbacks move."""
    with held_wheel() as (timer, clock):
        slept_before: list[int] = []
        done = threading.Event()
        first, second = timer.arm_at(SLICE_NS), timer.arm_at(SLICE_NS + 100_000)
        first.when_ended(lambda: clock.move(100_000))
        first.when_ended(lambda: slept_before.append(clock.sleeps))
        second.when_ended(lambda: slept_before.append(clock.sleeps))
        second.when_ended(done.set)
        clock.go.set()
        wait_for(done)
        assert slept_before[0] == slept_before[1], "no sleep between the two"


def test_a_callback_that_raises_is_logged_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    with wheel() as timer:
        token = timer.arm_at(time.monotonic_ns() + MS)

        def fail() -> None:
            raise ValueError("a waiter's fault")

        done = threading.Event()
        token.when_ended(fail)
        token.when_ended(done.set)
        wait_for(done)
        assert timer.arm_at(time.monotonic_ns() + MS).wait(PATIENCE_S)
    assert "a release callback failed" in caplog.text


# --- the end ------------------------------------------------------------------------------------------


def wheel_threads() -> int:
    return sum(thread.name == THREAD_NAME for thread in threading.enumerate())


def test_c_2_14_closing_abandons_what_is_pending_wakes_the_thread_and_joins_it() -> None:
    """C.2.14: with a deadline 10 s away; those who wait for it wake, and are not told that it was released."""
    with wheel() as timer:
        token = timer.arm_at(time.monotonic_ns() + FAR)
        ended = threading.Event()
        token.when_ended(ended.set)
        before = wheel_threads()
        began = time.monotonic()
        timer.close()
        assert time.monotonic() - began < 9, "not at the deadline"
        assert wheel_threads() == before - 1
        assert ended.is_set()
        assert (token.released, token.abandoned) == (False, True)
        assert not token.wait()
        timer.close()
        with pytest.raises(ReleaseTimerClosed, match="make a new one"):
            timer.arm_at(time.monotonic_ns() + FAR)


def test_c_2_15_closing_from_a_callback_on_the_wheels_own_thread_does_not_join_it() -> None:
    """C.2.15"""
    timer = ReleaseTimer(monotonic_ns=time.monotonic_ns, sleep=time.sleep)
    closed = threading.Event()

    def close() -> None:
        timer.close()
        closed.set()

    token = timer.arm_at(time.monotonic_ns() + MS)
    far = timer.arm_at(time.monotonic_ns() + FAR)
    token.when_ended(close)
    wait_for(closed)
    assert timer._thread is not None
    timer._thread.join(PATIENCE_S)
    assert not timer._thread.is_alive()
    assert far.abandoned


def test_c_2_16_a_notice_during_a_slice_is_lost_harmlessly() -> None:
    """C.2.16: the thread sleeps where nothing can wake it; what was armed meanwhile is released after that sleep."""
    with held_wheel() as (timer, clock):
        far = timer.arm_at(2 * MS)
        until(lambda: timer.wakes == 1)  # and now it sleeps, until it is let go
        near = timer.arm_at(300_000)
        order: list[tuple[str, int]] = []
        done = threading.Event()
        near.when_ended(lambda: order.append(("near", clock.read())))
        far.when_ended(lambda: order.append(("far", clock.read())))
        far.when_ended(done.set)
        clock.go.set()
        wait_for(done)
        assert order == [("near", SLICE_NS), ("far", 2 * MS)], "one slice later at most"


def test_c_2_17_condvar_does_not_sweep_before_its_head_is_due() -> None:
    """C.2.17: nothing wakes it."""
    with wheel(TimerBackend.CONDVAR) as timer:
        tokens = [timer.arm_at(time.monotonic_ns() + 30 * SECOND) for _ in range(100)]
        tokens.clear()
        until(lambda: timer._changed._waiters)  # type: ignore[attr-defined]
        time.sleep(1.5 * SWEEP_INTERVAL_NS / SECOND)  # that nothing happens is the statement
        assert len(timer) == 100


def test_condvar_is_never_early_either() -> None:
    with wheel(TimerBackend.CONDVAR) as timer:
        for _ in range(50):
            token = timer.arm_at(time.monotonic_ns() + MS)
            assert token.wait(PATIENCE_S)
            assert time.monotonic_ns() >= token.at_ns


@pytest.mark.benchmark
def test_c_2_19_on_a_quiet_machine_the_median_of_200_waits_of_3_ms_is_at_most_5_ms() -> None:
    """C.2.19: opt-in, `pytest -m benchmark`."""
    with wheel() as timer:
        waited_ms = []
        for _ in range(200):
            began_ns = time.monotonic_ns()
            assert timer.arm_at(began_ns + 3 * MS).wait(PATIENCE_S)
            waited_ms.append((time.monotonic_ns() - began_ns) / MS)
    limit_ms = 5 if TimerBackend.SLICE.is_precise_on(os.name) else 60
    assert statistics.median(waited_ms) <= limit_ms
    assert min(waited_ms) >= 3


# --- backends -----------------------------------------------------------------------------------------


def test_backends_have_a_name_and_say_where_they_are_precise() -> None:
    """C.1"""
    assert [backend.value for backend in TimerBackend] == ["sleep-slice", "condvar"]
    assert TimerBackend.SLICE.is_precise_on("nt")
    assert TimerBackend.SLICE.is_precise_on("posix")
    assert not TimerBackend.CONDVAR.is_precise_on("nt")
    assert TimerBackend.CONDVAR.is_precise_on("posix")


@pytest.mark.parametrize(
    ("value", "backend"),
    [
        (None, TimerBackend.SLICE),
        ("slice", TimerBackend.SLICE),
        ("condvar", TimerBackend.CONDVAR),
        (" CONDVAR ", TimerBackend.CONDVAR),
        ("hi-res", TimerBackend.SLICE),
    ],
)
def test_the_environment_chooses_the_backend_once_per_wheel(
    value: str | None, backend: TimerBackend, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """C.1"""
    if value is None:
        monkeypatch.delenv(process_wheel.BACKEND_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(process_wheel.BACKEND_VARIABLE, value)
    timer = process_wheel.new_release_timer()
    monkeypatch.setenv(process_wheel.BACKEND_VARIABLE, "condvar" if backend is TimerBackend.SLICE else "slice")
    assert timer.backend is backend
    assert timer.arm_at(time.monotonic_ns() + MS).wait(PATIENCE_S)
    assert timer.backend is backend
    timer.close()
    assert ("must be one of" in caplog.text) == (value == "hi-res")


def test_the_wheel_of_the_process_says_which_backend_it_uses() -> None:
    """C.1"""
    program = """
import time
from drivers.process_wheel import arm_at, release_timer_backend
assert arm_at(time.monotonic_ns() + 1_000_000).wait(30)
print(release_timer_backend().value)
"""
    assert in_a_new_process(program, MAINSPRING_RELEASE_TIMER="condvar") == "condvar"


def test_a_forked_child_makes_a_wheel_of_its_own() -> None:
    program = """
import os, sys, time
from drivers.process_wheel import arm_at, release_timer_started
assert arm_at(time.monotonic_ns() + 1_000_000).wait(30)
child = os.fork()
if child == 0:
    ok = not release_timer_started() and arm_at(time.monotonic_ns() + 1_000_000).wait(30)
    os._exit(0 if ok else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert in_a_new_process(program) == "0"


# --- lateness -----------------------------------------------------------------------------------------


def test_c_1_the_recorder_has_128_buckets_each_at_most_a_quarter_wide_that_cover_everything() -> None:
    """C.1"""
    bounds = sorted({upper_bound_ns(bucket_of(value)) for octave in range(33) for value in _around(octave)})
    assert bucket_of(2**32 - 1) == bucket_of(2**40) == 127
    assert all(bucket_of(low) < bucket_of(low + 1) for low in bounds[:-1])
    for low, high in pairwise(bounds):
        if low >= 8:
            assert (high - low) / low <= 0.25 + 1 / low


def _around(octave: int) -> list[int]:
    return [max(0, (1 << octave) + (quarter << octave) // 4) for quarter in range(4)]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=200))
def test_c_1_percentiles_are_upper_bounds_and_count_sum_and_maximum_are_exact(values: list[int]) -> None:
    """C.1"""
    recorder = LatenessRecorder()
    for value in values:
        recorder.record(value)
    summary = recorder.summary()
    assert (summary.count, summary.sum_ns, summary.max_ns) == (len(values), sum(values), max(values))
    ordered = sorted(values)
    for percent, given_ns in ((50, summary.p50_ns), (95, summary.p95_ns), (99, summary.p99_ns)):
        exact = ordered[-(-len(ordered) * percent // 100) - 1]
        assert exact <= given_ns <= exact * 1.25 + 1


def test_c_1_values_from_2_to_the_32_ns_on_share_the_last_bucket_and_the_maximum_stays_exact() -> None:
    """C.1"""
    recorder = LatenessRecorder()
    for value in (2**32, 2**50):
        recorder.record(value)
    assert recorder.summary().max_ns == 2**50
    assert recorder.summary().p50_ns == 2**32 - 1


def test_an_early_release_is_never_counted_as_a_late_one() -> None:
    with pytest.raises(ValueError, match="early"):
        LatenessRecorder().record(-1)
    assert LatenessRecorder().summary().p99_ns == 0
