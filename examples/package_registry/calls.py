"""Many calls at once, but not too many; and how long they took."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

__all__ = ["Caller", "all_of", "percentile"]


class Caller:
    """Makes calls, at most `in_flight` at a time, and counts every one of them by the method's name."""

    def __init__(self, in_flight: int) -> None:
        self._slots = asyncio.Semaphore(in_flight)
        self.made: Counter[str] = Counter()
        self.seconds: list[float] = []

    @property
    def total(self) -> int:
        return sum(self.made.values())

    async def call(self, name: str, method: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Call and wait. Raises what the method raises."""
        async with self._slots:
            self.made[name] += 1
            began = time.perf_counter()
            try:
                return await method(*args)
            finally:
                self.seconds.append(time.perf_counter() - began)


async def all_of(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run everything to its end, then raise the first error there was."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def percentile(values: list[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed; 0 when there is none."""
    if not values:
        return 0.0
    rank = math.ceil(len(values) * percent / 100)
    return sorted(values)[max(rank, 1) - 1]
