"""The client of a process: makes calls, and heals what breaks between it and the partitions."""

from __future__ import annotations

import asyncio
import contextvars
import os
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, Protocol

from actors import pickled
from actors.address import ClassRef, slot_of
from actors.barrier import Barriers
from actors.call import NO_SLOT, Call
from actors.channel import SESSION_BYTES, Channel, ChannelHandler
from actors.codec import encode
from actors.errors import (
    ChannelClosed,
    InvalidOption,
    RuntimeNotStarted,
    UnstorableValue,
    ValueTooLarge,
)
from actors.lane import Lane
from actors.messages import ADMIN, CALLS, PICKLED, QUESTION, is_keyed, pickled_session
from actors.routes import Routes
from actors.settings import Settings

__all__ = ["CallLater", "Cancellable", "Client", "Connect", "Directory"]

#: Deadlines are looked at this often at most, so that 20,000 calls with deadlines close to each other cost little.
#: A deadline is never early and at most this late.
SWEEP_INTERVAL_S: Final = 0.02

#: Opens a channel: partition, session, number of the connection, handler. See `Directory.connect`.
Connect = Callable[[int, bytes, int, ChannelHandler], Awaitable[Channel]]


class Directory(Protocol):
    """What a client needs to find partitions.

    A directory that can open channels which carry pickles (`Channel.trusted_pickle`) also has `connect_trusted`, a
    `Connect` or None. Calls whose arguments only pickle can carry need it; without it they raise `UnstorableValue`.
    """

    @property
    def map_version(self) -> int:
        """Version of the slot map that `partition_of` answers from."""
        ...

    def partition_of(self, slot: int) -> int:
        """The owner of a slot."""
        ...

    def partitions(self) -> Sequence[int]:
        """All partitions."""
        ...

    async def refresh(self, seen_version: int) -> None:
        """Get a newer map than `seen_version`, if there is one."""
        ...

    async def connect(self, partition: int, session: bytes, connection: int, handler: ChannelHandler) -> Channel:
        """Open a channel to the live incarnation of a partition; waits, with a limit, while it restarts.

        Raises `ChannelClosed` or `OSError` when it is worth trying again, any other `MainspringError` when it is
        not: the calls that wait for the partition get that error.
        """
        ...


class Cancellable(Protocol):
    """A timer's handle."""

    def cancel(self) -> None:
        """Do not run the call-back."""
        ...


class CallLater(Protocol):
    """Runs a call-back after a delay in seconds: `loop.call_later`, or a test's."""

    def __call__(self, delay: float, callback: Callable[..., object], *args: Any) -> Cancellable: ...


class Client:
    """All calls of one event loop to all partitions. Not thread-safe, and of no use in a forked child.

    A call is made at once: its arguments are encoded before `call` returns, and it stands in the queue of its
    object. Each call is answered exactly once. It raises what the method raised, or an error of the platform:
    `CallExpired` (never sent, nothing was run), `CallOutcomeUnknown` (no answer before the deadline), `Overloaded`,
    or the reason why the partition can't be had.

    `now` and `call_later` are the clock, in seconds; `jitter` gives numbers from 0 to 1 that spread reconnecting
    clients.
    """

    def __init__(
        self,
        directory: Directory,
        settings: Settings,
        *,
        session: bytes | None = None,
        now: Callable[[], float] | None = None,
        call_later: CallLater | None = None,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        # Call-backs run in a context of their own: the first call may be made in a turn, whose context variable
        # must not live on in timers and tasks.
        self._context = contextvars.Context()
        self._loop = asyncio.get_running_loop()
        self.directory = directory
        self.settings = settings
        self.session = session if session is not None else os.urandom(SESSION_BYTES)
        self.now = now if now is not None else self._loop.time
        self.call_later = call_later if call_later is not None else self._loop_call_later
        self.jitter = jitter if jitter is not None else random.Random().random
        #: requests for results of executions that partitions hold
        self.waits_held = 0
        #: No call is taken any more.
        self.is_closed = False
        self.routes = Routes(self, directory.connect, self.session)
        self._route = self.routes.current
        self._barriers: Barriers | None = None
        self._pickled_routes: Routes | None = None
        connect_trusted: Connect | None = getattr(directory, "connect_trusted", None)
        if connect_trusted is not None:
            self._pickled_routes = Routes(self, connect_trusted, pickled_session(self.session))
            self._barriers = Barriers(self.routes, self._pickled_routes, settings.max_queued_calls)
        self._create_future = self._loop.create_future
        self._max_args_bytes = settings.max_args_bytes
        self._batch_delay_s = settings.batch_delay_ms / 1000
        self._max_timeout_ms = max(1, settings.call_memory_ms // 2)
        self._timeout_s = min(settings.call_timeout_ms, self._max_timeout_ms) / 1000
        self._sweep_at = float("inf")
        self._sweep_timer: Cancellable | None = None

    # --- calls --------------------------------------------------------------------------------------

    def call(
        self,
        ref: ClassRef,
        key: str,
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        timeout_ms: int | None = None,
        call_id: bytes | None = None,
        chain: Iterable[tuple[str, str]] = (),
        caller: tuple[str, str, bytes] | None = None,
        slot: int | None = None,
    ) -> asyncio.Future[Any]:
        """Make a call; the future gives the method's result or raises its exception.

        `timeout_ms` is capped at half of `call_memory_ms`. `slot` saves computing it. Raises `UnstorableValue`,
        `ValueTooLarge`, `Overloaded` or `RuntimeNotStarted` before anything is queued.
        """
        payload, flags = self.encode_arguments(ref, method, args, kwargs)
        return self._start(ref, key, method, payload, flags, timeout_ms, call_id, chain, caller, slot, False)

    def encode_arguments(
        self, ref: ClassRef, method: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[bytes, int]:
        """Arguments as bytes, and the flags that say how: by the codec, or as a pickle where partitions take those.

        Raises `UnstorableValue`, and `ValueTooLarge` for a pickle over the limit.
        """
        try:
            return encode([list(args), kwargs]), 0
        except UnstorableValue as refusal:
            if self._barriers is None:
                raise
            what = f"the arguments of {ref.type_name}.{method}"
            return pickled.dump((list(args), kwargs), what, self._max_args_bytes, refusal), PICKLED

    def submit(
        self,
        ref: ClassRef,
        key: str,
        method: str,
        args_bytes: bytes,
        *,
        flags: int = 0,
        timeout_ms: int | None = None,
        call_id: bytes | None = None,
        chain: Iterable[tuple[str, str]] = (),
        caller: tuple[str, str, bytes] | None = None,
        slot: int | None = None,
    ) -> asyncio.Future[tuple[int, int, bytes]]:
        """The same with arguments and flags from `encode_arguments` and an undecoded answer: (partition that answered,
        status, payload)."""
        return self._start(ref, key, method, args_bytes, flags, timeout_ms, call_id, chain, caller, slot, True)

    def _start(
        self,
        ref: ClassRef,
        key: str,
        method: str,
        payload: bytes,
        flags: int,
        timeout_ms: int | None,
        call_id: bytes | None,
        chain: Iterable[tuple[str, str]],
        caller: tuple[str, str, bytes] | None,
        slot: int | None,
        raw: bool,
    ) -> asyncio.Future[Any]:
        if self.is_closed:
            raise RuntimeNotStarted("the runtime was stopped; start or connect it again before you make calls")
        if len(payload) > self._max_args_bytes:
            raise ValueTooLarge(
                f"the arguments of {ref.type_name}.{method} take {len(payload)} bytes; `max_args_bytes` is"
                f" {self._max_args_bytes}"
            )
        if slot is None:
            slot = slot_of(ref.type_name, key)
        extra: tuple[Any, ...] | None = None
        urgent = False
        if call_id is not None or chain or caller is not None:
            extra = (call_id, tuple(chain), caller)
            # Calls of turns must not wait behind others: those may be waiting for this very turn.
            urgent = not (call_id is not None and is_keyed(call_id))
        deadline = self.now() + (self._timeout_s if timeout_ms is None else self._checked_timeout_s(timeout_ms))
        future = self._create_future()
        wire = [0, ref.type_name, key, method, payload, flags, 0, extra]
        call = Call(CALLS, wire, future, deadline, slot, ref, raw, urgent)
        barriers = self._barriers
        if barriers is not None and (flags or barriers.by_place):
            barriers.put(call)
        else:
            self._route(slot).put(call)
        if deadline < self._sweep_at:
            self._arm_sweep(deadline)
        return future

    def _checked_timeout_s(self, timeout_ms: int) -> float:
        if timeout_ms < 1:
            raise InvalidOption(f"timeout_ms = {timeout_ms}: a call's timeout is at least 1 ms")
        return min(timeout_ms, self._max_timeout_ms) / 1000

    # --- what partitions are asked besides ----------------------------------------------------------

    async def admin(self, partition: int, op: str, args: Any, *, timeout_ms: int | None = None) -> Any:
        """Ask a partition for something that is not a method call. It is asked again after a lost connection,
        so every `op` must bear being done twice."""
        return await self._request(ADMIN, [0, op, encode(args)], NO_SLOT, self.lane(partition), timeout_ms)

    async def admin_object(self, ref: ClassRef, key: str, op: str, args: Any, *, timeout_ms: int | None = None) -> Any:
        """The same about one object: goes to its owner, behind the calls already made to the object."""
        slot = slot_of(ref.type_name, key)
        barrier = self._barriers.of_object(ref.type_name, key) if self._barriers is not None else None
        return await self._request(ADMIN, [0, op, encode(args)], slot, barrier or self._route(slot), timeout_ms)

    async def ask(self, partition: int, callers: Sequence[Sequence[Any]]) -> list[bool]:
        """For each caller (type, key, turn id): whether its turn is still unfinished."""
        wire = [0, [tuple(caller) for caller in callers]]
        answer: list[bool] = await self._request(QUESTION, wire, NO_SLOT, self.lane(partition), None)
        return answer

    def release(self, partition: int, call_ids: Iterable[bytes]) -> None:
        """The outcome of the turn that made these calls is durable: nobody will ask for their replies again."""
        if not self.is_closed:
            self.lane(partition).release(call_ids)

    def _request(
        self, kind: int, wire: list[Any], slot: int, route: Any, timeout_ms: int | None
    ) -> asyncio.Future[Any]:
        if self.is_closed:
            raise RuntimeNotStarted("the runtime was stopped; start or connect it again before you ask it")
        deadline = self.now() + (self._timeout_s if timeout_ms is None else self._checked_timeout_s(timeout_ms))
        call = Call(kind, wire, self._create_future(), deadline, slot, None, False, slot == NO_SLOT)
        route.put(call)
        if deadline < self._sweep_at:
            self._arm_sweep(deadline)
        return call.future

    def lane(self, partition: int) -> Lane:
        """The lane to a partition, of those that carry no pickles."""
        return self.routes.lane(partition)

    # --- deadlines ----------------------------------------------------------------------------------

    def _arm_sweep(self, deadline: float) -> None:
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        delay = max(deadline - self.now(), SWEEP_INTERVAL_S)
        self._sweep_at = deadline
        self._sweep_timer = self.call_later(delay, self._sweep)

    def _sweep(self) -> None:
        now = self.now()
        self._sweep_timer = None
        self._sweep_at = float("inf")
        earliest = float("inf")
        # Barriers first: what a lane's sweep lets go on from there into a lane has been looked at then.
        for each in (self._barriers, self.routes, self._pickled_routes):
            if each is not None:
                earliest = min(earliest, each.sweep(now))
        if earliest != float("inf"):
            self._arm_sweep(earliest)

    # --- the loop, for lanes and routes -------------------------------------------------------------

    def flush_soon(self, flush: Callable[[], None]) -> None:
        """Run `flush` when this loop tick's calls have been made."""
        if self._batch_delay_s:
            self.call_later(self._batch_delay_s, flush)
        else:
            self._loop.call_soon(flush, context=self._context)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task outside any turn."""
        task: asyncio.Task[None] = contextvars.Context().run(self._loop.create_task, work)
        return task

    async def sleep(self, delay_s: float) -> None:
        """Wait on the client's clock."""
        done = self._loop.create_future()
        # `done` may have been cancelled in the very loop turn in which the timer runs
        timer = self.call_later(delay_s, lambda: None if done.done() else done.set_result(None))
        try:
            await done
        finally:
            timer.cancel()

    def report(self, message: str, error: BaseException | None) -> None:
        """Tell the loop's exception handler of something that should not have happened."""
        self._loop.call_exception_handler({"message": message, "exception": error})

    def _loop_call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Cancellable:
        return self._loop.call_later(delay, callback, *args, context=self._context)

    # --- the end ------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Acknowledge what was received, close the connections and end what waits.

        Calls that were never sent raise `RuntimeNotStarted`; those that were sent raise `ChannelClosed` and may
        have run.
        """
        if self.is_closed:
            return
        self.is_closed = True
        if self._sweep_timer is not None:
            self._sweep_timer.cancel()
        if self._barriers is not None:
            self._barriers.close(_closed_error)
        endings = self.routes.close(_closed_error)
        if self._pickled_routes is not None:
            endings += self._pickled_routes.close(_closed_error)
        await asyncio.gather(*endings, return_exceptions=True)


def _closed_error(call: Call) -> Exception:
    if call.doubt:
        return ChannelClosed(f"the runtime was stopped before {call.title} was answered: it may have run")
    return RuntimeNotStarted(f"the runtime was stopped before {call.title} was sent; nothing was run")
