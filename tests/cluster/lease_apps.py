"""Durable objects for the tests of leases and quotas on Ray."""

from __future__ import annotations

from actors import Charge, DurableObject, Lease, QuotaLimit, shared


class Worker(DurableObject):
    """Holds leases, and does what they allow."""

    async def take(self, name: str, ttl: str | None = None) -> Lease:
        lease = await self.leases.acquire(name, ttl)
        self.storage[name] = lease
        return lease

    async def renew(self, name: str) -> Lease:
        lease = await self.leases.renew(self.storage[name])
        self.storage[name] = lease
        return lease

    async def give_back(self, name: str) -> None:
        await self.leases.release(self.storage[name])

    async def work(self, name: str, vault: str) -> int:
        """Take, write and give back, all in one turn."""
        lease = await self.leases.acquire(name)
        await self.namespace(Vault).get(vault).write(name, lease.epoch, self.key)
        await self.leases.release(lease)
        return lease.epoch


class Vault(DurableObject):
    """What a lease protects."""

    def write(self, name: str, epoch: int, what: str) -> None:
        self.leases.guard(name, epoch)
        self.storage["writes"] = [*self.storage.get("writes", []), (epoch, what)]

    @shared
    def writes(self) -> list[tuple[int, str]]:
        return [tuple(write) for write in self.storage.get("writes", [])]


class Uploader(DurableObject):
    """Charges to a quota."""

    def charge(self, operations: int, size: int, limit: QuotaLimit) -> Charge:
        return self.quotas.charge("uploads", operations, size, limit=limit)

    @shared
    def check(self, limit: QuotaLimit) -> Charge:
        return self.quotas.check("uploads", limit=limit)
