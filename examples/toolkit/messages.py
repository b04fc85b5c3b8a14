"""A shop that sends messages instead of waiting: `python -m examples.toolkit.messages`."""

from __future__ import annotations

import asyncio

from actors import DurableObject, Rejected, RetryPolicy
from actors.testing import LocalRuntime


class Order(DurableObject):
    """Somebody's order. Its turns call nobody, so they are fast and succeed whatever the others do."""

    def place(self, article: str) -> None:
        """The state and both messages are one commit: if anything here raised, none of them would exist."""
        self.storage["article"] = article
        self.send(Warehouse, "main", retry=RetryPolicy(max_attempts=5)).pack(self.key, article)
        self.send(Mailer, "main").after("3d").ask_how_it_was(self.key)

    def packed(self) -> None:
        """The warehouse sends this back."""
        self.storage["packed"] = True
        self.send(Mailer, "main").tell(self.key, f"your {self.storage['article']} is on its way")


class Warehouse(DurableObject):
    """Gets its messages in the order in which each order sent them, each applied once."""

    def fill(self, count: int) -> None:
        """New goods have come."""
        self.storage["count"] = self.storage.get("count", 0) + count

    def pack(self, order: str, article: str) -> None:
        """Refuses when nothing is there; the message comes again after a while."""
        left = self.storage.get("count", 0) - 1
        if left < 0:
            raise Rejected(f"no {article} for {order}")
        self.storage["count"] = left
        self.send(Order, order).packed()


class Mailer(DurableObject):
    """Writes down what it would have mailed."""

    def tell(self, order: str, text: str) -> None:
        """One mail."""
        self.storage["mails"] = [*self.storage.get("mails", []), f"{order}: {text}"]

    def ask_how_it_was(self, order: str) -> None:
        """Another, three days after the order."""
        self.tell(order, "how was it?")

    def mails(self) -> list[str]:
        """All mails so far."""
        return list(self.storage.get("mails", []))


async def main() -> list[str]:
    """Two orders, goods for one of them at first, and a crash in between; what was mailed, and what never will be."""
    async with LocalRuntime() as runtime:
        orders, warehouse = runtime.namespace(Order), runtime.namespace(Warehouse).get("main")
        await warehouse.fill(1)
        await orders.get("alice").place("lamp")
        await orders.get("bob").place("chair")
        await runtime.run_until_idle()  # alice's is packed; bob's was refused and will be tried again
        await runtime.crash()
        await warehouse.fill(1)
        await orders.get("carol").place("desk")
        await runtime.advance(days=4)
        mails: list[str] = await runtime.namespace(Mailer).get("main").mails()
        dead = [f"{letter.key} -> {letter.name}: given up" for letter in await runtime.dead_letters()]
        return [*mails, *dead]


if __name__ == "__main__":
    print("\n".join(asyncio.run(main())))
