"""One turn: what it has changed, whom it has called, and how far it is."""

from __future__ import annotations

import asyncio
import enum
import hashlib
import random
import threading
from collections.abc import Awaitable, Coroutine
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from actors import early_commit, pickled
from actors.address import ClassRef, slot_of
from actors.codec import decode
from actors.current import IN_STEP
from actors.errors import (
    MainspringError,
    Overloaded,
    ReadOnlyTurn,
    ReentrantCall,
    TurnOver,
    ValueTooLarge,
    WriteOutsideStep,
    WriteSetTooLarge,
    WrongThread,
)
from actors.messages import OK, OK_PICKLED, REFUSED
from actors.timer_work import TimerWork
from actors.wire_errors import decode_error, encode_error
from actors.write_buffer import DirectoryRow, WriteBuffer
from timers.outcomes import tagged_id

if TYPE_CHECKING:
    from actors.execution_run import ExecutionRun
    from actors.object_host import ObjectHost
    from actors.work import Work

__all__ = ["Turn", "inside_call_id"]

T = TypeVar("T")


def inside_call_id(turn_id: bytes, type_name: str, key: str, method: str, index: int) -> bytes:
    """Id of the `index`-th call that a turn makes to this target and method: the same when the turn is run again."""
    hasher = hashlib.blake2b(turn_id, digest_size=16)
    hasher.update(f"\0{type_name}\0{key}\0{method}\0{index}".encode())
    return b"i" + hasher.digest()


class _State(enum.Enum):
    RUNNING = "running"
    ENDED = "ended"
    TIMED_OUT = "timed out"
    SUPERSEDED = "been superseded"


class Turn:
    """A turn of one object. `CURRENT` holds it while its code runs; stubs and storage find it there."""

    __slots__ = (
        "_counts",
        "_intents",
        "_made",
        "_random",
        "_state",
        "attempt",
        "buffer",
        "called",
        "calls",
        "doomed",
        "execution",
        "firing",
        "host",
        "is_activation",
        "lineage",
        "now_ms",
        "outstanding",
        "read_only",
        "recorded",
        "step",
        "task",
        "timeout_handle",
        "turn_id",
        "work",
    )

    def __init__(
        self, host: ObjectHost, work: Work | None, turn_id: bytes, buffer: WriteBuffer, now_ms: int, attempt: int
    ) -> None:
        self.host = host
        self.work = work
        self.turn_id = turn_id
        self.buffer = buffer
        self.now_ms = now_ms
        self.attempt = attempt
        self.lineage = host.lineage
        self.read_only = False
        #: the run of a durable function that this turn is a segment of, and its step that runs now
        self.execution: ExecutionRun | None = None
        self.step: object | None = None
        self.is_activation = work is None
        self.task: asyncio.Future[Any] | None = None
        self.timeout_handle: Any = None
        self.doomed: BaseException | None = None
        #: (partition, call id) of what the turn has called: released once the turn's outcome is durable
        self.called: list[tuple[int, bytes]] | None = None
        self.outstanding = 0
        self.calls: set[asyncio.Future[Any]] | None = None
        #: generation of the timer that this turn of an interleaved class runs for, 0 when it runs for none
        self.firing = 0
        #: an intent is on its way to disk, so the outcome must be recorded whatever the turn wrote
        self.recorded = False
        self._intents: tuple[asyncio.Future[None], ...] = ()
        self._counts: dict[tuple[str, str, str], int] | None = None
        self._random: random.Random | None = None
        #: ids made so far
        self._made = 0
        self._state = _State.RUNNING

    # --- state ----------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self._state is _State.RUNNING

    @property
    def timed_out(self) -> bool:
        return self._state is _State.TIMED_OUT

    @property
    def superseded(self) -> bool:
        return self._state is _State.SUPERSEDED

    @property
    def outside_step(self) -> bool:
        """Whether the code of a durable function runs, and none of its steps: a replay would do again what it does."""
        if self.execution is None:
            return False
        return self.step is None or IN_STEP.get() is not self.step

    def end(self) -> None:
        if self._state is _State.RUNNING:
            self._state = _State.ENDED

    def time_out(self) -> None:
        self._state = _State.TIMED_OUT

    def supersede(self) -> None:
        self._state = _State.SUPERSEDED

    def check(self) -> None:
        """Raise `WrongThread` or `TurnOver` unless this turn may act right now."""
        if threading.get_ident() != self.host.partition.thread_id:
            raise WrongThread(
                f"{self.host.id}: storage, timers and stubs work on the partition's thread only; "
                "return the result of the thread and use it in the turn"
            )
        if self._state is not _State.RUNNING:
            raise TurnOver(
                f"{self.host.id}: this turn has {self._state.value}; what runs after a turn can't use its object. "
                "Await the work inside the turn, or call the object through a stub."
            )

    def check_writable(self) -> None:
        self.check()
        if self.read_only:
            raise ReadOnlyTurn(f"{self.host.id}: a @shared method can't write; drop @shared to make it a serial turn")
        if self.outside_step:
            raise WriteOutsideStep(
                f"{self.host.id}: a durable function writes, sets timers, sends and calls in its steps only, since the "
                "rest of it runs again at each replay: `await ctx.step(name, method, ...)`"
            )

    def doom(self, error: BaseException) -> NoReturn:
        """Raise `error`, and end the turn with it whatever its code does about it."""
        self.doomed = error
        raise error

    def following(self) -> DirectoryRow | None:
        """What takes the place of the timer that this turn runs for."""
        assert isinstance(self.work, TimerWork)
        return self.work.following()

    def wrote(self) -> None:
        """Something was put into the buffer. Raises `WriteSetTooLarge`, which also ends the turn."""
        settings = self.host.partition.settings
        if self.buffer.size > settings.max_write_set_bytes:
            self.doom(
                WriteSetTooLarge(
                    f"the turn of {self.host.id} has written {self.buffer.size:,} bytes, the limit is "
                    f"{settings.max_write_set_bytes:,}: commit in parts with `await self.storage.sync()`"
                )
            )
        if self.buffer.operations() > settings.max_write_set_ops:
            self.doom(
                WriteSetTooLarge(
                    f"the turn of {self.host.id} has made more than {settings.max_write_set_ops:,} writes: "
                    "commit in parts with `await self.storage.sync()`"
                )
            )
        if self.host.interleaved:
            early_commit.schedule_flush(self.host)

    def random(self) -> random.Random:
        self.check()
        if self._random is None:
            self._random = random.Random(self.turn_id)
        return self._random

    def unique_id(self, what: str) -> str:
        """An id that nothing else has: the same when the turn is run again. `what` keeps kinds of things apart."""
        self.check()
        self._made += 1
        own: tuple[int, ...] = (self.now_ms, self._made)
        if self.is_activation:  # has no id of its own, and is never run again as the same one
            partition = self.host.partition
            own = (*own, partition.config.partition, partition.epoch, partition.counters.take_generation())
        # a call named by a key may come again after its outcome was forgotten, as another turn with the same id
        return tagged_id(what, self.turn_id, self.host.id.type_name, self.host.id.key, repr(own))

    def check_may_wait(self, type_name: str, key: str) -> None:
        """Raises `ReentrantCall` for executions of objects that wait for this turn, and `WriteOutsideStep`."""
        self.check()
        if self.outside_step:
            self.check_writable()  # waited for in a step, whose result is in the journal
        own, chain = (self.host.id.type_name, self.host.id.key), () if self.work is None else self.work.chain
        if (type_name, key) == own or (type_name, key) in chain:
            raise ReentrantCall(
                f"{self.host.id}: this turn would wait for an execution of its own object, or of one that waits for "
                f"this turn ({type_name}/{key}), which can't go on meanwhile. Wait outside of turns, or let "
                "the execution send a message when it ends."
            )

    # --- calling other objects ------------------------------------------------------------------

    def outgoing_call(
        self,
        ref: ClassRef,
        key: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_ms: int | None,
    ) -> Awaitable[Any]:
        """Start a call that belongs to this turn: its id follows from the turn's, so it happens once."""
        if self.is_activation:  # belongs to no turn that is run again under the same id: at least once
            return self.host.partition.client.call(ref, key, method, args, kwargs, timeout_ms=timeout_ms)
        self.check()
        is_shared = method in ref.shared_methods
        if self.outside_step and not is_shared:
            self.check_writable()
        self._check_chain(ref, key, method, is_shared)
        data, flags = self.host.partition.client.encode_arguments(ref, method, args, kwargs)
        most = self.host.partition.settings.max_args_bytes
        if len(data) > most:
            raise ValueTooLarge(f"arguments of {ref.type_name}.{method}: {len(data):,} bytes (limit {most:,})")
        if self._counts is None:
            self._counts, self.called = {}, []
        count_key = (ref.type_name, key, method)
        index = self._counts.get(count_key, 0)
        self._counts[count_key] = index + 1
        call_id = inside_call_id(self.turn_id, ref.type_name, key, method, index)
        return self.begin_call(self._call(ref, key, method, data, flags, call_id, is_shared, timeout_ms))

    def begin_call(self, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something that the turn does not end before, whether its code waits for it or not."""
        self.outstanding += 1
        task = asyncio.ensure_future(call)
        if self.calls is None:
            self.calls = set()
        self.calls.add(task)
        task.add_done_callback(self._call_ended)
        return task

    def _check_chain(self, ref: ClassRef, key: str, method: str, is_shared: bool) -> None:
        assert self.work is not None
        chain = self.work.chain
        settings = self.host.partition.settings
        if len(chain) + 1 > settings.max_chain_depth:
            raise Overloaded(f"a chain of {len(chain) + 1} nested calls (limit {settings.max_chain_depth})")
        if self.outstanding >= settings.max_nested_calls:
            raise Overloaded(f"{self.host.id}: {self.outstanding} calls of this turn are outstanding already")
        target = (ref.type_name, key)
        own = (self.host.id.type_name, self.host.id.key)
        if not is_shared and (target == own or target in chain):
            path = " -> ".join(f"{name}/{each}" for name, each in (*chain, own, target))
            raise ReentrantCall(
                f"{ref.type_name}.{method} would re-enter an object that waits for this call: {path}. "
                "Call it after this turn (a timer), or mark a read-only method @shared."
            )

    async def _call(
        self,
        ref: ClassRef,
        key: str,
        method: str,
        data: bytes,
        flags: int,
        call_id: bytes,
        is_shared: bool,
        timeout_ms: int | None,
    ) -> Any:
        assert self.work is not None
        refusal = self.answer_to(call_id)
        if refusal is not None:
            raise decode_error(refusal)  # what the first run met: it may have decided by it
        if is_shared or self.read_only or self.host.interleaved:
            await early_commit.earlier_durable(self.host, self)
        else:
            await self.ensure_intent()
        own = (self.host.id.type_name, self.host.id.key)
        client = self.host.partition.client
        slot = slot_of(ref.type_name, key)
        partition = client.directory.partition_of(slot)
        try:
            partition, status, payload = await client.submit(
                ref,
                key,
                method,
                data,
                flags=flags,
                timeout_ms=timeout_ms,
                call_id=call_id,
                chain=(*self.work.chain, own),
                caller=(*own, self.turn_id),
            )
        except MainspringError as error:
            await self.remember(call_id, encode_error(error))
            raise
        finally:
            # also when the code stopped waiting: the target may have recorded an outcome that must be released
            assert self.called is not None
            self.called.append((partition, call_id))
        if status == OK:
            return decode(payload)
        if status == OK_PICKLED:
            return pickled.load(payload, f"the reply of {ref.type_name}.{method}")
        if status == REFUSED:
            await self.remember(call_id, payload)
        raise decode_error(payload)

    async def before_asking(self) -> None:
        """Until everything is durable that a request to somebody else may rest on, and that this turn runs."""
        if self.is_activation:  # never run again as the same turn: there is nothing to keep
            await early_commit.earlier_durable(self.host, self)
        else:
            await self.ensure_intent()

    def answer_to(self, ask_id: bytes) -> bytes | None:
        """What the turn was answered when it ran before, if it was."""
        answers = None if self.work is None else self.work.answers
        return answers.get(ask_id) if answers else None

    async def remember(self, ask_id: bytes, answer: bytes) -> None:
        """A refusal, or an answer of the coordinator, is recorded nowhere else, and may be another one when the turn is
        run again: keep it, durably, with the intent, before the code can decide by it."""
        if not self.recorded or self.host.partition.stopped:
            return
        assert self.work is not None
        if self.work.answers is None:
            self.work.answers = {}
        self.work.answers[ask_id] = answer
        await asyncio.shield(early_commit.commit_intent(self.host, self))

    def _call_ended(self, task: asyncio.Future[Any]) -> None:
        self.outstanding -= 1
        assert self.calls is not None
        self.calls.discard(task)
        if not task.cancelled():
            task.exception()  # seen: who awaits the call gets it, and a call nobody awaits must not warn at exit
        if self.outstanding == 0:
            self.host.calls_settled(self)

    async def ensure_intent(self) -> None:
        """Before the first call that may change something: make durable that this turn runs, and with what."""
        if not self._intents:
            self.note_intent(early_commit.commit_intent(self.host, self))
        await asyncio.shield(self._intents[-1])

    def note_intent(self, durable: asyncio.Future[None]) -> None:
        """An intent of this turn is on its way to disk: its outcome must be recorded, whatever it is."""
        self.recorded = True
        self._intents = (*self._intents, durable)

    def resume(self) -> None:
        """The turn is run again: its intent is on disk already."""
        durable: asyncio.Future[None] = self.host.partition.loop.create_future()
        durable.set_result(None)
        self.note_intent(durable)

    @property
    def intent_durable(self) -> bool:
        """Whether an intent is on disk, so that the turn would be run again after a crash. A later one that was not
        written, with a second `sync()`, takes nothing away from that."""
        return any(intent.done() and not intent.cancelled() and intent.exception() is None for intent in self._intents)

    def cancel(self) -> None:
        """Cancel the turn's code and the calls that it waits for."""
        for call in list(self.calls or ()):
            call.cancel()
        if self.task is not None:
            self.task.cancel()
