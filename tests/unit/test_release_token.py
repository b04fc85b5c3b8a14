"""Release tokens for asyncio: the loop is never blocked, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from drivers.release_token import wait_released
from tests.support.wheels import MS, SECOND, wheel
from timers.errors import ReleaseTimerClosed
from timers.release_timer import ReleaseToken

PATIENCE_S = 30.0


async def test_a_coroutine_waits_until_its_token_is_released_and_never_less() -> None:
    with wheel() as timer:
        tokens = [timer.arm_at(time.monotonic_ns() + number * MS) for number in range(1, 30)]

        async def look(token: ReleaseToken) -> int:
            await wait_released(token)
            return time.monotonic_ns() - token.at_ns

        late = await asyncio.wait_for(asyncio.gather(*map(look, tokens)), PATIENCE_S)
        assert min(late) >= 0


async def test_a_token_that_was_released_before_is_there_at_once() -> None:
    await wait_released(ReleaseToken.of_the_past(0))


async def test_who_waits_for_a_wheel_that_is_closed_is_told() -> None:
    with wheel() as timer:
        token = timer.arm_at(time.monotonic_ns() + 3_600 * SECOND)
        waiting = asyncio.ensure_future(wait_released(token))
        await asyncio.sleep(0)
        timer.close()
        with pytest.raises(ReleaseTimerClosed, match="closed before the deadline"):
            await asyncio.wait_for(waiting, PATIENCE_S)


async def test_a_wait_that_is_cancelled_leaves_nothing_behind() -> None:
    with wheel() as timer:
        token = timer.arm_at(time.monotonic_ns() + 3_600 * SECOND)
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wait_released(token), 0.001)
        assert token._callbacks == []


def test_a_loop_that_was_closed_meanwhile_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    token = ReleaseToken(0)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(wait_released(token))
    loop.run_until_complete(asyncio.sleep(0))
    (callback,) = token._callbacks
    waiting.cancel()
    loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
    loop.close()
    token.when_ended(callback)  # as if it had been released in the moment of closing
    token._end(released=True)
    assert "a release callback failed" not in caplog.text
