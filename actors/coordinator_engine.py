"""The coordinator's engine: a partition without objects. Leases live here, with timers of their own.

Opened, locked, fenced and committed as any partition is. Decisions are made on what is durable under what is on its
way to disk, and each is guarded by the rows that it rests on: the overlay only spares repeats, it proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from actors.cluster_file import ClusterFile
from actors.coordinator_services import LeaseGrant, LeaseInfo, LeaseRefusal, LeaseRequest, QuotaTotal
from actors.errors import CommitFailed, CoordinatorUnavailable, DataMissing, StoreClosed
from actors.logs import log_event
from actors.settings import Settings
from drivers.files import COORDINATOR
from drivers.group_commit import GroupCommitter
from drivers.native import Driver, OpenedStore, has_partition_file
from drivers.sqlite_store import prefix_end
from drivers.ticker import Ticker
from drivers.timer_store import CommittingTimerStore
from timers.batch import Batch, Outcome, Put
from timers.engine import earliest_timer_put
from timers.firing import PartitionName, PartitionRole
from timers.lease_sweep import HolderBacklogs, LeaseSweep
from timers.leases import Holder, LeaseRow, end_lease, grant_lease, renew_lease
from timers.quota_rollup import QuotaRollup
from timers.quotas import NO_USAGE, QuotaPush, QuotaWindow, SourceRow, TotalRow, Usage, drop_source, push_usage
from timers.registry import TimerKind, TimerRegistry
from timers.rows import Row

__all__ = ["CoordinatorEngine", "EngineConfig", "has_engine"]

R = TypeVar("R", bound=Row)
T = TypeVar("T")

#: How often something is decided anew because what it rested on had changed meanwhile.
MAX_PLANS: Final = 9
#: The sweep asks the holders' partitions, so it has ticks of its own.
_REMOTE_KINDS: Final = frozenset({TimerKind.LEASE_SWEEP})
_Place = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class EngineConfig:
    """What the engine is opened with. `recorded`: the data directory has a `cluster.json`, which says whether there has
    been an engine; without one nothing outlives the runtime."""

    data_dir: str
    cluster_id: str
    recorded: bool
    settings: Settings


def has_engine(config: EngineConfig) -> bool:
    """Whether the engine has been opened here before."""
    return _record(config).engine if config.recorded else has_partition_file(config.data_dir, COORDINATOR)


def _record(config: EngineConfig) -> ClusterFile:
    found = ClusterFile.read(Path(config.data_dir))
    if found is None:
        raise DataMissing(f"{config.data_dir} holds no cluster: it was there when the runtime was started.")
    return found


def _ignore(error: BaseException) -> None:
    return None


class CoordinatorEngine:
    """Lives on one event loop. Made by `open`. See `CoordinatorServices` for what it does for partitions."""

    def __init__(
        self,
        config: EngineConfig,
        driver: Driver,
        opened: OpenedStore,
        backlogs: HolderBacklogs,
        ended: Callable[[BaseException], None],
    ) -> None:
        self._clock = driver.clock
        self._opened = opened
        self._ended = ended
        self.store = opened.store
        self.stopped = False
        #: leases that were found kept for too long, since the engine was opened
        self.lagging_leases = 0
        #: rows as the batches on their way to disk will leave them
        self._planned: dict[_Place, Row | None] = {}
        self._executor = driver.executor(COORDINATOR)
        self._checkpointer = driver.checkpointer(self.store)
        settings = config.settings
        self.committer = GroupCommitter(
            self.store,
            self._executor,
            wall_ms=self._clock.wall_ms,
            on_fatal=self._fatal,
            max_group_rows=settings.max_group_rows,
            slice_rows=settings.slice_rows,
            wal_truncate_bytes=settings.wal_truncate_bytes,
        )
        self.committer.start()
        self.registry = TimerRegistry([LeaseSweep(backlogs, self._lease_lags), QuotaRollup()])
        self._ticker = Ticker(
            self.store,
            CommittingTimerStore(self.store, self.committer),
            self.registry,
            self._clock,
            partition=PartitionName(PartitionRole.COORDINATOR, COORDINATOR),
            user_tick=lambda: None,
            poll_ms=driver.poll_ms,
            remote_kinds=_REMOTE_KINDS,
            waker=driver.waker(),
        )

    @classmethod
    async def open(
        cls,
        config: EngineConfig,
        driver: Driver,
        backlogs: HolderBacklogs,
        *,
        min_commit_seq: int = 0,
        ended: Callable[[BaseException], None] = _ignore,
    ) -> CoordinatorEngine:
        """Open the file and begin to serve. It is made where there has never been one.

        `min_commit_seq`: a commit that the file is known to have had. `ended` is told the error after which the engine
        must not go on. Raises `PartitionBusy`, `DataMissing`, `DataRolledBack`, `WrongPartition`, `SchemaTooNew`;
        nothing is left open then.
        """
        create = not config.recorded or not has_engine(config)
        opened = await asyncio.to_thread(
            driver.open_store,
            config.data_dir,
            config.cluster_id,
            COORDINATOR,
            create=create,
            min_commit_seq=min_commit_seq,
        )
        try:
            if config.recorded:
                _record(config).mark_engine(Path(config.data_dir))  # from now on it never starts empty
            engine = cls(config, driver, opened, backlogs, ended)
        except BaseException:
            opened.close()
            raise
        engine._ticker.start()
        return engine

    # --- leases -----------------------------------------------------------------------------------

    async def acquire_lease(self, request: LeaseRequest) -> LeaseGrant | LeaseRefusal:
        return await self._decide(lambda: self._plan_grant(request))

    def _plan_grant(self, request: LeaseRequest) -> tuple[Batch | None, LeaseGrant | LeaseRefusal]:
        now_ms = self._clock.wall_ms()
        row = self._lease(request.name)
        if row is not None and not row.is_expired(now_ms):
            if row.request_id == request.request_id:
                return None, LeaseGrant(row.epoch, row.expires_ms)
            if row.holder != request.holder:
                return None, LeaseRefusal(row.holder.type_name, row.holder.object_key, row.expires_ms)
        # One counter for all names, which every commit carries: an epoch outlives its lease without a row of its own.
        epoch = self.store.counters.take_generation()
        expires_ms = now_ms + request.ttl_ms
        new = LeaseRow(request.name, epoch, request.holder, request.request_id, expires_ms, expires_ms)
        return grant_lease(row, new, now_ms), LeaseGrant(epoch, expires_ms)

    async def renew_lease(self, name: str, holder: Holder, epoch: int, ttl_ms: int) -> LeaseGrant | None:
        return await self._decide(lambda: self._plan_renewal(name, holder, epoch, ttl_ms))

    def _plan_renewal(
        self, name: str, holder: Holder, epoch: int, ttl_ms: int
    ) -> tuple[Batch | None, LeaseGrant | None]:
        row = self._lease(name)
        if row is None or (row.holder, row.epoch) != (holder, epoch):
            return None, None
        now_ms = self._clock.wall_ms()
        expires_ms = now_ms + ttl_ms
        if expires_ms <= row.expires_ms:
            return None, LeaseGrant(epoch, row.expires_ms)
        _renewed, batch = renew_lease(row, expires_ms, now_ms)
        return batch, LeaseGrant(epoch, expires_ms)

    async def release_lease(self, name: str, holder: Holder, epoch: int) -> None:
        def plan() -> tuple[Batch | None, None]:
            row = self._lease(name)
            is_there = row is not None and (row.holder, row.epoch) == (holder, epoch)
            return (end_lease(row) if row is not None and is_there else None), None

        await self._decide(plan)

    async def leases(self, prefix: str, after: str | None, limit: int) -> list[LeaseInfo]:
        end = prefix_end(prefix)
        rows = self.store.scan(
            LeaseRow.table,
            start=(prefix,) if after is None else None,
            start_after=None if after is None else (max(after, prefix),),
            end=None if end is None else (end,),
            limit=limit,
        )
        found = [LeaseRow.from_columns(columns[:1], columns[1:]) for columns in rows]
        return [
            LeaseInfo(row.name, row.epoch, (row.holder.type_name, row.holder.object_key), row.expires_ms)
            for row in found
        ]

    def _lease(self, name: str) -> LeaseRow | None:
        row = self._read(LeaseRow, (name,))
        if row is not None:
            row.check()
        return row

    def _lease_lags(self, row: LeaseRow, late_ms: int) -> None:
        self.lagging_leases += 1

    # --- quotas -----------------------------------------------------------------------------------

    async def apply_quota(self, push: QuotaPush) -> Usage:
        def plan() -> tuple[Batch | None, Usage]:
            return push_usage(*self._quota_rows(push.window, push.source), push)

        return await self._decide(plan)

    async def drop_quota_source(self, window: QuotaWindow, source: str) -> None:
        await self._decide(lambda: (drop_source(*self._quota_rows(window, source)), None))

    def _quota_rows(self, window: QuotaWindow, source: str) -> tuple[TotalRow | None, SourceRow | None]:
        return self._read(TotalRow, window.key()), self._read(SourceRow, (*window.key(), source))

    async def quota_total(self, name: str, window_ms: int) -> QuotaTotal:
        window = QuotaWindow.at(name, window_ms, self._clock.wall_ms())
        values = self.store.get(TotalRow.table, window.key())
        usage = NO_USAGE if values is None else TotalRow.from_columns(window.key(), values).usage
        return QuotaTotal(usage.operations, usage.bytes, window.end_ms)

    # --- deciding ---------------------------------------------------------------------------------

    def _read(self, row_type: type[R], key: tuple[Any, ...]) -> R | None:
        place = (row_type.table, key)
        if place in self._planned:
            row: Any = self._planned[place]
            return row  # type: ignore[no-any-return]
        values = self.store.get(*place)
        return None if values is None else row_type.from_columns(key, values)

    async def _decide(self, plan: Callable[[], tuple[Batch | None, T]]) -> T:
        """Plan and commit, until it holds. A plan without a batch answers by what it read."""
        for _ in range(MAX_PLANS):
            batch, answer = plan()
            if batch is None:
                if self._planned:
                    await self._apply(Batch())  # what it read may not be durable yet: it is when this is
                return answer
            if await self._commit(batch):
                return answer
        raise CoordinatorUnavailable(
            f"the coordinator decided {MAX_PLANS} times, each time others were faster; nothing was changed: try again"
        )

    async def _commit(self, batch: Batch) -> bool:
        planned: dict[_Place, Row | None] = {}
        for write in batch.writes:
            if isinstance(write, Put):
                planned[write.row.table, write.row.key()] = write.row
            else:
                planned[write.table, write.key] = None
        self._planned.update(planned)
        try:
            outcome = await self._apply(batch)
        finally:
            for place, row in planned.items():
                if place in self._planned and self._planned[place] is row:
                    del self._planned[place]
        if outcome is not Outcome.COMMITTED:
            return False
        self._ticker.alarm.arm(earliest_timer_put(batch))
        return True

    async def _apply(self, batch: Batch) -> Outcome:
        try:
            (outcome,) = await self.committer.apply([batch])
        except (CommitFailed, StoreClosed) as error:
            raise CoordinatorUnavailable(f"the coordinator could not write: {error}") from error
        return outcome

    # --- life -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything is running or on its way to disk."""
        return self._ticker.busy or not self.committer.idle

    def status(self) -> dict[str, Any]:
        """What the engine is doing, as plain data."""
        return {
            "epoch": self.store.header.epoch,
            "commit_seq": self.store.commit_seq,
            "commits": self.committer.commits,
            "next_due_ms": self.store.next_due_ms(),
            "lagging_leases": self.lagging_leases,
            **self._ticker.status(),
        }

    def _fatal(self, error: BaseException) -> None:
        """Nobody is answered from now on: its successor reads what is there."""
        self.stopped = True
        log_event(logging.CRITICAL, "coordinator_fatal", f"the coordinator's engine: {error}")
        self._ended(error)

    async def stop(self) -> None:
        """End ticks, commit what is under way, mark the file clean and close it."""
        if not self.stopped:
            self.stopped = True
            await self._ticker.stop()
            await self.committer.drain()
            self.store.mark_clean()
            self.committer.poke()
            await self.committer.drain()
        self._close()

    async def abandon(self) -> None:
        """Let go of everything at once, as a dying process does."""
        self.stopped = True
        self.committer.abandon()
        await self._ticker.stop()
        self._close()

    def _close(self) -> None:
        self._executor.close()
        if self._checkpointer is not None:
            self._checkpointer.stop()
        self._opened.close()
