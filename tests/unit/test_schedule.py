"""Named timers: reading times, occurrences, misfires, what counts as the same timer, the stored form."""

from __future__ import annotations

import datetime as dt
import zoneinfo
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from timers.backoff import RetryPolicy
from timers.errors import InvalidSchedule
from timers.schedule import (
    MAX_EPOCH_MS,
    Advance,
    TimerSpec,
    advance,
    make_spec,
    parse_duration_ms,
    parse_when_ms,
)

NOW = 1_700_000_000_000
UTC = dt.timezone.utc
MINUTE = 60_000
DAY = 86_400_000


def ms(*when: int, tz: str = "Europe/Rome", fold: int = 0) -> int:
    return int(dt.datetime(*when, tzinfo=zoneinfo.ZoneInfo(tz), fold=fold).timestamp() * 1000)  # type: ignore[misc,arg-type]


# --- times and durations --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("250ms", 250),
        ("1s", 1_000),
        ("30m", 30 * MINUTE),
        ("1h30m", 90 * MINUTE),
        ("1h 30m", 90 * MINUTE),
        (" 2H ", 120 * MINUTE),
        ("7d", 7 * DAY),
        ("2w1d", 15 * DAY),
        ("1.5h", 90 * MINUTE),
        ("0.1ms", 1),
        ("1m1ms", MINUTE + 1),
        ("0s", 0),
        (dt.timedelta(seconds=1, microseconds=1), 1_001),
        (dt.timedelta(days=1), DAY),
    ],
    ids=str,
)
def test_durations(text: Any, expected: int) -> None:
    assert parse_duration_ms(text) == expected


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "5",
        "m",
        "-5m",
        "1x",
        "1m1h",
        "1m1m",
        "1e3s",
        "5 minutes",
        "٣m",
        ".5h",
        "1.h",
        "99999999w",
        5,
        5.0,
        True,
        None,
        dt.timedelta(-1),
    ],
    ids=repr,
)
def test_what_is_not_a_duration(value: Any) -> None:
    with pytest.raises(InvalidSchedule):
        parse_duration_ms(value)


def test_an_int_is_epoch_milliseconds_and_text_counts_from_now() -> None:
    assert parse_when_ms(NOW - 5, NOW) == NOW - 5
    assert parse_when_ms("30m", NOW) == NOW + 30 * MINUTE
    assert parse_when_ms(dt.timedelta(microseconds=1), NOW) == NOW + 1


def test_an_aware_datetime_is_rounded_upward() -> None:
    when = dt.datetime(2024, 1, 1, 0, 0, 0, 1, tzinfo=dt.timezone(dt.timedelta(hours=1)))
    assert parse_when_ms(when, NOW) == 1_704_063_600_001
    assert parse_when_ms(when.replace(microsecond=0), NOW) == 1_704_063_600_000
    assert parse_when_ms(dt.datetime(9999, 12, 31, 23, 59, 59, 999000, UTC), NOW) == MAX_EPOCH_MS


@pytest.mark.parametrize(
    "value",
    [1.7e12, True, None, dt.datetime(2024, 1, 1), dt.date(2024, 1, 1), "tomorrow", "2024-01-01", 0, -1, 10**15,
     dt.datetime(1970, 1, 1, tzinfo=UTC), dt.datetime(1960, 1, 1, tzinfo=UTC)],
    ids=repr,
)  # fmt: skip
def test_what_is_not_a_time(value: Any) -> None:
    with pytest.raises(InvalidSchedule):
        parse_when_ms(value, NOW)


# --- setting --------------------------------------------------------------------------------------


def test_each_way_of_saying_when() -> None:
    assert make_spec(NOW, at=NOW + 5).first_due_ms == NOW + 5
    assert make_spec(NOW, after="5s").first_due_ms == NOW + 5_000
    assert make_spec(NOW, every="5s").first_due_ms == NOW + 5_000
    assert make_spec(NOW, cron="* * * * *").first_due_ms == NOW // MINUTE * MINUTE + MINUTE


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"at": NOW, "after": "5s"},
        {"every": "0s"},
        {"every": 5},
        {"after": 5},
        {"cron": "nonsense"},
        {"cron": 5},
        {"cron": "* * * * *", "tz": "Mars/Olympus"},
        {"cron": "* * * * *", "tz": 5},
        {"at": NOW, "tz": "UTC"},
        {"every": "5s", "tz": "UTC"},
        {"every": "5s", "misfire": "never"},
        {"every": "5s", "misfire": []},
        {"every": "5s", "retry": 3},
        {"every": "5s", "jitter_ms": -1},
        {"every": "5s", "jitter_ms": 0.5},
        {"every": "5s", "jitter_ms": 5_000},
        {"at": NOW, "method": None},
        {"at": NOW, "payload": "text"},
    ],
    ids=repr,
)
def test_what_makes_no_sense_is_refused_when_it_is_set(arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchedule):
        make_spec(NOW, **arguments)


def test_fields_of_another_mode_are_refused() -> None:
    for fields in ({"mode": "at", "every_ms": 5}, {"mode": "at", "cron": "* * * * *"}, {"mode": "sometimes"}):
        with pytest.raises(InvalidSchedule):
            TimerSpec(start_ms=NOW, **fields)  # type: ignore[arg-type]


# --- the same timer -------------------------------------------------------------------------------


def test_one_shots_are_the_same_when_they_are_due_at_the_same_instant() -> None:
    assert make_spec(NOW, after="5s").same_as(make_spec(NOW + 1_000, after="4s"))
    assert make_spec(NOW, after="5s").same_as(make_spec(NOW, at=NOW + 5_000))
    assert not make_spec(NOW, after="5s").same_as(make_spec(NOW + 1, after="5s"))


def test_recurring_timers_are_the_same_whenever_they_were_set() -> None:
    assert make_spec(NOW, every="5s").same_as(make_spec(NOW + 1, every="5s"))
    assert make_spec(NOW, cron="0 9 * * *").same_as(make_spec(NOW + 1, cron="0  9 * * * "))
    assert not make_spec(NOW, every="5s").same_as(make_spec(NOW, every="6s"))
    assert not make_spec(NOW, cron="0 9 * * *").same_as(make_spec(NOW, cron="0 9 * * *", tz="Europe/Rome"))
    assert not make_spec(NOW, every="1d").same_as(make_spec(NOW, at=NOW + DAY))


@pytest.mark.parametrize("when", [{"at": NOW}, {"every": "5s"}], ids=["once", "every"])
@pytest.mark.parametrize(
    "change",
    [{"method": "other"}, {"payload": b"other"}, {"misfire": "all"}, {"retry": RetryPolicy(3)}, {"jitter_ms": 1}],
    ids=lambda change: next(iter(change)),
)
def test_a_change_of_anything_else_makes_another_timer(when: dict[str, Any], change: dict[str, Any]) -> None:
    assert not make_spec(NOW, **when).same_as(make_spec(NOW, **when, **change))


# --- occurrences and misfires ---------------------------------------------------------------------


def test_an_interval_is_anchored() -> None:
    spec = make_spec(NOW, every="10s")
    assert [spec.next_after(NOW + late) - NOW for late in (-5, 0, 9_999, 10_000, 10_001, 25_000)] == [
        10_000, 10_000, 10_000, 20_000, 20_000, 30_000
    ]  # fmt: skip
    assert advance(spec, NOW + 10_000, NOW + 13_000, 10) == Advance(True, NOW + 20_000, 0)


def test_a_one_shot_runs_however_late_and_has_no_next() -> None:
    for misfire in ("coalesce", "skip", "all"):
        assert advance(make_spec(NOW, at=NOW, misfire=misfire), NOW, NOW + 400 * DAY, 1) == Advance(True, None, 0)


def test_due_now_is_due() -> None:
    assert advance(make_spec(NOW, every="10s"), NOW + 10_000, NOW + 10_000, 1) == Advance(True, NOW + 20_000, 0)


def test_an_occurrence_is_never_handled_early() -> None:
    with pytest.raises(InvalidSchedule, match="early"):
        advance(make_spec(NOW, every="10s"), NOW + 10_000, NOW + 9_999, 1)
    with pytest.raises(InvalidSchedule, match="limit"):
        advance(make_spec(NOW, every="10s"), NOW + 10_000, NOW + 10_000, 0)


def test_coalesce_runs_once_and_says_how_many_others_there_were() -> None:
    spec = make_spec(NOW, every="10s")
    assert advance(spec, NOW + 10_000, NOW + 45_000, 1) == Advance(True, NOW + 50_000, 3)
    assert advance(spec, NOW + 10_000, NOW + 40_000, 1) == Advance(True, NOW + 50_000, 3)


def test_skip_runs_what_is_late_by_less_than_a_period_and_nothing_older() -> None:
    spec = make_spec(NOW, every="10s", misfire="skip")
    assert advance(spec, NOW + 10_000, NOW + 19_999, 1) == Advance(True, NOW + 20_000, 0)
    assert advance(spec, NOW + 10_000, NOW + 20_000, 1) == Advance(False, NOW + 30_000, 2)
    assert advance(spec, NOW + 10_000, NOW + 45_000, 1) == Advance(False, NOW + 50_000, 4)


def test_all_runs_each_in_its_turn_and_leaves_out_the_oldest_beyond_the_limit() -> None:
    spec = make_spec(NOW, every="10s", misfire="all")
    assert advance(spec, NOW + 10_000, NOW + 45_000, 3) == Advance(True, NOW + 20_000, 0)
    assert advance(spec, NOW + 10_000, NOW + 45_000, 2) == Advance(True, NOW + 30_000, 1)
    assert advance(spec, NOW + 10_000, NOW + 45_000, 1) == Advance(True, NOW + 40_000, 2)


def test_misfires_of_cron() -> None:
    start = ms(2026, 6, 1, 12, 0)
    for misfire, expected in (
        ("coalesce", Advance(True, ms(2026, 6, 9, 9, 0), 6)),
        ("skip", Advance(False, ms(2026, 6, 9, 9, 0), 7)),
        ("all", Advance(True, ms(2026, 6, 7, 9, 0), 4)),
    ):
        spec = make_spec(start, cron="0 9 * * *", tz="Europe/Rome", misfire=misfire)  # type: ignore[arg-type]
        assert advance(spec, ms(2026, 6, 2, 9, 0), ms(2026, 6, 8, 20, 0), 2) == expected


def test_years_of_missed_seconds_are_counted_exactly() -> None:
    start = ms(2026, 1, 1, 0, 0)
    end = ms(2036, 1, 1, 0, 0)
    spec = make_spec(start, cron="* * * * * *", tz="Europe/Rome", misfire="all")
    step = advance(spec, spec.first_due_ms, end, 1_000)
    assert step == Advance(True, end - 999_000, (end - start) // 1000 - 1_001)


# --- jitter ---------------------------------------------------------------------------------------


def test_jitter_only_delays_and_is_the_same_each_time() -> None:
    spec = make_spec(NOW, every="10s", jitter_ms=100)
    delays = [spec.wake_ms(due, b"seed") - due for due in range(NOW, NOW + 5_000)]
    assert (min(delays), max(delays)) == (0, 100)
    assert delays == [spec.wake_ms(due, b"seed") - due for due in range(NOW, NOW + 5_000)]
    assert delays != [spec.wake_ms(due, b"other") - due for due in range(NOW, NOW + 5_000)]
    assert replace(spec, jitter_ms=0).wake_ms(NOW, b"seed") == NOW


# --- the stored form ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        make_spec(NOW, at=NOW),
        make_spec(NOW, after="5s", method="m", payload=b"\0\xff"),
        make_spec(NOW, every="5s", misfire="all", jitter_ms=7, retry=RetryPolicy(3, 5, 1.5, 10, 0.0)),
        make_spec(NOW, cron="*/5 9-17 * * mon-fri", tz="Europe/Rome", misfire="skip"),
    ],
    ids=lambda spec: spec.mode,
)
def test_the_stored_form_round_trips(spec: TimerSpec) -> None:
    assert TimerSpec.from_bytes(spec.to_bytes()) == spec


def test_the_stored_form_never_changes() -> None:
    spec = TimerSpec("every", 1, every_ms=2, misfire="skip", retry=RetryPolicy(7, 2000, 2.0, 600000, 0.25), method="m")
    assert msgpack.unpackb(spec.to_bytes()) == [1, 2, 1, 2, "", None, 1, [7, 2000, 2.0, 600000, 0.25], 0, "m", b""]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(5),
        msgpack.packb([]),
        msgpack.packb([2] + [0] * 10),
        msgpack.packb([1, 9, 1, 0, "", None, 0, [7, 2000, 2.0, 600000, 0.25], 0, "", b""]),
        msgpack.packb([1, 0, 1, 0, "", None, 0, [], 0, "", b"", 1]),
        msgpack.packb([1, 0, 1, 0, "", None, 0, [0], 0, "", b""]),
        msgpack.packb([1, 3, 1, 0, "nonsense", None, 0, [7], 0, "", b""]),
    ],
    ids=repr,
)
def test_a_stored_form_that_is_damaged_or_newer_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidSchedule):
        TimerSpec.from_bytes(data)
