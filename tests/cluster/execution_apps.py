"""Durable functions for the cluster tests: in a module that worker processes import."""

from __future__ import annotations

import os
import signal
from typing import Any

from actors.durable_object import DurableObject, shared
from actors.workflow import DurableContext, durable

__all__ = ["PRICE", "STEPS", "Bank", "Fuse", "Order"]

PRICE = 7
STEPS = ("pick", "charge", "ask", "ship")


class Bank(DurableObject):
    """Counts what it was asked for, by who asked: a loss or a repeat shows."""

    def charge(self, who: str, amount: int) -> int:
        total: int = self.storage.get(who, 0) + amount
        self.storage.put(who, total)
        return total

    @shared
    def charged(self) -> dict[str, int]:
        return dict(self.storage.list())


class Order(DurableObject):
    """Several orders, each an execution. Each step counts its runs in the state."""

    def _count(self, order: str, step: str) -> None:
        key = f"{step} {order}"
        self.storage.put(key, self.storage.get(key, 0) + 1)

    def pick(self, order: str) -> str:
        self._count(order, "pick")
        return f"goods of {order}"

    async def charge(self, order: str, bank: str) -> int:
        self._count(order, "charge")
        total: int = await self.namespace(Bank).get(bank).charge(order, PRICE)
        return total

    def ask(self, order: str, token: str) -> None:
        self._count(order, "ask")
        self.storage.put(f"token {order}", token)

    async def ship(self, order: str, bank: str, approval: str) -> str:
        self._count(order, "ship")
        await self.namespace(Bank).get(bank).charge(f"shipping {order}", 1)
        return f"{order}: {approval}"

    @durable
    async def fulfil(self, ctx: DurableContext, order: str, bank: str, pause: str) -> list[Any]:
        goods = await ctx.step("pick", self.pick, order)
        charged = await ctx.step("charge", self.charge, order, bank)
        approval = ctx.promise("approved")
        await ctx.step("ask", self.ask, order, approval.token)
        await ctx.sleep(pause)
        shipped = await ctx.step("ship", self.ship, order, bank, await approval)
        return [goods, charged, shipped]

    @shared
    def counts(self) -> dict[str, int]:
        """Runs by step and order."""
        return {key: value for key, value in self.storage.list().items() if not key.startswith("token ")}

    @shared
    def tokens(self) -> dict[str, str]:
        """Tokens of the promises that wait, by order."""
        return {key.removeprefix("token "): value for key, value in self.storage.list(prefix="token ").items()}


class Fuse(DurableObject):
    """Ends its process in a step."""

    @durable
    async def burns_once(self, ctx: DurableContext) -> str:
        await ctx.step("burn", self.burn, effect="guarded", ambiguous="skip")
        return "skipped"

    def burn(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
