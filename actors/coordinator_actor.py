"""The coordinator as a Ray actor: opens in the background, then passes calls on."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray.util.metrics

from actors.channel import Endpoint
from actors.coordinator import (
    Coordinator,
    CoordinatorConfig,
    CoordinatorStatus,
    OpeningFacts,
    RuntimeDescription,
    Verdict,
)
from actors.coordinator_engine import CoordinatorEngine, EngineConfig
from actors.coordinator_services import SERVICES
from actors.coordinator_store import ClassDefinition, SlotMap
from actors.errors import InvalidOption, PartitionStopped
from actors.logs import log_event, log_to_stderr
from actors.metrics import COORDINATOR, MetricsExporter, RayMetrics, Snapshot
from actors.opening import Opening
from actors.process_id import ProcessId
from actors.ray_calls import remote_method
from drivers.native import NativeDriver

__all__ = ["CoordinatorActor"]

#: What the process exits with when its engine must not go on; Ray starts it again.
EXIT_ENGINE = 86
#: The metrics' thread waits so long for the loop before it gives that round up.
_LOOK_TIMEOUT_S = 10.0


def _exit_process(error: BaseException) -> None:
    """What the engine has committed is not known any more: Ray starts another process, which looks."""
    sys.stderr.flush()
    os._exit(EXIT_ENGINE)


async def _watch_engine(coordinator: Coordinator, engine: CoordinatorEngine, interval_ms: int) -> None:
    """Keep on record how far the engine's file has come."""
    while not engine.stopped:
        try:
            coordinator.engine_reached(engine.store.commit_seq)
        except sqlite3.Error as error:  # the next round tells as much
            log_event(logging.ERROR, "engine_not_recorded", f"the commit of the coordinator's engine: {error}")
        await asyncio.sleep(interval_ms / 1_000)


class CoordinatorActor:
    """Holds the coordinator and, beside it, its engine."""

    # Async, so that it runs on the actor's event loop, and Ray awaits it. It must not raise: an actor whose
    # `__init__` raises is never restarted.
    async def __init__(self, config: CoordinatorConfig) -> None:  # type: ignore[misc]
        log_to_stderr()
        self._stopped = False
        self._opening = Opening("The coordinator", lambda: Coordinator.open(config))
        self._start = asyncio.ensure_future(self._opening.run())
        self._metrics = self._export_metrics(config)
        # Beside it: without its engine's file a coordinator still knows the slot map.
        self._engine_opening = Opening("The coordinator's engine", partial(self._open_engine, config))
        self._engine_start = asyncio.ensure_future(self._engine_opening.run())
        self._engine_watch: asyncio.Future[None] | None = None

    def _export_metrics(self, config: CoordinatorConfig) -> MetricsExporter:
        loop = asyncio.get_running_loop()

        async def snapshot() -> Snapshot:
            return (await self._coordinator()).snapshot()

        def look() -> Snapshot:
            return asyncio.run_coroutine_threadsafe(snapshot(), loop).result(_LOOK_TIMEOUT_S)

        metrics = RayMetrics(ray.util.metrics, {"runtime": config.runtime}, COORDINATOR, "mainspring_coordinator_")
        exporter = MetricsExporter("coordinator", config.settings.metrics_interval_ms, look, metrics.publish)
        exporter.start()
        return exporter

    async def _coordinator(self) -> Coordinator:
        if self._stopped:
            raise PartitionStopped("the coordinator has been stopped")
        return await self._opening.get()

    async def _open_engine(self, config: CoordinatorConfig) -> CoordinatorEngine:
        coordinator = await self._coordinator()  # who has its lock is the only one to open the engine
        settings = config.settings
        driver = NativeDriver(
            durability=settings.durability,
            poll_ms=settings.poll_ms,
            lock_wait_ms=settings.lock_wait_ms,
            busy_timeout_ms=settings.busy_timeout_ms,
            checkpoint_interval_ms=settings.checkpoint_interval_ms,
        )
        engine_config = EngineConfig(config.data_dir, config.cluster_id, recorded=True, settings=settings)
        engine = await CoordinatorEngine.open(
            engine_config, driver, coordinator, min_commit_seq=coordinator.engine_commit_seq, ended=_exit_process
        )
        self._engine_watch = asyncio.ensure_future(_watch_engine(coordinator, engine, settings.partition_renew_ms))
        return engine

    async def serve(self, method: str, args: tuple[Any, ...]) -> Any:
        """One of `CoordinatorServices`. Raises why the engine can't open."""
        if method not in SERVICES:
            raise InvalidOption(f"the coordinator has no service {method!r}")
        if self._stopped:
            raise PartitionStopped("the coordinator has been stopped")
        engine = await self._engine_opening.get()
        return await getattr(engine, method)(*args)

    # What only reads is tried again by Ray across a restart: the caller waits instead of failing.
    @remote_method(max_task_retries=-1)
    async def describe(self) -> RuntimeDescription:
        """See `Coordinator.describe`."""
        return (await self._coordinator()).describe()

    @remote_method(max_task_retries=-1)
    async def slot_map(self, newer_than: int = 0, wait_ms: int = 0) -> SlotMap:
        """See `Coordinator.slot_map`."""
        return await (await self._coordinator()).slot_map(newer_than, wait_ms)

    async def assign_disks(self, own: str, disks: Sequence[str]) -> dict[int, str]:
        """See `Coordinator.assign_disks`."""
        return (await self._coordinator()).assign_disks(own, disks)

    async def deploy_environment(self, runtime_env: Mapping[str, Any]) -> None:
        """See `Coordinator.deploy_environment`."""
        (await self._coordinator()).deploy_environment(runtime_env)

    async def add_partition(self, partition: int) -> None:
        """See `Coordinator.add_partition`."""
        (await self._coordinator()).add_partition(partition)

    async def remove_partition(self, partition: int) -> None:
        """See `Coordinator.remove_partition`."""
        (await self._coordinator()).remove_partition(partition)

    async def spread(self, partitions: Sequence[int]) -> None:
        """See `SlotMoves.spread`."""
        (await self._coordinator()).moves.spread(partitions)

    async def move_slots(self, slots: Sequence[int], target: int) -> None:
        """See `SlotMoves.move`."""
        await (await self._coordinator()).moves.move(slots, target)

    @remote_method(max_task_retries=-1)
    async def move_progress(self) -> dict[str, Any]:
        """See `SlotMoves.progress`."""
        return (await self._coordinator()).moves.progress()

    async def renew(self, partition: int, process: ProcessId) -> None:
        """See `Coordinator.renew`."""
        (await self._coordinator()).renew(partition, process)

    async def settle_moves(self, partition: int, moves: dict[str, tuple[str, int]]) -> None:
        """See `Coordinator.settle_moves`."""
        (await self._coordinator()).settle_moves(partition, moves)

    async def status(self) -> CoordinatorStatus:
        """See `Coordinator.status`."""
        engine = self._engine_opening.opened
        status = (await self._coordinator()).status()
        return status if engine is None else replace(status, engine={**engine.status(), "pid": os.getpid()})

    @remote_method(max_task_retries=-1)
    async def absences(self) -> dict[int, str]:
        """See `Coordinator.absences`."""
        return await (await self._coordinator()).absences()

    async def register_class(self, definition: ClassDefinition) -> None:
        """See `Coordinator.register_class`."""
        (await self._coordinator()).register_class(definition)

    async def class_definition(self, type_name: str, wait_ms: int = 0) -> ClassDefinition | None:
        """See `Coordinator.class_definition`."""
        return await (await self._coordinator()).class_definition(type_name, wait_ms)

    @remote_method(max_task_retries=-1)
    async def opening_facts(self, partition: int) -> OpeningFacts:
        """See `Coordinator.opening_facts`."""
        return (await self._coordinator()).opening_facts(partition)

    async def initialised(self, partition: int) -> None:
        """See `Coordinator.initialised`."""
        (await self._coordinator()).initialised(partition)

    async def announce(
        self, partition: int, epoch: int, endpoint: Endpoint, commit_seq: int, slots: Sequence[tuple[int, int]]
    ) -> Verdict:
        """See `Coordinator.announce`."""
        return (await self._coordinator()).announce(partition, epoch, endpoint, commit_seq, slots)

    async def report(self, partition: int, epoch: int, commit_seq: int) -> Verdict:
        """See `Coordinator.report`."""
        return (await self._coordinator()).report(partition, epoch, commit_seq)

    async def stop(self) -> None:
        """Close the file; later calls raise `PartitionStopped`. Idempotent."""
        self._stopped = True
        self._metrics.stop()
        self._start.cancel()
        self._engine_start.cancel()
        if self._engine_watch is not None:
            self._engine_watch.cancel()
        coordinator, engine = self._opening.opened, self._engine_opening.opened
        if engine is not None:
            await engine.stop()
        if coordinator is not None:
            coordinator.close()
