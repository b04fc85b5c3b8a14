"""A partition as a Ray actor: one process, one thread for the partition's loop, and methods that post to it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
import ray.util.metrics

from actors.channel import Endpoint
from actors.coordinator_store import SlotMap
from actors.errors import CommitOutcomeUnknown, Fenced, PartitionStopped
from actors.logs import log_event, log_to_stderr
from actors.loop_thread import LoopThread
from actors.metrics import MetricsExporter, RayMetrics, Snapshot
from actors.namespace import runtime_registry
from actors.node import node_identity
from actors.partition_host import HostConfig, HostedPartition, OpenOrder, PartitionHost
from actors.partition_leases import LeaseRenewal
from actors.process_id import ProcessId
from actors.ray_calls import COORDINATOR, RayCalls, partition_actor, ray_namespace, remote_method
from actors.ray_coordinator import COORDINATOR_TIMEOUT_S, RayCoordinator
from actors.ray_directory import RayDirectory, Transport
from actors.ray_services import RayServices
from actors.ray_transport import Answer
from actors.settings import Settings
from actors.wheel_waker import WheelWaker
from drivers.durable_object import DurableObjectDriver, tune_process
from drivers.waker import Waker
from timers.lease_sweep import HolderBacklog
from timers.leases import Holder

__all__ = ["CONCURRENCY_GROUPS", "PartitionActor", "PartitionActorConfig"]

T = TypeVar("T")

#: Calls of the actor that may run at once, by group; each group has a loop thread of its own. Long polls of the Ray
#: transport wait in theirs, so that they never keep a control call waiting.
CONCURRENCY_GROUPS = {"control": 256, "transport": 4_096}

#: What the process exits with, by the reason; Ray starts it again in each case, and its logs show the number.
EXIT_FENCED = 83
EXIT_OUTCOME_UNKNOWN = 84
EXIT_OTHER = 85
EXIT_RESTART = 86
_EXIT_CODES: dict[type[BaseException], int] = {Fenced: EXIT_FENCED, CommitOutcomeUnknown: EXIT_OUTCOME_UNKNOWN}
#: How long the partition's loop may take to tell its numbers.
_LOOK_TIMEOUT_S = 5.0
#: How long to wait for the address of a release wheel that starts; meanwhile the partition wakes itself.
_WHEEL_TIMEOUT_S = 15.0
#: How long a partition that has stopped for another actor waits for its end before it comes back itself.
_LEAVE_PATIENCE_S = 20.0


@dataclass(frozen=True)
class PartitionActorConfig:
    """What the actor is created with. Ray passes the same again at each restart."""

    runtime: str
    data_dir: str
    cluster_id: str
    partition: int
    secret: bytes
    settings: Settings
    slot_map: SlotMap
    import_paths: tuple[str, ...]
    transport: Transport
    #: The actor that is the release wheel of the partition's node; None: it wakes itself.
    release_wheel: str | None = None


class PartitionActor:
    """Ray's loop threads run these methods; the partition itself lives on a thread of its own."""

    # It must not raise: an actor whose `__init__` raises is never restarted. Opening goes on in the background.
    def __init__(self, config: PartitionActorConfig) -> None:
        log_to_stderr()
        tune_process()
        _extend_import_path(config.import_paths)
        self._config = config
        #: the process ends, and the next one serves: whoever looks for the partition waits for that
        self._leaving = False
        self._thread = LoopThread(f"partition-{config.partition}", config.settings)
        self._thread.start()
        self._started = self._thread.post(self._start())
        self._started.add_done_callback(self._start_ended)
        self._lease = self._keep_lease()
        self._metrics = self._export_metrics()

    def _keep_lease(self) -> LeaseRenewal:
        config = self._config
        calls = RayCalls(ray_namespace(config.runtime))
        process = ProcessId.own()

        def renew() -> None:
            calls.call(COORDINATOR, "renew", config.partition, process, timeout_s=COORDINATOR_TIMEOUT_S)

        renewal = LeaseRenewal(f"partition-{config.partition}", config.settings.partition_renew_ms, renew)
        renewal.start()
        return renewal

    def _export_metrics(self) -> MetricsExporter:
        config = self._config

        def look() -> Snapshot:
            host = self._started.result(_LOOK_TIMEOUT_S)
            return self._thread.post(host.snapshot()).result(_LOOK_TIMEOUT_S)

        metrics = RayMetrics(ray.util.metrics, {"runtime": config.runtime, "partition": str(config.partition)})
        exporter = MetricsExporter(
            f"partition-{config.partition}", config.settings.metrics_interval_ms, look, metrics.publish
        )
        exporter.start()
        return exporter

    async def _start(self) -> PartitionHost:
        config = self._config
        calls = RayCalls(ray_namespace(config.runtime))
        coordinator = RayCoordinator(calls)
        directory = RayDirectory(calls, config.slot_map, config.secret, config.settings, transport=config.transport)
        host = PartitionHost(
            HostConfig(
                data_dir=config.data_dir,
                cluster_id=config.cluster_id,
                partition=config.partition,
                secret=config.secret,
                settings=config.settings,
                node=node_identity(),
                node_ip=ray.util.get_node_ip_address(),
                actor_name=partition_actor(config.partition),
            ),
            coordinator,
            lambda order: _open_partition(config, order, directory, coordinator, calls),
            self._ended,
            take_map=directory.take_map,
        )
        host.start()
        return host

    def _start_ended(self, started: Future[PartitionHost]) -> None:
        if not started.cancelled() and (error := started.exception()) is not None:
            self._ended(error)  # not a failure to open, which is tried again: this process can't be used

    async def _get_host(self) -> PartitionHost:
        # Shielded: a call that is cancelled must not cancel what all others need.
        return await asyncio.shield(asyncio.wrap_future(self._started))

    async def _on_host(self, ask: Callable[[PartitionHost], Coroutine[Any, Any, T]]) -> T:
        host = await self._get_host()
        return await asyncio.wrap_future(self._thread.post(ask(host)))

    # Tried again by Ray across a restart: it only asks.
    @remote_method(concurrency_group="control", max_task_retries=-1)
    async def endpoint(self) -> Endpoint:
        """Where the partition serves, once it does. Raises why it can't."""
        if self._leaving:
            await asyncio.Event().wait()  # until this process ends: Ray then asks the next one
        return await self._on_host(PartitionHost.endpoint)

    @remote_method(concurrency_group="control")
    async def status(self) -> dict[str, Any]:
        """Plain facts about the partition."""
        return {**await self._on_host(PartitionHost.status), "ray_node": ray.get_runtime_context().get_node_id()}

    @remote_method(concurrency_group="control")
    async def leftovers(self) -> str:
        """See `Partition.leftovers`."""
        return await self._on_host(PartitionHost.leftovers)

    @remote_method(concurrency_group="control")
    async def holder_backlog(self, holder: Holder) -> HolderBacklog:
        """See `Partition.holder_backlog`."""
        return await self._on_host(lambda host: host.holder_backlog(holder))

    @remote_method(concurrency_group="control")
    async def send_slots(self, move_id: str, slots: list[int], target: int, patience_ms: int, cut_short: bool) -> int:
        """See `Departures.send`."""

        async def send(host: PartitionHost) -> int:
            departures = await host.departures()
            return await departures.send(move_id, slots, target, patience_ms=patience_ms, cut_short=cut_short)

        return await self._on_host(send)

    @remote_method(concurrency_group="control")
    async def call_off_move(self, move_id: str) -> None:
        """See `Departures.call_off`."""

        async def call_off(host: PartitionHost) -> None:
            await (await host.departures()).call_off(move_id)

        await self._on_host(call_off)

    @remote_method(concurrency_group="control")
    async def complete_move(self, move_id: str) -> None:
        """See `Departures.complete`."""

        async def complete(host: PartitionHost) -> None:
            await (await host.departures()).complete(move_id)

        await self._on_host(complete)

    @remote_method(concurrency_group="control")
    async def own_slots(self, move_id: str, version: int) -> None:
        """See `Arrivals.own`."""

        async def own(host: PartitionHost) -> None:
            await (await host.arrivals()).own(move_id, version)

        await self._on_host(own)

    @remote_method(concurrency_group="control")
    async def discard_slots(self, move_id: str) -> None:
        """See `Arrivals.discard`."""

        async def discard(host: PartitionHost) -> None:
            await (await host.arrivals()).discard(move_id)

        await self._on_host(discard)

    @remote_method(concurrency_group="control")
    async def stop(self) -> None:
        """Stop cleanly; the actor stays and answers `PartitionStopped`."""
        self._lease.stop()
        self._metrics.stop()
        await self._on_host(PartitionHost.stop)

    @remote_method(concurrency_group="control")
    async def restart(self, epoch: int) -> None:
        """End this process cleanly and let Ray start the next one, unless another epoch serves already.

        Returns at once. Running turns get their time to end; calls that come meanwhile go on in the next process.
        """
        try:
            endpoint = await self._on_host(PartitionHost.endpoint)
        except PartitionStopped:
            return  # it was asked before
        if endpoint.epoch == epoch:
            self._leaving = True
            self._metrics.stop()
            self._thread.post(self._leave())

    @remote_method(concurrency_group="control")
    async def leave(self) -> None:
        """Stop cleanly, to make room for another actor of this partition; the caller ends this one for good.

        Should it not do so soon, the process ends by itself, and Ray starts it as it was. Whoever looks for the
        partition meanwhile waits for whichever comes.
        """
        self._leaving = True
        self._lease.stop()
        self._metrics.stop()
        await self._on_host(PartitionHost.stop)
        self._thread.loop.call_soon_threadsafe(self._thread.loop.call_later, _LEAVE_PATIENCE_S, _exit_to_restart)

    async def _leave(self) -> None:
        await (await self._get_host()).stop()
        _exit_to_restart()

    @remote_method(concurrency_group="transport")
    async def submit(self, session: bytes, connection: int, seq: int, frames: list[bytes]) -> Answer:
        """The Ray transport's way in."""
        transport = (await self._get_host()).transport
        if transport is None:
            raise PartitionStopped("the partition does not serve")
        return await asyncio.wrap_future(transport.submit_threadsafe(session, connection, seq, frames))

    @remote_method(concurrency_group="transport")
    async def replies(self, session: bytes, connection: int, after_seq: int) -> Answer:
        """The Ray transport's way out: waits for frames."""
        transport = (await self._get_host()).transport
        if transport is None:
            raise PartitionStopped("the partition does not serve")
        return await asyncio.wrap_future(transport.replies_threadsafe(session, connection, after_seq))

    def _ended(self, error: BaseException) -> None:
        code = _EXIT_CODES.get(type(error), EXIT_OTHER)
        log_event(
            logging.ERROR,
            "partition_exits",
            f"The process of partition {self._config.partition} exits with {code}: {error}",
            error=error,
            partition=self._config.partition,
            code=code,
        )
        sys.stderr.flush()
        os._exit(code)


async def _open_partition(
    config: PartitionActorConfig,
    order: OpenOrder,
    directory: RayDirectory,
    coordinator: RayCoordinator,
    calls: RayCalls,
) -> HostedPartition:
    # Imported here, after the import path has been extended: what the application's modules need may be there.
    from actors.partition import Partition
    from actors.partition_config import PartitionConfig

    async def fetch_class(type_name: str) -> bytes | None:
        definition = await coordinator.class_definition(type_name)
        return None if definition is None else definition.shipped

    partition = await Partition.open(
        PartitionConfig(
            data_dir=config.data_dir,
            cluster_id=config.cluster_id,
            partition=config.partition,
            create=order.create,
            slots=order.slots,
            min_commit_seq=order.min_commit_seq,
            settings=config.settings,
            runtime_name=config.runtime,
            fetch_class=fetch_class,
            coordinator=RayServices(calls),
        ),
        directory,
        driver=DurableObjectDriver(
            durability=config.settings.durability,
            lock_wait_ms=config.settings.lock_wait_ms,
            busy_timeout_ms=config.settings.busy_timeout_ms,
            checkpoint_interval_ms=config.settings.checkpoint_interval_ms,
            poll_ms=config.settings.poll_ms,
            make_waker=_wheel_waker(config, calls),
        ),
    )
    runtime_registry.register(partition.runtime)  # stubs that come here by pickle belong to this partition
    return partition


def _wheel_waker(config: PartitionActorConfig, calls: RayCalls) -> Callable[[], Waker] | None:
    """Makes the partition's way to the release wheel of its node."""
    wheel = config.release_wheel
    if wheel is None:
        return None

    async def find() -> Endpoint:
        endpoint: Endpoint = await calls.call_async(wheel, "endpoint", timeout_s=_WHEEL_TIMEOUT_S)
        return endpoint

    return lambda: WheelWaker(find, config.secret, config.settings, node_identity())


def _exit_to_restart() -> None:
    sys.stderr.flush()
    os._exit(EXIT_RESTART)


def _extend_import_path(paths: Sequence[str]) -> None:
    """Let this process import what the process that started the runtime could."""
    for path in paths:
        if path not in sys.path:
            sys.path.append(path)
    importlib.invalidate_caches()
