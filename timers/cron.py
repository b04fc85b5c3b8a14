"""Cron: when an expression comes next, and how often it came, in a time zone with daylight-saving changes.

An expression has five fields (minute hour day month weekday) or six, then with **seconds first**. Names (`mon`,
`jan`), ranges, steps, lists, `L`, `#` and `@daily` and its like are understood; a year field, `R` and `H` are not.
As in every cron, day and weekday are alternatives when both are restricted.

What happens when clocks change:

- An expression whose hour field covers every hour (`*/10 * * * *`) keeps to elapsed time: it goes on through an hour
  that comes twice, and leaves out times that do not exist.
- Any other expression means a time of day. A time that does not exist runs once, at the first instant after the gap
  (several such times: still once). A time that comes twice runs once, the first time.

croniter reads the fields and finds matching days; times of day and instants are worked out here, so that the rules
above hold whatever its version.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
import zoneinfo
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from croniter import croniter

from timers.errors import InvalidSchedule

__all__ = ["CronSchedule", "parse_cron"]

_DAY: Final = 86_400
_EPOCH_ORDINAL: Final = dt.date(1970, 1, 1).toordinal()
#: Any fixed instant (2000-01-01): an expression that has no occurrence in the fifty years after it never has one.
_REFERENCE_MS: Final = 946_684_800_000

_ALIASES: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_RANDOM: Final = re.compile(r"(^|[,/ ])[rh]($|[(/, ])")
#: Number of values of each field, seconds first: a step as long as that would run once a round, not "every 90".
_FIELD_SIZES: Final = (60, 60, 24, 31, 12, 7)


@dataclass(frozen=True)
class CronSchedule:
    """A parsed expression in a time zone. Times are epoch milliseconds; occurrences are whole seconds."""

    expression: str
    zone: dt.tzinfo
    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: str  # a cron expression for midnight of the matching days; "" when every day matches

    def next_after(self, after_ms: int) -> int:
        """The first occurrence later than `after_ms`. Raises `InvalidSchedule` if there is none before year 9999."""
        after = after_ms // 1000
        days = _Days(self.days)
        try:
            for stretch in self._stretches(after, None, days):
                if stretch.gap_filled:
                    return stretch.start * 1000
                wall = self._next_wall(stretch.low, days)
                if wall < stretch.high:
                    return (wall - stretch.offset) * 1000
        except (ValueError, OverflowError) as error:  # croniter's errors are ValueErrors; dates end with year 9999
            raise InvalidSchedule(f"cron {self.expression!r} has no further occurrence: {error}") from error
        raise AssertionError("stretches of time do not end")

    def count(self, after_ms: int, until_ms: int) -> int:
        """How many occurrences are later than `after_ms` and not later than `until_ms`."""
        days = _Days(self.days)
        total = 0
        for stretch in self._stretches(after_ms // 1000, until_ms // 1000 + 1, days):
            total += self._count_walls(stretch.low, stretch.high, days)
            if stretch.gap_filled and not self._count_walls(stretch.low, stretch.low + 1, days):
                total += 1
        return total

    # Below, "wall" is what the clock on the wall shows, as seconds since its own 1970-01-01 00:00.

    def _stretches(self, after: int, end: int | None, days: _Days) -> Iterator[_Stretch]:
        """Stretches of time later than `after` and before `end`, in order, in each of which every matching wall time
        from `low` to before `high` is one occurrence."""
        elapsed = len(self.hours) == 24
        shown = None  # the latest wall time that the clock has passed so far
        # From a day earlier, to know of a change that still matters: the clock may be in an hour that comes twice.
        for start, stop, offset in _constant_offsets(self.zone, after - _DAY, end):
            low, high = start + offset, stop + offset
            gap_filled = False
            if not elapsed and shown is not None:
                gap_filled = low > shown and start > after and self._count_walls(shown, low, days) > 0
                low = max(low, shown)
            shown = high if shown is None else max(shown, high)
            low = max(low, after + 1 + offset)
            if low < high:
                yield _Stretch(start, offset, low, high, gap_filled)

    def _next_wall(self, wall: int, days: _Days) -> int:
        day, second = divmod(wall, _DAY)
        if days.at_or_after(day) == day:
            rank = self._rank(second)
            if rank < len(self.hours) * len(self.minutes) * len(self.seconds):
                return day * _DAY + self._time(rank)
        return days.at_or_after(day + 1) * _DAY + self._time(0)

    def _count_walls(self, low: int, high: int, days: _Days) -> int:
        total = 0
        day = days.at_or_after(low // _DAY)
        while day * _DAY < high:
            midnight = day * _DAY
            total += self._rank(min(high - midnight, _DAY)) - self._rank(max(low - midnight, 0))
            day = days.at_or_after(day + 1)
        return total

    def _rank(self, second: int) -> int:
        """How many of a day's times come before this second of the day."""
        hour, minute, second = second // 3600, second // 60 % 60, second % 60
        rank = bisect_left(self.hours, hour)
        whole_hour = rank < len(self.hours) and self.hours[rank] == hour
        rank *= len(self.minutes)
        if not whole_hour:
            return rank * len(self.seconds)
        at = bisect_left(self.minutes, minute)
        rank = (rank + at) * len(self.seconds)
        if at < len(self.minutes) and self.minutes[at] == minute:
            rank += bisect_left(self.seconds, second)
        return rank

    def _time(self, rank: int) -> int:
        """The second of the day of the day's time number `rank`."""
        rank, second = divmod(rank, len(self.seconds))
        hour, minute = divmod(rank, len(self.minutes))
        return self.hours[hour] * 3600 + self.minutes[minute] * 60 + self.seconds[second]


@functools.lru_cache(maxsize=512)
def parse_cron(expression: str, tz: str | None = None) -> CronSchedule:
    """Read a cron expression for a zoneinfo zone (None: UTC). Raises `InvalidSchedule` with the reason."""
    if not isinstance(expression, str):
        raise InvalidSchedule(f"a cron expression is text, not {expression!r}")
    text = " ".join(expression.lower().split())
    fields = _ALIASES.get(text, text).split(" ")
    if len(fields) not in (5, 6):
        raise InvalidSchedule(
            f"cron {expression!r}: give five fields (minute hour day month weekday), or six with seconds first"
        )
    if len(fields) == 5:
        fields.insert(0, "0")
    if _RANDOM.search(" ".join(fields)):
        raise InvalidSchedule(f"cron {expression!r}: R and H are not supported; use jitter_ms to spread timers")
    for field, size in zip(fields, _FIELD_SIZES, strict=True):
        for step in re.findall(r"/(\d+)", field):
            if int(step) >= size and size > 1:
                raise InvalidSchedule(
                    f"cron {expression!r}: a step of {step} is longer than the field's round of {size}"
                )
    second, minute, hour, *day = fields
    try:
        times, _ = croniter.expand(f"{minute} {hour} * * * {second}")
        days = " ".join(day) if set(day) - {"*", "?"} else ""
        schedule = CronSchedule(
            text,
            _zone(tz),
            seconds=_values(times[5], 60),
            minutes=_values(times[0], 60),
            hours=_values(times[1], 24),
            days=days and f"0 0 {days}",
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # croniter has bugs with odd text, all of these
        raise InvalidSchedule(f"cron {expression!r} makes no sense: {error}") from error
    schedule.next_after(_REFERENCE_MS)
    return schedule


@dataclass(frozen=True)
class _Stretch:
    """Wall times low <= w < high, with one offset from UTC. `gap_filled`: times that the clock jumped over at `start`
    make an occurrence at `start`."""

    start: int
    offset: int
    low: int
    high: int
    gap_filled: bool


class _Days:
    """Matching days, as days since 1970, for questions that mostly go forward."""

    def __init__(self, expression: str) -> None:
        self._expression = expression
        self._asked = self._found = 0
        self._iterator: croniter | None = None

    def at_or_after(self, day: int) -> int:
        if not self._expression:
            return day
        if self._iterator is None or day < self._asked:
            eve = dt.datetime.fromordinal(day - 1 + _EPOCH_ORDINAL)
            self._iterator = croniter(self._expression, eve)
            self._found = day - 1
        self._asked = day
        while self._found < day:
            self._found = self._iterator.get_next(dt.datetime).toordinal() - _EPOCH_ORDINAL
        return self._found


def _zone(tz: str | None) -> dt.tzinfo:
    if tz is None or tz == "UTC":
        return dt.timezone.utc
    try:
        return zoneinfo.ZoneInfo(tz)
    except Exception as error:  # a missing zone is a KeyError; odd names give OSError, ValueError, TypeError
        raise InvalidSchedule(f"time zone {tz!r} is not known; use a name such as 'Europe/Rome'") from error


def _values(expanded: list[int | str], size: int) -> tuple[int, ...]:
    if expanded == ["*"]:
        return tuple(range(size))
    return tuple(sorted(int(value) for value in expanded))


def _offset(zone: dt.tzinfo, instant: int) -> int:
    offset = dt.datetime.fromtimestamp(instant, zone).utcoffset()
    assert offset is not None
    return offset // dt.timedelta(seconds=1)


def _constant_offsets(zone: dt.tzinfo, start: int, end: int | None) -> Iterator[tuple[int, int, int]]:
    """(start, stop, offset) of consecutive stretches of at most a day in which the offset from UTC stays the same."""
    offset = _offset(zone, start)
    while end is None or start < end:
        stop = start + _DAY if end is None else min(start + _DAY, end)
        next_offset = _offset(zone, stop)
        if next_offset != offset:
            before = start  # here the offset still holds, at `stop` it does not
            while stop - before > 1:
                middle = (before + stop) // 2
                if _offset(zone, middle) == offset:
                    before = middle
                else:
                    stop = middle
            next_offset = _offset(zone, stop)
        yield start, stop, offset
        start, offset = stop, next_offset
