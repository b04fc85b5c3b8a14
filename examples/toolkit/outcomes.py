"""Orders tell an audit what has become of them, once each: `python -m examples.toolkit.outcomes`."""

from __future__ import annotations

import asyncio

from actors import DurableObject, Outcome
from actors.testing import LocalRuntime


class Audit(DurableObject):
    """Keeps what it is told. It fails now and then; nothing is lost or doubled by that."""

    def record(self, outcome: Outcome) -> None:
        """The sink: one turn, in effect once for each outcome."""
        self.storage[outcome.id] = f"{outcome.source[1]} {outcome.kind} {outcome.payload}"
        if self.turn.random.randrange(2):
            raise RuntimeError("not today")  # what is written above has never happened, and the outcome comes again

    def entries(self) -> list[str]:
        """What it was told."""
        return sorted(self.storage.list().values())


class Order(DurableObject):
    """Somebody's order."""

    outcome_sink = (Audit, "main", "record")

    def pay(self, amount: int) -> None:
        """The state and the outcome are one commit."""
        self.storage["paid"] = amount
        self.outcomes.add("paid", amount)


async def main() -> list[str]:
    """Pay three orders through a crash; what the audit was told."""
    async with LocalRuntime() as runtime:
        orders = runtime.namespace(Order)
        for number in (1, 2, 3):
            await orders.get(f"order-{number}").pay(10 * number)
        await runtime.crash()
        await runtime.advance(hours=1)
        entries: list[str] = await runtime.namespace(Audit).get("main").entries()
        return entries


if __name__ == "__main__":
    print("\n".join(asyncio.run(main())))
