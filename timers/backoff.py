"""Delays between tries: the engine's own retry ladder, and the policies of what runs user code."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Final

from timers.errors import InvalidSchedule

__all__ = [
    "ALARM_RETRY",
    "MAX_RETRY_BACKOFF_MS",
    "MESSAGE_RETRY",
    "NAMED_TIMER_RETRY",
    "RETRY_BACKOFF_MS",
    "RetryPolicy",
    "retry_delay_ms",
]

#: First rung of the engine's ladder, and how soon a tick that could do nothing looks again.
RETRY_BACKOFF_MS: Final = 5_000

#: Last rung: a kind that fails for hours is still tried six times an hour, so it heals soon after its cause does.
MAX_RETRY_BACKOFF_MS: Final = 600_000

#: From this many doublings on the ladder is at its cap (5 s x 2^7 > 600 s); bounds the shift for any attempt.
_DOUBLINGS_TO_CAP: Final = 7


def _require_attempt(attempt: int) -> None:
    if attempt < 1:
        raise InvalidSchedule(f"attempt {attempt}: the first failure is attempt 1")


def _require_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidSchedule(f"retry policy: {name} must be a whole number of at least {least}, not {value!r}")


def _require_number(name: str, value: object, least: float, most: float) -> None:
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not math.isfinite(value)
        or not least <= value <= most
    ):
        raise InvalidSchedule(f"retry policy: {name} must be a finite number in {least}..{most}, not {value!r}")


def retry_delay_ms(attempt: int) -> int:
    """The engine's delay in ms after the `attempt`-th failure (1-based): 5, 10, 20 ... 320, 600, 600 s.

    Raises `InvalidSchedule` when `attempt` is below 1.
    """
    _require_attempt(attempt)
    return min(RETRY_BACKOFF_MS << min(attempt - 1, _DOUBLINGS_TO_CAP), MAX_RETRY_BACKOFF_MS)


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and after which delays, failed user code is run again. Plain data: it is stored with its timer.

    `max_attempts` counts all runs, the first one too. The delay before run n+1 is `base_ms * factor**(n-1)`, at
    most `cap_ms`, and then up to `jitter` (a fraction, 0..1) of itself later: jitter never makes a retry earlier,
    and it spreads capped delays as well, so a delay may exceed `cap_ms` by that fraction.

    Raises `InvalidSchedule` when a field makes no sense.
    """

    max_attempts: int = 7
    base_ms: int = 2_000
    factor: float = 2.0
    cap_ms: int = 600_000
    jitter: float = 0.25

    def __post_init__(self) -> None:
        _require_int("max_attempts", self.max_attempts, 1)
        _require_int("base_ms", self.base_ms, 1)
        _require_int("cap_ms", self.cap_ms, self.base_ms)
        _require_number("factor", self.factor, 1.0, math.inf)
        _require_number("jitter", self.jitter, 0.0, 1.0)

    def is_exhausted(self, attempt: int) -> bool:
        """True when `attempt` failed runs have used up the policy."""
        return attempt >= self.max_attempts

    def ladder_ms(self, attempt: int) -> int:
        """The delay in ms after the `attempt`-th failure (1-based), without jitter, rounded up.

        Raises `InvalidSchedule` when `attempt` is below 1.
        """
        _require_attempt(attempt)
        try:
            delay = self.base_ms * float(self.factor) ** (attempt - 1)
        except OverflowError:
            return self.cap_ms
        if delay >= self.cap_ms:
            return self.cap_ms
        # Rounded to the microsecond first: 1,000 x 1.1 is 1100.0000000000002 as a float, and means 1,100.
        return min(math.ceil(round(delay, 3)), self.cap_ms)

    def delay_ms(self, attempt: int, seed: bytes) -> int:
        """The delay in ms after the `attempt`-th failure (1-based), with jitter.

        The jitter is drawn from a hash of `seed` and `attempt`: the same timer gets the same delay whoever computes
        it, and timers that failed together spread out. Raises `InvalidSchedule` when `attempt` is below 1.
        """
        ladder = self.ladder_ms(attempt)
        widest = int(ladder * self.jitter)
        digest = hashlib.sha256(b"retry\0%d\0" % attempt + seed).digest()
        # A 64-bit fraction times (widest + 1), shifted down, is spread evenly over 0..widest.
        return ladder + ((widest + 1) * int.from_bytes(digest[:8], "big") >> 64)


#: The one alarm of an object: seven runs over about two minutes, then the dead letters.
ALARM_RETRY: Final = RetryPolicy(max_attempts=7)

#: Named timers are retried as alarms are.
NAMED_TIMER_RETRY: Final = RetryPolicy(max_attempts=7)

#: Messages wait for other objects, which may be down longer than a handler of our own: ten runs.
MESSAGE_RETRY: Final = RetryPolicy(max_attempts=10, cap_ms=600_000)
