"""One active object: its instance, its queue of turns, and the rules under which turns start and end."""

from __future__ import annotations

import asyncio
import inspect
import logging
import traceback
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from actors.address import ObjectId
from actors.codec import encode
from actors.current import CURRENT
from actors.durable_object import ClassInfo, DurableObject
from actors.errors import CallExpired, ObjectReset, TurnOver, TurnTimeout
from actors.logs import log_event
from actors.object_state import ObjectState
from actors.object_timers import EXHAUSTED_TIMER, INTERNAL_NAMES, ObjectTimers
from actors.storage import Storage
from actors.timer_work import TimerWork, dead_letter_op
from actors.turn import Turn, TurnInfo
from actors.work import CallWork, Reply, Work, raised
from actors.write_buffer import DirectoryRow, WriteBuffer
from drivers.clock import Handle
from drivers.tables import INTENTS, Op
from drivers.write_set import Lineage, WriteSet
from timers.registry import TimerKind
from timers.schedule import TimerSpec

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["ObjectHost"]

#: After a failed commit, work that must be run again waits this long: the cause (a full disk) needs time to pass.
RERUN_DELAY_MS = 1_000


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
        self.state = ObjectState(partition, object_id, self._reset)
        self.storage = Storage(self)
        self.timers = ObjectTimers(self)
        self.queue: deque[Work] = deque()
        self.current: Turn | None = None
        self.instance: DurableObject | None = None
        self._side_turns: set[Turn] = set()  # shared and interleaved turns that run beside others
        self._activation: Turn | None = None
        self._pumping = False
        self._ended: dict[Turn, tuple[Any, BaseException | None]] = {}  # bodies that wait for calls they made
        self._buffer = WriteBuffer()  # interleaved turns write here together
        self._flush_scheduled = False
        self._blocked = 0
        self._rerun: Handle | None = None
        #: a turn of before the last crash must run before all others; it has not come yet
        self.recovering = False
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
        if turn.read_only:
            turn.check_writable()
        return turn

    def read_kv(self, key: str) -> bytes | None:
        return self.state.read(key)

    def scan_kv(self, turn: Turn, **bounds: Any) -> list[tuple[str, bytes]]:
        return self.state.scan(turn.buffer, most=self.partition.settings.max_list_rows, **bounds)

    def directory(self) -> dict[str, DirectoryRow]:
        return self.state.directory()

    def turn_info(self) -> TurnInfo:
        return TurnInfo(self.reading_turn())

    # --- the queue --------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(
            self.queue or self.current or self._side_turns or self._activation or self._rerun or not self.state.settled
        )

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

    def put_timer(self, name: str, kind: int, spec: bytes, extra: list[Op]) -> WriteSet:
        """Set a timer, due now, from its stored spec: for dead letters that are run again."""
        now_ms = self.partition.clock.wall_ms()
        generation = self.partition.counters.take_generation()
        buffer = WriteBuffer()
        buffer.top.timers[name] = DirectoryRow(0, name, kind, now_ms, generation, now_ms, 0, 0, 0, spec)
        return self.state.hand_over(buffer.top, extra=extra)

    def pump(self) -> None:
        """Start what may start."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self.queue and self._may_start(self.queue[0]):
                if self.instance is None and not self._activate():
                    break
                self._start(self.queue.popleft())
        finally:
            self._pumping = False
        if not self.busy:
            self._became_idle()

    def _may_start(self, work: Work) -> bool:
        if self._activation is not None or self._rerun is not None or self.partition.stopped:
            return False
        if self.recovering and not work.resumed:
            return False
        if self.interleaved:
            return self._blocked == 0
        return self.current is None or (isinstance(work, CallWork) and work.method.is_shared)

    # --- activation -------------------------------------------------------------------------------

    def _activate(self) -> bool:
        """Make the instance and run `on_start`; False while it runs, or when it failed and took the head with it."""
        turn = Turn(self, None, b"", WriteBuffer(), self.partition.clock.wall_ms(), 1)
        self._activation = turn
        token = CURRENT.set(turn)
        try:
            instance = self.info.cls.__new__(self.info.cls)
            instance._ms_host = self
            instance.__init__()  # type: ignore[misc]
            started = instance.on_start() if self.info.has_on_start else None  # type: ignore[attr-defined]
            if inspect.isawaitable(started):
                turn.task = asyncio.ensure_future(started)
        except Exception as error:
            self._activation_failed(turn, error)
            return False
        finally:
            CURRENT.reset(token)
        if turn.task is None:
            return self._activated(turn, instance)
        self._set_timeout(turn, self._turn_timeout_ms(None))
        turn.task.add_done_callback(lambda task: self._on_start_ended(turn, instance, task))
        return False

    def _on_start_ended(self, turn: Turn, instance: DurableObject, task: asyncio.Future[Any]) -> None:
        self._clear_timeout(turn)
        if turn.superseded:
            return
        error: BaseException | None
        if turn.timed_out:
            error = TurnTimeout(f"{self.id}: on_start ran longer than {self._turn_timeout_ms(None):,} ms")
        else:
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._activation_failed(turn, error)
            self.pump()
        elif self._activated(turn, instance):
            self.pump()

    def _activated(self, turn: Turn, instance: DurableObject) -> bool:
        turn.end()
        self.partition.activations += 1
        if not turn.buffer.dirty:
            self._activation = None
            self.instance = instance
            return True
        # what on_start wrote is a write set of its own, durable before the first turn starts
        write_set = self.state.hand_over(turn.buffer.merged())
        write_set.waiters.append(lambda error: self._on_start_durable(turn, instance, error))
        return False

    def _on_start_durable(self, turn: Turn, instance: DurableObject, error: BaseException | None) -> None:
        if turn.superseded:
            return
        self._activation = None
        if error is None:
            self.instance = instance
            self.pump()

    def _activation_failed(self, turn: Turn, error: BaseException) -> None:
        """The call at the head gets the exception; the next one tries again."""
        turn.end()
        self._activation = None
        self._log_failure("on_start_failed", error)
        work = self.queue.popleft()
        if isinstance(work, CallWork):
            work.answer(*raised(error))
            self.partition.work_ended(work)
        else:
            assert isinstance(work, TimerWork)
            if self._begin_timer(work):
                self._timer_failed(work, None, error)

    # --- running a turn ---------------------------------------------------------------------------

    def _start(self, work: Work) -> None:
        now_ms = self.partition.clock.wall_ms()
        if isinstance(work, CallWork):
            if work.deadline_ns and self.partition.clock.monotonic_ns() > work.deadline_ns:
                work.refuse(CallExpired(f"{self.id}.{work.method.name}: its deadline passed before it could start"))
                self.partition.work_ended(work)
                return
            function = work.method.call
        else:
            assert isinstance(work, TimerWork)
            if not self._begin_timer(work):
                return
            found = self._timer_method(work)
            if found is None:
                return
            function = found
        buffer = self._buffer if self.interleaved else WriteBuffer()
        turn = Turn(self, work, work.turn_id, buffer, work.began_ms or now_ms, work.attempt)
        if work.resumed:
            turn.resume()
            work.resumed = False
        if isinstance(work, TimerWork):
            self.partition.claims.started(work)
            self._end_timer_in(turn, work)
        elif work.method.is_shared:
            turn.read_only = True
            turn.buffer = WriteBuffer()
        if turn.read_only or self.interleaved:
            self._side_turns.add(turn)
        else:
            self.current = turn
        self.partition.turns += 1
        self._run(turn, function)

    def _run(self, turn: Turn, function: Any) -> None:
        work = turn.work
        assert work is not None
        token = CURRENT.set(turn)
        try:
            if isinstance(work, CallWork):
                args, kwargs = work.arguments()
                result = function(self.instance, *args, **kwargs)
            else:
                assert isinstance(work, TimerWork)
                result = function(self.instance, work.handler_argument())
            if inspect.iscoroutine(result):
                turn.task = asyncio.ensure_future(result)
        except Exception as error:
            self._body_ended(turn, None, work.method.misfit(error) or error)
            return
        finally:
            CURRENT.reset(token)
        if turn.task is None:
            self._body_ended(turn, result, None)
            return
        self._set_timeout(turn, self._turn_timeout_ms(work))
        turn.task.add_done_callback(lambda task: self._task_ended(turn, task))

    def _task_ended(self, turn: Turn, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            self._body_ended(turn, None, asyncio.CancelledError("the turn was cancelled by its own code"))
            return
        error = task.exception()
        if error is not None:
            assert turn.work is not None
            self._body_ended(turn, None, turn.work.method.misfit(error) or error)
        else:
            self._body_ended(turn, task.result(), None)

    def _body_ended(self, turn: Turn, result: Any, error: BaseException | None) -> None:
        if turn.superseded or (turn is not self.current and turn not in self._side_turns):
            return  # abandoned: somebody else has answered for it
        if turn.outstanding:
            # calls that nobody awaits belong to the turn all the same: it ends when they have
            self._ended[turn] = (result, error)
            return
        self._clear_timeout(turn)
        if turn.timed_out:
            error = self._timeout_error(turn)
        elif error is None and turn.doomed is not None:
            error = turn.doomed
        turn.end()
        if turn is self.current:
            self.current = None
        self._side_turns.discard(turn)
        assert turn.work is not None
        self.partition.claims.ended(turn.work)
        if error is None:
            error = self._succeeded(turn, result)
        if error is not None:
            self._failed(turn, error)
        self.pump()

    def calls_settled(self, turn: Turn) -> None:
        """The last outstanding call of the turn has ended."""
        ended = self._ended.pop(turn, None)
        if ended is not None:
            self._body_ended(turn, *ended)

    # --- the end of a turn ------------------------------------------------------------------------

    def _succeeded(self, turn: Turn, result: Any) -> BaseException | None:
        """Hand over what the turn did and answer once it is durable; the error when its result can't travel."""
        work = turn.work
        if isinstance(work, TimerWork):
            guards = work.guards()
            if self.interleaved:
                known, row = turn.buffer.lookup_timer(work.row.name)
                row = row if known else self.directory().get(work.row.name)
                if row is not None and row.generation == work.row.generation:
                    turn.buffer.top.timers[work.row.name] = work.following()
                else:
                    guards = []  # replaced or cancelled by another turn of this process
            extra = work.closing_ops(turn)
            write_set = self.state.hand_over(turn.buffer.merged(), extra=extra, guards=guards)
            self._renew_buffer()
            write_set.waiters.append(lambda error: self._timer_durable(turn, error))
            return None
        assert isinstance(work, CallWork)
        settings = self.partition.settings
        try:
            reply = work.encode_result(result, settings.max_args_bytes)
        except Exception as error:
            return error
        if turn.read_only or not (turn.buffer.dirty or turn.recorded or turn.called or work.claimed):
            self._answer_when_durable(turn, reply)
            return None
        entry = work.inbox_entry(reply, settings.max_reply_memory_bytes)
        write_set = self.state.hand_over(turn.buffer.merged(), extra=work.closing_ops(turn), inbox=entry)
        self._renew_buffer()
        write_set.waiters.append(lambda error: self._call_durable(turn, reply, error))
        return None

    def _renew_buffer(self) -> None:
        if self.interleaved:
            self._buffer = WriteBuffer()
            for turn in self._side_turns:
                if not turn.read_only:
                    turn.buffer = self._buffer

    def _failed(self, turn: Turn, error: BaseException) -> None:
        """Everything since the last commit is undone; the exception is the answer."""
        work = turn.work
        if not self.interleaved and not isinstance(error, self.info.cls.harmless_errors):
            self._discard_instance()
        if isinstance(work, TimerWork):
            self._timer_failed(work, turn, error)
            return
        assert isinstance(work, CallWork)
        reply = raised(error)
        if not (turn.recorded or turn.called or work.claimed or (self.interleaved and turn.buffer.dirty)):
            self._answer_when_durable(turn, reply)
            return
        entry = work.inbox_entry(reply, self.partition.settings.max_reply_memory_bytes)
        layer = turn.buffer.merged() if self.interleaved else WriteBuffer().top
        write_set = self.state.hand_over(layer, extra=work.closing_ops(turn), inbox=entry)
        self._renew_buffer()
        write_set.waiters.append(lambda failure: self._call_durable(turn, reply, failure))

    def _answer_when_durable(self, turn: Turn, reply: Reply) -> None:
        """The gate: nothing that rests on an undurable write leaves the object."""
        if self.state.last is None or self.state.last.done:
            self._call_durable(turn, reply, None)
        else:
            self.state.last.waiters.append(lambda error: self._call_durable(turn, reply, error))

    def _call_durable(self, turn: Turn, reply: Reply, error: BaseException | None) -> None:
        work = turn.work
        assert isinstance(work, CallWork)
        if error is None:
            work.answer(*reply)
            self.partition.work_ended(work)
            self.partition.release_calls(turn)
        elif turn.recorded and turn.intent_durable:
            # what it called has happened, so the turn must be run again until its own outcome is recorded
            self._run_again(work, turn)
        else:
            work.refuse(error)
            self.partition.work_ended(work)
        if not self.queue and not self.busy:
            self._became_idle()

    def _discard_instance(self) -> None:
        """Memory and storage never disagree: the next turn gets a fresh instance. Shared turns start over on it."""
        self.instance = None
        for turn in [turn for turn in self._side_turns if turn.read_only]:
            self._supersede(turn)
            assert turn.work is not None
            self.queue.appendleft(turn.work)

    # --- timers -----------------------------------------------------------------------------------

    def _begin_timer(self, work: TimerWork) -> bool:
        """Check the timer again; False when it is not the one that was armed, or when it is skipped by its policy."""
        row = self.directory().get(work.row.name)
        if row is None or row.generation != work.row.generation or row.due_ms != work.row.due_ms:
            self.partition.timer_ended(work)
            return False
        now_ms = self.partition.clock.wall_ms()
        if row.due_ms > now_ms:  # the wall clock was set back since the tick
            self.partition.timer_ended(work)
            self.partition.timer_armed(row.due_ms)
            return False
        work.begin(now_ms, self.partition.settings.misfire_all_limit)
        assert work.step is not None
        if work.step.run:
            return True
        buffer = WriteBuffer()
        buffer.top.timers[work.row.name] = work.following()
        write_set = self.state.hand_over(buffer.top, guards=work.guards())
        write_set.waiters.append(lambda error: self.partition.timer_ended(work))
        return False

    def _timer_method(self, work: TimerWork) -> Any:
        """The handler, or None after the timer was failed because its class has none (any more)."""
        name = work.spec.method
        if work.row.name in INTERNAL_NAMES:
            handler = getattr(self.info.cls, name, None)
        else:
            found = self.info.methods.get(name)
            handler = None if found is None else found.call
        if handler is None:
            self._timer_failed(work, None, AttributeError(f"{self.info.type_name} has no method {name!r} to run"))
        return handler

    def _end_timer_in(self, turn: Turn, work: TimerWork) -> None:
        """The turn begins with its timer ended (or moved on): what the handler sets itself takes the place of that.

        Interleaved turns share a buffer that may be committed at any await, so theirs is ended when they return.
        """
        if self.interleaved:
            turn.firing = work.row.generation
        else:
            turn.buffer.top.timers[work.row.name] = work.following()

    def _timer_durable(self, turn: Turn, error: BaseException | None) -> None:
        work = turn.work
        assert isinstance(work, TimerWork)
        if error is None:
            self.partition.fires += 1
            self.partition.release_calls(turn)
            self.partition.timer_ended(work)
        elif turn.recorded and turn.intent_durable:
            self._run_again(work, turn)
        else:
            self.partition.timer_ended(work, retry=True)

    def _timer_failed(self, work: TimerWork, turn: Turn | None, error: BaseException) -> None:
        """One failed run: the retry, or the dead letters, in a commit after the roll-back."""
        now_ms = self.partition.clock.wall_ms()
        retry_row = work.after_failure(now_ms)
        extra: list[Op] = [] if turn is None else work.closing_ops(turn)
        buffer = WriteBuffer()
        if retry_row is None:
            self._bury(work, error, buffer, extra)
        else:
            buffer.top.timers[work.row.name] = retry_row
            self.partition.retries += 1
        self._log_failure("timer_failed", error, timer=work.row.name, attempt=work.row.attempt)
        write_set = self.state.hand_over(buffer.merged(), extra=extra, guards=work.guards())
        write_set.waiters.append(lambda failure: self._timer_failure_durable(work, turn, failure))

    def _bury(self, work: TimerWork, error: BaseException, buffer: WriteBuffer, extra: list[Op]) -> None:
        """Into the dead letters; a recurring timer goes on with its next occurrence."""
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        number = self.partition.counters.take_id()
        attempts = work.row.attempt + 1
        now_ms = self.partition.clock.wall_ms()
        extra.append(dead_letter_op(number, self.id.type_name, self.id.key, work.row, text, now_ms, attempts))
        self.partition.dead_letters += 1
        buffer.top.timers[work.row.name] = work.following()
        if work.is_alarm and hasattr(self.info.cls, "on_alarm_exhausted"):
            buffer.top.timers[EXHAUSTED_TIMER] = self._exhausted_row(work, now_ms)

    def _exhausted_row(self, work: TimerWork, now_ms: int) -> DirectoryRow:
        """`on_alarm_exhausted` runs as a timer of the runtime's own, due now: durable, once, with retries."""
        spec = TimerSpec(mode="at", start_ms=now_ms, method="on_alarm_exhausted", payload=encode(work.info()))
        return DirectoryRow(
            oid=0,
            name=EXHAUSTED_TIMER,
            kind=int(TimerKind.NAMED_TIMER),
            due_ms=now_ms,
            generation=self.partition.counters.take_generation(),
            first_due_ms=now_ms,
            attempt=0,
            crashes=0,
            missed=0,
            spec=spec.to_bytes(),
        )

    def _timer_failure_durable(self, work: TimerWork, turn: Turn | None, failure: BaseException | None) -> None:
        if failure is None and turn is not None:
            self.partition.release_calls(turn)
        self.partition.timer_ended(work, retry=failure is not None)

    # --- cut short --------------------------------------------------------------------------------

    def _turn_timeout_ms(self, work: Work | None) -> int:
        settings = self.partition.settings
        if isinstance(work, TimerWork):
            return settings.timer_turn_timeout_ms
        return self.info.cls.turn_timeout_ms or settings.turn_timeout_ms

    def _set_timeout(self, turn: Turn, timeout_ms: int) -> None:
        turn.timeout_handle = self.partition.clock.call_later(timeout_ms, lambda: self._time_out(turn))

    @staticmethod
    def _clear_timeout(turn: Turn) -> None:
        if turn.timeout_handle is not None:
            turn.timeout_handle.cancel()
            turn.timeout_handle = None

    def _timeout_error(self, turn: Turn) -> TurnTimeout:
        name = turn.work.method.name if isinstance(turn.work, CallWork) else "a timer's handler"
        limit = self._turn_timeout_ms(turn.work)
        return TurnTimeout(f"{self.id}: {name} ran longer than {limit:,} ms; it was cancelled and rolled back")

    def _time_out(self, turn: Turn) -> None:
        turn.time_out()
        turn.cancel()
        grace_ms = self.partition.settings.cancel_grace_ms
        turn.timeout_handle = self.partition.clock.call_later(grace_ms, lambda: self._abandon(turn))

    def _abandon(self, turn: Turn) -> None:
        """The code swallowed its cancellation: it runs on without its object, which is rebuilt."""
        log_event(logging.ERROR, "turn_abandoned", f"{self.id}: a cancelled turn goes on running", object=str(self.id))
        self._ended.pop(turn, None)
        turn.outstanding = 0
        if turn is self._activation:
            turn.supersede()
            self._activation_failed(turn, self._timeout_error(turn))
            self.pump()
        else:
            self._body_ended(turn, None, None)

    def _supersede(self, turn: Turn) -> None:
        """The turn no longer counts, whatever its code goes on to do."""
        turn.supersede()
        turn.cancel()
        self._clear_timeout(turn)
        self._ended.pop(turn, None)
        self._side_turns.discard(turn)
        if turn is self.current:
            self.current = None

    def _reset(self, error: BaseException) -> None:
        """A write set was not applied: back to what is durable; what ran on top of it is cut short."""
        self.partition.resets += 1
        log_event(logging.WARNING, "object_reset", f"{self.id}: {error}", object=str(self.id))
        self.instance = None
        self._buffer = WriteBuffer()
        if self._activation is not None:
            self._supersede(self._activation)
            self._activation = None
        running = [*self._side_turns, *([self.current] if self.current else [])]
        for turn in running:
            self._supersede(turn)
            work = turn.work
            if isinstance(work, CallWork) and work.method.is_shared:
                self.queue.appendleft(work)
            elif work is not None and turn.recorded and turn.intent_durable:
                self._run_again(work, turn)
            elif isinstance(work, CallWork):
                reset = ObjectReset(f"{self.id} went back to its last durable state; nothing of this turn was applied")
                reset.__cause__ = error
                work.refuse(reset)
                self.partition.work_ended(work)
            elif isinstance(work, TimerWork):
                self.partition.timer_ended(work, retry=True)
        self.partition.loop.call_soon(self.pump)

    def _run_again(self, work: Work, turn: Turn) -> None:
        """Its calls have happened, its own outcome is not recorded: the same turn, again, before any other."""
        work.attempt = turn.attempt + 1
        work.began_ms = turn.now_ms
        work.resumed = True
        self.queue.appendleft(work)
        if self._rerun is None:
            self._rerun = self.partition.clock.call_later(RERUN_DELAY_MS, self._rerun_now)

    def _rerun_now(self) -> None:
        self._rerun = None
        self.pump()

    # --- committing early -------------------------------------------------------------------------

    def commit_intent(self, turn: Turn) -> asyncio.Future[None]:
        """Make durable that this turn runs. Covers every earlier write set of the object too."""
        return self._wait_for(self.state.hand_over(WriteBuffer().top, extra=[self._intent_op(turn)]))

    async def sync(self, turn: Turn) -> None:
        """Hand over what the turn has so far, with its intent, and wait until it is durable."""
        if self.interleaved or turn.is_activation:
            self._flush(turn.buffer)
            await self.earlier_durable(turn)
            return
        if turn.read_only:
            await self.earlier_durable(turn)
            return
        if turn.buffer.dirty:
            turn.note_intent(self._hand_over_part(turn))
            await turn.ensure_intent()
        else:
            await self.earlier_durable(turn)
        turn.check()

    def _hand_over_part(self, turn: Turn) -> asyncio.Future[None]:
        """What a turn has written so far, with its intent; its timer ends with the turn, not with its parts."""
        work = turn.work
        assert work is not None
        layer = turn.buffer.merged()
        turn.buffer = WriteBuffer()
        if isinstance(work, TimerWork) and work.row.name in layer.timers:
            turn.buffer.top.timers[work.row.name] = layer.timers.pop(work.row.name)
        return self._wait_for(self.state.hand_over(layer, extra=[self._intent_op(turn)]))

    def _intent_op(self, turn: Turn) -> Op:
        assert turn.work is not None
        return (INTENTS, (self.id.type_name, self.id.key), (turn.turn_id, turn.work.pack_intent(turn)))

    async def earlier_durable(self, turn: Turn) -> None:
        """Wait until every write set handed over so far is durable. Raises what an earlier one failed with."""
        if self.interleaved:
            self._flush(self._buffer)
        last = self.state.last
        if last is not None and not last.done:
            await self._wait_for(last)

    def _wait_for(self, write_set: WriteSet) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self.partition.loop.create_future()

        def ended(error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
                future.exception()  # seen: a turn that was cut short does not ask

        write_set.when_done(ended)
        return future

    # --- interleaved classes ----------------------------------------------------------------------

    def schedule_flush(self) -> None:
        """Writes made without an await between them commit together: hand over at the next loop turn."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.partition.loop.call_soon(self._flush_scheduled_now)

    def _flush_scheduled_now(self) -> None:
        self._flush_scheduled = False
        if len(self._buffer.layers) == 1:
            self._flush(self._buffer)

    def _flush(self, buffer: WriteBuffer) -> None:
        if not buffer.dirty:
            return
        self.state.hand_over(buffer.merged())
        if buffer is self._buffer:
            self._renew_buffer()
        else:
            buffer.layers[:] = WriteBuffer().layers

    @asynccontextmanager
    async def block_concurrency(self) -> AsyncIterator[None]:
        """No other turn of the object starts until the block is left."""
        self.reading_turn()
        self._blocked += 1
        try:
            yield
        finally:
            self._blocked -= 1
            if not self._blocked:
                self.partition.loop.call_soon(self.pump)

    # --- leaving memory ---------------------------------------------------------------------------

    def _became_idle(self) -> None:
        self._idle_since_ns = self.partition.clock.monotonic_ns()
        if self._idle is None:
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
        for turn in [*self._side_turns, self.current, self._activation]:
            if turn is not None:
                self._supersede(turn)
        self._activation = None
        self.queue.clear()
        self.forget()
        if self._rerun is not None:
            self._rerun.cancel()

    def stop_instance(self) -> None:
        """Run `on_stop`, best effort: its errors are logged, and it can use nothing durable any more."""
        instance, self.instance = self.instance, None
        hook = None if instance is None else getattr(instance, "on_stop", None)
        if hook is None:
            return
        try:
            result = hook()
            if inspect.iscoroutine(result):
                task = asyncio.ensure_future(result)
                task.add_done_callback(self._on_stop_ended)
        except Exception as error:
            self._log_failure("on_stop_failed", error)

    def _on_stop_ended(self, task: asyncio.Future[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._log_failure("on_stop_failed", error)

    def _log_failure(self, event: str, error: BaseException, **fields: Any) -> None:
        log_event(logging.INFO, event, f"{self.id}: {error!r}", error=error, object=str(self.id), **fields)
