"""What the unit tests share: a hand-moved clock and, for the engine, every timer store there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.timer_store import TIMER_STORES
from tests.support.timer_table import NOW, Table
from timers.engine import TimerStore


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW)


@pytest.fixture(params=sorted(TIMER_STORES))
def inner_store(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[TimerStore]:
    with TIMER_STORES[request.param](clock) as store:
        yield store


@pytest.fixture
def table(inner_store: TimerStore, clock: ManualClock) -> Table:
    return Table(inner_store, clock)
