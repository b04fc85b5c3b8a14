"""The coordinator of a `LocalRuntime`: its engine in this process. See `CoordinatorServices`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from actors.coordinator_engine import CoordinatorEngine, EngineConfig, has_engine
from actors.coordinator_services import LeaseGrant, LeaseInfo, LeaseRefusal, LeaseRequest, QuotaTotal
from actors.errors import CoordinatorUnavailable
from drivers.native import Driver
from timers.lease_sweep import HolderBacklogs
from timers.leases import Holder
from timers.quotas import QuotaPush, QuotaWindow, Usage

__all__ = ["LocalCoordinator"]

T = TypeVar("T")


class LocalCoordinator:
    """Opens the engine when it is first needed: at the start when there has been one, else with the first request."""

    def __init__(self, config: EngineConfig, driver: Driver, backlogs: HolderBacklogs) -> None:
        self._config = config
        self._driver = driver
        self._backlogs = backlogs
        self._opening: asyncio.Task[CoordinatorEngine] | None = None
        self._stopped = False

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the engine if there has been one. Raises what opening raises, `DataMissing` when its file is gone."""
        if has_engine(self._config):
            await self._engine()

    async def stop(self) -> None:
        """Commit what is under way and close the file."""
        self._stopped = True
        engine = await self._opened()
        if engine is not None:
            await engine.stop()

    async def crash(self) -> None:
        """Drop memory and keep the disk, then start again."""
        engine = await self._opened()
        if engine is not None:
            self._opening = None
            await engine.abandon()
            await self._engine()

    async def _opened(self) -> CoordinatorEngine | None:
        """The engine that runs, after waiting for one that is just being opened."""
        if self._opening is not None:
            await asyncio.wait({self._opening})
        return self.engine

    @property
    def engine(self) -> CoordinatorEngine | None:
        """The engine that runs, if one does."""
        opening = self._opening
        is_open = opening is not None and opening.done() and not opening.cancelled() and opening.exception() is None
        return opening.result() if opening is not None and is_open else None

    @property
    def busy(self) -> bool:
        return self.engine is not None and self.engine.busy

    @property
    def commits(self) -> int:
        return 0 if self.engine is None else self.engine.committer.commits

    async def _engine(self) -> CoordinatorEngine:
        if self._stopped:
            raise CoordinatorUnavailable("the runtime has been stopped")
        if self._opening is None or (self._opening.done() and self.engine is None):
            self._opening = asyncio.ensure_future(CoordinatorEngine.open(self._config, self._driver, self._backlogs))
        return await asyncio.shield(self._opening)

    # --- what partitions ask ----------------------------------------------------------------------

    async def _ask(self, ask: Callable[[CoordinatorEngine], Awaitable[T]]) -> T:
        engine = await self._engine()
        if engine.stopped:
            raise CoordinatorUnavailable("the coordinator has ended; it starts again with the runtime")
        asked = asyncio.ensure_future(ask(engine))
        try:
            await asyncio.wait({asked})
        finally:
            asked.cancel()
        if asked.cancelled():  # with the engine: whether it was done nobody knows
            raise CoordinatorUnavailable("the coordinator ended before it could answer")
        return asked.result()

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant | LeaseRefusal:
        return await self._ask(lambda engine: engine.acquire_lease(request))

    async def renew_lease(self, name: str, holder: Holder, epoch: int, ttl_ms: int) -> LeaseGrant | None:
        return await self._ask(lambda engine: engine.renew_lease(name, holder, epoch, ttl_ms))

    async def release_lease(self, name: str, holder: Holder, epoch: int) -> None:
        await self._ask(lambda engine: engine.release_lease(name, holder, epoch))

    async def leases(self, prefix: str, after: str | None, limit: int) -> list[LeaseInfo]:
        return await self._ask(lambda engine: engine.leases(prefix, after, limit))

    async def apply_quota(self, push: QuotaPush) -> Usage:
        return await self._ask(lambda engine: engine.apply_quota(push))

    async def drop_quota_source(self, window: QuotaWindow, source: str) -> None:
        await self._ask(lambda engine: engine.drop_quota_source(window, source))

    async def quota_total(self, name: str, window_ms: int) -> QuotaTotal:
        return await self._ask(lambda engine: engine.quota_total(name, window_ms))
