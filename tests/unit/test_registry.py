"""Kind numbers and the registry of handlers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.timer_table import A, B, Handler
from timers.errors import DuplicateTimerKind, InvalidTimerKind
from timers.registry import FIRST_TEST_KIND, LAST_TEST_KIND, TimerKind, TimerRegistry, lane_of
from timers.rows import USER_LANE


def test_kind_numbers_are_permanent() -> None:
    assert {kind.name: int(kind) for kind in TimerKind} == {
        "LEASE_SWEEP": 1,
        "TICKET_EXPIRY": 2,
        "OUTBOX_RELAY": 3,
        "QUOTA_ROLLUP": 5,
        "OUTCOME_DELIVERY": 8,
        "RESERVATION_RECONCILE": 9,
        "PUBLICATION_RECHECK": 12,
        "OBJECT_ALARM": 32,
        "NAMED_TIMER": 33,
        "DURABLE_SLEEP": 34,
        "INBOX_SWEEP": 35,
        "PUBLICATION_NOTICE": 36,
    }
    assert (FIRST_TEST_KIND, LAST_TEST_KIND) == (0xF0, 0xFE)


def test_a_handler_is_found_by_its_kind() -> None:
    a, b = Handler(kind=A), Handler(kind=B)
    registry = TimerRegistry([b, a])
    assert registry.get(A) is a
    assert registry.get(B) is b
    assert registry.get(TimerKind.LEASE_SWEEP) is None
    assert registry.kinds() == (A, B)


def test_two_handlers_of_one_kind_are_refused_at_start_up() -> None:
    with pytest.raises(DuplicateTimerKind, match="240"):
        TimerRegistry([Handler(), Handler()])


@pytest.mark.parametrize("kind", [0, -1, 255, 256, True, "1", None])
def test_kind_zero_and_other_invalid_kinds_are_refused_at_start_up(kind: Any) -> None:
    with pytest.raises(InvalidTimerKind):
        TimerRegistry([Handler(kind=kind)])


@pytest.mark.parametrize("kind", [1, 254])
def test_the_first_and_the_last_kind_are_accepted(kind: int) -> None:
    assert TimerRegistry([Handler(kind=kind)]).kinds() == (kind,)


@pytest.mark.parametrize(("own", "cap"), [(None, 32), (8, 8), (32, 32), (100, 32), (0, 1), (-5, 1)])
def test_max_per_tick_only_lowers_the_shared_cap_and_counts_as_at_least_one(own: int | None, cap: int) -> None:
    assert TimerRegistry([Handler(max_per_tick=own)]).cap_of(A, 32) == cap


def test_a_handler_needs_no_max_per_tick() -> None:
    class Bare:
        kind = A

        async def fire(self, ctx: Any, timer: Any) -> Any: ...

    assert TimerRegistry([Bare()]).cap_of(A, 32) == 32


def test_each_engine_kind_has_its_own_lane_and_user_kinds_share_one() -> None:
    user = {TimerKind.OBJECT_ALARM, TimerKind.NAMED_TIMER, TimerKind.DURABLE_SLEEP}
    for kind in TimerKind:
        assert lane_of(kind) == (USER_LANE if kind in user else kind)
    assert lane_of(A) == A
