"""What a runtime shows of the things that its coordinator keeps for all objects: leases, totals of quotas."""

from __future__ import annotations

from typing import Any, Final

from actors.coordinator_services import CoordinatorServices, LeaseInfo, QuotaTotal
from actors.errors import InvalidOption
from actors.toolkit.quotas import window_length_ms

__all__ = ["CoordinatorViews"]

#: Leases that one request may ask for.
MAX_LEASES: Final = 10_000


class CoordinatorViews:
    """Base of runtimes."""

    def _services(self) -> CoordinatorServices:
        raise NotImplementedError  # each runtime has its own way to the coordinator

    async def quota_total(self, name: str, window: Any = "1h") -> QuotaTotal:
        """What all objects together have charged to a quota in the window that lies now, as far as they have told: each
        does once a minute. Raises `CoordinatorUnavailable`, `InvalidOption`."""
        return await self._services().quota_total(name, window_length_ms(window))

    async def leases(self, prefix: str = "", *, after: str | None = None, limit: int = 1_000) -> list[LeaseInfo]:
        """Leases by name. Raises `CoordinatorUnavailable`, `InvalidOption`."""
        if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LEASES:
            raise InvalidOption(f"limit = {limit!r}: must be 1 to {MAX_LEASES}")
        return await self._services().leases(prefix, after, limit)
