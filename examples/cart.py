"""Two durable objects: the shelf of an article and the cart of a customer. `examples.quickstart` uses them."""

from __future__ import annotations

from actors import DurableObject, Rejected, TimerInfo, shared

__all__ = ["Cart", "OutOfStock", "Shelf"]


class OutOfStock(Rejected):
    """There are not so many of it."""


class Shelf(DurableObject):
    """What is there of one article."""

    def fill(self, count: int) -> int:
        """Put some there."""
        self.storage["count"] = self.storage.get("count", 0) + count
        return int(self.storage["count"])

    def take(self, count: int) -> int:
        """Take some away. Raises `OutOfStock`, and then nothing has changed."""
        left = int(self.storage.get("count", 0)) - count
        self.storage["count"] = left
        if left < 0:
            raise OutOfStock(f"{self.key}: {count} wanted, {left + count} there")
        return left


class Cart(DurableObject):
    """One customer's cart. It is reminded of itself when nothing has been added for half an hour."""

    def add(self, sku: str, count: int = 1) -> int:
        """Put something in; gives how many of it are in the cart now."""
        total = int(self.storage.get(f"item/{sku}", 0)) + count
        self.storage[f"item/{sku}"] = total
        self.timers.set("abandoned", after="30m", method="on_abandoned")
        return total

    @shared
    def items(self) -> dict[str, int]:
        """What is in the cart."""
        return {key.removeprefix("item/"): count for key, count in self.storage.list(prefix="item/").items()}

    @shared
    def reminders(self) -> int:
        """How often the customer was reminded."""
        return int(self.storage.get("reminders", 0))

    async def check_out(self) -> dict[str, int]:
        """Take everything from the shelves and empty the cart.

        If a process dies in the middle, this runs again and each shelf gives the answer that it gave the first time.
        """
        items = self.items()
        for sku, count in items.items():
            await self.namespace(Shelf).get(sku).take(count)
        self.storage.delete_all()
        return items

    def on_abandoned(self, timer: TimerInfo) -> None:
        """Runs half an hour after the last `add`, also when the machine was off in between."""
        self.storage["reminders"] = self.reminders() + 1
