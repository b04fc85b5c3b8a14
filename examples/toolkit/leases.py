"""One leader at a time, and a ledger that knows who it is: `python -m examples.toolkit.leases`."""

from __future__ import annotations

import asyncio

from actors import DurableObject
from actors.errors import LeaseHeld, StaleLease
from actors.testing import LocalRuntime


class Ledger(DurableObject):
    """Takes entries from the leader only."""

    def enter(self, epoch: int, text: str) -> None:
        """Raises `StaleLease` when a later leader has been here."""
        self.leases.guard("leader", epoch)
        self.storage["entries"] = [*self.entries(), text]

    def entries(self) -> list[str]:
        entries: list[str] = self.storage.get("entries", [])
        return entries


class Candidate(DurableObject):
    """Leads when nobody else does."""

    async def lead(self) -> bool:
        try:
            self.storage["lease"] = await self.leases.acquire("leader", ttl="30s")
        except LeaseHeld:
            return False
        return True

    async def write(self, text: str) -> None:
        """Enter something in the ledger under the lease that was taken last."""
        await self.namespace(Ledger).get("main").enter(self.storage["lease"].epoch, text)


async def main() -> list[str]:
    """Ann leads and is lost in thought until her lease is over; Bob takes over."""
    async with LocalRuntime() as runtime:
        candidates = runtime.namespace(Candidate)
        ann, bob = candidates.get("ann"), candidates.get("bob")
        lines = [f"ann leads: {await ann.lead()}, bob leads: {await bob.lead()}"]
        await ann.write("from ann")
        await runtime.advance(seconds=30)
        lines.append(f"half a minute later bob leads: {await bob.lead()}")
        await bob.write("from bob")
        try:
            await ann.write("from ann, who thinks she still leads")
        except StaleLease:
            lines.append("ann is refused")
        return [*lines, f"ledger: {', '.join(await runtime.namespace(Ledger).get('main').entries())}"]


if __name__ == "__main__":
    print("\n".join(asyncio.run(main())))
