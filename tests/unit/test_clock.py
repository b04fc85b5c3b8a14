"""Clocks: nothing is called before its instant, whatever happens to the wall clock meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from drivers.clock import VIRTUAL_START_MS, SystemClock, VirtualClock


class FakeLoop:
    """The timed calls of an event loop, with monotonic time moved by hand; calls may come a little early."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[tuple[float, Callable[[], None], FakeHandle]] = []

    def call_soon(self, callback: Callable[[], None]) -> FakeHandle:
        return self.call_later(0, callback)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeHandle:
        handle = FakeHandle()
        self.calls.append((self.now_s + delay_s, callback, handle))
        return handle

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
        for _ in range(100):
            due = [call for call in self.calls if call[0] <= self.now_s]
            if not due:
                return
            self.calls = [call for call in self.calls if call[0] > self.now_s]
            for _, callback, handle in due:
                if not handle.cancelled:
                    callback()
        raise AssertionError("it waits without waiting")


class FakeHandle:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class System:
    """A `SystemClock` on a fake loop and a fake wall clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = FakeLoop()
        self.wall_ns = 1_000_000_000_000_000
        monkeypatch.setattr(time, "time_ns", lambda: self.wall_ns)
        self.clock = SystemClock(self.loop)  # type: ignore[arg-type]
        self.fired_ms: list[int] = []

    def pass_time(self, seconds: float) -> None:
        self.wall_ns += round(seconds * 1e9)
        self.loop.advance(seconds)

    def wake_at(self, due_ms: int) -> FakeHandle:
        handle = self.clock.call_at(due_ms, lambda: self.fired_ms.append(self.clock.wall_ms()))
        return handle  # type: ignore[return-value]


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    return System(monkeypatch)


# --- the machine's clock ----------------------------------------------------------------------------


def test_wall_time_is_cut_and_never_rounded(system: System) -> None:
    system.wall_ns = 1_999_999
    assert system.clock.wall_ms() == 1


def test_a_wake_comes_in_the_millisecond_it_was_asked_for_and_not_before(system: System) -> None:
    due_ms = system.clock.wall_ms() + 10
    system.wake_at(due_ms)
    system.pass_time(0.0099999)
    assert system.fired_ms == []
    system.pass_time(0.0000001)
    assert system.fired_ms == [due_ms]


def test_a_wake_in_the_past_comes_at_once_but_not_from_inside_the_call(system: System) -> None:
    system.wake_at(system.clock.wall_ms() - 5)
    assert system.fired_ms == []
    system.pass_time(0)
    assert len(system.fired_ms) == 1


def test_a_loop_that_calls_early_does_not_make_the_wake_early(system: System) -> None:
    due_ms = system.clock.wall_ms() + 1_000
    system.wake_at(due_ms)
    system.pass_time(0)
    system.loop.advance(1.0)  # monotonic time runs ahead of the wall clock
    assert system.fired_ms == []
    system.pass_time(1.0)
    assert system.fired_ms == [due_ms]


def test_a_clock_set_back_makes_the_wake_wait_again(system: System) -> None:
    due_ms = system.clock.wall_ms() + 1_000
    system.wake_at(due_ms)
    system.pass_time(0.5)
    system.wall_ns -= 3_600 * 10**9
    system.pass_time(0.6)
    assert system.fired_ms == []
    system.pass_time(3_600)
    assert len(system.fired_ms) == 1
    assert system.fired_ms[0] >= due_ms


def test_a_clock_set_forward_never_makes_a_wake_come_twice_or_early(system: System) -> None:
    due_ms = system.clock.wall_ms() + 10_000
    system.wake_at(due_ms)
    system.pass_time(0)
    system.wall_ns += 3_600 * 10**9
    system.pass_time(10)
    assert len(system.fired_ms) == 1
    assert system.fired_ms[0] >= due_ms
    system.pass_time(100)
    assert len(system.fired_ms) == 1


def test_a_far_wake_looks_again_from_time_to_time(system: System) -> None:
    due_ms = system.clock.wall_ms() + 10 * 365 * 86_400_000
    system.wake_at(due_ms)
    for _ in range(3):
        system.pass_time(3_600)
        assert len(system.loop.calls) == 1, "one call of the loop, however far the wake"
    assert system.fired_ms == []


def test_a_cancelled_wake_never_comes(system: System) -> None:
    early = system.wake_at(system.clock.wall_ms() + 10)
    early.cancel()
    late = system.wake_at(system.clock.wall_ms() + 10)
    system.pass_time(0.005)
    late.cancel()
    system.pass_time(1)
    assert system.fired_ms == []


async def test_the_loop_is_the_one_that_runs() -> None:
    clock = SystemClock()
    woken = asyncio.Event()
    due_ms = clock.wall_ms() + 2
    clock.call_at(due_ms, woken.set)
    await asyncio.wait_for(woken.wait(), 10)
    assert clock.wall_ms() >= due_ms
    assert clock.loop is asyncio.get_running_loop()
    clock.call_later(0, woken.clear)
    await asyncio.sleep(0.001)
    assert not woken.is_set()


# --- virtual time -----------------------------------------------------------------------------------


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def test_virtual_time_stands_still_until_it_is_moved(clock: VirtualClock) -> None:
    assert (clock.wall_ms(), clock.monotonic_ns()) == (VIRTUAL_START_MS, 0)
    clock.move_to(VIRTUAL_START_MS + 5)
    assert (clock.wall_ms(), clock.monotonic_ns()) == (VIRTUAL_START_MS + 5, 5_000_000)


def test_virtual_time_does_not_move_back(clock: VirtualClock) -> None:
    with pytest.raises(ValueError, match="step_wall"):
        clock.move_to(VIRTUAL_START_MS - 1)


def test_calls_run_in_order_of_their_time_and_equal_ones_in_order_of_asking(clock: VirtualClock) -> None:
    order: list[str] = []
    clock.call_at(VIRTUAL_START_MS + 20, lambda: order.append("at 20"))
    clock.call_at(VIRTUAL_START_MS + 10, lambda: order.append("at 10, first"))
    clock.call_at(VIRTUAL_START_MS + 10, lambda: order.append("at 10, second"))
    clock.call_later(15, lambda: order.append("after 15"))
    while (next_ms := clock.next_ms()) is not None:
        clock.move_to(next_ms)
        clock.run_due()
    assert order == ["at 10, first", "at 10, second", "after 15", "at 20"]
    assert clock.wall_ms() == VIRTUAL_START_MS + 20


def test_a_call_is_due_in_its_millisecond_and_not_before(clock: VirtualClock) -> None:
    ran: list[int] = []
    clock.call_at(VIRTUAL_START_MS + 10, lambda: ran.append(clock.wall_ms()))
    clock.call_later(10.5, lambda: ran.append(clock.monotonic_ns()))
    clock.move_to(VIRTUAL_START_MS + 9)
    assert clock.run_due() == 0
    clock.move_to(VIRTUAL_START_MS + 10)
    assert clock.run_due() == 1
    assert clock.next_ms() == VIRTUAL_START_MS + 11, "half a millisecond is rounded up"
    clock.move_to(VIRTUAL_START_MS + 11)
    assert clock.run_due() == 1
    assert ran == [VIRTUAL_START_MS + 10, 11_000_000]


def test_what_a_call_asks_for_now_runs_in_the_same_go(clock: VirtualClock) -> None:
    ran: list[str] = []

    def first() -> None:
        ran.append("first")
        clock.call_later(0, lambda: ran.append("second"))

    clock.call_later(0, first)
    assert clock.run_due() == 2
    assert ran == ["first", "second"]


def test_a_wall_clock_set_back_holds_wakes_but_not_delays(clock: VirtualClock) -> None:
    ran: list[str] = []
    clock.call_at(VIRTUAL_START_MS + 10, lambda: ran.append("wake"))
    clock.call_later(10, lambda: ran.append("delay"))
    clock.step_wall(-1_000)
    clock.move_to(clock.wall_ms() + 10)
    clock.run_due()
    assert ran == ["delay"]
    clock.move_to(VIRTUAL_START_MS + 10)
    clock.run_due()
    assert ran == ["delay", "wake"]


def test_a_wall_clock_set_forward_brings_wakes_but_not_delays(clock: VirtualClock) -> None:
    ran: list[str] = []
    clock.call_at(VIRTUAL_START_MS + 10, lambda: ran.append("wake"))
    clock.call_later(10, lambda: ran.append("delay"))
    clock.step_wall(1_000)
    assert clock.next_ms() == clock.wall_ms()
    clock.run_due()
    assert ran == ["wake"]


def test_cancelled_calls_are_neither_run_nor_waited_for(clock: VirtualClock) -> None:
    ran: list[str] = []
    handles = [
        clock.call_at(VIRTUAL_START_MS + 10, lambda: ran.append("wake")),
        clock.call_later(10, lambda: ran.append("delay")),
    ]
    for handle in handles:
        handle.cancel()
    assert clock.next_ms() is None
    clock.move_to(VIRTUAL_START_MS + 100)
    assert clock.run_due() == 0
    for handle in handles:
        handle.cancel()  # no harm
