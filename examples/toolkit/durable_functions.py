"""Orders that take days to fulfil: `python -m examples.toolkit.durable_functions`."""

from __future__ import annotations

import asyncio
from typing import Any

from actors import DurableContext, DurableObject, RetryPolicy, durable
from actors.errors import PromiseTimeout
from actors.testing import LocalRuntime

#: The card company is down now and then.
PATIENTLY = RetryPolicy(max_attempts=5, base_ms=60_000, jitter=0)


class CardDown(Exception):
    """Worth another try. A `Rejected` would be a "no", and end the step."""


class Card(DurableObject):
    """Somebody's credit card."""

    def charge(self, amount: int) -> int:
        """What was charged in all. Fails at first."""
        if not self.storage.get("is up"):
            raise CardDown("try again later")
        total: int = self.storage.get("charged", 0) + amount
        self.storage["charged"] = total
        return total

    def repair(self) -> None:
        """From now on it works."""
        self.storage["is up"] = True

    def charged(self) -> int:
        """What was charged in all."""
        return int(self.storage.get("charged", 0))


class Desk(DurableObject):
    """Where people approve orders; a token lets its holder do that, once."""

    def ask(self, order: str, token: str) -> None:
        """Put an order on the desk."""
        self.storage[order] = token

    def token(self, order: str) -> str:
        """The token of an order that waits."""
        return str(self.storage[order])


class Order(DurableObject):
    """One order. `fulfil` may take longer than any process lives."""

    @durable
    async def fulfil(self, ctx: DurableContext, article: str, price: int) -> str:
        """A charge, a day until it ships, somebody's approval, a receipt."""
        await ctx.step("charge", self.charge, price, retry=PATIENTLY)
        await ctx.sleep("1d")
        approved = ctx.promise("approved", timeout="7d")
        await ctx.step("ask", self.ask, approved.token)
        try:
            by = await approved
        except PromiseTimeout:
            await ctx.step("refund", self.charge, -price, retry=PATIENTLY)
            return f"{article}: nobody approved it, {price} are paid back"
        return str(await ctx.step("receipt", self.receipt, f"{article}: {price}, approved by {by}"))

    async def charge(self, amount: int) -> Any:
        """A step: called once in effect, also when a process dies in it."""
        return await self.namespace(Card).get("visa").charge(amount)

    async def ask(self, token: str) -> None:
        """Another one."""
        await self.namespace(Desk).get("main").ask(self.key, token)

    def receipt(self, text: str) -> str:
        """What a step writes is durable with its result."""
        self.storage["receipt"] = text
        return text


async def main() -> list[str]:
    """Two orders, one of them approved; crashes at the worst moments."""
    async with LocalRuntime(partitions=2) as runtime:
        orders, card = runtime.namespace(Order), runtime.namespace(Card).get("visa")
        lamp = await orders.get("lamp-1").fulfil.start("lamp", 40, execution_id="first")
        chair = await orders.get("chair-1").fulfil.start("chair", 60, execution_id="first")
        await runtime.advance(seconds=10)  # both charges failed, and will be tried again
        await runtime.crash()
        await card.repair()
        await runtime.advance(hours=1)
        status = await lamp.status()
        lines = [f"charged: {await card.charged()}; the lamp is {status.status} and waits for {status.waits_for}"]
        await runtime.crash()
        await runtime.advance(days=1)
        token = await runtime.namespace(Desk).get("main").token("lamp-1")
        lines.append(f"resolved: {await orders.resolve_promise(token, 'ann')}")
        lines.append(f"resolved again: {await orders.resolve_promise(token, 'bob')}")
        await runtime.advance(seconds=1)
        lines.append(await lamp.result())  # kept for a week; afterwards the execution is forgotten
        await runtime.advance(days=8)
        lines += [await chair.result(), f"charged: {await card.charged()}"]
        return lines


if __name__ == "__main__":
    print("\n".join(asyncio.run(main())))
