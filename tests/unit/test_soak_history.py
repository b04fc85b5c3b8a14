"""The soak's judge finds what must not happen."""

from __future__ import annotations

import pytest

from tests.support.soak_history import History

FIRST = (1, 7, 1, 0, 1, 100)


def history(*answers: tuple[int, ...]) -> History:
    found = History()
    for number, seen in enumerate(answers):
        found.answered("a", f"t{number}", seen)
    return found


def test_restarts_and_moves_in_order_are_fine() -> None:
    found = history(FIRST, (2, 7, 1, 0, 2, 200), (4, 7, 3, 1, 1, 300))
    found.fired("a", (3, 7, 1, 0, 2, 200))
    found.check_owners()
    found.check_tokens("a", {"t0": 1, "t1": 1, "t2": 1, "not answered": 1}, under_way=1)
    assert (found.count, found.incarnations(), found.slot_owners()) == (3, 3, 2)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((2, 7, 1, 1, 1, 300), "slot 7 in version 1 has had two owners"),
        ((2, 7, 1, 0, 1, 101), "partition 0 in epoch 1 has had two processes"),
        ((1, 7, 1, 0, 2, 200), "out of order"),
    ],
)
def test_second_owners_and_two_writes_in_one_place_are_found(second: tuple[int, ...], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        history(FIRST, second).check_owners()


def test_an_owner_that_comes_back_is_found() -> None:
    found = history((1, 7, 2, 0, 5, 100), (2, 7, 1, 1, 1, 300))
    with pytest.raises(AssertionError, match="then"):
        found.check_owners()


def test_a_fire_and_a_call_in_one_place_are_found() -> None:
    found = history(FIRST)
    found.fired("a", FIRST)
    with pytest.raises(AssertionError, match="one place"):
        found.check_owners()


@pytest.mark.parametrize(
    ("applied", "message"), [({}, "lost"), ({"t0": 2}, "more than once"), ({"t0": 1, "x": 1}, "nobody acknowledged")]
)
def test_lost_repeated_and_unasked_effects_are_found(applied: dict[str, int], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        history(FIRST).check_tokens("a", applied)
