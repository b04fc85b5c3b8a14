"""What a tick may do, and how it is counted."""

from __future__ import annotations

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.timer_table import A, B
from timers.budget import TickBudget, TickState


def state(clock: ManualClock, **limits: int) -> TickState:
    return TickState.new(TickBudget(**limits), clock.monotonic_ms)


def test_the_default_budget() -> None:
    budget = TickBudget()
    assert (budget.max_fired, budget.max_per_kind, budget.max_scanned, budget.max_elapsed_ms) == (128, 32, 512, 10_000)


@pytest.mark.parametrize("limit", ["max_fired", "max_per_kind", "max_scanned", "max_elapsed_ms"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_below_one_counts_as_one(limit: str, value: int) -> None:
    assert getattr(TickBudget(**{limit: value}), limit) == 1


def test_a_new_state_has_nothing_spent(clock: ManualClock) -> None:
    fresh = state(clock)
    assert (fresh.examined, fresh.committed, fresh.attempted, fresh.remaining_scanned) == (0, 0, 0, 512)
    assert not fresh.exhausted()
    assert not fresh.work_exhausted()


def test_a_scan_is_charged_whole_or_not_at_all(clock: ManualClock) -> None:
    tick = state(clock, max_scanned=10)
    assert tick.charge_scan(7)
    assert not tick.charge_scan(4)
    assert tick.remaining_scanned == 3
    assert tick.charge_scan(3)
    assert tick.remaining_scanned == 0


def test_without_scan_units_the_tick_is_exhausted_but_its_work_is_not(clock: ManualClock) -> None:
    tick = state(clock, max_scanned=1)
    tick.charge_scan(1)
    assert tick.exhausted()
    assert not tick.work_exhausted()


def test_work_is_exhausted_at_exactly_the_last_commit(clock: ManualClock) -> None:
    tick = state(clock, max_fired=2)
    tick.record_commit()
    assert not tick.work_exhausted()
    tick.record_commit()
    assert tick.work_exhausted()
    assert tick.exhausted()


def test_work_is_exhausted_at_exactly_the_time_limit(clock: ManualClock) -> None:
    tick = state(clock, max_elapsed_ms=10)
    clock.advance(9)
    assert not tick.work_exhausted()
    clock.advance(1)
    assert tick.work_exhausted()
    assert tick.clock_exhausted()


def test_a_clock_that_goes_backwards_is_no_time_passed(clock: ManualClock) -> None:
    tick = state(clock, max_elapsed_ms=1)
    clock.step_monotonic(-100)
    assert tick.elapsed_ms() == 0
    assert not tick.work_exhausted()


def test_attempts_are_claimed_per_kind_up_to_the_cap(clock: ManualClock) -> None:
    tick = state(clock)
    assert [tick.claim_attempt(A, 2) for _ in range(3)] == [True, True, False]
    assert tick.claim_attempt(B, 1)
    assert (tick.attempted_for(A), tick.attempted_for(B), tick.attempted) == (2, 1, 3)
