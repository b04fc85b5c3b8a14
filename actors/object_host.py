"""One active object: its instance, its queue of turns, and the rules under which turns start and end."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from actors import activation, call_turns, deletion, early_commit, interruption, message_turns, timer_turns
from actors.address import ObjectId
from actors.containment import failure_of, shown, start_body
from actors.critical_section import CriticalSection
from actors.current import CURRENT
from actors.durable_object import ClassInfo, DurableObject, misfit
from actors.errors import CallExpired, InvalidOption, TransactionClosed, TurnOver
from actors.kept_runs import KeptRuns
from actors.logs import log_event
from actors.object_rows import ObjectRows
from actors.object_state import ObjectState
from actors.object_timers import ObjectTimers
from actors.outbox import Sender
from actors.storage import Storage
from actors.timer_work import TimerWork
from actors.turn import Turn
from actors.turn_info import TurnInfo
from actors.work import CallWork, Work
from actors.write_buffer import DirectoryRow, WriteBuffer
from drivers.clock import Handle
from drivers.tables import Op
from drivers.write_set import Lineage, WriteSet
from timers.backoff import RetryPolicy
from timers.schedule import TimerSpec

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["ObjectHost"]


class ObjectHost:
    """Runs the turns of one object on the partition's loop.

    Serial classes: turns start in order of arrival, one at a time; a turn's changes are handed over as one write set
    when it returns, and the next turn starts without waiting for the disk. `@shared` calls at the head of the queue
    may start while a serial turn awaits.
    """

    def __init__(self, partition: Partition, info: ClassInfo, object_id: ObjectId) -> None:
        self.partition = partition
        self.info = info
        self.id = object_id
        self.interleaved = info.cls.turns == "interleaved"
        self.state = ObjectState(partition, object_id, partial(interruption.reset, self), info.cls.schema_version)
        self.storage = Storage(self)
        self.timers = ObjectTimers(self)
        self.rows = ObjectRows(self)
        self.runs = KeptRuns()
        self.queue: deque[Work] = deque()
        self.current: Turn | None = None
        self.instance: DurableObject | None = None
        self.side_turns: dict[Turn, None] = {}  # shared and interleaved turns that run beside others, as they began
        self.activation: Turn | None = None
        self._pumping = False
        self._expected = 0  # work that is held back elsewhere
        self.ended_bodies: dict[Turn, tuple[Any, BaseException | None]] = {}  # bodies that wait for calls they made
        self.buffer = WriteBuffer()  # interleaved turns write here together
        self.flush_scheduled = False
        #: timers that turns of an interleaved class run for, by generation: they look ended to all turns
        self.firing: dict[int, Turn] = {}
        self.section = CriticalSection()
        self.rerun: Handle | None = None
        #: a turn of before the last crash must run before all others; it has not come yet
        self.recovering = False
        #: its class has a newer definition: it leaves memory as soon as it has nothing to do
        self.outdated = False
        self._idle: Handle | None = None
        self._idle_since_ns = 0

    # --- what storage, timers and turns ask -------------------------------------------------------

    @property
    def lineage(self) -> Lineage:
        return self.state.lineage

    def reading_turn(self) -> Turn:
        """The running turn of this object. Raises `WrongThread` and `TurnOver`."""
        turn = CURRENT.get()
        if turn is None or turn.host is not self:  # type: ignore[attr-defined]
            self.partition.check_thread(self.id)
            raise TurnOver(f"{self.id}: its storage and timers can be used in its own turns only; call it by a stub")
        assert isinstance(turn, Turn)
        turn.check()
        return turn

    def writing_turn(self) -> Turn:
        """The same, for changes. Raises `ReadOnlyTurn` too."""
        turn = self.reading_turn()
        if turn.read_only or turn.outside_step:
            turn.check_writable()
        return turn

    def read_kv(self, key: str) -> bytes | None:
        return self.state.read(key)

    def scan_kv(self, turn: Turn, **bounds: Any) -> list[tuple[str, bytes]]:
        return self.state.scan(turn.buffer, most=self.partition.settings.max_list_rows, **bounds)

    def directory(self) -> dict[str, DirectoryRow]:
        return self.state.directory()

    def send(self, cls: type[DurableObject], key: str, after: Any, at: Any, retry: RetryPolicy | None) -> Sender:
        """See `DurableObject.send`."""
        if after is not None and at is not None:
            raise InvalidOption("a message goes after a time or at an instant, not both: give `after` or `at`")
        sender = Sender(self, cls, key, retry)
        if after is not None:
            return sender.after(after)
        return sender if at is None else sender.at(at)

    def turn_info(self) -> TurnInfo:
        return TurnInfo(self.reading_turn())

    # --- the queue --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(
            self.queue
            or self.current
            or self.side_turns
            or self.activation
            or self.rerun
            or self._expected
            or not self.state.settled
        )

    def running(self) -> list[Turn]:
        """The turns that run, as they began."""
        return [*([self.current] if self.current is not None else []), *self.side_turns]

    def expect(self, start: Callable[[], None]) -> Callable[[], None]:
        """`start` for work of this object that is held back elsewhere. Until it is called the object stays in memory:
        the work will come to this host, and a second one beside it would not see what this one writes."""
        self._expected += 1

        def come() -> None:
            self._expected -= 1
            start()

        return come

    def enqueue(self, work: Work, *, front: bool = False) -> None:
        """Add work; it starts at once when nothing stands before it."""
        if front:
            self.queue.appendleft(work)
        else:
            self.queue.append(work)
        self.pump()

    def resume(self, work: Work) -> None:
        """Run the turn that a crash cut short, before any other turn of the object."""
        self.recovering = False
        self.enqueue(work, front=True)

    def put_timer(self, name: str, kind: int, spec: TimerSpec, extra: list[Op]) -> WriteSet:
        """Set a timer outside any turn: for dead letters that are run again."""
        due_ms = spec.first_due_ms
        generation = self.partition.counters.take_generation()
        buffer = WriteBuffer()
        buffer.top.timers[name] = DirectoryRow(0, name, kind, due_ms, generation, due_ms, 0, 0, 0, spec.to_bytes())
        return self.state.hand_over(buffer.top, extra=extra)

    def pump(self) -> None:
        """Start what may start."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self.queue and self._may_start(self.queue[0]):
                needs_instance = self.instance is None and not deletion.is_deletion(self.queue[0])
                if needs_instance and not activation.activate(self):
                    continue  # it is under way, or has failed and taken the head of the queue with it
                self._start(self.queue.popleft())
        finally:
            self._pumping = False
        if not self.busy:
            self.became_idle()

    def _may_start(self, work: Work) -> bool:
        if self.activation is not None or self.rerun is not None or self.partition.stopped:
            return False
        if self.recovering and not work.resumed:
            return False
        if not self.partition.gate.may_start(self, work.resumed):
            return False
        if deletion.is_deletion(work):
            return self.current is None and not self.side_turns
        if self.interleaved:
            return not self.section.held
        return self.current is None or (isinstance(work, CallWork) and work.method.is_shared)

    # --- running a turn ---------------------------------------------------------------------------

    def _start(self, work: Work) -> None:
        now_ms = self.partition.clock.wall_ms()
        if isinstance(work, CallWork):
            # one that is run again is past that: what it had called has happened
            if work.deadline_ns and not work.resumed and self.partition.clock.monotonic_ns() > work.deadline_ns:
                work.refuse(CallExpired(f"{self.id}.{work.method.name}: its deadline passed before it could start"))
                self.partition.admission.work_ended(work)
                return
            if work.message is not None and not work.resumed and not message_turns.begin(self, work):
                return
            if deletion.is_deletion(work):
                deletion.begin(self, work)
                return
            function = work.method.call
        else:
            assert isinstance(work, TimerWork)
            if not timer_turns.begin(self, work):
                return
            found = timer_turns.handler_of(self, work)
            if found is None:
                return
            function = found
        buffer = self.buffer if self.interleaved else WriteBuffer()
        turn = Turn(self, work, work.turn_id, buffer, work.began_ms or now_ms, work.attempt)
        if work.resumed:
            turn.resume()
            work.resumed = False
            turn.note_intent(early_commit.commit_intent(self, turn))  # says how often it has begun
        if isinstance(work, TimerWork):
            self.partition.claims.started(work)
            timer_turns.end_timer_in(self, turn, work)
        elif work.method.is_shared:
            turn.read_only = True
            turn.buffer = WriteBuffer()
        if turn.read_only or self.interleaved:
            self.side_turns[turn] = None
        else:
            self.current = turn
        self.partition.turns += 1
        self._run(turn, function)

    def _run(self, turn: Turn, function: Any) -> None:
        work = turn.work
        assert work is not None
        failure: BaseException | None = None
        token = CURRENT.set(turn)
        try:
            if isinstance(work, CallWork):
                args, kwargs = work.arguments()
                result = function(self.instance, *args, **kwargs)
            else:
                assert isinstance(work, TimerWork)
                result = function(self.instance, work.handler_argument())
            if inspect.iscoroutine(result):
                turn.task = start_body(result)
        except BaseException as error:
            # a timer's handler is found late: its work does not name it
            unfit = work.method.misfit(error) if isinstance(work, CallWork) else misfit(function, error)
            result, failure = None, unfit or failure_of(error)
        finally:
            CURRENT.reset(token)
        if turn.task is None:
            self.body_ended(turn, result, failure)
            return
        interruption.set_timeout(self, turn, interruption.timeout_ms(self, work))
        turn.task.add_done_callback(lambda task: self._task_ended(turn, task))

    def _task_ended(self, turn: Turn, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            self.body_ended(turn, None, asyncio.CancelledError("the turn was cancelled by its own code"))
            return
        error = task.exception()
        if error is not None:
            work = turn.work  # a timer's handler was entered, or there would be no task
            unfit = work.method.misfit(error) if isinstance(work, CallWork) else None
            self.body_ended(turn, None, unfit or error)
        else:
            self.body_ended(turn, task.result(), None)

    def body_ended(self, turn: Turn, result: Any, error: BaseException | None) -> None:
        if turn.superseded or (turn is not self.current and turn not in self.side_turns):
            return  # abandoned: somebody else has answered for it
        if turn.outstanding:
            # calls that nobody awaits belong to the turn all the same: it ends when they have
            self.ended_bodies[turn] = (result, error)
            return
        interruption.clear_timeout(turn)
        if turn.timed_out:
            error = interruption.timeout_error(self, turn)
        elif error is None and turn.doomed is not None:
            error = turn.doomed
        unfinished = self._unfinished(turn)
        error = unfinished if error is None else error
        turn.end()
        if turn is self.current:
            self.current = None
            self.partition.gate.turn_ended(self)
        self.side_turns.pop(turn, None)
        self.firing.pop(turn.firing, None)
        self.section.drop(turn)
        assert turn.work is not None
        self.partition.claims.ended(turn.work)
        if error is None:
            error = self._succeeded(turn, result)
        if error is not None:
            self.turn_failed(turn, error)
        self.pump()

    def _unfinished(self, turn: Turn) -> TransactionClosed | None:
        """What is left in a transaction that was never ended is not part of the turn, and makes it fail."""
        is_open = len(turn.buffer.layers) > 1
        if self.interleaved and not turn.read_only:
            turn.buffer = self.buffer
        if is_open:
            return TransactionClosed(f"{self.id}: the turn returned with a transaction open; leave its `with` block")
        return None

    def calls_settled(self, turn: Turn) -> None:
        """The last outstanding call of the turn has ended."""
        ended = self.ended_bodies.pop(turn, None)
        if ended is not None:
            self.body_ended(turn, *ended)

    # --- the end of a turn ------------------------------------------------------------------------

    def _succeeded(self, turn: Turn, result: Any) -> BaseException | None:
        """Hand over what the turn did and answer once it is durable; the error when its result can't travel."""
        work = turn.work
        if isinstance(work, TimerWork):
            timer_turns.succeeded(self, work, turn)
            return None
        assert isinstance(work, CallWork)
        return call_turns.succeeded(self, work, turn, result)

    def turn_failed(self, turn: Turn, error: BaseException) -> None:
        """Everything since the last commit is undone; the exception is the answer."""
        work = turn.work
        if not self.interleaved and not isinstance(error, self.info.cls.harmless_errors):
            self.discard_instance()
        if isinstance(work, TimerWork):
            timer_turns.failed(self, work, turn, error)
            return
        assert isinstance(work, CallWork)
        call_turns.failed(self, work, turn, error)

    def discard_instance(self) -> None:
        """Memory and storage never disagree: the next turn gets a fresh instance. Shared turns start over on it."""
        self.instance = None
        self.runs.clear()
        for turn in [turn for turn in reversed(self.side_turns) if turn.read_only]:  # each goes before the last
            interruption.supersede(self, turn)
            assert turn.work is not None
            self.queue.appendleft(turn.work)

    # --- interleaved classes ----------------------------------------------------------------------

    @asynccontextmanager
    async def block_concurrency(self) -> AsyncIterator[None]:
        """No other turn of the object starts until the block is left; blocks run one after the other."""
        turn = self.reading_turn()
        await self.section.enter(turn)
        try:
            turn.check()
            yield
        finally:
            self.section.leave(turn)
            if not self.section.held:
                self.partition.loop.call_soon(self.pump)

    # --- leaving memory ---------------------------------------------------------------------------

    def became_idle(self) -> None:
        self._idle_since_ns = self.partition.clock.monotonic_ns()
        self.partition.host_idle.set()
        if self.outdated:
            self.partition.evict(self)
        elif self._idle is None:
            self._idle = self.partition.clock.call_later(self._idle_timeout_ms(), self._look_idle)

    def _idle_timeout_ms(self) -> int:
        return self.info.cls.idle_timeout_ms or self.partition.settings.idle_timeout_ms

    def _look_idle(self) -> None:
        self._idle = None
        if self.busy:
            return  # becomes idle again when that ends
        idle_ms = (self.partition.clock.monotonic_ns() - self._idle_since_ns) / 1e6
        left_ms = self._idle_timeout_ms() - idle_ms
        if left_ms > 0:
            self._idle = self.partition.clock.call_later(left_ms, self._look_idle)
        else:
            self.partition.evict(self)

    def forget(self) -> None:
        """Drop the callbacks that point here; the partition has let go of this host."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def abandon(self) -> None:
        """The process is treated as dead: nothing that still runs counts."""
        for turn in [*self.side_turns, self.current, self.activation]:
            if turn is not None:
                interruption.supersede(self, turn)
        self.activation = None
        self.queue.clear()
        self.runs.clear()
        self.forget()
        if self.rerun is not None:
            self.rerun.cancel()

    def stop_instance(self) -> None:
        """Run `on_stop`, best effort: its errors are logged, and it can use nothing durable any more."""
        instance, self.instance = self.instance, None
        self.runs.clear()
        hook = None if instance is None else getattr(instance, "on_stop", None)
        if hook is None:
            return
        try:
            result = hook()
            if inspect.iscoroutine(result):
                task = start_body(result)
                task.add_done_callback(self._on_stop_ended)
        except BaseException as error:
            self.log_failure("on_stop_failed", failure_of(error))

    def _on_stop_ended(self, task: asyncio.Future[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.log_failure("on_stop_failed", error)

    def log_failure(self, event: str, error: BaseException, **fields: Any) -> None:
        log_event(logging.INFO, event, f"{self.id}: {shown(error)}", error=error, object=str(self.id), **fields)
