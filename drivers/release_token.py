"""Release tokens for asyncio: waiting for one without blocking the loop."""

from __future__ import annotations

import asyncio
import contextlib

from timers.errors import ReleaseTimerClosed
from timers.release_timer import ReleaseToken

__all__ = ["wait_released"]


async def wait_released(token: ReleaseToken) -> None:
    """Wait on the running loop until the token is released. Raises `ReleaseTimerClosed` when it is abandoned."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def set_ended() -> None:
        if not ended.done():
            ended.set_result(None)

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(set_ended)

    token.when_ended(wake)
    try:
        await ended
    finally:
        token.forget(wake)
    if not token.released:
        raise ReleaseTimerClosed("the release timer was closed before the deadline")
