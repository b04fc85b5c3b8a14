"""What the coordinator's engine does for the objects of all partitions, as a partition sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from actors.errors import CoordinatorUnavailable
from timers.leases import Holder
from timers.quotas import QuotaPush, QuotaWindow, Usage

__all__ = [
    "SERVICES",
    "CoordinatorServices",
    "LeaseGrant",
    "LeaseInfo",
    "LeaseRefusal",
    "LeaseRequest",
    "NoCoordinator",
    "QuotaTotal",
]


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


@dataclass(frozen=True)
class LeaseInfo:
    """A lease as the coordinator has it. One whose time is over stays while messages of its holder are under way."""

    name: str
    epoch: int
    holder: tuple[str, str]
    expires_ms: int


@dataclass(frozen=True)
class QuotaTotal:
    """What all objects together have charged in the window that ends at `resets_ms` (epoch ms), as far as the
    coordinator has been told: each tells it once a minute."""

    operations: int
    bytes: int
    resets_ms: int


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

    async def leases(self, prefix: str, after: str | None, limit: int) -> list[LeaseInfo]:
        """Leases whose name begins with `prefix` and comes after `after`, in the order of their names."""
        ...

    async def apply_quota(self, push: QuotaPush) -> Usage:
        """Take what a source has charged so far into the total; the total with it. Raises `CorruptRow`."""
        ...

    async def drop_quota_source(self, window: QuotaWindow, source: str) -> None:
        """The source tells nothing more of this window."""
        ...

    async def quota_total(self, name: str, window_ms: int) -> QuotaTotal:
        """What all sources have told of the window that lies now."""
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

    async def leases(self, prefix: str, after: str | None, limit: int) -> list[LeaseInfo]:
        raise self._error()

    async def apply_quota(self, push: QuotaPush) -> Usage:
        raise self._error()

    async def drop_quota_source(self, window: QuotaWindow, source: str) -> None:
        raise self._error()

    async def quota_total(self, name: str, window_ms: int) -> QuotaTotal:
        raise self._error()

    @staticmethod
    def _error() -> CoordinatorUnavailable:
        return CoordinatorUnavailable("this partition was opened without a coordinator: start it through a runtime")
