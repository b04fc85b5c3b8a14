"""What steps of durable functions may do and how they are asked for: cases that are easily got wrong."""

from __future__ import annotations

from typing import Any

import pytest

from actors import DurableContext, DurableObject, durable
from actors.errors import InvalidOption, TransactionClosed
from actors.testing import LocalRuntime


class Wiper(DurableObject):
    """Fills its storage and wipes it, in steps."""

    def fill(self) -> None:
        self.storage.put_many({"a": 1, "b": 2})
        self.timers.set("t", after="1d", method="on_timer")

    def wipe(self) -> dict[str, Any]:
        self.storage.delete_all()
        self.storage.put("left", 1)
        return self.storage.list()

    def wipe_and_fail(self) -> None:
        self.storage.delete_all()
        raise ValueError("after the wipe")

    def wipe_in_a_transaction(self) -> None:
        with self.storage.transaction():
            self.storage.delete_all()

    def on_timer(self, timer: Any) -> None:
        self.storage.put("rang", 1)

    def look(self) -> tuple[dict[str, Any], list[str]]:
        return self.storage.list(), [timer.name for timer in self.timers.list()]

    @durable
    async def run(self, ctx: DurableContext, how: str) -> Any:
        await ctx.step("fill", self.fill)
        result = await ctx.step(how, getattr(self, how))
        await ctx.sleep("2d")
        return result

    @durable
    async def retried(self, ctx: DurableContext, retry: Any) -> None:
        await ctx.step("fill", self.fill, retry=retry)


async def test_delete_all_is_a_part_of_its_step_and_leaves_the_execution() -> None:
    async with LocalRuntime(memory=True) as runtime:
        wiper = runtime.namespace(Wiper).get("w")
        handle = await wiper.run.start("wipe")
        await runtime.advance(days=1)
        assert await wiper.look() == ({"left": 1}, [])
        await runtime.advance(days=1)
        assert await handle.result() == {"left": 1}


async def test_a_delete_all_is_undone_with_a_step_that_fails() -> None:
    async with LocalRuntime(memory=True) as runtime:
        wiper = runtime.namespace(Wiper).get("w")
        handle = await wiper.run.start("wipe_and_fail")
        await runtime.run_until_idle()
        with pytest.raises(ValueError, match="after the wipe"):
            await handle.result()
        assert await wiper.look() == ({"a": 1, "b": 2}, ["t"])


async def test_delete_all_inside_a_transaction_of_a_step_is_refused_as_everywhere() -> None:
    async with LocalRuntime(memory=True) as runtime:
        handle = await runtime.namespace(Wiper).get("w").run.start("wipe_in_a_transaction")
        await runtime.run_until_idle()
        with pytest.raises(TransactionClosed):
            await handle.result()


@pytest.mark.parametrize("retry", [3, "often", {"max_attempts": 3}])
async def test_a_retry_that_is_no_policy_is_refused_before_anything_runs(retry: Any) -> None:
    async with LocalRuntime(memory=True) as runtime:
        wiper = runtime.namespace(Wiper).get("w")
        handle = await wiper.retried.start(retry)
        await runtime.run_until_idle()
        with pytest.raises(InvalidOption, match="RetryPolicy"):
            await handle.result()
        assert await wiper.look() == ({}, [])
