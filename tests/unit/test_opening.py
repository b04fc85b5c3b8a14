"""What can't be opened yet is looked at again, and says why meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from actors.errors import DataMissing
from actors.opening import Opening


async def test_whoever_asks_waits_for_the_first_attempt() -> None:
    gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def attempt() -> str:
        return await gate

    opening = Opening("x", attempt)
    running = asyncio.ensure_future(opening.run())
    asking = asyncio.ensure_future(opening.get())
    await asyncio.sleep(0)
    assert not asking.done()
    assert opening.opened is None
    gate.set_result("open")
    assert await asking == "open"
    assert await running == "open"
    assert opening.opened == "open"


async def test_a_failed_attempt_is_told_at_once_and_tried_again_until_it_works() -> None:
    results: list[Exception | str] = [DataMissing("gone"), DataMissing("gone"), "open"]
    tries: asyncio.Queue[None] = asyncio.Queue()

    async def attempt() -> str:
        tries.put_nowait(None)
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    opening = Opening("x", attempt, retry_s=0.001)
    running = asyncio.ensure_future(opening.run())
    await tries.get()
    with pytest.raises(DataMissing):
        await opening.get()
    assert await running == "open"
    assert await opening.get() == "open"
