"""Schedules on generated timers: never early, anchored, every occurrence accounted for."""

from __future__ import annotations

import datetime as dt
import zoneinfo

from hypothesis import given, settings
from hypothesis import strategies as st

from timers.cron import parse_cron
from timers.errors import InvalidSchedule
from timers.schedule import Misfire, TimerSpec, advance, parse_when_ms

START = 1_700_000_000_000
YEAR = 366 * 86_400_000
HOUR = 3_600_000

ZONES = st.sampled_from(
    ["UTC", "Europe/Rome", "America/New_York", "Australia/Lord_Howe", "Africa/Casablanca", "Asia/Beirut"]
)
MISFIRES: st.SearchStrategy[Misfire] = st.sampled_from(["coalesce", "skip", "all"])


def field(low: int, high: int) -> st.SearchStrategy[str]:
    number = st.integers(low, high)
    return st.one_of(
        st.just("*"),
        number.map(str),
        st.integers(2, max(2, (high - low) // 2)).map(lambda step: f"*/{step}"),
        st.lists(number, min_size=1, max_size=3, unique=True).map(lambda numbers: ",".join(map(str, sorted(numbers)))),
        st.tuples(number, number).map(lambda ends: f"{min(ends)}-{max(ends)}"),
    )


CRONS = st.builds(
    lambda *fields: " ".join(fields),
    st.sampled_from(["0", "*/20", "59"]),
    field(0, 59),
    field(0, 23),
    st.one_of(st.just("*"), st.integers(1, 28).map(str), st.just("L")),
    st.just("*"),
    st.one_of(st.just("*"), st.just("mon-fri"), st.integers(0, 6).map(str)),
)
EVERY = st.builds(
    lambda start, every, misfire: TimerSpec("every", start, every_ms=every, misfire=misfire),
    st.integers(1, START),
    st.integers(1, YEAR),
    MISFIRES,
)
CRON = st.builds(
    lambda start, expression, tz, misfire: TimerSpec("cron", start, cron=expression, tz=tz, misfire=misfire),
    st.integers(START, START + YEAR),
    CRONS,
    ZONES,
    MISFIRES,
)


@given(EVERY, st.integers(1, 10**6), st.integers(0, YEAR))
def test_the_kth_due_time_of_an_interval_is_start_plus_k_intervals(spec: TimerSpec, k: int, late: int) -> None:
    due = spec.start_ms + k * spec.every_ms
    assert spec.next_after(due - 1) == due
    assert spec.next_after(due) == due + spec.every_ms
    step = advance(spec, due, due + late, 10)
    assert step.next_due_ms is not None
    assert (step.next_due_ms - spec.start_ms) % spec.every_ms == 0


@given(st.one_of(EVERY, CRON), st.data())
def test_runs_and_missed_are_all_occurrences(spec: TimerSpec, data: st.DataObject) -> None:
    """Whatever the delays, over the life of a timer nothing is lost and nothing is counted twice."""
    period = spec.next_after(spec.first_due_ms) - spec.first_due_ms
    limit = data.draw(st.integers(1, 4))
    now = due = spec.first_due_ms
    runs = missed = 0
    for _ in range(6):
        now = max(now, due) + data.draw(st.integers(0, 6 * period))
        step = advance(spec, due, now, limit)
        assert step.next_due_ms is not None
        assert step.next_due_ms > due
        assert step.missed >= 0
        runs += step.run
        missed += step.missed
        if spec.misfire == "coalesce":
            assert step.run
        if spec.misfire == "all":
            assert step.run
            assert spec.count(step.next_due_ms - 1, now) <= limit
        else:
            assert step.next_due_ms > now
        due = step.next_due_ms
    assert runs + missed == spec.count(spec.start_ms, due - 1)


@given(CRON, st.integers(0, YEAR))
def test_cron_is_never_early_and_always_on_the_clock(spec: TimerSpec, ahead: int) -> None:
    after = spec.start_ms + ahead
    due = spec.next_after(after)
    assert due > after
    assert due % 1000 == 0
    assert spec.count(after, due) == 1
    assert spec.count(after, due - 1) == 0


@settings(max_examples=200)
@given(CRONS, ZONES, st.integers(0, 40), st.sampled_from([1_711_846_800_000, 1_729_990_800_000, 1_743_296_400_000]))
def test_around_clock_changes_counting_agrees_with_walking(
    expression: str, tz: str, steps: int, change_ms: int
) -> None:
    schedule = parse_cron(expression, tz)
    start = instant = change_ms - 3 * HOUR
    for _ in range(steps):
        following = schedule.next_after(instant)
        assert following > instant
        instant = following
    assert schedule.count(start, instant) == steps


@settings(max_examples=100)
@given(
    st.sampled_from(["0,30", "*/7", "5-50/15", "59"]),
    st.one_of(st.just("*"), st.sets(st.integers(0, 5), min_size=1).map(lambda hours: ",".join(map(str, hours)))),
    ZONES,
    # Days of 2024 on which a clock of ZONES changes, and any other.
    st.one_of(st.sampled_from([69, 90, 97, 104, 279, 300, 307]), st.integers(0, 365)).map(
        lambda day: 1_704_067_200 + (day + 1) * 86_400
    ),
)
def test_cron_agrees_with_looking_at_the_clock_each_minute(minutes: str, hours: str, tz: str, middle: int) -> None:
    """Against the rules as the module states them: look at the wall clock every minute of two days."""
    schedule = parse_cron(f"{minutes} {hours} * * *", tz)
    zone = zoneinfo.ZoneInfo(tz)
    expected = []
    shown = None
    for instant in range(middle - 86_400, middle + 86_400, 60):
        wall = dt.datetime.fromtimestamp(instant, zone)
        naive = wall.replace(tzinfo=None)
        passed = [naive]  # what the clock showed or jumped over since a minute ago
        while shown is not None and passed[0] - shown > dt.timedelta(minutes=1):
            passed.insert(0, passed[0] - dt.timedelta(minutes=1))
        shown = naive
        if hours == "*":
            passed = [naive]
        elif wall.fold:
            passed = []
        if any(at.hour in schedule.hours and at.minute in schedule.minutes for at in passed):
            expected.append(instant * 1000)
    found = []
    instant = (middle - 86_400) * 1000 - 1
    while (instant := schedule.next_after(instant)) < (middle + 86_400) * 1000:
        found.append(instant)
    assert found == expected


@given(
    st.integers(0, 59),
    st.integers(0, 23),
    st.sampled_from(["Europe/Rome", "America/New_York", "Australia/Lord_Howe", "Asia/Beirut"]),
)
def test_a_daily_time_runs_once_each_day_of_the_year(minute: int, hour: int, tz: str) -> None:
    schedule = parse_cron(f"{minute} {hour} * * *", tz)
    zone = zoneinfo.ZoneInfo(tz)
    instant = int(dt.datetime(2023, 12, 31, 23, 59, 59, tzinfo=zone).timestamp()) * 1000
    end = int(dt.datetime(2024, 12, 31, 23, 59, 59, tzinfo=zone).timestamp()) * 1000
    assert schedule.count(instant, end) == 366
    days = []
    for _ in range(366):
        instant = schedule.next_after(instant)
        days.append(dt.datetime.fromtimestamp(instant / 1000, zone).date())
    assert days == [dt.date(2024, 1, 1) + dt.timedelta(days=number) for number in range(366)]


@given(st.datetimes(dt.datetime(1970, 1, 2), dt.datetime(9999, 12, 30), timezones=ZONES.map(zoneinfo.ZoneInfo)))
def test_a_time_is_rounded_upward_by_less_than_a_millisecond(when: dt.datetime) -> None:
    due = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc) + dt.timedelta(milliseconds=parse_when_ms(when, 0))
    assert dt.timedelta(0) <= due - when < dt.timedelta(milliseconds=1)


@given(st.integers(1, 10**6), st.integers(0, 10**9), st.binary(max_size=20))
def test_jitter_stays_within_its_bounds(jitter: int, due: int, seed: bytes) -> None:
    wake = TimerSpec("at", 1, jitter_ms=jitter).wake_ms(due, seed)
    assert due <= wake <= due + jitter


@given(st.one_of(EVERY, CRON))
def test_the_stored_form_round_trips(spec: TimerSpec) -> None:
    assert TimerSpec.from_bytes(spec.to_bytes()) == spec
    assert TimerSpec.from_bytes(spec.to_bytes()).same_as(spec)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_no_timer(data: bytes) -> None:
    try:
        TimerSpec.from_bytes(data)
    except InvalidSchedule:
        pass


@given(st.text(max_size=20) | st.text("0123456789*/,-lrh# ?@w", max_size=20))
def test_arbitrary_text_is_a_cron_expression_or_refused(text: str) -> None:
    try:
        parse_cron(text)
    except InvalidSchedule:
        pass
