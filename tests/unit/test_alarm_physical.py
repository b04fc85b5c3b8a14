"""The physical alarm: one wake, the earliest; never early; and a look of its own for wakes that got lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drivers.alarm import Alarm
from drivers.clock import VIRTUAL_START_MS, Handle, VirtualClock

START = VIRTUAL_START_MS
POLL_MS = 1_000


class Bench:
    def __init__(self, poll_ms: int | None = POLL_MS) -> None:
        self.clock = VirtualClock()
        self.stored_ms: int | None = None
        self.fired_ms: list[int] = []
        self.broken: Exception | None = None
        self.alarm = Alarm(self.clock, self._fire, earliest_ms=self._earliest, poll_ms=poll_ms)

    def _fire(self) -> None:
        self.fired_ms.append(self.clock.wall_ms() - START)
        if self.stored_ms is not None and self.stored_ms <= self.clock.wall_ms():
            self.stored_ms = None  # run

    def _earliest(self) -> int | None:
        if self.broken is not None:
            raise self.broken
        return self.stored_ms

    def advance(self, ms: int) -> None:
        target = self.clock.wall_ms() + ms
        while (next_ms := self.clock.next_ms()) is not None and next_ms <= target:
            self.clock.move_to(next_ms)
            self.clock.run_due()
        self.clock.move_to(target)


def test_it_fires_at_the_armed_instant_and_not_before() -> None:
    bench = Bench(poll_ms=None)
    bench.alarm.arm(START + 500)
    bench.advance(499)
    assert bench.fired_ms == []
    bench.advance(1)
    assert bench.fired_ms == [500]
    assert bench.alarm.armed_ms is None


def test_an_earlier_wake_takes_the_place_of_a_later_one_and_not_the_other_way_round() -> None:
    bench = Bench(poll_ms=None)
    for due in (500, 300, 400, 300):
        bench.alarm.arm(START + due)
    bench.alarm.arm(None)
    assert bench.alarm.armed_ms == START + 300
    bench.advance(10_000)
    assert bench.fired_ms == [300]


def test_starting_arms_what_is_stored_also_when_it_is_overdue() -> None:
    for due, fired in ((200, 200), (-5_000, 0)):
        bench = Bench(poll_ms=None)
        bench.stored_ms = START + due
        bench.alarm.start()
        assert bench.fired_ms == []
        bench.advance(1_000)
        assert bench.fired_ms == [fired]


def test_a_wake_that_was_never_armed_is_found_by_the_look_each_second() -> None:
    bench = Bench()
    bench.alarm.start()
    bench.advance(100)
    bench.stored_ms = START + 150  # nobody armed it
    bench.advance(899)
    assert bench.fired_ms == []
    bench.advance(1)
    assert bench.fired_ms == [1_000]


def test_a_look_arms_what_is_not_due_yet() -> None:
    bench = Bench()
    bench.alarm.start()
    bench.stored_ms = START + 1_234
    bench.advance(5_000)
    assert bench.fired_ms == [1_234]


def test_a_clock_set_back_delays_the_wake_and_never_makes_it_early() -> None:
    bench = Bench()
    bench.stored_ms = START + 2_000
    bench.alarm.start()
    bench.advance(1_500)
    bench.clock.step_wall(-10_000)
    bench.advance(10_000)
    assert bench.fired_ms == []
    bench.advance(500)
    assert bench.fired_ms == [2_000]


class SleepyClock(VirtualClock):
    """Waits for wall time in monotonic time, as the machine's clock does: a step forward does not wake it."""

    def call_at(self, due_ms: int, callback: Callable[[], None]) -> Handle:
        return self.call_later(due_ms - self.wall_ms(), lambda: self._look(due_ms, callback))

    def _look(self, due_ms: int, callback: Callable[[], None]) -> None:
        if self.wall_ms() >= due_ms:
            callback()
        else:
            self.call_at(due_ms, callback)


@pytest.fixture
def sleepy() -> Bench:
    bench = Bench()
    bench.clock = SleepyClock()
    bench.alarm = Alarm(bench.clock, bench._fire, earliest_ms=bench._earliest, poll_ms=POLL_MS)
    return bench


def test_after_a_clock_set_forward_the_overtaken_wake_fires_at_the_next_look(sleepy: Bench) -> None:
    sleepy.stored_ms = START + 3_600_000
    sleepy.alarm.start()
    sleepy.clock.step_wall(7_200_000)
    sleepy.advance(1_000)
    assert sleepy.fired_ms == [7_201_000]


def test_a_wake_that_the_clock_has_overtaken_does_not_stand_before_later_ones(sleepy: Bench) -> None:
    sleepy.stored_ms = START + 3_600_000
    sleepy.alarm.start()
    sleepy.clock.step_wall(7_200_000)
    sleepy.advance(1_000)
    sleepy.stored_ms = sleepy.clock.wall_ms() + 250
    sleepy.alarm.arm(sleepy.stored_ms)
    sleepy.advance(250)
    assert sleepy.fired_ms == [7_201_000, 7_201_250], "to the millisecond, not at the look after it"


def test_a_cancelled_timer_whose_wake_was_overtaken_does_not_stand_before_later_ones(sleepy: Bench) -> None:
    sleepy.stored_ms = START + 3_600_000
    sleepy.alarm.start()
    sleepy.clock.step_wall(7_200_000)
    sleepy.stored_ms = START + 7_200_000 + 1_700  # the one it was armed for is gone, this one came instead
    sleepy.advance(1_000)
    assert sleepy.fired_ms == [7_201_000], "the overtaken wake"
    sleepy.alarm.arm(sleepy.stored_ms)  # as the tick that it fired does
    sleepy.advance(700)
    assert sleepy.fired_ms == [7_201_000, 7_201_700]


def test_a_look_that_fails_is_not_the_last_one() -> None:
    bench = Bench()
    bench.alarm.start()
    bench.broken = RuntimeError("the store can't be read")
    with pytest.raises(RuntimeError):
        bench.advance(1_000)
    bench.broken = None
    bench.stored_ms = START + 100
    bench.advance(2_000)
    assert len(bench.fired_ms) == 1


def test_a_stopped_alarm_calls_nobody() -> None:
    bench = Bench()
    bench.stored_ms = START + 500
    bench.alarm.start()
    bench.alarm.stop()
    bench.alarm.arm(START + 600)
    bench.advance(10_000)
    assert bench.fired_ms == []
    assert bench.clock.next_ms() is None
