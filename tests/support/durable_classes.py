"""Durable objects for the cluster tests: in a module that worker processes import."""

from __future__ import annotations

import os
import time

from actors.durable_object import DurableObject


class Counter(DurableObject):
    """Counts, and tells where it lives."""

    def add(self, amount: int = 1) -> int:
        total: int = self.storage.get("total", 0) + amount
        self.storage.put("total", total)
        return total

    def value(self) -> int:
        total: int = self.storage.get("total", 0)
        return total

    def pid(self) -> int:
        return os.getpid()

    async def add_to(self, key: str, amount: int) -> int:
        """Adds to another counter, wherever that one lives."""
        total: int = await self.namespace(Counter).get(key).add(amount)
        return total

    def block(self, seconds: float) -> None:
        """Does what an object must not do."""
        time.sleep(seconds)


class SecondCounter(DurableObject):
    """Has the name of another class."""

    type_name = "Counter"
