"""Retry delays: the engine's ladder and the policies of user code."""

from __future__ import annotations

import hashlib
import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import pytest

from timers.backoff import (
    ALARM_RETRY,
    MAX_RETRY_BACKOFF_MS,
    MESSAGE_RETRY,
    NAMED_TIMER_RETRY,
    RETRY_BACKOFF_MS,
    RetryPolicy,
    retry_delay_ms,
)
from timers.errors import InvalidSchedule


def test_the_engine_ladder_doubles_from_5_s_and_stays_at_600_s() -> None:
    ladder = [retry_delay_ms(attempt) // 1_000 for attempt in range(1, 11)]
    assert ladder == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert (RETRY_BACKOFF_MS, MAX_RETRY_BACKOFF_MS) == (5_000, 600_000)


def test_the_engine_ladder_takes_any_attempt_number() -> None:
    assert retry_delay_ms(10**12) == MAX_RETRY_BACKOFF_MS


@pytest.mark.parametrize("attempt", [0, -1])
def test_attempts_are_counted_from_one(attempt: int) -> None:
    with pytest.raises(InvalidSchedule):
        retry_delay_ms(attempt)
    with pytest.raises(InvalidSchedule):
        RetryPolicy().delay_ms(attempt, b"")


def test_alarms_and_named_timers_run_seven_times_from_2_s_doubling() -> None:
    assert ALARM_RETRY == NAMED_TIMER_RETRY
    assert ALARM_RETRY.max_attempts == 7
    assert [ALARM_RETRY.ladder_ms(attempt) for attempt in range(1, 7)] == [2_000, 4_000, 8_000, 16_000, 32_000, 64_000]
    assert ALARM_RETRY.jitter == 0.25


def test_messages_run_ten_times_with_at_most_10_min_between() -> None:
    assert MESSAGE_RETRY.max_attempts == 10
    assert MESSAGE_RETRY.cap_ms == 600_000


def test_max_attempts_counts_all_runs() -> None:
    policy = RetryPolicy(max_attempts=3)
    assert [policy.is_exhausted(failed) for failed in (1, 2, 3, 4)] == [False, False, True, True]


def test_the_ladder_stops_at_the_cap() -> None:
    policy = RetryPolicy(base_ms=1_000, factor=3, cap_ms=10_000)
    assert [policy.ladder_ms(attempt) for attempt in range(1, 6)] == [1_000, 3_000, 9_000, 10_000, 10_000]
    assert policy.ladder_ms(10**9) == 10_000


def test_a_fractional_delay_is_rounded_up_and_never_by_float_noise() -> None:
    assert RetryPolicy(base_ms=1_000, factor=1.1).ladder_ms(2) == 1_100
    assert RetryPolicy(base_ms=1, factor=1.5).ladder_ms(2) == 2


def test_jitter_only_ever_delays_and_by_at_most_its_fraction() -> None:
    policy = RetryPolicy(base_ms=1_000, jitter=0.25)
    delays = [policy.delay_ms(1, b"%d" % seed) for seed in range(2_000)]
    assert all(type(delay) is int for delay in delays)
    assert 1_000 <= min(delays) < 1_010
    assert 1_240 < max(delays) <= 1_250


def test_jitter_spreads_capped_delays_too() -> None:
    policy = RetryPolicy(base_ms=1_000, cap_ms=1_000, jitter=0.5)
    assert len({policy.delay_ms(9, b"%d" % seed) for seed in range(100)}) > 50


def test_the_same_seed_and_attempt_give_the_same_delay() -> None:
    policy = RetryPolicy(base_ms=100_000, factor=1, jitter=1.0)
    assert policy.delay_ms(2, b"seed") == policy.delay_ms(2, b"seed")
    assert policy.delay_ms(2, b"seed") != policy.delay_ms(3, b"seed")
    assert policy.delay_ms(2, b"seed") != policy.delay_ms(2, b"other")


def test_the_delay_of_a_seed_does_not_change_between_releases() -> None:
    fraction = Fraction(int.from_bytes(hashlib.sha256(b"retry\x001\x00fixed").digest()[:8], "big"), 2**64)
    assert RetryPolicy().delay_ms(1, b"fixed") == 2_000 + int(fraction * 501) == 2_391


def test_without_jitter_the_delay_is_the_ladder() -> None:
    assert RetryPolicy(jitter=0).delay_ms(3, b"any") == 8_000


@pytest.mark.parametrize(
    "fields",
    [
        {"max_attempts": 0},
        {"max_attempts": True},
        {"max_attempts": 2.0},
        {"base_ms": 0},
        {"base_ms": 1.5},
        {"base_ms": 2_000, "cap_ms": 1_999},
        {"factor": 0.9},
        {"factor": math.inf},
        {"factor": math.nan},
        {"factor": "2"},
        {"jitter": -0.1},
        {"jitter": 1.1},
        {"jitter": math.nan},
        {"jitter": True},
    ],
    ids=str,
)
def test_a_policy_that_makes_no_sense_is_refused_and_the_message_names_the_field(fields: dict[str, Any]) -> None:
    name = list(fields)[-1]
    with pytest.raises(InvalidSchedule, match=name):
        RetryPolicy(**fields)


def test_a_policy_can_not_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        RetryPolicy().base_ms = 1  # type: ignore[misc]
