"""Group commit: one writer, many write sets, one transaction, one fsync; gates open together, in order.

Statements run on the loop thread in short slices (sqlite3 gives up the GIL at every row, so a busy loop beside a
writing thread would make them a hundred times slower); only COMMIT and the next BEGIN wait on the executor's thread.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Protocol

from drivers.batch_unit import BatchUnit
from drivers.errors import CommitFailed, CommitOutcomeUnknown, Fenced, StoreClosed, WriteSetRejected
from drivers.executor import Executor
from drivers.sqlite_store import is_disk_full
from drivers.store import Store
from drivers.tables import Op
from drivers.write_set import InboxEntry, Lineage, WriteSet
from timers.batch import Absent, Batch, Delete, Equals, NotAfter, Outcome, Precondition, Present, Put

__all__ = ["GroupCommitter", "Rider"]


class Rider(Protocol):
    """Adds rows to each group on their way: the inbox and the claims cost no commit of their own."""

    def ride(self, commit_seq: int, entries: Sequence[InboxEntry]) -> Iterable[Op]: ...

    def landed(self, commit_seq: int, now_ms: int) -> None:
        """The group is durable. `now_ms` is monotonic: a wall clock that jumps makes nobody forget anything."""
        ...

    def lost(self, commit_seq: int) -> None:
        """The group was not applied."""
        ...


Unit = WriteSet | BatchUnit


def _unobserved(units: int, took_ns: int) -> None:
    return None


class GroupCommitter:
    """The one writer of a partition.

    `submit` takes write sets in the order in which their turns ended. All units of a group, also those that were
    rejected, are told their end together and in that order, once the group is durable: who hears of a rejection
    already finds on disk everything that was handed over before it. `on_fatal` is called once, when the outcome of a
    commit is unknown or a newer owner was found: the partition must answer nobody and exit.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        *,
        wall_ms: Callable[[], int],
        monotonic_ms: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        on_fatal: Callable[[BaseException], None],
        riders: Sequence[Rider] = (),
        max_group_rows: int = 2_000,
        slice_rows: int = 500,
        wal_truncate_bytes: int = 64 * 1024 * 1024,
        on_commit: Callable[[int, int], None] = _unobserved,
    ) -> None:
        self._on_commit = on_commit
        self._began_ns = 0
        self._store = store
        self._executor = executor
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_fatal = on_fatal
        self.riders: list[Rider] = list(riders)
        self._max_group_rows = max_group_rows
        self._slice_rows = slice_rows
        self._wal_truncate_bytes = wal_truncate_bytes
        self._queue: deque[Unit] = deque()
        self._group: list[Unit] = []
        self._entries: list[InboxEntry] = []
        self._breaking: set[Lineage] = set()  # broken by a unit of the group that has not been told yet
        self._rows = 0
        self._busy = False  # a group is being written or committed, or is scheduled
        self._poked = False
        self._dead: BaseException | None = None
        self._idle_waiters: list[asyncio.Future[None]] = []
        self.commits = 0
        self.units = 0

    # --- the queue ------------------------------------------------------------------------------

    def start(self) -> None:
        """Open the first transaction. Raises sqlite3.OperationalError when the file can't be locked."""
        with suppress(RuntimeError):  # without a loop yet: that of the first write set
            self._loop = asyncio.get_running_loop()
        self._store.begin()

    def submit(self, unit: Unit) -> None:
        """Queue one unit. It is told its end through its waiters, never from inside this call."""
        if self._dead is not None:
            return  # nothing is committed any more, and nobody is told anything
        self._queue.append(unit)
        self._wake()

    async def apply(self, batches: Sequence[Batch]) -> Sequence[Outcome]:
        """Apply engine batches in order in one transaction, each judged on its own.

        Raises `CommitFailed` when nothing of them was applied, `StoreClosed` after the end of the committer; is
        cancelled when that end comes while it waits.
        """
        if self._dead is not None:
            raise StoreClosed(f"nothing is committed any more: {self._dead}") from self._dead
        future: asyncio.Future[Sequence[Outcome]] = asyncio.get_running_loop().create_future()
        self.submit(BatchUnit(batches, future))
        return await future

    def poke(self) -> None:
        """Commit what the riders have, even when no unit comes."""
        self._poked = True
        self._wake()

    @property
    def idle(self) -> bool:
        return not self._busy and not self._queue

    async def drain(self) -> None:
        """Wait until everything submitted so far has ended."""
        while not self.idle and self._dead is None:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter

    def _wake(self) -> None:
        if not self._busy and self._dead is None:
            # the next loop turn: everything that ends in this one shares the group
            self._soon(self._gather)
            self._busy = True
            self._began_ns = time.monotonic_ns()

    def _soon(self, step: Callable[[], None]) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._run, step)

    def _run(self, step: Callable[[], None]) -> None:
        """Run one step of the writer. An error that no step expects ends the partition, it does not stall it."""
        if self._dead is not None:
            return
        try:
            step()
        except Exception as error:
            self._die(error)

    # --- writing a group ------------------------------------------------------------------------

    def _gather(self) -> None:
        """One slice: judge and write what is ready, then go on, or commit."""
        limit = min(self._rows + self._slice_rows, self._max_group_rows)
        try:
            while self._queue and self._rows < limit:
                self._judge(self._queue.popleft())
            more_units = bool(self._queue) and self._rows < self._max_group_rows
            if not more_units:
                self._board_riders()
            more_rows = self._store.flush(self._slice_rows)
        except Exception as error:  # before COMMIT: whatever it is, nothing of the group was applied
            self._statement_failed(error)
            return
        self._go_on(more_units, more_rows)

    def _flush_rest(self) -> None:
        try:
            more_rows = self._store.flush(self._slice_rows)
        except Exception as error:
            self._statement_failed(error)
            return
        self._go_on(False, more_rows)

    def _go_on(self, more_units: bool, more_rows: bool) -> None:
        if more_units:
            self._soon(self._gather)
        elif more_rows:
            self._soon(self._flush_rest)
        else:
            self._executor.submit(self._commit_and_begin, self._committed)

    def _judge(self, unit: Unit) -> None:
        self._group.append(unit)  # before anything can fail, so that it is told its end whatever happens
        if unit.error is not None:
            self._reject(unit, unit.error)  # found unwritable on its own
            return
        if isinstance(unit, BatchUnit):
            unit.outcomes = [self._judge_batch(batch) for batch in unit.batches]
            return
        lineage = unit.lineage
        if lineage is not None and lineage.broken is not None:
            error = WriteSetRejected(f"{lineage.name}: not applied: an earlier write of the object was not")
            if lineage in self._breaking:
                unit.error = error
            else:  # whatever becomes of this group, it is not applied: who waits need not wait for a commit
                self._group.pop()
                unit.finish(error)
            return
        for guard in unit.guards or ():
            if not guard.holds(self._store.peek(guard.table, guard.key)):
                self._reject(unit, _rejection(unit, f"the guard {guard} no longer holds"))
                return
        self._store.write(unit.ops)
        self._rows += len(unit.ops)
        if unit.inbox is not None:
            self._entries.append(unit.inbox)

    def _reject(self, unit: Unit, error: BaseException) -> None:
        """Nothing later of its lineage is applied from now on. Both are told with the group, not before: their object
        then starts over from disk, where what it handed over earlier in this group must be."""
        unit.error = error
        if isinstance(unit, WriteSet) and unit.lineage is not None and unit.lineage.broken is None:
            unit.lineage.broken = error
            self._breaking.add(unit.lineage)

    def _judge_batch(self, batch: Batch) -> Outcome:
        for precondition in batch.preconditions:
            if isinstance(precondition, NotAfter):
                if self._wall_ms() > precondition.deadline_ms:
                    return Outcome.DEADLINE_PASSED
            elif not self._holds(precondition):
                return Outcome.PRECONDITION_FAILED
        ops: list[Op] = []
        for write in batch.writes:
            if isinstance(write, Put):
                ops.append((write.row.table, write.row.key(), write.row.values()))
            else:
                assert isinstance(write, Delete)
                ops.append((write.table, write.key, None))
        self._store.write(ops)
        self._rows += len(ops)
        return Outcome.COMMITTED

    def _holds(self, precondition: Precondition) -> bool:
        if isinstance(precondition, Equals):
            row = precondition.row
            return self._store.peek(row.table, row.key()) == row.values()
        if isinstance(precondition, Absent):
            return self._store.peek(precondition.table, precondition.key) is None
        assert isinstance(precondition, Present)
        return self._store.peek(precondition.table, precondition.key) is not None

    def _board_riders(self) -> None:
        self._poked = False
        commit_seq = self._store.commit_seq + 1
        for rider in self.riders:
            self._store.write(rider.ride(commit_seq, self._entries))
        self._entries = []

    # --- the end of a group ---------------------------------------------------------------------

    def _commit_and_begin(self) -> BaseException | None:
        """On the executor's thread. Raises what COMMIT raised; returns what the next BEGIN raised."""
        self._store.commit()
        try:
            if self._store.wal_bytes() > self._wal_truncate_bytes:
                self._store.truncate_wal()
            self._store.begin()
        except Exception as error:
            return error  # the group *is* durable, only the next one can't begin
        return None

    def _committed(self, begin_error: BaseException | None, error: BaseException | None) -> None:
        self._run(lambda: self._landed(begin_error) if error is None else self._commit_failed(error))

    def _landed(self, begin_error: BaseException | None) -> None:
        group = self._take_group()
        self.commits += 1
        self._on_commit(len(group), time.monotonic_ns() - self._began_ns)
        for rider in self.riders:
            rider.landed(self._store.commit_seq, self._monotonic_ms())
        for unit in group:
            self.units += unit.error is None
            unit.finish(unit.error)
        if begin_error is not None:
            self._die(begin_error)
        else:
            self._next()

    def _take_group(self) -> list[Unit]:
        group, self._group, self._rows, self._entries = self._group, [], 0, []
        self._breaking.clear()
        return group

    def _next(self) -> None:
        self._busy = False
        if self._queue or self._poked:
            self._wake()
        else:
            self._tell_idle()

    def _tell_idle(self) -> None:
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _commit_failed(self, error: BaseException) -> None:
        if is_disk_full(error):
            self._fail_group(error)
        elif isinstance(error, Fenced):
            self._die(error)
        else:
            # A WAL commit whose fsync failed may still reappear after a crash: nobody can say, so nobody is told.
            unknown = CommitOutcomeUnknown(
                f"COMMIT failed ({error}); whether the last {len(self._group)} write sets are durable is not known. "
                "The partition exits and its successor reads what is there."
            )
            unknown.__cause__ = error
            self._die(unknown)

    def _statement_failed(self, error: Exception) -> None:
        # The disk's and the file's errors meet the whole group; anything else is a unit's own.
        if isinstance(error, sqlite3.OperationalError | sqlite3.InternalError) or type(error) is sqlite3.DatabaseError:
            self._fail_group(error)
        else:
            self._isolate(error)

    def _start_over(self) -> list[Unit]:
        """Undo the group in the database; the units that were in it."""
        self._store.rollback()
        self._store.begin()
        for rider in self.riders:
            rider.lost(self._store.commit_seq + 1)
        return self._take_group()

    def _fail_group(self, error: BaseException) -> None:
        """Nothing of this group was applied: say so to each, and to everything queued on the same objects."""
        self._tell_failure(self._start_over(), error)

    def _tell_failure(self, group: list[Unit], error: BaseException) -> None:
        failure = CommitFailed(f"not applied: {error}. The objects are back at their last durable state.")
        failure.__cause__ = error
        for unit in group:
            if isinstance(unit, WriteSet) and unit.lineage is not None and unit.lineage.broken is None:
                unit.lineage.broken = failure
        for unit in group:
            unit.finish(unit.error or failure)
        self._next()

    def _isolate(self, error: Exception) -> None:
        """Some unit of the group can't be written: find it by writing each on its own, and reject only that one."""
        for lineage in self._breaking:
            lineage.broken = None  # broken again when the rejected unit's turn comes, not for the good ones before it
        units = self._start_over()
        found = [unit for unit in units if unit.error is None and self._is_unwritable(unit)]
        if not found:
            self._tell_failure(units, error)  # it takes several of them, or a rider: there is no better answer
            return
        # Back to the front of the queue in their old order: what is left is known to be writable.
        self._queue.extendleft(reversed(units))
        self._soon(self._gather)

    def _is_unwritable(self, unit: Unit) -> bool:
        try:
            if isinstance(unit, WriteSet):
                for guard in unit.guards or ():
                    guard.holds(self._store.peek(guard.table, guard.key))
                self._store.write(unit.ops)
            else:
                for batch in unit.batches:
                    self._judge_batch(batch)
            self._store.flush()
        except Exception as error:
            unit.error = _rejection(unit, f"it can't be written ({error!r})")  # its lineage breaks when its turn comes
            return True
        finally:
            self._store.rollback()
            self._store.begin()
        return False

    def abandon(self) -> None:
        """Commit nothing more and tell nobody: the process is treated as dead."""
        self._end(StoreClosed("the partition was abandoned"))

    def _die(self, error: BaseException) -> None:
        if self._dead is None:
            self._end(error)
            self._on_fatal(error)

    def _end(self, error: BaseException) -> None:
        self._dead = error
        for unit in (*self._group, *self._queue):
            if isinstance(unit, BatchUnit):
                unit.future.cancel()  # the tick that waits for its page ends, without being told how the page did
        self._queue.clear()
        self._group.clear()
        self._tell_idle()


def _rejection(unit: Unit, reason: str) -> WriteSetRejected:
    if isinstance(unit, BatchUnit):
        return WriteSetRejected(f"a page of batches was not applied: {reason}")
    name = unit.lineage.name if unit.lineage else "a write set"
    return WriteSetRejected(f"{name}: write set {unit.position} was not applied: {reason}")
