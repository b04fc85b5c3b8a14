"""Seats that are kept for ten minutes: `python -m examples.toolkit.tickets`."""

from __future__ import annotations

import asyncio

from actors import DurableObject, Outcome, Rejected, Ticket
from actors.testing import LocalRuntime


class SoldOut(Rejected):
    """There are not so many seats left."""


class Show(DurableObject):
    """One evening in the theatre."""

    outcome_sink = "on_expired"
    seats = 100

    def keep(self, customer: str, count: int) -> Ticket:
        """Keep seats; asking again gives the same ticket. Raises `SoldOut`."""
        ticket = self.tickets.open(f"seats of {customer}", ttl="10m", size=count, holder=customer)
        if self.tickets.usage().size + self.storage.get("sold", 0) > self.seats:
            raise SoldOut(f"{count} seats for {customer}")  # and the ticket was never opened
        return ticket

    def buy(self, ticket_id: str) -> int:
        """Take the seats of a ticket. Raises `TicketGone` after ten minutes."""
        ticket = self.tickets.consume(ticket_id)
        sold: int = self.storage.get("sold", 0) + ticket.size
        self.storage["sold"] = sold
        return sold

    def on_expired(self, outcome: Outcome) -> None:
        """Called once for each ticket that nobody used."""
        self.storage["expired"] = [*self.storage.get("expired", []), outcome.detail]

    def expired(self) -> list[str]:
        """Whose seats are free again."""
        expired: list[str] = self.storage.get("expired", [])
        return expired


async def main() -> list[str]:
    """Two customers keep seats, one of them buys; what the show has to say."""
    async with LocalRuntime() as runtime:
        show = runtime.namespace(Show).get("hamlet")
        ann = await show.keep("ann", 60)
        await show.keep("bob", 40)
        lines = [f"sold: {await show.buy(ann.id)}"]
        try:
            await show.keep("eve", 1)
        except SoldOut as refusal:
            lines.append(f"sold out: {refusal}")
        await runtime.crash()
        await runtime.advance(minutes=11)
        lines.append(f"expired: {', '.join(await show.expired())}")
        lines.append(f"eve keeps {(await show.keep('eve', 1)).size}")
        return lines


if __name__ == "__main__":
    print("\n".join(asyncio.run(main())))
