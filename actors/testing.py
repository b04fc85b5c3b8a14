"""The whole runtime in one process, on virtual time when asked: for tests, notebooks and small services.

The same partitions, files and rules as on Ray. `LocalRuntime(clock=VirtualClock())` moves time only when told to,
and commits inline, so that a month of timers runs in seconds and in one order.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Coroutine
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from actors.address import SLOTS
from actors.client import Client
from actors.cluster_file import LOCAL_CLUSTER, ClusterFile
from actors.coordinator_engine import EngineConfig
from actors.coordinator_views import CoordinatorViews
from actors.dead_letters import DeadLetter, DeadLetters
from actors.durable_object import DurableObject, class_info
from actors.errors import (
    InvalidOption,
    PartitionStopped,
    RuntimeNotStarted,
    SyncCallInLoop,
    WrongPartition,
    WrongThread,
)
from actors.holder_backlogs import LocalBacklogs
from actors.local_coordinator import LocalCoordinator
from actors.local_directory import LocalDirectory
from actors.local_moves import LocalMoves
from actors.namespace import Namespace, Stub
from actors.partition import Partition
from actors.partition_config import PartitionConfig
from actors.settings import Settings
from actors.slot_table import as_ranges
from actors.turn import Turn
from drivers.clock import Clock, SystemClock, VirtualClock
from drivers.files import COORDINATOR
from drivers.memory_store import MemoryData
from drivers.native import NativeDriver, has_partition_file

__all__ = ["COORDINATOR", "DeadLetter", "LocalRuntime", "SystemClock", "VirtualClock"]

T = TypeVar("T")

#: Loop turns without any progress after which a busy partition is taken to wait for something else than itself.
_QUIET_TURNS = 25
#: Loop turns in which a call that was just made has reached its partition.
_ARRIVAL_TURNS = 10
#: Loop turns after which everything has begun that was asked of the loop for its next turn.
_SOON_TURNS = 2
#: How long (real time) something that runs elsewhere (a thread, a socket) is waited for before virtual time goes on.
_PATIENCE_S = 0.25


class LocalRuntime(DeadLetters, CoordinatorViews):
    """`async with LocalRuntime() as rt:` gives `rt.namespace(Class)` as a runtime on Ray does.

    `clock`: a `VirtualClock` (the default) or a `SystemClock`. `data_dir`: where the files are, and a `cluster.json`
    that says so; a directory of its own, removed at the end, when None. `memory=True` uses no files at all.
    """

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        partitions: int = 1,
        data_dir: str | Path | None = None,
        settings: Settings | None = None,
        memory: bool = False,
        name: str = "local",
        driver: NativeDriver | None = None,
    ) -> None:
        if not 1 <= partitions <= SLOTS:
            raise InvalidOption(f"partitions={partitions}: must be 1 to {SLOTS}")
        self.clock: Clock = clock if clock is not None else VirtualClock()
        self._virtual = self.clock if isinstance(self.clock, VirtualClock) else None
        self.settings = settings or Settings(durability="off" if self._virtual else "full")
        self.name = name
        self.partition_count = partitions
        self.partitions: list[Partition | None] = [None] * partitions
        self._data_dir = data_dir
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._memory: dict[int, MemoryData] | None = {} if memory else None
        #: every partition has been created once: from then on a missing file is lost data
        self._is_complete = False
        self._driver = driver
        self._classes: list[type[DurableObject]] = []
        self._directory = LocalDirectory(self)
        self.moves: LocalMoves
        self._coordinator: LocalCoordinator | None = None
        self._client: Client | None = None
        #: turns that wait for something, and were given real time to go on by themselves
        self._waited_for: set[Turn] = set()

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> LocalRuntime:
        """Open (and at first create) the partitions.

        Raises what opening raises, `PartitionBusy` for one, `DataMissing` for files that are gone, and `InvalidOption`
        when the directory has another number of partitions.
        """
        if self._data_dir is None and self._memory is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="mainspring-")
            self._data_dir = self._temporary.name
        if self._driver is None:
            self._driver = NativeDriver(
                clock=self.clock,
                inline=self._virtual is not None,
                durability=self.settings.durability,
                # a virtual clock can't lose a wake, and a look each virtual second would be most of the work
                poll_ms=None if self._virtual else self.settings.poll_ms,
                lock_wait_ms=self.settings.lock_wait_ms,
                busy_timeout_ms=self.settings.busy_timeout_ms,
                checkpoint_interval_ms=self.settings.checkpoint_interval_ms,
                memory=self._memory,
            )
        cluster = self._open_cluster()
        self.moves = self._open_moves(cluster)
        directory = "" if self._data_dir is None else str(self._data_dir)
        config = EngineConfig(directory, LOCAL_CLUSTER, recorded=cluster is not None, settings=self.settings)
        self._coordinator = LocalCoordinator(config, self._driver, LocalBacklogs(self._find_by_slot))
        try:
            await self._coordinator.start()
            for number in range(self.partition_count):
                await self._open(number)
            if cluster is not None:
                cluster.mark_ready(Path(str(self._data_dir)))
            self._is_complete = True
        except BaseException:
            await self.stop()
            raise
        self._client = Client(self._directory, self.settings)
        return self

    def _open_moves(self, cluster: ClusterFile | None) -> LocalMoves:
        if cluster is None:
            return LocalMoves(LOCAL_CLUSTER, self.partition_count, self.find_partition, None)
        moves = LocalMoves(LOCAL_CLUSTER, cluster.partitions, self.find_partition, Path(str(self._data_dir)))
        known = len(moves.partitions)
        if known != self.partition_count:
            moves.close()
            raise InvalidOption(f"{self._data_dir} has {known} partitions, not {self.partition_count}")
        return moves

    def _open_cluster(self) -> ClusterFile | None:
        """What says that the directory is ours and complete; None where nothing outlives this object."""
        if self._memory is not None or self._temporary is not None:
            return None
        directory = Path(str(self._data_dir))
        directory.mkdir(parents=True, exist_ok=True)
        cluster = ClusterFile.read(directory)
        if cluster is None:
            ClusterFile(LOCAL_CLUSTER, self.partition_count).create(directory)  # or another process is doing it now
            cluster = ClusterFile.read(directory)
            assert cluster is not None
        if cluster.cluster_id != LOCAL_CLUSTER:
            raise WrongPartition(
                f"{directory} belongs to a runtime on Ray (cluster {cluster.cluster_id}): start it there"
            )
        self._is_complete = cluster.ready
        return cluster

    async def _open(self, number: int, *, is_new: bool = False) -> None:
        assert self._driver is not None
        directory = "" if self._data_dir is None else str(self._data_dir)
        exists = number in self._memory if self._memory is not None else has_partition_file(directory, number)
        config = PartitionConfig(
            data_dir=directory,
            cluster_id=LOCAL_CLUSTER,
            partition=number,
            create=not exists and (is_new or not self._is_complete),
            slots=as_ranges(self.moves.slots_of(number)),
            settings=self.settings,
            runtime_name=self.name,
            coordinator=self.coordinator,
        )
        partition = await Partition.open(config, self._directory, driver=self._driver, classes=self._classes)
        self.partitions[number] = partition

    async def stop(self) -> None:
        """Let running turns end, and close everything. The data stays, unless the directory was our own."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        for number, partition in enumerate(self.partitions):
            if partition is not None:
                await partition.stop()
                self.partitions[number] = None
        if self._coordinator is not None:
            await self._coordinator.stop()
        self.moves.close()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None
            self._data_dir = None

    async def __aenter__(self) -> LocalRuntime:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- what applications use --------------------------------------------------------------------

    def namespace(self, cls: type[DurableObject]) -> Namespace:
        """The objects of a class; also while the event loop does not run. Raises `DuplicateTypeName`, and `WrongThread`
        on another thread than the event loop's."""
        info = class_info(cls)
        if any(partition.thread_id != threading.get_ident() for partition in self._running()):
            raise WrongThread(f"runtime {self.name!r} lives on the thread of its event loop: ask it for {cls!r} there")
        for partition in self._running():
            partition.classes.add(cls)
        if cls not in self._classes:
            self._classes.append(cls)
        return Namespace(self, info)

    def client(self) -> Client:
        if self._client is None:
            raise RuntimeNotStarted(f"runtime {self.name!r} is not running: use it inside `async with`")
        return self._client

    def run_sync(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        raise SyncCallInLoop("a LocalRuntime lives on its own event loop: await the call")

    # --- what tests use ---------------------------------------------------------------------------

    async def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0, ms: float = 0
    ) -> None:
        """Move virtual time on, and run everything that is due on the way at its own instant, in order."""
        clock = self._virtual_clock()
        delta = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=ms)
        target = clock.wall_ms() + delta // timedelta(milliseconds=1)
        await self.run_until_idle()
        while (next_ms := clock.next_ms()) is not None and next_ms <= target:
            clock.move_to(next_ms)
            clock.run_due()
            await self._settle()
        clock.move_to(max(target, clock.wall_ms()))
        await self.run_until_idle()

    async def run_until_idle(self) -> None:
        """Run what is due now, until nothing is running or on its way to disk."""
        for _ in range(_ARRIVAL_TURNS):
            await asyncio.sleep(0)
        while True:
            await self._settle()
            if self._virtual is None or not self._virtual.run_due():
                return

    async def fire_alarm(self, stub: Stub) -> bool:
        """Run the object's alarm now, whenever it is due; whether one was set. Moves virtual time to its due time."""
        await self.run_until_idle()
        due_ms = self._alarm_due_ms(stub)
        if due_ms is None:
            return False
        clock = self._virtual_clock()
        await self.advance(ms=max(0, due_ms - clock.wall_ms()))
        return True

    def _alarm_due_ms(self, stub: Stub) -> int | None:
        partition = self._partition_of(stub)
        oid = partition.store.find_object(stub.id.type_name, stub.key)
        row = None if oid is None else partition.store.get("directory", (oid, ""))
        return None if row is None else row[1]

    async def evict(self, stub: Stub) -> bool:
        """Let the object leave memory once its turns have ended; False when it was not there."""
        await self.run_until_idle()
        partition = self._partition_of(stub)
        host = partition.find_host(stub.id.type_name, stub.key)
        return host is not None and partition.evict(host)

    async def crash(self, partition: int | None = None) -> None:
        """Drop memory and keep the disk, as `kill -9` does, then start again. Everything, or one partition;
        `COORDINATOR` is the coordinator's number."""
        if partition is None or partition == COORDINATOR:
            await self.coordinator.crash()
        if partition == COORDINATOR:
            return
        for number in range(self.partition_count) if partition is None else [partition]:
            found = self.partitions[number]
            if found is not None:
                self.partitions[number] = None
                await found.abandon()
        for number in range(self.partition_count):
            if self.partitions[number] is None:
                await self._open(number)

    async def scale(self, partitions: int) -> None:
        """Have so many partitions from now on, while everything goes on: slots move until all have equal shares.

        Raises `InvalidOption`.
        """
        if not 1 <= partitions <= SLOTS:
            raise InvalidOption(f"partitions must be 1 to {SLOTS}, not {partitions}")
        for number in range(self.partition_count, partitions):
            self.moves.add(number)
            self.partitions.append(None)
            self.partition_count += 1
            await self._open(number, is_new=True)
        await self.moves.mover().spread(range(partitions))
        while self.partition_count > partitions:
            last = self.partitions.pop()
            self.partition_count -= 1
            if last is not None:
                await last.stop()
            self.moves.remove(self.partition_count)

    def status(self) -> list[dict[str, Any]]:
        """What each partition is doing."""
        return [partition.status() for partition in self._running()]

    # --- inside -----------------------------------------------------------------------------------

    def find_partition(self, number: int) -> Partition | None:
        """The partition of this number, if it runs."""
        return self.partitions[number] if number < len(self.partitions) else None

    def _find_by_slot(self, slot: int) -> Partition | None:
        return self.find_partition(self._directory.partition_of(slot))

    @property
    def coordinator(self) -> LocalCoordinator:
        """Leases, and what all objects together have charged to quotas."""
        if self._coordinator is None:
            raise RuntimeNotStarted(f"runtime {self.name!r} is not running: use it inside `async with`")
        return self._coordinator

    def _services(self) -> LocalCoordinator:
        return self.coordinator

    def _running(self) -> list[Partition]:
        return [partition for partition in self.partitions if partition is not None]

    def _partition_of(self, stub: Stub) -> Partition:
        partition = self.partitions[self._directory.partition_of(stub.id.slot)]
        if partition is None:
            raise PartitionStopped("the object's partition is not running")
        return partition

    def _virtual_clock(self) -> VirtualClock:
        if self._virtual is None:
            raise InvalidOption("only a LocalRuntime with a VirtualClock can move time")
        return self._virtual

    def _progress(self) -> tuple[int, ...]:
        moved = (p.turns + p.committer.commits + p.admission.calls + p.activations for p in self._running())
        return (*moved, self.coordinator.commits)

    async def _settle(self) -> None:
        """Until nothing moves by itself: what still waits then waits for time, or for something outside."""
        loop = asyncio.get_running_loop()
        quiet, seen, since = 0, self._progress(), loop.time()
        while await self._is_busy():
            # what runs in threads or waits for sockets needs real time; everything else only loop turns
            await asyncio.sleep(0 if quiet < _QUIET_TURNS else 0.001)
            progress = self._progress()
            if progress != seen:
                quiet, seen, since = 0, progress, loop.time()
                continue
            quiet += 1
            if self._virtual is None or quiet < _QUIET_TURNS:
                continue
            running = self._running_turns()
            if running and running <= self._waited_for:
                return
            if loop.time() - since > _PATIENCE_S:
                self._waited_for = running
                return

    async def _is_busy(self) -> bool:
        """Whether anything goes on, also after the loop turns in which what was put off to the next one begins."""
        for _ in range(_SOON_TURNS):
            if self.coordinator.busy or any(partition.busy for partition in self._running()):
                return True
            await asyncio.sleep(0)
        return False

    def _running_turns(self) -> set[Turn]:
        """The turns that run, if they are all that keeps the partitions busy. They were given real time once, and are
        not given more before each step of virtual time."""
        found = [partition.running_turns() for partition in self._running()]
        return set() if self.coordinator.busy or None in found else set().union(*(turns or () for turns in found))
