"""An event on asyncio and a clock, virtual or real: what durable sleeps and promises wait with."""

from __future__ import annotations

import asyncio

from drivers.clock import Clock

__all__ = ["LoopEvent"]


class LoopEvent:
    """A `timers.durable_sleep.WaitEvent`. Has one waiter at a time."""

    __slots__ = ("_clock", "_future", "_is_set")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._is_set = False
        self._future: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        self._wake()

    def _wake(self) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout_ms: int) -> None:
        """Return once it is set, or after `timeout_ms` of monotonic time."""
        if self._is_set:
            return
        self._future = asyncio.get_running_loop().create_future()
        handle = self._clock.call_later(timeout_ms, self._wake)
        try:
            await self._future
        finally:
            handle.cancel()
            self._future = None
