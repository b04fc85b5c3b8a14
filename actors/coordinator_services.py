"""What the coordinator's engine does for the objects of all partitions, as a partition sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from actors.errors import CoordinatorUnavailable
from timers.leases import Holder

__all__ = ["SERVICES", "CoordinatorServices", "LeaseGrant", "LeaseRefusal", "LeaseRequest", "NoCoordinator"]


@dataclass(frozen=True)
class LeaseRequest:
    """Somebody wants a lease. A request that comes again under the same id gets what it was granted."""

    name: str
    holder: Holder
    request_id: str
    ttl_ms: int


@dataclass(frozen=True)
class LeaseGrant:
    """A lease that is held: its epoch, and when it ends (epoch ms of the coordinator's clock)."""

    epoch: int
    expires_ms: int


@dataclass(frozen=True)
class LeaseRefusal:
    """Somebody else holds the lease, until then unless it is renewed."""

    holder_class: str
    holder_key: str
    until_ms: int


class CoordinatorServices(Protocol):
    """Every method may be repeated: a repeat does nothing more. When it returns, what it did is durable.

    All raise `CoordinatorUnavailable` when there is no answer; then it may have been done, or be done yet.
    """

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant | LeaseRefusal:
        """Grant a lease that is free or expired, or that the same object holds already: under a higher epoch."""
        ...

    async def renew_lease(self, name: str, holder: Holder, epoch: int, ttl_ms: int) -> LeaseGrant | None:
        """Let the grant last `ttl_ms` from now, if not longer already. None when it is not there any more."""
        ...

    async def release_lease(self, name: str, holder: Holder, epoch: int) -> None:
        """End the grant; nothing happens when it is not there any more."""
        ...


#: The methods above: what may be asked for by name over Ray.
SERVICES: Final = frozenset(name for name in vars(CoordinatorServices) if not name.startswith("_"))


class NoCoordinator:
    """Where a partition was opened without a coordinator."""

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant | LeaseRefusal:
        raise self._error()

    async def renew_lease(self, name: str, holder: Holder, epoch: int, ttl_ms: int) -> LeaseGrant | None:
        raise self._error()

    async def release_lease(self, name: str, holder: Holder, epoch: int) -> None:
        raise self._error()

    @staticmethod
    def _error() -> CoordinatorUnavailable:
        return CoordinatorUnavailable("this partition was opened without a coordinator: start it through a runtime")
