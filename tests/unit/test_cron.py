"""Cron: what is understood, and what happens when clocks change."""

from __future__ import annotations

import datetime as dt
import zoneinfo

import pytest

from timers.cron import parse_cron
from timers.errors import InvalidSchedule


def ms(when: str, tz: str = "Europe/Rome", fold: int = 0) -> int:
    local = dt.datetime.fromisoformat(when).replace(tzinfo=zoneinfo.ZoneInfo(tz), fold=fold)
    return int(local.timestamp() * 1000)


def occurrences(expression: str, after: str, count: int, tz: str = "Europe/Rome") -> list[str]:
    """The next occurrences as local times with their offset from UTC."""
    schedule, instant, found = parse_cron(expression, tz), ms(after, tz), []
    start = instant
    for _ in range(count):
        instant = schedule.next_after(instant)
        found.append(dt.datetime.fromtimestamp(instant / 1000, zoneinfo.ZoneInfo(tz)).strftime("%m-%d %H:%M:%S%z")[:-2])
    assert schedule.count(start, instant) == count
    assert schedule.count(start, instant - 1) == count - 1
    return found


def test_six_fields_begin_with_seconds() -> None:
    assert occurrences("*/20 * * * * *", "2026-06-01 12:00", 3) == [
        "06-01 12:00:20+02", "06-01 12:00:40+02", "06-01 12:01:00+02"
    ]  # fmt: skip


def test_names_ranges_lists_and_steps() -> None:
    assert occurrences("0 9-17/4 * jun,jul mon-tue", "2026-06-01 10:00", 4) == [
        "06-01 13:00:00+02", "06-01 17:00:00+02", "06-02 09:00:00+02", "06-02 13:00:00+02"
    ]  # fmt: skip


def test_last_day_nth_weekday_and_sunday_as_7() -> None:
    assert occurrences("0 0 L * *", "2026-01-31 12:00", 2) == ["02-28 00:00:00+01", "03-31 00:00:00+02"]
    assert occurrences("0 0 * * mon#1", "2026-01-01 12:00", 2) == ["01-05 00:00:00+01", "02-02 00:00:00+01"]
    assert parse_cron("0 0 * * 7").next_after(0) == parse_cron("0 0 * * sun").next_after(0)


def test_day_and_weekday_are_alternatives_when_both_are_given() -> None:
    assert occurrences("0 0 13 * fri", "2026-06-10 12:00", 3) == [
        "06-12 00:00:00+02", "06-13 00:00:00+02", "06-19 00:00:00+02"
    ]  # fmt: skip


def test_29_february_is_found_over_a_century_without_it() -> None:
    assert occurrences("0 0 29 2 *", "2096-03-01 00:00", 1) == ["02-29 00:00:00+01"]
    assert parse_cron("0 0 29 2 *").next_after(ms("2096-03-01", "UTC")) == ms("2104-02-29", "UTC")


@pytest.mark.parametrize("alias", ["@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"])
def test_aliases(alias: str) -> None:
    assert parse_cron(alias).next_after(0) > 0


def test_an_occurrence_is_later_than_the_instant_asked_about() -> None:
    schedule = parse_cron("* * * * * *")
    assert [schedule.next_after(now) for now in (999, 1_000, 1_001, 1_999)] == [1_000, 2_000, 2_000, 2_000]


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("", "five fields"),
        ("* * * *", "five fields"),
        ("* * * * * * 2030", "five fields"),
        ("@reboot", "five fields"),
        ("61 * * * *", "out of range"),
        ("a b c d e", "makes no sense"),
        ("1,,2 * * * *", "makes no sense"),
        ("*/0 * * * *", "makes no sense"),
        ("l * * * *", "makes no sense"),
        ("r * * * *", "R and H"),
        ("0 h * * *", "R and H"),
        ("0 0 r(1-5) * *", "R and H"),
        ("*/90 * * * *", "step of 90"),
        ("0 */24 * * *", "step of 24"),
        ("0 0 31 2 *", "no further occurrence"),
        ("0 0 32 * *", "no further occurrence"),
    ],
)
def test_what_is_not_understood_is_refused(expression: str, words: str) -> None:
    with pytest.raises(InvalidSchedule, match=words):
        parse_cron(expression)


def test_an_unknown_zone_is_refused() -> None:
    for zone in ("Mars/Olympus", "../etc/passwd", "", "Europe"):
        with pytest.raises(InvalidSchedule, match="time zone"):
            parse_cron("* * * * *", zone)


def test_after_year_9999_there_is_nothing() -> None:
    with pytest.raises(InvalidSchedule, match="no further occurrence"):
        parse_cron("0 0 1 1 *").next_after(253_402_300_799_000)


# --- when clocks go forward: 2026-03-29 02:00 becomes 03:00 in Rome -------------------------------


def test_a_time_that_does_not_exist_runs_once_at_the_end_of_the_gap() -> None:
    assert occurrences("30 2 * * *", "2026-03-28 12:00", 2) == ["03-29 03:00:00+02", "03-30 02:30:00+02"]
    assert occurrences("*/20 2 * * *", "2026-03-28 12:00", 2) == ["03-29 03:00:00+02", "03-30 02:00:00+02"]


def test_times_in_the_gap_and_a_time_at_its_end_run_once_together() -> None:
    assert occurrences("0,30 2,3 * * *", "2026-03-28 12:00", 3) == [
        "03-29 03:00:00+02", "03-29 03:30:00+02", "03-30 02:00:00+02"
    ]  # fmt: skip


def test_an_hourly_expression_leaves_the_gap_out() -> None:
    assert occurrences("30 * * * *", "2026-03-29 01:00", 2) == ["03-29 01:30:00+01", "03-29 03:30:00+02"]


def test_a_whole_day_that_does_not_exist_runs_once() -> None:
    assert occurrences("0 12 * * *", "2011-12-29 13:00", 2, "Pacific/Apia") == [
        "12-31 00:00:00+14", "12-31 12:00:00+14"
    ]  # fmt: skip


# --- when clocks go back: 2026-10-25 03:00 becomes 02:00 in Rome ----------------------------------


def test_a_time_that_comes_twice_runs_the_first_time() -> None:
    assert occurrences("30 2 * * *", "2026-10-24 12:00", 2) == ["10-25 02:30:00+02", "10-26 02:30:00+01"]
    assert occurrences("0,30 2,3 * * *", "2026-10-24 12:00", 4) == [
        "10-25 02:00:00+02", "10-25 02:30:00+02", "10-25 03:00:00+01", "10-25 03:30:00+01"
    ]  # fmt: skip


def test_asked_in_the_second_pass_the_first_is_over() -> None:
    schedule = parse_cron("45 2 * * *", "Europe/Rome")
    assert schedule.next_after(ms("2026-10-25 02:10", fold=1)) == ms("2026-10-26 02:45")
    assert schedule.next_after(ms("2026-10-25 02:10", fold=0)) == ms("2026-10-25 02:45", fold=0)


def test_an_hourly_expression_goes_on_through_the_repeated_hour() -> None:
    assert occurrences("30 * * * *", "2026-10-25 01:40", 3) == [
        "10-25 02:30:00+02", "10-25 02:30:00+01", "10-25 03:30:00+01"
    ]  # fmt: skip
    assert occurrences("30 * 25 10 *", "2026-10-25 02:00", 2) == ["10-25 02:30:00+02", "10-25 02:30:00+01"]


def test_a_repeated_hour_before_midnight() -> None:
    # Asuncion, 2024-03-24 00:00 became 23:00 of the day before.
    assert occurrences("30 23 * * *", "2024-03-23 12:00", 2, "America/Asuncion") == [
        "03-23 23:30:00-03", "03-24 23:30:00-04"
    ]  # fmt: skip
    assert occurrences("30 * 23 3 *", "2024-03-23 23:00", 2, "America/Asuncion") == [
        "03-23 23:30:00-03", "03-23 23:30:00-04"
    ]  # fmt: skip


def test_half_an_hour_back() -> None:
    # Lord Howe, 2026-04-05 02:00 becomes 01:30.
    assert occurrences("45 1 * * *", "2026-04-04 12:00", 2, "Australia/Lord_Howe") == [
        "04-05 01:45:00+11", "04-06 01:45:00+10"
    ]  # fmt: skip
