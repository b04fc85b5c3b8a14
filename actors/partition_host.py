"""What surrounds a partition in its process: opening with retries, servers, announcements, the end."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from actors.arrival import Arrivals
from actors.channel import Channel, ChannelHandler, Endpoint
from actors.coordinator import OpeningFacts, Verdict
from actors.coordinator_store import ClassDefinition, SlotMap
from actors.departure import Departures
from actors.errors import DataMissing, DataRolledBack, Fenced, PartitionStopped, WrongPartition
from actors.link_server import LinkServer
from actors.logs import log_event
from actors.metrics import Snapshot
from actors.opening import RETRY_S, Opening
from actors.ray_transport_server import RayTransportServer
from actors.settings import Settings
from drivers.files import partition_directory
from timers.lease_sweep import HolderBacklog
from timers.leases import Holder

__all__ = ["CoordinatorPort", "HostConfig", "HostedPartition", "OpenOrder", "PartitionHost"]

#: How often a partition tells the coordinator that it lives and what it has committed.
REPORT_INTERVAL_S = 10.0
#: How soon a coordinator that did not answer is tried again.
ANNOUNCE_RETRY_S = 1.0
#: Loopback needs no TCP: whoever can reach it can reach the Unix socket.
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class CoordinatorPort(Protocol):
    """The coordinator, as a partition sees it. Every method raises `ActorUnreachable` when it does not answer."""

    async def opening_facts(self, partition: int) -> OpeningFacts: ...

    async def initialised(self, partition: int) -> None: ...

    async def announce(
        self, partition: int, epoch: int, endpoint: Endpoint, commit_seq: int, slots: Sequence[tuple[int, int]]
    ) -> Verdict: ...

    async def report(self, partition: int, epoch: int, commit_seq: int) -> Verdict: ...

    async def settle_moves(self, partition: int, moves: dict[str, tuple[str, int]]) -> None: ...

    async def class_definition(self, type_name: str) -> ClassDefinition | None: ...


class HostedPartition(Protocol):
    """What the host needs of `actors.partition.Partition`."""

    @property
    def epoch(self) -> int: ...

    @property
    def commit_seq(self) -> int: ...

    @property
    def slots(self) -> list[tuple[int, int]]: ...

    @property
    def exited(self) -> asyncio.Future[Any]: ...

    @property
    def moves(self) -> dict[str, tuple[str, int]]:
        """Moves of slots that have not come to their end here."""
        ...

    def leftovers(self) -> str: ...

    def snapshot(self) -> Snapshot: ...

    def holder_backlog(self, holder: Holder) -> HolderBacklog: ...

    departures: Departures
    arrivals: Arrivals

    def accept(self, channel: Channel) -> ChannelHandler: ...

    def status(self) -> dict[str, Any]: ...

    async def stop(self) -> None: ...


@dataclass(frozen=True)
class HostConfig:
    """What a partition's host is started with. The same at each restart of its process."""

    data_dir: str
    cluster_id: str
    partition: int
    secret: bytes
    settings: Settings
    node: str
    node_ip: str
    actor_name: str


@dataclass(frozen=True)
class OpenOrder:
    """How the partition is to be opened this time."""

    create: bool
    slots: list[tuple[int, int]]
    min_commit_seq: int


@dataclass(frozen=True)
class _Serving:
    partition: HostedPartition
    link: LinkServer
    transport: RayTransportServer
    endpoint: Endpoint


class PartitionHost:
    """Opens and serves one partition on the running event loop, until `stop` or the partition's own end."""

    def __init__(
        self,
        config: HostConfig,
        coordinator: CoordinatorPort,
        open_partition: Callable[[OpenOrder], Awaitable[HostedPartition]],
        ended: Callable[[BaseException], None],
        *,
        take_map: Callable[[SlotMap], None] = lambda _: None,
        retry_s: float = RETRY_S,
        report_interval_s: float = REPORT_INTERVAL_S,
        announce_retry_s: float = ANNOUNCE_RETRY_S,
    ) -> None:
        """`ended` is told the error after which the process must not go on: it exits. `take_map` gets newer maps."""
        self._config = config
        self._coordinator = coordinator
        self._open_partition = open_partition
        self._ended = ended
        self._take_map = take_map
        self._report_interval_s = report_interval_s
        self._announce_retry_s = announce_retry_s
        self._opening = Opening(f"Partition {config.partition}", self._open, retry_s)
        self._running: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to open; returns at once."""
        self._running = asyncio.ensure_future(self._run())
        self._running.add_done_callback(self._run_ended)

    async def endpoint(self) -> Endpoint:
        """Where the partition serves, once it does. Raises why it can't, or `PartitionStopped`."""
        return (await self._serving()).endpoint

    async def snapshot(self) -> Snapshot:
        """See `Partition.snapshot`. Raises like `endpoint`."""
        return (await self._serving()).partition.snapshot()

    async def leftovers(self) -> str:
        """See `Partition.leftovers`. Raises like `endpoint`."""
        return (await self._serving()).partition.leftovers()

    async def holder_backlog(self, holder: Holder) -> HolderBacklog:
        """See `Partition.holder_backlog`. Raises like `endpoint`."""
        return (await self._serving()).partition.holder_backlog(holder)

    async def departures(self) -> Departures:
        """The side of moves that gives slots away. Raises like `endpoint`."""
        return (await self._serving()).partition.departures

    async def arrivals(self) -> Arrivals:
        """The side of moves that takes slots in. Raises like `endpoint`."""
        return (await self._serving()).partition.arrivals

    async def status(self) -> dict[str, Any]:
        """The partition's own status and its connections. Raises like `endpoint`."""
        serving = await self._serving()
        return {
            **serving.partition.status(),
            "partition": self._config.partition,
            "epoch": serving.partition.epoch,
            "commit_seq": serving.partition.commit_seq,
            "connections": serving.link.connections + serving.transport.connections,
            "pid": os.getpid(),
        }

    @property
    def transport(self) -> RayTransportServer | None:
        """The end of the Ray transport, while the partition serves."""
        serving = self._opening.opened
        return None if serving is None else serving.transport

    async def stop(self) -> None:
        """Let running turns end, close files and connections, give up the lock. Idempotent."""
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait((self._running,))
        serving = self._opening.opened
        if serving is None:
            return
        # The partition first: the replies of its last turns still need the connections.
        await serving.partition.stop()
        await asyncio.gather(serving.link.stop(), serving.transport.stop())

    async def _serving(self) -> _Serving:
        if self._stopping is not None:
            raise PartitionStopped(f"partition {self._config.partition} has been stopped")
        return await self._opening.get()

    # --- opening --------------------------------------------------------------------------------

    async def _run(self) -> None:
        serving = await self._opening.run()
        serving.partition.exited.add_done_callback(self._partition_exited)
        await self._keep_announced(serving)

    async def _open(self) -> _Serving:
        order, initialised = await self._order()
        partition = await self._open_partition(order)
        try:
            if not initialised:
                # Before the first call is served: from here on an empty directory means lost data.
                await self._coordinator.initialised(self._config.partition)
            return await self._serve(partition)
        except BaseException:
            await partition.stop()
            raise

    async def _order(self) -> tuple[OpenOrder, bool]:
        config = self._config
        try:
            facts = await self._coordinator.opening_facts(config.partition)
        except WrongPartition:
            raise
        except Exception as error:
            path = partition_directory(config.data_dir, config.partition)
            if (path / "partition.sqlite").exists():
                return OpenOrder(False, [], 0), True  # files first: what is here can be served without anybody
            raise DataMissing(
                f"{path} has no data, and the coordinator can't be asked whether it ever had: {error}"
            ) from error
        self._take_map(facts.slot_map)
        slots = facts.slot_map.slots_of(config.partition)
        return OpenOrder(not facts.initialised, slots, facts.min_commit_seq), facts.initialised

    async def _serve(self, partition: HostedPartition) -> _Serving:
        config = self._config
        transport = RayTransportServer(
            partition.accept, config.settings, partition=config.partition, epoch=partition.epoch
        )
        link = LinkServer(
            config.secret,
            partition.accept,
            config.settings,
            partition=config.partition,
            epoch=partition.epoch,
            node=config.node,
            actor_name=config.actor_name,
        )
        tcp_host = None if config.node_ip in _LOOPBACK else config.node_ip
        endpoint = await link.start(unix_dir=tempfile.gettempdir(), tcp_host=tcp_host)
        return _Serving(partition, link, transport, endpoint)

    # --- announcements --------------------------------------------------------------------------

    async def _keep_announced(self, serving: _Serving) -> None:
        """Tell the coordinator, for as long as the partition serves. Its absence stops nothing."""
        announced = False
        silent = False
        while True:
            try:
                verdict = await (self._report(serving) if announced else self._announce(serving))
            except WrongPartition:
                raise  # it answers, and knows no such partition
            except Exception as error:  # also a coordinator that can't write: it is of no use, and stops nothing either
                if not silent:
                    silent = True
                    self._log(logging.WARNING, "coordinator_unreachable", f"Serving without the coordinator: {error!r}")
                announced = False  # a coordinator that comes back has forgotten where this partition is
                await asyncio.sleep(self._announce_retry_s)
                continue
            if verdict is not Verdict.ACCEPTED:
                self._refused(serving, verdict)
                return
            announced, silent = True, False
            await asyncio.sleep(self._report_interval_s)

    async def _announce(self, serving: _Serving) -> Verdict:
        partition = serving.partition
        verdict = await self._coordinator.announce(
            self._config.partition, partition.epoch, serving.endpoint, self._safe_seq(partition), partition.slots
        )
        return await self._settled(partition, verdict)

    async def _report(self, serving: _Serving) -> Verdict:
        partition = serving.partition
        verdict = await self._coordinator.report(self._config.partition, partition.epoch, self._safe_seq(partition))
        return await self._settled(partition, verdict)

    async def _settled(self, partition: HostedPartition, verdict: Verdict) -> Verdict:
        """Ask what has become of moves that have not ended here: their end may have come while nobody could be told."""
        if verdict is Verdict.ACCEPTED and partition.moves:
            await self._coordinator.settle_moves(self._config.partition, partition.moves)
        return verdict

    def _safe_seq(self, partition: HostedPartition) -> int:
        # With weaker durability a power failure may take commits back, which is then no sign of a wrong file.
        return partition.commit_seq if self._config.settings.durability == "full" else 0

    # --- the end ----------------------------------------------------------------------------------

    def _refused(self, serving: _Serving, verdict: Verdict) -> None:
        number, epoch = self._config.partition, serving.partition.epoch
        if verdict is Verdict.FENCED:
            self._ended(Fenced(f"partition {number} has a newer owner than epoch {epoch}"))
        else:
            self._ended(DataRolledBack(f"partition {number} has an older file than it had when it last reported"))

    def _run_ended(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            self._ended(error)

    def _partition_exited(self, exited: asyncio.Future[Any]) -> None:
        if exited.cancelled() or self._stopping is not None:
            return
        error = exited.exception()
        if error is None:
            result = exited.result()
            error = result if isinstance(result, BaseException) else Fenced(f"the partition ended: {result!r}")
        self._ended(error)

    def _log(self, level: int, event: str, message: str, **fields: Any) -> None:
        log_event(level, event, message, partition=self._config.partition, **fields)
