"""What a named timer is: once, at an interval or by cron; which occurrence comes next; what was missed.

All pure functions of epoch milliseconds. Times are rounded upward, never down: a timer is never early.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Any, Final, Literal, get_args

import msgpack

from timers.backoff import NAMED_TIMER_RETRY, RetryPolicy
from timers.cron import CronSchedule, parse_cron
from timers.errors import InvalidSchedule

__all__ = [
    "MAX_EPOCH_MS",
    "Advance",
    "Misfire",
    "Mode",
    "TimerSpec",
    "advance",
    "make_spec",
    "parse_duration_ms",
    "parse_when_ms",
]

Mode = Literal["at", "after", "every", "cron"]
Misfire = Literal["coalesce", "skip", "all"]

#: The end of year 9999, where datetimes end. Larger numbers are microseconds by mistake.
MAX_EPOCH_MS: Final = 253_402_300_799_999

_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_UNITS_MS: Final = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_DURATION: Final = re.compile(
    r"\s*".join(rf"(?:(\d{{1,15}}(?:\.\d{{1,9}})?)\s*{unit})?" for unit in _UNITS_MS), re.ASCII
)

#: First item of the encoded form. Permanent: a reader refuses a version that it does not know.
_VERSION: Final = 1
#: Longer stored forms, which have a large payload, are not kept in memory.
_SHORT_BYTES: Final = 256
# Positions in these are stored: append only.
_MODES: Final[tuple[Mode, ...]] = get_args(Mode)
_MISFIRES: Final[tuple[Misfire, ...]] = get_args(Misfire)


@dataclass(frozen=True)
class TimerSpec:
    """Everything that was said when a named timer was set. Times are epoch milliseconds, spans milliseconds.

    `start_ms` is the due time of a one-shot ("at", "after"), the anchor of an interval (the k-th due time is
    `start_ms + k * every_ms`, k >= 1) and the instant from which cron counts (the first occurrence later than it).
    `tz` is a zoneinfo name and belongs to cron (None: UTC). `misfire` matters to "every" and "cron" only.
    Raises `InvalidSchedule` when the fields make no sense together.
    """

    mode: Mode
    start_ms: int
    every_ms: int = 0
    cron: str = ""
    tz: str | None = None
    misfire: Misfire = "coalesce"
    retry: RetryPolicy = NAMED_TIMER_RETRY
    jitter_ms: int = 0
    method: str = ""
    payload: bytes = b""

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise InvalidSchedule(f"a timer's mode is one of {', '.join(_MODES)}, not {self.mode!r}")
        if self.misfire not in _MISFIRES:
            raise InvalidSchedule(f"misfire is one of {', '.join(_MISFIRES)}, not {self.misfire!r}")
        _require_ms("start_ms", self.start_ms, least=0 if self.recurring else 1)
        _require_ms("jitter_ms", self.jitter_ms, least=0)
        if not isinstance(self.retry, RetryPolicy):
            raise InvalidSchedule(f"retry is a RetryPolicy, not {self.retry!r}")
        if not isinstance(self.method, str) or not isinstance(self.payload, bytes):
            raise InvalidSchedule("a timer's method is text and its payload is bytes")
        if self.mode == "every":
            _require_ms("every_ms", self.every_ms, least=1)
            if self.jitter_ms >= self.every_ms:
                raise InvalidSchedule(
                    f"jitter of {self.jitter_ms} ms must be shorter than the interval of {self.every_ms} ms"
                )
        elif self.every_ms:
            raise InvalidSchedule(f"every_ms does not go with mode {self.mode!r}")
        if not isinstance(self.cron, str) or not isinstance(self.tz, (str, type(None))):
            raise InvalidSchedule(f"cron and tz are texts, not {self.cron!r} and {self.tz!r}")
        if self.mode == "cron":
            parse_cron(self.cron, self.tz)
        elif self.cron or self.tz is not None:
            raise InvalidSchedule(f"cron and tz do not go with mode {self.mode!r}")

    @property
    def recurring(self) -> bool:
        """True if the timer has a next occurrence after each one."""
        return self.mode in ("every", "cron")

    @property
    def first_due_ms(self) -> int:
        """When the timer is due for the first time."""
        return self.next_after(self.start_ms) if self.recurring else self.start_ms

    def next_after(self, after_ms: int) -> int:
        """A recurring timer's first occurrence later than `after_ms`, jitter left aside."""
        if self.mode == "every":
            return self.start_ms + (max(after_ms - self.start_ms, 0) // self.every_ms + 1) * self.every_ms
        return self._cron().next_after(max(after_ms, self.start_ms))

    def count(self, after_ms: int, until_ms: int) -> int:
        """How many of a recurring timer's occurrences are later than `after_ms` and not later than `until_ms`."""
        after_ms = max(after_ms, self.start_ms)
        if until_ms <= after_ms:
            return 0
        if self.mode == "every":
            return (until_ms - self.start_ms) // self.every_ms - (after_ms - self.start_ms) // self.every_ms
        return self._cron().count(after_ms, until_ms)

    def wake_ms(self, due_ms: int, seed: bytes) -> int:
        """When an occurrence due at `due_ms` runs: up to `jitter_ms` later, never earlier.

        Drawn from a hash of `seed` and `due_ms`, so that whoever computes it gets the same instant.
        """
        if not self.jitter_ms:
            return due_ms
        digest = hashlib.sha256(b"jitter\0%d\0" % due_ms + seed).digest()
        # A 64-bit fraction times (jitter + 1), shifted down, is spread evenly over 0..jitter.
        return due_ms + ((self.jitter_ms + 1) * int.from_bytes(digest[:8], "big") >> 64)

    def same_as(self, other: TimerSpec) -> bool:
        """True if setting this timer where `other` stands changes nothing.

        One-shots are the same if they are due at the same instant, however that was said; recurring timers if they
        were described alike, whenever that was. Payload, method and all policies count in both.
        """
        if self.recurring != other.recurring:
            return False
        if self.recurring:
            return self == replace(other, start_ms=self.start_ms)
        return self == replace(other, mode=self.mode)

    def once(self, at_ms: int) -> TimerSpec:
        """The same handler, payload and retry policy as a one-shot at `at_ms`."""
        return replace(self, mode="at", start_ms=at_ms, every_ms=0, cron="", tz=None, jitter_ms=0)

    def to_bytes(self) -> bytes:
        """The stored form: a versioned msgpack array."""
        retry = self.retry
        packed: bytes = msgpack.packb(
            [
                _VERSION,
                _MODES.index(self.mode),
                self.start_ms,
                self.every_ms,
                self.cron,
                self.tz,
                _MISFIRES.index(self.misfire),
                [retry.max_attempts, retry.base_ms, retry.factor, retry.cap_ms, retry.jitter],
                self.jitter_ms,
                self.method,
                self.payload,
            ]
        )
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> TimerSpec:
        """Read the stored form. Raises `InvalidSchedule` if it is damaged or of a newer version."""
        return _read_short(data) if len(data) <= _SHORT_BYTES else cls._read(data)

    @classmethod
    def _read(cls, data: bytes) -> TimerSpec:
        try:
            version, *rest = msgpack.unpackb(data)
            if version != _VERSION:
                raise InvalidSchedule(f"a stored timer has version {version!r}; this Mainspring knows {_VERSION}")
            mode, start_ms, every_ms, cron, tz, misfire, retry, jitter_ms, method, payload = rest
            return cls(
                mode=_at(_MODES, mode),
                start_ms=start_ms,
                every_ms=every_ms,
                cron=cron,
                tz=tz,
                misfire=_at(_MISFIRES, misfire),
                retry=_retry_policy(*retry),
                jitter_ms=jitter_ms,
                method=method,
                payload=payload,
            )
        except InvalidSchedule:
            raise
        except Exception as error:  # msgpack and unpacking have many errors for damaged bytes
            raise InvalidSchedule(f"a stored timer can't be read: {type(error).__name__}: {error}") from error

    def _cron(self) -> CronSchedule:
        return parse_cron(self.cron, self.tz)


@lru_cache(maxsize=1_024)
def _read_short(data: bytes) -> TimerSpec:
    """Recurring timers are read at each of their fires, and their stored form stays the same."""
    return TimerSpec._read(data)


@lru_cache(maxsize=256, typed=True)
def _retry_policy(*fields: Any) -> RetryPolicy:
    """An application has a handful of these, and very many timers."""
    return RetryPolicy(*fields)


@dataclass(frozen=True)
class Advance:
    """What follows from an occurrence that has come due.

    `run`: whether it runs at all. `next_due_ms`: the next occurrence, None after a one-shot. `missed`: occurrences
    that will never run; with `run=False` the one at hand is among them, and they belong to the next run's account.
    """

    run: bool
    next_due_ms: int | None
    missed: int


def advance(spec: TimerSpec, due_ms: int, now_ms: int, limit: int) -> Advance:
    """Decide about the occurrence `due_ms` that is seen at `now_ms`, for its first try (a retry always runs).

    One-shots always run. For recurring timers, by `spec.misfire`:

    - "coalesce": it runs; later occurrences that have come meanwhile do not.
    - "skip": it runs if the next occurrence has not come yet, so one that is late by less than a period still runs.
      Otherwise neither it nor the others that have come meanwhile run: the timer waits for the next one.
    - "all": it runs, and so do the later ones, each in its turn; when more than `limit` are waiting, the oldest of
      those are left out.

    Runs and missed occurrences together are all occurrences. Raises `InvalidSchedule` if `limit` is below 1 or if
    `due_ms` is later than `now_ms`.
    """
    if limit < 1:
        raise InvalidSchedule(f"the limit of runs to catch up with must be at least 1, not {limit}")
    if due_ms > now_ms:
        raise InvalidSchedule(f"an occurrence due at {due_ms} ms was handled early, at {now_ms} ms")
    if not spec.recurring:
        return Advance(True, None, 0)
    following = spec.next_after(due_ms)
    if following > now_ms:
        return Advance(True, following, 0)
    waiting = spec.count(due_ms, now_ms)
    if spec.misfire == "coalesce":
        return Advance(True, spec.next_after(now_ms), waiting)
    if spec.misfire == "skip":
        return Advance(False, spec.next_after(now_ms), waiting + 1)
    if waiting <= limit:
        return Advance(True, following, 0)
    return Advance(True, _last(spec, due_ms, now_ms, limit), waiting - limit)


def _last(spec: TimerSpec, low_ms: int, now_ms: int, limit: int) -> int:
    """The first of the last `limit` occurrences up to `now_ms`, of which more than that are later than `low_ms`."""
    if spec.mode == "every":
        return spec.next_after(now_ms) - limit * spec.every_ms
    # Bisection: more than `limit` are later than low, at most `limit` are later than high.
    high_ms = now_ms
    while high_ms - low_ms > 1:
        middle = (low_ms + high_ms) // 2
        if spec.count(middle, now_ms) > limit:
            low_ms = middle
        else:
            high_ms = middle
    return spec.next_after(high_ms)


def make_spec(
    now_ms: int,
    *,
    at: Any = None,
    after: Any = None,
    every: Any = None,
    cron: str | None = None,
    tz: str | None = None,
    misfire: Misfire = "coalesce",
    retry: RetryPolicy = NAMED_TIMER_RETRY,
    jitter_ms: int = 0,
    method: str = "",
    payload: bytes = b"",
) -> TimerSpec:
    """A timer from what an application says at `now_ms`; exactly one of `at`, `after`, `every` and `cron`.

    `at` is read by `parse_when_ms`, `after` and `every` by `parse_duration_ms`. Raises `InvalidSchedule`.
    """
    given = [
        name for name, value in (("at", at), ("after", after), ("every", every), ("cron", cron)) if value is not None
    ]
    if len(given) != 1:
        raise InvalidSchedule(f"give exactly one of at, after, every and cron, not {' and '.join(given) or 'none'}")
    mode: Mode = given[0]  # type: ignore[assignment]
    start_ms, every_ms = now_ms, 0
    if mode == "at":
        start_ms = parse_when_ms(at, now_ms)
    elif mode == "after":
        start_ms = now_ms + parse_duration_ms(after)
    elif mode == "every":
        every_ms = parse_duration_ms(every)
    return TimerSpec(
        mode=mode,
        start_ms=start_ms,
        every_ms=every_ms,
        cron=" ".join(cron.split()) if isinstance(cron, str) else cron or "",
        tz=tz,
        misfire=misfire,
        retry=retry,
        jitter_ms=jitter_ms,
        method=method,
        payload=payload,
    )


def parse_when_ms(value: Any, now_ms: int) -> int:
    """An instant in epoch milliseconds, rounded upward.

    An int is epoch milliseconds, a datetime must be aware, a timedelta or a text such as "30m" counts from `now_ms`.
    An instant in the past is fine (it is due at once). Raises `InvalidSchedule` for anything else, also for floats
    (seconds or milliseconds?), naive datetimes (which zone?) and instants before 1970 or after year 9999.
    """
    if isinstance(value, dt.datetime):
        if value.utcoffset() is None:
            raise InvalidSchedule(f"{value!r} has no time zone; use an aware datetime")
        when = _ceil_ms(value - _EPOCH)
    elif isinstance(value, int) and not isinstance(value, bool):
        when = int(value)
    elif isinstance(value, (str, dt.timedelta)):
        when = now_ms + parse_duration_ms(value)
    else:
        raise InvalidSchedule(
            f"a time is epoch milliseconds (int), an aware datetime, a timedelta or a text such as '30m', not {value!r}"
        )
    _require_ms("time", when, least=1)
    return when


def parse_duration_ms(value: Any) -> int:
    """A span in milliseconds, rounded upward: a timedelta, or a text such as "250ms", "1h30m", "1.5h" or "7d".

    Units are w, d, h, m, s and ms, largest first, each at most once. Raises `InvalidSchedule` for anything else:
    bare numbers have no unit, and a span is not negative.
    """
    if isinstance(value, dt.timedelta):
        span = _ceil_ms(value)
    elif isinstance(value, str):
        match = _DURATION.fullmatch(value.strip().lower())
        if match is None or not any(match.groups()):
            raise InvalidSchedule(f"{value!r} is not a duration; write '30m', '1h30m', '250ms' or '7d'")
        amounts = zip(match.groups(), _UNITS_MS.values(), strict=True)
        span = ceil(sum(Fraction(amount) * unit for amount, unit in amounts if amount))
    else:
        raise InvalidSchedule(f"a duration is a timedelta or a text such as '30m', not {value!r}")
    _require_ms("duration", span, least=0)
    return span


def _ceil_ms(span: dt.timedelta) -> int:
    return -(-span // dt.timedelta(milliseconds=1))


def _require_ms(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidSchedule(f"{name} is a whole number of milliseconds, not {value!r}")
    if not least <= value <= MAX_EPOCH_MS:
        raise InvalidSchedule(f"{name} of {value} ms is outside {least}..{MAX_EPOCH_MS}")


def _at(names: tuple[Any, ...], index: Any) -> Any:
    if not isinstance(index, int) or not 0 <= index < len(names):
        raise InvalidSchedule(f"a stored timer names choice {index!r} of {', '.join(names)}")
    return names[index]
