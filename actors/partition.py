"""A partition: the objects of its slots, their calls and timers, and the one writer of its file."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from actors.address import ClassRef, ObjectId, slot_of
from actors.admin import Admin
from actors.admission import Admission
from actors.arrival import Arrivals
from actors.careful import Careful
from actors.channel import Channel, ChannelHandler
from actors.claims import Claims
from actors.class_table import ClassTable
from actors.client import Client, Directory
from actors.departure import Departures
from actors.durable_object import DurableObject
from actors.early_commit import outcome_of
from actors.engine_gate import EngineGate
from actors.engine_kinds import REMOTE_KINDS, engine_handlers
from actors.errors import (
    ChannelClosed,
    DataMissing,
    MainspringError,
    PartitionStopped,
    WrongThread,
)
from actors.execution_waits import ExecutionWaits
from actors.holder_backlogs import holder_backlog
from actors.inbox import Inbox
from actors.inbox_sweep import InboxSweep
from actors.inside_runtime import InsideRuntime
from actors.intent_runner import IntentRunner
from actors.logs import log_event
from actors.message_numbers import MessageNumbers
from actors.messages import Admin as AdminMessage
from actors.metrics import PartitionMetrics, Snapshot
from actors.outbox_relay import OutboxRelay
from actors.partition_config import PartitionConfig, default_driver
from actors.partition_connection import PartitionConnection
from actors.partition_objects import PartitionObjects
from actors.partition_status import leftovers_of, status_of
from actors.publication_port import PublicationPort
from actors.recovery import Recovery, read_intents, recover
from actors.sleep_backstop import SleepBackstop
from actors.slot_table import SlotTable, owned_ops, slots_of
from actors.timer_dispatcher import TimerDispatcher
from actors.timer_work import TimerWork
from actors.toolkit.delivery import OutcomeDeliveries
from actors.turn import Turn
from drivers.checkpoint import Checkpointer
from drivers.executor import Executor
from drivers.group_commit import GroupCommitter
from drivers.native import Driver, OpenedStore
from drivers.store import Counters, Store
from drivers.tables import Key, Op
from drivers.ticker import Ticker
from drivers.timer_store import CommittingTimerStore
from drivers.write_set import WriteSet
from timers.firing import PartitionName, PartitionRole
from timers.lease_sweep import HolderBacklog
from timers.leases import Holder
from timers.message_rows import OutboxRow
from timers.registry import TimerRegistry

__all__ = ["Partition"]

#: How long stopping waits for running turns before it cancels them.
STOP_GRACE_MS = 5_000


class Partition(PartitionObjects):
    """Lives on one event loop. Made by `open`; `exited` resolves when it must not go on."""

    def __init__(self, config: PartitionConfig, driver: Driver, opened: OpenedStore, recovery: Recovery) -> None:
        super().__init__(config.settings.max_active_objects)
        self.config = config
        self.settings = config.settings
        self.coordinator = config.coordinator
        self.clock = driver.clock
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self._opened = opened
        self.store: Store = opened.store
        self.exited: asyncio.Future[BaseException] = self.loop.create_future()
        self.stopped = False
        self.draining = False
        self._connections: set[PartitionConnection] = set()
        #: set whenever an object has nothing to do any more
        self.host_idle = asyncio.Event()
        self.admission = Admission(self)
        self.slot_table = SlotTable(self.store)
        self.metrics = PartitionMetrics()
        self.inbox = Inbox()
        self.inbox.load(self.store, self.serving_ms())
        self.claims = Claims()
        self._executor: Executor = driver.executor(config.partition)
        self._checkpointer: Checkpointer | None = driver.checkpointer(self.store)
        self.committer = GroupCommitter(
            self.store,
            self._executor,
            wall_ms=self.clock.wall_ms,
            monotonic_ms=self.serving_ms,
            on_fatal=self._fatal,
            riders=(self.inbox, self.claims),
            max_group_rows=self.settings.max_group_rows,
            slice_rows=self.settings.slice_rows,
            wal_truncate_bytes=self.settings.wal_truncate_bytes,
            on_commit=self.metrics.committed,
        )
        self.committer.start()
        self.classes = ClassTable(self.store, self.persist, config.fetch_class)
        self.classes.on_outdated = self._rebuild_objects
        self.numbers = MessageNumbers(self.store)
        self.dispatcher = TimerDispatcher(self)
        self.deliveries = OutcomeDeliveries(self)
        self.publications = PublicationPort(self)
        self.registry = TimerRegistry(engine_handlers(self))
        self.gate = EngineGate(self)
        self._ticker = Ticker(
            self.store,
            CommittingTimerStore(self.store, self.committer, self.gate),
            self.registry,
            self.clock,
            partition=PartitionName(PartitionRole.PARTITION, config.partition),
            user_tick=self.dispatcher.tick,
            poll_ms=driver.poll_ms,
            remote_kinds=REMOTE_KINDS,
            ended=self._tick_ended,
            waker=driver.waker(),
        )
        self.careful = Careful(self, not self.store.was_clean, recovery.crashes, recovery.let_go)
        self.departures = Departures(self)
        self.arrivals = Arrivals(self)
        self.execution_waits = ExecutionWaits(self)
        self.sleeps = SleepBackstop(self)
        self._can_lose_wakes = driver.poll_ms is not None  # virtual time can't
        self._admin = Admin(self)
        self._sweep = InboxSweep(self)
        self.inbox.on_entries = self._sweep.nudge
        self._intents = IntentRunner(self)
        self.relay = OutboxRelay(self)
        self.client: Client
        self.runtime: InsideRuntime
        # counters for status and metrics
        self.turns = self.fires = self.retries = self.dead_letters = self.activations = self.resets = 0

    @classmethod
    async def open(
        cls,
        config: PartitionConfig,
        directory: Directory,
        *,
        driver: Driver | None = None,
        classes: Sequence[type[DurableObject]] = (),
    ) -> Partition:
        """Open the partition's data and begin to serve. `classes` are known from the start, without an import.

        Raises `PartitionBusy`, `DataMissing`, `DataRolledBack`, `WrongPartition`, `SchemaTooNew`; nothing is left
        open then.
        """
        driver = driver or default_driver(config.settings)
        opened = await asyncio.to_thread(
            driver.open_store,
            config.data_dir,
            config.cluster_id,
            config.partition,
            create=config.create,
            min_commit_seq=config.min_commit_seq,
        )
        try:
            if opened.store.commit_seq == 0:  # new, or its creation was cut short: nothing else is its first commit
                if not config.slots and not config.create:
                    raise DataMissing(
                        f"partition {config.partition}: its creation was never completed, and its slots are not known "
                        "here. It is completed once the coordinator answers."
                    )
                _write_slots(opened.store, config.slots)
            recovery = recover(
                opened.store,
                unclean=not opened.store.was_clean,
                crash_limit=config.settings.crash_limit,
                misfire_limit=config.settings.misfire_all_limit,
                now_ms=driver.clock.wall_ms(),
            )
            partition = cls(config, driver, opened, recovery)
        except BaseException:
            opened.close()
            raise
        for known in classes:
            partition.classes.add(known)
        partition._start(directory, recovery)
        return partition

    def _start(self, directory: Directory, recovery: Recovery) -> None:
        self.client = Client(directory, self.settings)
        self.runtime = InsideRuntime(self.config.runtime_name, self)
        for what in recovery.poisoned:
            log_event(logging.ERROR, "poison", f"{what} ended its process too often and was taken out", what=what)
        # the innermost calls first: their callers, run again, will wait for them
        for intent in sorted(recovery.intents, key=lambda intent: -intent.depth):
            if self.runs_slot(slot_of(intent.class_name, intent.key)):
                self._intents.run(intent)
        for class_name, key, name in recovery.suspects:
            self.dispatcher.suspects.add((class_name, key, name))
        self.relay.start()
        self._ticker.start()
        if self._can_lose_wakes:
            self.sleeps.start()
        if recovery.suspects:
            self.tick()  # at once: a call that arrives first would run beside them, and they would not be alone
        if self.inbox.needs_sweep:
            self._sweep.nudge()

    # --- identity and state -----------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.store.header.epoch

    @property
    def commit_seq(self) -> int:
        return self.store.commit_seq

    @property
    def counters(self) -> Counters:
        return self.store.counters

    @property
    def moves(self) -> dict[str, tuple[str, int]]:
        """Moves of slots that have not come to their end here; see `SlotTable.moves`."""
        return self.slot_table.moves()

    def holder_backlog(self, holder: Holder) -> HolderBacklog:
        """What an object of this partition has sent and has not arrived."""
        return holder_backlog(self, holder)

    def leftovers(self) -> str:
        """What is here although the partition may own no slot any more, for people; empty when it can be ended."""
        return leftovers_of(self)

    def serving_ms(self) -> int:
        """A clock for what is kept for a time: it goes on while the partition serves, whatever the wall clock does."""
        return self.clock.monotonic_ns() // 1_000_000

    def runs_slot(self, slot: int) -> bool:
        """Whether this partition runs the objects of the slot."""
        return slot in self.slot_table.owned

    def starts_timers(self, slot: int) -> bool:
        """Whether due timers of the slot are started here; not any more when it is about to leave."""
        return slot in self.slot_table.owned and slot not in self.slot_table.leaving

    def slots_arrived(self, slots: Collection[int]) -> None:
        """Slots run here that did not before: turns of theirs that were cut short first, then what is due."""
        for intent in read_intents(self.store):
            host = self.find_host(intent.class_name, intent.key)
            if slot_of(intent.class_name, intent.key) in slots and (host is None or not host.busy):
                self._intents.run(intent)
        for host in list(self._hosts.values()):
            host.pump()
        self.relay.slots_arrived(slots)
        self.dispatcher.rewind(0)
        self.tick()

    @property
    def slots(self) -> list[tuple[int, int]]:
        """The slots that it owns, as inclusive ranges."""
        return self.slot_table.ranges()

    def check_thread(self, object_id: ObjectId) -> None:
        if threading.get_ident() != self.thread_id:
            raise WrongThread(f"{object_id}: storage, timers and stubs work on the partition's thread only")

    @property
    def busy(self) -> bool:
        """Whether anything is queued, running or on its way to disk."""
        return self._works or self.admission.busy or any(host.busy for host in self._hosts.values())

    @property
    def _works(self) -> bool:
        """Whether anything goes on beside turns and the calls that wait for them."""
        return (
            not self.committer.idle
            or self._ticker.busy
            or self.relay.busy
            or self.careful.active
            or self.publications.busy
        )

    def running_turns(self) -> set[Turn] | None:
        """The turns that run, if nothing else is going on here; None if something is."""
        if self._works or any(host.activation or host.rerun for host in self._hosts.values()):
            return None
        return {turn for host in self._hosts.values() for turn in host.running()}

    def status(self) -> dict[str, Any]:
        """What the partition is doing, as plain data."""
        return status_of(self)

    def tick_status(self) -> dict[str, Any]:
        """How the ticks go, what wakes the partition, and how late its wakes have been."""
        return self._ticker.status()

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self._connections)

    def snapshot(self) -> Snapshot:
        """Status and observations, for metrics."""
        return Snapshot(self.status(), self.metrics.take_recent())

    # --- connections ------------------------------------------------------------------------------

    def accept(self, channel: Channel) -> ChannelHandler:
        """A client has proved itself on this channel."""
        return PartitionConnection(self)

    def connected(self, connection: PartitionConnection) -> None:
        self._connections.add(connection)
        self.inbox.connected(connection.session)

    def disconnected(self, connection: PartitionConnection, session: bytes) -> None:
        self._connections.discard(connection)
        if not any(other.session == session for other in self._connections):
            self.inbox.disconnected(session, self.serving_ms())
            self._sweep.nudge()

    def tell_classes(self, connection: PartitionConnection, refs: Sequence[ClassRef]) -> None:
        """A client says where the classes that it will call come from."""
        for ref in refs:
            try:
                self.classes.tell(ref)
                connection.refused_classes.pop(ref.type_name, None)
            except MainspringError as error:  # answered to each call that this client makes of the class
                connection.refused_classes[ref.type_name] = error

    def acknowledge(self, connection: PartitionConnection, flat: Sequence[int]) -> None:
        """The client has the replies of these ranges of calls."""
        aliases = connection.aliases
        for low, high in zip(flat[::2], flat[1::2], strict=True):
            self.inbox.acknowledge(connection.session, low, high)
            for seq in [seq for seq in aliases if low <= seq <= high]:
                self.inbox.acknowledge_one(aliases.pop(seq))

    def release_ids(self, call_ids: Sequence[bytes]) -> None:
        self.inbox.release(call_ids, self.serving_ms())

    def administer(self, connection: PartitionConnection, message: AdminMessage) -> None:
        self._admin.handle(message.op, message.args, partial(connection.reply, message.seq))

    # --- objects ----------------------------------------------------------------------------------

    def release_calls(self, turn: Turn) -> None:
        """The turn's outcome is durable: what it called need not be remembered any more."""
        if not turn.called:
            return
        by_partition: dict[int, list[bytes]] = {}
        for number, call_id in turn.called:
            by_partition.setdefault(number, []).append(call_id)
        for number, call_ids in by_partition.items():
            self.client.release(number, call_ids)

    # --- write sets -------------------------------------------------------------------------------

    def submit(self, write_set: WriteSet) -> None:
        if not self.stopped:
            self.committer.submit(write_set)

    def persist(self, ops: list[Op]) -> None:
        self.submit(WriteSet(ops))

    def commit(self, ops: list[Op]) -> asyncio.Future[None]:
        """The same; done when it is durable. Raises `CommitFailed` when it was not applied, `PartitionStopped`."""
        if self.stopped:
            raise PartitionStopped(f"partition {self.config.partition} has stopped; nothing was written")
        write_set = WriteSet(ops)
        outcome = outcome_of(self.loop, write_set)
        self.submit(write_set)
        return outcome

    def executions_changed(self, object_id: ObjectId) -> None:
        """Executions of the object have changed, durably."""
        self.execution_waits.changed(object_id)

    def drop_pointer(self, key: Key) -> None:
        """Remove a timer row that points to an object that no longer exists."""
        self.persist([("timers", key, None)])

    def _fatal(self, error: BaseException) -> None:
        """Nobody is answered from now on; the process exits and its successor reads what is there."""
        self.stopped = True
        log_event(logging.CRITICAL, "partition_fatal", f"partition {self.config.partition}: {error}")
        if not self.exited.done():
            self.exited.set_result(error)

    # --- timers -----------------------------------------------------------------------------------

    def tick(self) -> None:
        if not self.stopped:
            self._ticker.tick()

    def _tick_ended(self) -> None:
        self.gate.tick_ended()
        departed = self.numbers.departed()
        if departed:
            self.messages_left(departed)
        self.publications.tick_ended()

    @property
    def max_outbox_messages(self) -> int:
        return self.settings.max_outbox_messages

    def messages_left(self, rows: Sequence[OutboxRow]) -> None:
        """These messages are durable and may leave."""
        if not self.stopped:
            self.relay.messages_left(rows)

    def timer_armed(self, due_ms: int) -> None:
        """A timer was put, durably."""
        self.dispatcher.rewind(due_ms)
        self._ticker.alarm.arm(due_ms)

    def start_timer(self, work: TimerWork) -> None:
        """Queue a due timer's turn; fresh ones wait while suspects run."""
        start = partial(work.host.enqueue, work)
        if work.suspected:
            self.careful.suspect(work, work.host.expect(start))
        elif self.careful.unclean or self.careful.active:
            self.careful.admit_timer(work, work.host.expect(start))
        else:
            start()

    def timer_ended(self, work: TimerWork, *, retry: bool = False) -> None:
        self.dispatcher.ended(work, retry=retry)
        work.settle()

    # --- the end ----------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Take no new work, let running turns end (bounded), commit, mark the file clean, and close it."""
        if self.stopped:
            await self._close(clean=False)
            return
        self.publications.stop()
        self.draining = True  # calls from outside go elsewhere; those of turns that still run are let in
        self.sleeps.stop()
        await self._ticker.stop()
        self.relay.stop()
        await self._drain()
        clean = not any(host.busy for host in self._hosts.values())
        for host in list(self._hosts.values()):
            self.evict(host)
        await self.committer.drain()
        await self._close(clean=clean)

    async def abandon(self) -> None:
        """Let go of everything at once, as a dying process does: what is not durable is lost."""
        self.stopped = True
        self.relay.stop()
        self.publications.stop()
        self.committer.abandon()
        self.sleeps.stop()
        await self._ticker.stop()
        for host in list(self._hosts.values()):
            host.abandon()
        for connection in list(self._connections):
            connection.close(ChannelClosed("the partition's process is gone"))
        await self.deliveries.close()
        await self.client.close()
        self._executor.close()
        if self._checkpointer is not None:
            self._checkpointer.stop()
        self._opened.close()

    async def _drain(self) -> None:
        """Wait until no object has anything to do, for at most the grace period."""
        deadline = self.loop.time() + STOP_GRACE_MS / 1_000
        while any(host.busy for host in self._hosts.values()):
            self.host_idle.clear()
            try:
                await asyncio.wait_for(self.host_idle.wait(), deadline - self.loop.time())
            except asyncio.TimeoutError:
                return

    async def _close(self, *, clean: bool) -> None:
        fatal = self.exited.done()
        self.stopped = True
        for connection in list(self._connections):
            connection.close()
        await self.deliveries.close()
        await self.client.close()
        if clean and not fatal:
            self.store.mark_clean()
            self.committer.poke()
            await self.committer.drain()
        self._executor.close()
        if self._checkpointer is not None:
            self._checkpointer.stop()
        self._opened.close()


def _write_slots(store: Store, ranges: Sequence[tuple[int, int]]) -> None:
    store.begin()
    store.write(owned_ops(slots_of(ranges), version=1))
    store.flush()
    store.commit()
