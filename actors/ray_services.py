"""The coordinator's engine behind Ray calls, for partitions. See `CoordinatorServices`."""

from __future__ import annotations

from typing import Any, Final

from actors.coordinator_services import LeaseGrant, LeaseInfo, LeaseRefusal, LeaseRequest, QuotaTotal
from actors.errors import CoordinatorUnavailable, PartitionStopped
from actors.ray_calls import COORDINATOR, ActorUnreachable, RayCalls
from timers.leases import Holder
from timers.quotas import QuotaPush, QuotaWindow, Usage

__all__ = ["RayServices"]

#: How long one try may take; whoever asks tries again while it is patient.
_TRY_TIMEOUT_S: Final = 3.0


class RayServices:
    """Any process of the runtime can have one."""

    def __init__(self, calls: RayCalls) -> None:
        self._calls = calls

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant | LeaseRefusal:
        answer: LeaseGrant | LeaseRefusal = await self._ask("acquire_lease", request)
        return answer

    async def renew_lease(self, name: str, holder: Holder, epoch: int, ttl_ms: int) -> LeaseGrant | None:
        grant: LeaseGrant | None = await self._ask("renew_lease", name, holder, epoch, ttl_ms)
        return grant

    async def release_lease(self, name: str, holder: Holder, epoch: int) -> None:
        await self._ask("release_lease", name, holder, epoch)

    async def leases(self, prefix: str, after: str | None, limit: int) -> list[LeaseInfo]:
        found: list[LeaseInfo] = await self._ask("leases", prefix, after, limit)
        return found

    async def apply_quota(self, push: QuotaPush) -> Usage:
        total: Usage = await self._ask("apply_quota", push)
        return total

    async def drop_quota_source(self, window: QuotaWindow, source: str) -> None:
        await self._ask("drop_quota_source", window, source)

    async def quota_total(self, name: str, window_ms: int) -> QuotaTotal:
        total: QuotaTotal = await self._ask("quota_total", name, window_ms)
        return total

    async def _ask(self, method: str, *args: Any) -> Any:
        try:
            return await self._calls.call_async(COORDINATOR, "serve", method, args, timeout_s=_TRY_TIMEOUT_S)
        except (ActorUnreachable, PartitionStopped) as error:
            raise CoordinatorUnavailable(f"the coordinator does not answer: {error}") from error
