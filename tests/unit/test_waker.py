"""What wakes an alarm precisely: never early, whatever the clocks do, and only ever beside the alarm's own way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivers.alarm import BACKSTOP_DELAY_MS, Alarm
from drivers.clock import VIRTUAL_START_MS, SystemClock, VirtualClock
from drivers.native import NativeDriver
from drivers.waker import ProcessWaker
from timers.release_timer import ReleaseToken
from timers.transit import Transit

START = VIRTUAL_START_MS
PATIENCE_S = 30.0
MS = 1_000_000


class FakeWaker:
    """Remembers what is armed; wakes when a test says so."""

    def __init__(self) -> None:
        self.armed: tuple[int, Callable[[], None]] | None = None
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def arm(self, due_ms: int, wake: Callable[[], None]) -> None:
        self.calls.append(f"arm {due_ms - START}")
        self.armed = (due_ms, wake)

    def disarm(self) -> None:
        self.armed = None

    def stop(self) -> None:
        self.calls.append("stop")

    def status(self) -> dict[str, Any]:
        return {"backend": "fake"}


class Bench:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.waker = FakeWaker()
        self.fired_ms: list[int] = []
        self.alarm = Alarm(self.clock, self._fire, earliest_ms=lambda: None, poll_ms=None, waker=self.waker)

    def _fire(self) -> None:
        self.fired_ms.append(self.clock.wall_ms() - START)


# --- the alarm's port ---------------------------------------------------------------------------------


def test_the_waker_is_told_the_earliest_wake_and_the_alarm_fires_once_whoever_comes_first() -> None:
    bench = Bench()
    bench.alarm.start()
    bench.alarm.arm(START + 500)
    bench.alarm.arm(START + 300)
    bench.alarm.arm(START + 400)
    assert bench.waker.calls == ["start", "arm 500", "arm 300"]
    bench.clock.move_to(START + 300)
    assert bench.waker.armed is not None
    wake = bench.waker.armed[1]
    wake()
    assert bench.fired_ms == [300]
    wake()
    bench.clock.run_due()
    assert bench.fired_ms == [300]
    assert bench.alarm.armed_ms is None


def test_a_waker_that_never_wakes_delays_by_no_more_than_the_backstop() -> None:
    bench = Bench()
    bench.alarm.arm(START + 300)
    bench.clock.move_to(START + 300 + BACKSTOP_DELAY_MS)
    bench.clock.run_due()
    assert bench.fired_ms == [300 + BACKSTOP_DELAY_MS]
    assert bench.waker.armed is None, "disarmed: its wake would be for nothing"


def test_a_wake_that_comes_too_early_fires_nothing_and_loses_nothing() -> None:
    bench = Bench()
    bench.alarm.arm(START + 300)
    assert bench.waker.armed is not None
    bench.clock.move_to(START + 299)
    bench.waker.armed[1]()
    assert bench.fired_ms == []
    assert bench.alarm.armed_ms == START + 300
    bench.clock.move_to(START + 300 + BACKSTOP_DELAY_MS)
    bench.clock.run_due()
    assert bench.fired_ms == [300 + BACKSTOP_DELAY_MS]


def test_what_is_due_already_does_not_go_through_the_waker() -> None:
    bench = Bench()
    bench.alarm.arm(START)
    assert bench.waker.calls == []
    bench.clock.run_due()
    assert bench.fired_ms == [0]


def test_stopping_the_alarm_stops_its_waker() -> None:
    bench = Bench()
    bench.alarm.arm(START + 300)
    bench.alarm.stop()
    assert bench.waker.armed is None
    assert bench.waker.calls[-1] == "stop"


def test_an_alarm_says_how_it_is_woken() -> None:
    bench = Bench()
    assert bench.alarm.status() == {"backend": "fake"}
    alone = Alarm(bench.clock, lambda: None, earliest_ms=lambda: None, poll_ms=None)
    assert alone.status() == {"backend": "event-loop"}


async def test_only_a_driver_in_real_time_has_a_waker() -> None:
    assert NativeDriver(clock=VirtualClock(), inline=True).waker() is None
    assert NativeDriver(clock=VirtualClock()).waker() is None
    assert isinstance(NativeDriver(clock=SystemClock()).waker(), ProcessWaker)


# --- the process's own wheel --------------------------------------------------------------------------


async def woken(waker: ProcessWaker, due_ms: int) -> int:
    """Wall time in ns at the wake."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    waker.arm(due_ms, lambda: future.set_result(time.time_ns()))
    return await asyncio.wait_for(future, PATIENCE_S)


async def test_it_wakes_on_the_loop_at_the_millisecond_and_never_before_it() -> None:
    waker = ProcessWaker()
    for ahead_ms in (0, 1, 2, 3, 5, 8) * 10:
        due_ms = time.time_ns() // MS + ahead_ms
        assert await woken(waker, due_ms) >= due_ms * MS
    status = waker.status()
    assert (status["backend"], status["release_timer"]) == ("process", "sleep-slice")
    assert status["lateness"]["count"] == 60


async def test_the_newest_wake_takes_the_place_of_the_one_before() -> None:
    waker = ProcessWaker()
    order: list[str] = []
    done = asyncio.Event()
    now_ms = time.time_ns() // MS
    waker.arm(now_ms + 10, lambda: order.append("first"))
    waker.arm(now_ms + 30, lambda: (order.append("second"), done.set()))
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    assert order == ["second"]


async def test_what_was_disarmed_does_not_wake() -> None:
    waker, witness = ProcessWaker(), ProcessWaker()
    order: list[str] = []
    due_ms = time.time_ns() // MS + 20
    waker.arm(due_ms, lambda: order.append("disarmed"))
    waker.disarm()
    await woken(witness, due_ms + 5)
    assert order == []


class Clocks:
    """A wall clock that can be set, and a wheel that releases when a test says so."""

    def __init__(self) -> None:
        self.wall_ns = START * MS
        self.now_ns = 0
        self.tokens: list[ReleaseToken] = []

    def arm_at(self, at_ns: int) -> ReleaseToken:
        token = ReleaseToken(at_ns)
        self.tokens.append(token)
        return token

    def pass_time(self, ns: int) -> None:
        self.wall_ns += ns
        self.now_ns += ns

    def waker(self) -> ProcessWaker:
        return ProcessWaker(arm_at=self.arm_at, wall_ns=lambda: self.wall_ns, monotonic_ns=lambda: self.now_ns)


async def test_a_wall_clock_set_back_makes_the_wake_later_and_never_early() -> None:
    clocks = Clocks()
    waker = clocks.waker()
    fired: list[int] = []
    waker.arm(START + 100, lambda: fired.append(clocks.wall_ns))
    assert clocks.tokens[0].at_ns == 100 * MS
    clocks.pass_time(60 * MS)
    clocks.wall_ns -= 1_000 * MS
    clocks.pass_time(40 * MS)
    clocks.tokens[0]._end(released=True)
    await asyncio.sleep(0)
    assert fired == []
    assert clocks.tokens[1].at_ns == 1_100 * MS
    clocks.pass_time(1_000 * MS)
    clocks.tokens[1]._end(released=True)
    await asyncio.sleep(0)
    assert fired == [(START + 100) * MS]


async def test_without_a_thread_the_alarm_is_left_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def no_thread(at_ns: int) -> ReleaseToken:
        raise RuntimeError("can't start new thread")

    waker = ProcessWaker(arm_at=no_thread)
    for _ in range(3):
        waker.arm(START, lambda: None)
    assert caplog.text.count("no release timer") == 1


def test_a_loop_that_is_closed_is_not_woken(caplog: pytest.LogCaptureFixture) -> None:
    clocks = Clocks()
    fired: list[int] = []

    async def arm() -> ProcessWaker:
        waker = clocks.waker()
        waker.arm(START + 5, lambda: fired.append(1))
        return waker

    _waker = asyncio.run(arm())  # kept: its loop ends, it does not
    clocks.tokens[0]._end(released=True)
    assert fired == []
    assert "a release callback failed" not in caplog.text


# --- how early the node's wheel wakes -----------------------------------------------------------------


def test_the_first_wake_leaves_as_early_as_it_may() -> None:
    assert Transit(5 * MS).lead_ns == 5 * MS


@given(st.lists(st.integers(0, 1_000 * MS), min_size=1))
def test_the_lead_is_bounded_whatever_was_observed(transits: list[int]) -> None:
    transit = Transit(5 * MS)
    for each in transits:
        transit.observe(each)
        assert 0 <= transit.lead_ns <= 5 * MS


def test_the_lead_settles_above_what_is_observed_and_follows_it() -> None:
    transit = Transit(5 * MS)
    for _ in range(100):
        transit.observe(200_000)
    assert 200_000 <= transit.lead_ns < 250_000
    for _ in range(100):
        transit.observe(1_000_000)
    assert 1_000_000 <= transit.lead_ns < 1_250_000
