"""What stands around the releases: an audit trail that gets every outcome, and the index that one indexer writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors import DurableObject, Outcome, shared
from actors.errors import LeaseHeld

__all__ = ["Audit", "Index", "Indexer"]

#: Long enough for a partition to be killed and started again while the lease is held.
_INDEX_TTL = "30s"
#: Releases that the indexer hands over with one call.
_PAGE = 20


class Audit(DurableObject):
    """Gets every outcome and every announcement of its repository. Adds up whatever it is told: twice would show."""

    def record(self, outcome: Outcome) -> None:
        """One outcome: what happened, to what."""
        self._count(f"outcome/{outcome.kind}/{outcome.reason}", outcome.id)

    async def announced(self, release: str, token: str) -> None:
        """A release says, by message, that it is published; what waits for this with the token goes on."""
        from examples.package_registry.app import Release  # which imports this module

        self._count("announced", release)
        await self.namespace(Release).resolve_promise(token, True)

    def _count(self, what: str, subject: str) -> None:
        self.storage[f"count/{what}"] = self.storage.get(f"count/{what}", 0) + 1
        self.storage[f"seen/{what}/{subject}"] = self.storage.get(f"seen/{what}/{subject}", 0) + 1

    @shared
    def counts(self) -> dict[str, int]:
        """How often each thing has happened."""
        return {name.removeprefix("count/"): count for name, count in self.storage.list(prefix="count/").items()}

    @shared
    def repeated(self) -> list[str]:
        """What was told more than once."""
        return [name for name, count in self.storage.list(prefix="seen/").items() if count != 1]


class Index(DurableObject):
    """The list of published releases. Only the holder of the lease may write to it."""

    def add(self, lease: str, epoch: int, releases: Sequence[str]) -> None:
        """Note releases. Raises `StaleLease` when somebody else has the lease by now."""
        self.leases.guard(lease, epoch)
        for release in releases:
            self.storage[f"release/{release}"] = self.storage.get(f"release/{release}", 0) + 1

    @shared
    def entries(self) -> dict[str, int]:
        """How often each release was noted."""
        found: dict[str, int] = self.storage.list(prefix="release/")
        return {name.removeprefix("release/"): count for name, count in found.items()}


class Indexer(DurableObject):
    """Writes the index, unless another indexer is at it."""

    async def run(self, repository: str, releases: Sequence[str]) -> bool:
        """Write all of them into the repository's index; False when another one has the lease."""
        name = f"indexer/{repository}"
        try:
            lease = await self.leases.acquire(name, ttl=_INDEX_TTL)
        except LeaseHeld:
            return False
        index = self.namespace(Index).get(repository)
        for first in range(0, len(releases), _PAGE):
            await index.add(name, lease.epoch, list(releases[first : first + _PAGE]))
        self.storage["lease"] = [lease.name, lease.epoch]
        return True

    @shared
    def epoch(self) -> Any:
        """The name and epoch of the lease that it had, or None."""
        return self.storage.get("lease")
