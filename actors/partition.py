"""A partition: the objects of its slots, their calls and timers, and the one writer of its file."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from actors.address import ClassRef, ObjectId, check_key, slot_of
from actors.admin import Admin
from actors.careful import Careful
from actors.channel import Channel, ChannelHandler
from actors.claims import Claims
from actors.class_table import ClassTable, FetchClass
from actors.client import Client, Directory
from actors.durable_object import ClassInfo, DurableObject
from actors.errors import (
    CallDiverged,
    ChannelClosed,
    MainspringError,
    Overloaded,
    ReplyLost,
    WrongThread,
)
from actors.inbox import Inbox
from actors.inside_runtime import InsideRuntime
from actors.logs import log_event
from actors.messages import RAISED, REFUSED, REPEAT, RESUMED, STALE, CallRow, outside_call_id
from actors.messages import Admin as AdminMessage
from actors.object_host import ObjectHost
from actors.partition_connection import PartitionConnection
from actors.recovery import Intent, Recovery, recover
from actors.settings import Settings
from actors.timer_dispatcher import TimerDispatcher
from actors.timer_work import TimerWork
from actors.turn import Turn
from actors.wire_errors import encode_error
from actors.work import REPLY_LOST, CallWork, Work, call_fingerprint
from drivers.checkpoint import Checkpointer
from drivers.durable_object import DurableObjectDriver
from drivers.executor import Executor
from drivers.group_commit import GroupCommitter
from drivers.native import Driver, OpenedStore
from drivers.store import Counters, Store
from drivers.tables import SLOTS as SLOT_TABLE
from drivers.tables import Key, Op
from drivers.ticker import Ticker
from drivers.timer_store import CommittingTimerStore
from drivers.write_set import WriteSet
from timers.firing import PartitionName, PartitionRole
from timers.registry import TimerRegistry

__all__ = ["Partition", "PartitionConfig"]

#: How often what vanished clients and callers have left is looked through.
_SWEEP_MS = 30_000
#: How long stopping waits for running turns before it cancels them.
STOP_GRACE_MS = 5_000
_OWNED = "owned"


@dataclass(frozen=True)
class PartitionConfig:
    """What a partition is opened with. `slots` (inclusive ranges) count at creation only; later its file knows."""

    data_dir: str
    cluster_id: str
    partition: int
    create: bool
    slots: Sequence[tuple[int, int]]
    settings: Settings
    min_commit_seq: int = 0
    runtime_name: str = "default"
    fetch_class: FetchClass | None = field(default=None, compare=False)


class Partition:
    """Lives on one event loop. Made by `open`; `exited` resolves when it must not go on."""

    def __init__(self, config: PartitionConfig, driver: Driver, opened: OpenedStore, recovery: Recovery) -> None:
        self.config = config
        self.settings = config.settings
        self.clock = driver.clock
        self.loop = asyncio.get_running_loop()
        self.thread_id = threading.get_ident()
        self._opened = opened
        self.store: Store = opened.store
        self.exited: asyncio.Future[BaseException] = self.loop.create_future()
        self.stopped = False
        self._draining = False
        self._connections: set[PartitionConnection] = set()
        self._hosts: dict[tuple[str, str], ObjectHost] = {}
        self._running: dict[bytes, CallWork] = {}
        self._held = 0
        self._slots = {row[0] for row in self.store.scan(SLOT_TABLE) if row[1] == _OWNED}
        self.inbox = Inbox()
        self.inbox.load(self.store, self.clock.wall_ms())
        self.claims = Claims()
        self._executor: Executor = driver.executor(config.partition)
        self._checkpointer: Checkpointer | None = driver.checkpointer(self.store)
        self.committer = GroupCommitter(
            self.store,
            self._executor,
            wall_ms=self.clock.wall_ms,
            on_fatal=self._fatal,
            riders=(self.inbox, self.claims),
            max_group_rows=self.settings.max_group_rows,
            slice_rows=self.settings.slice_rows,
            wal_truncate_bytes=self.settings.wal_truncate_bytes,
        )
        self.committer.start()
        self.classes = ClassTable(self.store, self._persist, config.fetch_class)
        self.dispatcher = TimerDispatcher(self)
        self.registry = TimerRegistry()
        self._ticker = Ticker(
            self.store,
            CommittingTimerStore(self.store, self.committer),
            self.registry,
            self.clock,
            partition=PartitionName(PartitionRole.PARTITION, config.partition),
            user_tick=self.dispatcher.tick,
            poll_ms=driver.poll_ms,
        )
        self.careful = Careful(self, not self.store.was_clean, recovery.crashes)
        self._admin = Admin(self)
        self._asking = False
        self.client: Client
        self.runtime: InsideRuntime
        # counters for status and metrics
        self.turns = self.fires = self.retries = self.dead_letters = self.activations = self.resets = 0
        self.calls = self.repeats = 0

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
            if config.create and opened.store.commit_seq == 0:
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
            self._run_intent(intent)
        for class_name, key, name in recovery.suspects:
            self._suspect_timer(class_name, key, name)
        self._ticker.start()
        self.clock.call_later(_SWEEP_MS, self._sweep)

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

    def runs_slot(self, slot: int) -> bool:
        """Whether this partition runs the objects of the slot."""
        return slot in self._slots

    @property
    def slots(self) -> list[tuple[int, int]]:
        """The slots that it owns, as inclusive ranges."""
        ranges: list[tuple[int, int]] = []
        for slot in sorted(self._slots):
            if ranges and ranges[-1][1] == slot - 1:
                ranges[-1] = (ranges[-1][0], slot)
            else:
                ranges.append((slot, slot))
        return ranges

    def check_thread(self, object_id: ObjectId) -> None:
        if threading.get_ident() != self.thread_id:
            raise WrongThread(f"{object_id}: storage, timers and stubs work on the partition's thread only")

    @property
    def busy(self) -> bool:
        """Whether anything is queued, running or on its way to disk."""
        return (
            bool(self._running)
            or not self.committer.idle
            or self._ticker.busy
            or self.careful.active
            or any(host.busy for host in self._hosts.values())
        )

    def status(self) -> dict[str, Any]:
        """What the partition is doing, as plain data."""
        return {
            "partition": self.config.partition,
            "epoch": self.epoch,
            "commit_seq": self.commit_seq,
            "slots": len(self._slots),
            "active_objects": len(self._hosts),
            "held_calls": self._held,
            "calls": self.calls,
            "repeats": self.repeats,
            "turns": self.turns,
            "commits": self.committer.commits,
            "write_sets": self.committer.units,
            "fires": self.fires,
            "retries": self.retries,
            "dead_letters": self.dead_letters,
            "activations": self.activations,
            "resets": self.resets,
            "timer_turns": self.dispatcher.in_flight,
            "next_due_ms": self.store.next_due_ms(),
            "inbox": len(self.inbox),
            "connections": len(self._connections),
            "careful": self.careful.active,
        }

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
            self.inbox.disconnected(session, self.clock.wall_ms())

    def tell_classes(self, refs: Sequence[ClassRef]) -> None:
        for ref in refs:
            try:
                self.classes.tell(ref)
            except MainspringError as error:
                log_event(logging.ERROR, "class_refused", str(error), type_name=ref.type_name)

    def acknowledge(self, session: bytes, flat: Sequence[int]) -> None:
        for low, high in zip(flat[::2], flat[1::2], strict=True):
            self.inbox.acknowledge(session, low, high)

    def release_ids(self, call_ids: Sequence[bytes]) -> None:
        self.inbox.release(call_ids, self.clock.wall_ms())

    def administer(self, connection: PartitionConnection, message: AdminMessage) -> None:
        self._admin.handle(message.op, message.args, partial(connection.reply, message.seq))

    # --- calls ------------------------------------------------------------------------------------

    def admit(self, connection: PartitionConnection, row: CallRow) -> None:
        """A call has arrived: answer it from the inbox, join it to its running original, refuse it, or queue it."""
        seq, type_name, key, method_name, args, flags, _, extra = row
        target = partial(connection.reply, seq)
        call_id = extra[0] if extra is not None else None
        if call_id is None:
            call_id = outside_call_id(connection.session, seq)
        if flags & REPEAT:
            self.repeats += 1
        # a repeat is looked up before every bound
        entry = self.inbox.find(call_id)
        if entry is not None:
            self._answer_again(entry.fingerprint, entry.status, entry.reply, method_name, args, target)
            return
        running = self._running.get(call_id)
        if running is not None:
            if running.args != args or running.method.name != method_name:
                target(REFUSED, encode_error(_diverged(type_name, method_name)))
            else:
                running.targets.append(target)
            return
        if self.inbox.is_released(call_id):
            return  # its caller has the reply, or will never ask: a frame that was late
        slot = slot_of(type_name, key)
        if self._is_stale(connection, slot, flags, extra is not None and extra[2] is not None):
            target(STALE, b"")
            return
        info = self.classes.get(type_name)
        if info is None:
            self.classes.when_loaded(type_name, partial(self.admit, connection, row))
            return
        try:
            work = self._work(info, key, slot, row, call_id)
        except MainspringError as error:
            target(REFUSED, encode_error(error))
            return
        work.targets.append(target)
        self._take(work)

    def _answer_again(
        self, fingerprint: bytes, status: int, reply: bytes, method: str, args: bytes, target: Any
    ) -> None:
        if fingerprint and fingerprint != call_fingerprint(method, args):
            target(REFUSED, encode_error(_diverged("", method)))
        elif status == REPLY_LOST:
            lost = ReplyLost(
                f"{method} ran and is durable, but its reply was larger than "
                f"{self.settings.max_reply_memory_bytes:,} bytes and was not kept. Read the state instead."
            )
            target(RAISED, encode_error(lost))
        else:
            target(status, reply)

    def _is_stale(self, connection: PartitionConnection, slot: int, flags: int, is_nested: bool) -> bool:
        if slot in connection.stale_slots:
            if not flags & RESUMED:
                return True
            connection.stale_slots.discard(slot)
        if slot in self._slots and (not self._draining or is_nested):
            return False
        connection.stale_slots.add(slot)
        return True

    def _work(self, info: ClassInfo | MainspringError, key: str, slot: int, row: CallRow, call_id: bytes) -> CallWork:
        """The call as work. Raises what refuses it."""
        _, type_name, _, method_name, args, flags, timeout_ms, extra = row
        if not isinstance(info, ClassInfo):
            raise info
        check_key(key)
        method = info.method(method_name)
        chain = extra[1] if extra is not None else ()
        caller = extra[2] if extra is not None else None
        host = self.host(info, ObjectId(type_name, key, slot))
        bound = info.cls.max_queued_turns or self.settings.max_queued_turns
        if len(host.queue) >= bound:
            raise Overloaded(f"{host.id} has {len(host.queue)} turns waiting (max_queued_turns={bound})")
        if caller is None and self._held >= self.settings.max_partition_calls:
            raise Overloaded(
                f"partition {self.config.partition} holds {self._held} calls "
                f"(max_partition_calls={self.settings.max_partition_calls})"
            )
        deadline_ns = self.clock.monotonic_ns() + timeout_ms * 1_000_000 if timeout_ms else 0
        return CallWork(
            host,
            method,
            call_id,
            args=args,
            flags=flags,
            deadline_ns=deadline_ns,
            chain=chain,
            caller=caller,
            is_repeat=bool(flags & REPEAT),
        )

    def _take(self, work: CallWork) -> None:
        self.calls += 1
        self._running[work.turn_id] = work
        if work.caller is not None:
            work.host.enqueue(work)  # belongs to a turn that has been admitted already
            return
        self._held += 1
        work.counted = True
        if self.careful.unclean and work.is_repeat:
            self.careful.suspect(work, partial(work.host.enqueue, work))
        elif self.careful.active:
            self.careful.admit(partial(work.host.enqueue, work))
        else:
            work.host.enqueue(work)

    def work_ended(self, work: Work) -> None:
        """The call has been answered."""
        if isinstance(work, CallWork):
            self._running.pop(work.turn_id, None)
            if work.counted:
                work.counted = False
                self._held -= 1

    def release_calls(self, turn: Turn) -> None:
        """The turn's outcome is durable: what it called need not be remembered any more."""
        if not turn.called:
            return
        by_partition: dict[int, list[bytes]] = {}
        for number, call_id in turn.called:
            by_partition.setdefault(number, []).append(call_id)
        for number, call_ids in by_partition.items():
            self.client.release(number, call_ids)

    def unfinished(self, callers: Sequence[tuple[str, str, bytes]]) -> list[bool]:
        """Which of these turns have not reached a durable outcome yet, so that they may ask again."""
        return [self._is_unfinished(*caller) for caller in callers]

    def _is_unfinished(self, type_name: str, key: str, turn_id: bytes) -> bool:
        if turn_id in self._running or not self.runs_slot(slot_of(type_name, key)):
            return True  # of a slot that is elsewhere nothing is known here
        intent = self.store.get("intents", (type_name, key))
        host = self._hosts.get((type_name, key))
        return (intent is not None and intent[0] == turn_id) or (host is not None and host.busy)

    # --- objects ----------------------------------------------------------------------------------

    def host(self, info: ClassInfo, object_id: ObjectId) -> ObjectHost:
        """The object's host, made when it is not in memory."""
        place = (object_id.type_name, object_id.key)
        host = self._hosts.get(place)
        if host is None:
            host = self._hosts[place] = ObjectHost(self, info, object_id)
            if len(self._hosts) > self.settings.max_active_objects:
                self._evict_one()
        return host

    def find_host(self, type_name: str, key: str) -> ObjectHost | None:
        return self._hosts.get((type_name, key))

    def _evict_one(self) -> None:
        for host in self._hosts.values():  # oldest first
            if not host.busy:
                self.evict(host)
                return

    def evict(self, host: ObjectHost) -> bool:
        """Let an idle object leave memory; its rows stay. False when it is busy."""
        if host.busy:
            return False
        host.forget()
        self._hosts.pop((host.id.type_name, host.id.key), None)
        host.stop_instance()
        return True

    # --- write sets -------------------------------------------------------------------------------

    def submit(self, write_set: WriteSet) -> None:
        if not self.stopped:
            self.committer.submit(write_set)

    def _persist(self, ops: list[Op]) -> None:
        self.submit(WriteSet(ops))

    def drop_pointer(self, key: Key) -> None:
        """Remove a timer row that points to an object that no longer exists."""
        self._persist([("timers", key, None)])

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

    def timer_armed(self, due_ms: int) -> None:
        """A timer was put, durably."""
        self.dispatcher.rewind(due_ms)
        self._ticker.alarm.arm(due_ms)

    def start_timer(self, work: TimerWork) -> None:
        """Queue a due timer's turn; fresh ones wait while suspects run."""
        if work.suspected:
            self.careful.suspect(work, partial(work.host.enqueue, work))
        elif self.careful.active:
            self.careful.admit(partial(work.host.enqueue, work))
        else:
            work.host.enqueue(work)

    def timer_ended(self, work: TimerWork, *, retry: bool = False) -> None:
        self.dispatcher.ended(work, retry=retry)
        work.settle()

    def _suspect_timer(self, class_name: str, key: str, name: str) -> None:
        self.dispatcher.suspects.add((class_name, key, name))

    # --- recovery ---------------------------------------------------------------------------------

    def _run_intent(self, intent: Intent) -> None:
        """Run again, before any other turn of the object, what had called out when the process died."""
        info = self.classes.get(intent.class_name)
        if info is None:
            self.classes.when_loaded(intent.class_name, partial(self._run_intent, intent))
            return
        object_id = ObjectId(intent.class_name, intent.key, slot_of(intent.class_name, intent.key))
        if not isinstance(info, ClassInfo):
            log_event(logging.ERROR, "intent_waits", f"a turn of {object_id} can't be run again: {info}")
            self.clock.call_later(_SWEEP_MS, partial(self._retry_intent, intent))
            return
        host = self.host(info, object_id)
        if intent.fields[0] == "timer":
            self._run_timer_intent(host, intent)
            return
        _, method_name, args, flags, now_ms, attempt, chain, caller = intent.fields
        work = CallWork(
            host,
            info.method(str(method_name)),
            intent.turn_id,
            args=args,
            flags=flags,
            chain=tuple((name, key) for name, key in chain),
            caller=tuple(caller) if caller else None,
            attempt=int(attempt) + 1,
            began_ms=now_ms,
            resumed=True,
        )
        self._running[work.turn_id] = work
        host.recovering = True
        self.careful.suspect(work, partial(host.resume, work))

    def _retry_intent(self, intent: Intent) -> None:
        self.classes.forget_failure(intent.class_name)
        self._run_intent(intent)

    def _run_timer_intent(self, host: ObjectHost, intent: Intent) -> None:
        _, name, generation, now_ms, attempt = intent.fields
        row = host.directory().get(str(name))
        if row is None or row.generation != generation:
            self._persist([("intents", (intent.class_name, intent.key), None)])
            return
        work = TimerWork.of(host, row)
        work.attempt, work.began_ms, work.resumed = int(attempt) + 1, now_ms, True
        host.recovering = True
        self.dispatcher.adopt(work)
        self.careful.suspect(work, partial(host.resume, work))

    # --- upkeep -----------------------------------------------------------------------------------

    def _sweep(self) -> None:
        if self.stopped:
            return
        now_ms = self.clock.wall_ms()
        asked = self.inbox.sweep(now_ms, self.settings.call_memory_ms)
        if self.inbox.has_upkeep:
            self.committer.poke()
        if asked and not self._asking:
            self._asking = True
            self.loop.create_task(self._ask_callers(asked))
        self.clock.call_later(_SWEEP_MS, self._sweep)

    async def _ask_callers(self, entries: Sequence[Any]) -> None:
        """Outcomes of nested calls are forgotten when their caller says that it is finished, never by age."""
        try:
            by_partition: dict[int, list[Any]] = {}
            for entry in entries:
                type_name, key, _ = entry.caller
                number = self.client.directory.partition_of(slot_of(type_name, key))
                by_partition.setdefault(number, []).append(entry)
            for number, asked in by_partition.items():
                unfinished = await self.client.ask(number, [entry.caller for entry in asked])
                done = [entry.call_id for entry, still in zip(asked, unfinished, strict=True) if not still]
                self.inbox.release(done, self.clock.wall_ms())
            if self.inbox.has_upkeep and not self.stopped:
                self.committer.poke()
        except MainspringError as error:
            log_event(logging.INFO, "inbox_sweep_waits", f"a caller's partition does not answer: {error}")
        finally:
            self._asking = False

    # --- the end ----------------------------------------------------------------------------------

    async def stop(self) -> None:
        """Take no new work, let running turns end (bounded), commit, mark the file clean, and close it."""
        if self.stopped:
            await self._close(clean=False)
            return
        self._draining = True  # calls from outside go elsewhere; those of turns that still run are let in
        await self._ticker.stop()
        await self._drain()
        clean = not any(host.busy for host in self._hosts.values())
        for host in list(self._hosts.values()):
            self.evict(host)
        await self.committer.drain()
        await self._close(clean=clean)

    async def abandon(self) -> None:
        """Let go of everything at once, as a dying process does: what is not durable is lost."""
        self.stopped = True
        self.committer.abandon()
        await self._ticker.stop()
        for host in list(self._hosts.values()):
            host.abandon()
        for connection in list(self._connections):
            connection.close(ChannelClosed("the partition's process is gone"))
        await self.client.close()
        self._executor.close()
        if self._checkpointer is not None:
            self._checkpointer.stop()
        self._opened.close()

    async def _drain(self) -> None:
        deadline = self.loop.time() + STOP_GRACE_MS / 1_000
        while any(host.busy for host in self._hosts.values()) and self.loop.time() < deadline:
            await asyncio.sleep(0.005)

    async def _close(self, *, clean: bool) -> None:
        fatal = self.exited.done()
        self.stopped = True
        for connection in list(self._connections):
            connection.close()
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
    store.write((SLOT_TABLE, (slot,), (_OWNED, 1, None)) for low, high in ranges for slot in range(low, high + 1))
    store.flush()
    store.commit()


def default_driver(settings: Settings) -> Driver:
    """The driver of a partition that has its process to itself."""
    return DurableObjectDriver(
        durability=settings.durability,
        poll_ms=settings.poll_ms,
        lock_wait_ms=settings.lock_wait_ms,
        busy_timeout_ms=settings.busy_timeout_ms,
        checkpoint_interval_ms=settings.checkpoint_interval_ms,
    )


def _diverged(type_name: str, method: str) -> CallDiverged:
    return CallDiverged(
        f"a call of {type_name}.{method} came with an id that was used with other arguments; nothing was run. "
        "A turn that is run again must make the same calls: use self.turn.now and self.turn.random."
    )
