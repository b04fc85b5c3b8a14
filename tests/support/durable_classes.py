"""Durable objects for the cluster tests: in a module that worker processes import."""

from __future__ import annotations

import os
import time

from actors.durable_object import DurableObject
from actors.toolkit.publications import Advance


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


class Publisher(DurableObject):
    """Publishes one thing after that of others, and counts how often it hears of it."""

    def advance(self, needs: list[str]) -> Advance:
        return self.publications.advance(items=["thing"], depends_on=[(Publisher, key, "thing") for key in needs])

    def get(self) -> Advance:
        return self.publications.get(1)

    def on_published(self, advance: Advance) -> None:
        self.storage.put("heard", self.heard() + 1)

    def heard(self) -> int:
        heard: int = self.storage.get("heard", 0)
        return heard

    def process(self) -> int:
        return os.getpid()
