"""Payments that are authorised first and captured later, or given up: `python -m examples.toolkit.reservations`."""

from __future__ import annotations

import asyncio

from actors import DurableObject, Outcome
from actors.errors import IllegalTransition
from actors.testing import LocalRuntime


class Ledger(DurableObject):
    """Is told once what became of each payment."""

    def record(self, outcome: Outcome) -> None:
        """The sink."""
        self.storage[outcome.subject] = f"{outcome.kind} ({outcome.reason}): {outcome.payload}"

    def lines(self) -> list[str]:
        """What it was told."""
        return [f"{payment} {text}" for payment, text in self.storage.list().items()]


class Account(DurableObject):
    """Money, and what of it is set aside."""

    outcome_sink = (Ledger, "main", "record")

    def authorise(self, payment: str, amount: int) -> None:
        """Set money aside for five minutes."""
        self.reservations.hold(payment, deadline="5m", payload=amount)

    def capture(self, payment: str) -> None:
        """Take it. Raises `IllegalTransition` when it was given up meanwhile."""
        amount = self.reservations.commit(payment).payload
        self.storage["balance"] = self.storage.get("balance", 100) - amount

    def cancel(self, payment: str) -> None:
        """Give it up."""
        self.reservations.abort(payment, detail="the customer changed their mind")

    def balance(self) -> int:
        """What is left."""
        balance: int = self.storage.get("balance", 100)
        return balance


async def main() -> list[str]:
    """One payment is captured, one cancelled, one comes too late."""
    async with LocalRuntime() as runtime:
        account = runtime.namespace(Account).get("ann")
        for payment, amount in (("p1", 10), ("p2", 20), ("p3", 30)):
            await account.authorise(payment, amount)
        await account.capture("p1")
        await account.cancel("p2")
        await runtime.crash()
        await runtime.advance(minutes=5)
        lines: list[str] = []
        try:
            await account.capture("p3")
        except IllegalTransition as refusal:
            lines.append(f"too late: p3 is {refusal.state} ({refusal.reason})")
        lines += await runtime.namespace(Ledger).get("main").lines()
        return [*lines, f"balance: {await account.balance()}"]


if __name__ == "__main__":
    print("\n".join(asyncio.run(main())))
