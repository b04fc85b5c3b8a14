"""Durable functions as applications write them: `@durable`, and the context that their steps go through.

An execution runs in *segments*, each a turn of its object: the function runs from its beginning, what is in the journal
is returned without running, and the first new step runs. Its result and its state writes are that turn's one commit,
which also wakes the next segment. So a step's effects on state happen exactly once, an execution that waits holds no
turn and no memory, and a crash costs the step that was running, which runs again.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, TypeVar

from actors.codec import decode, encode
from actors.errors import (
    AmbiguousEffect,
    ExecutionDiverged,
    InvalidOption,
    PromiseTimeout,
    ValueTooLarge,
)
from actors.execution_rows import (
    DONE,
    FAILED_STEP,
    INTENT,
    PENDING,
    RETRY,
    ExecutionRow,
    JournalRow,
    execution_name,
)
from actors.promise_token import PromiseAddress, promise_secret
from actors.wire_errors import decode_error, encode_error
from timers.backoff import RetryPolicy
from timers.batch import Batch, Put
from timers.durable_sleep import StepCounter, promise_id
from timers.schedule import parse_duration_ms, parse_when_ms

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.turn import Turn

__all__ = ["DurableContext", "Parked", "Promise", "durable", "is_durable"]

F = TypeVar("F", bound=Callable[..., Any])
Effect = Literal["at_least_once", "guarded"]
Ambiguous = Literal["fail", "rerun", "skip"]

_MARK: Final = "_ms_durable"
#: A step is run once unless it says otherwise: what may be repeated after an error, the application knows.
_ONE_RUN: Final = RetryPolicy(max_attempts=1)


def durable(method: F) -> F:
    """Mark `async def method(self, ctx: DurableContext, ...)` as a durable function.

    It is started by `await stub.method.start(...)` and can't be called. Outside its steps it must do the same whenever
    it is run: no writes (they raise `WriteOutsideStep`), and time and randomness from `ctx`.
    """
    if not inspect.iscoroutinefunction(method):
        raise InvalidOption(f"{method!r}: a durable function is an `async def` method")
    setattr(method, _MARK, True)
    return method


def is_durable(function: Any) -> bool:
    """Whether the method was marked with `@durable`."""
    return bool(getattr(function, _MARK, False))


class Parked(BaseException):
    """Unwinds a durable function whose segment is over. Not an `Exception`: the function's code must let it pass."""


class DurableContext:
    """What a durable function does things with.

    Steps, sleeps and promises are numbered in the order in which the function makes them, which must be the same at
    each replay. Of several that are awaited together, one runs after the other.
    """

    def __init__(self, host: ObjectHost, turn: Turn, row: ExecutionRow, journal: dict[int, JournalRow]) -> None:
        self._host = host
        self._turn = turn
        self._row = row
        self._journal = journal
        self._steps = StepCounter(host.partition.settings.max_journal_steps)
        self._one_at_a_time = asyncio.Lock()
        self._random = random.Random(row.seed)
        self._now_ms = row.began_ms
        #: why the segment is over: what the execution waits for, and when to look again (None: only when it is told)
        self.waits_for: str | None = None
        self.wake_ms: int | None = None

    # --- what a function may know -------------------------------------------------------------------

    @property
    def execution_id(self) -> str:
        """The id of this execution."""
        return self._row.execution_id

    @property
    def steps(self) -> int:
        """Steps, sleeps and promises so far."""
        return self._steps.taken

    @property
    def now_ms(self) -> int:
        """When the last step, sleep or promise ended, or else the execution began, in epoch ms. Replays agree."""
        return self._now_ms

    @property
    def now(self) -> datetime:
        """`now_ms` as an aware datetime in UTC."""
        return datetime.fromtimestamp(self._now_ms / 1_000, tz=timezone.utc)

    @property
    def random(self) -> random.Random:
        """Random numbers of this execution: the same at each replay."""
        return self._random

    def uuid(self) -> uuid.UUID:
        """A new id, the same at each replay."""
        return uuid.UUID(int=self._random.getrandbits(128), version=4)

    # --- steps --------------------------------------------------------------------------------------

    def step(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        retry: RetryPolicy | None = None,
        effect: Effect = "at_least_once",
        ambiguous: Ambiguous | None = None,
        **kwargs: Any,
    ) -> Coroutine[Any, Any, Any]:
        """Run `function(*args, **kwargs)`, synchronous or not, and journal its result; at a replay the result is
        returned and nothing runs. Its state writes are in the same commit as its result. Await it.

        An exception is tried again as `retry` says (default: not at all), each time from the state before, and in the
        end raised. What the step does to the outside world happens at least once. With `effect="guarded"` it is on
        record before that the step begins, and `ambiguous` says what to do if the process died in it: "fail" (raise
        `AmbiguousEffect`), "rerun", or "skip" (take it as done; the result is None).

        Raises `InvalidOption`, `UnstorableValue`, `TooManySteps`, `ExecutionDiverged`.
        """
        if effect not in ("at_least_once", "guarded") or (effect == "guarded") is not (ambiguous is not None):
            raise InvalidOption(
                f"step {name!r}: effect is 'at_least_once', or 'guarded' and then with ambiguous = 'fail', 'rerun' or "
                "'skip'"
            )
        if ambiguous not in (None, "fail", "rerun", "skip"):
            raise InvalidOption(f"step {name!r}: ambiguous = {ambiguous!r}: must be 'fail', 'rerun' or 'skip'")
        mine = self._row_of("step", name, encode([list(args), kwargs]))
        policy = _ONE_RUN if retry is None else retry
        return self._step(mine, policy, ambiguous, lambda: function(*args, **kwargs))

    async def _step(
        self, mine: JournalRow, policy: RetryPolicy, ambiguous: Ambiguous | None, call: Callable[[], Any]
    ) -> Any:
        async with self._one_at_a_time:
            known = self._known(mine)
            if known is not None and known.state in (DONE, FAILED_STEP):
                return self._outcome(known)
            row = mine if known is None else known
            if row.state == RETRY and row.due_ms is not None and row.due_ms > self._wall_ms():
                self._park(f"step {mine.name!r}, which is tried again", row.due_ms)
            if row.state == INTENT and ambiguous != "rerun":
                self._settle_ambiguous(row, ambiguous)
            elif ambiguous is not None:
                await self._declare(row)
            await self._run(row, policy, call)
            self._park(f"step {mine.name!r}", self._wall_ms())

    def _settle_ambiguous(self, row: JournalRow, ambiguous: Ambiguous | None) -> NoReturn:
        """The process died in a guarded step: nobody knows whether its effect happened."""
        if ambiguous == "skip":
            self._put(row, state=DONE, payload=encode(None))
        else:
            error = AmbiguousEffect(
                f"{self._host.id}: the process ended in step {row.name!r} of execution {self.execution_id!r}; whether "
                "its effect happened is not known"
            )
            self._put(row, state=FAILED_STEP, payload=encode_error(error))
        self._park(f"step {row.name!r}", self._wall_ms())

    async def _declare(self, row: JournalRow) -> None:
        """Make durable that the step begins, together with this turn's intent."""
        self._put(row, state=INTENT)
        await self._host.storage.sync()

    async def _run(self, row: JournalRow, policy: RetryPolicy, call: Callable[[], Any]) -> None:
        buffer = self._turn.buffer
        layer = buffer.begin()
        self._turn.outside_step = False
        try:
            result = call()
            if inspect.isawaitable(result):
                result = await result
            payload = self._encoded(row.name, result)
        except Exception as error:
            self._turn.check()
            buffer.roll_back_to(layer)
            self._failed(row, policy, error)
        else:
            buffer.commit_top()
            self._put(row, state=DONE, payload=payload)
        finally:
            self._turn.outside_step = True

    def _failed(self, row: JournalRow, policy: RetryPolicy, error: Exception) -> None:
        """What the step wrote is undone; the instance is rebuilt for the next turn, as after any turn that raised."""
        if not isinstance(error, self._host.info.cls.harmless_errors):
            self._host.discard_instance()
        attempt = row.attempt + 1
        if policy.is_exhausted(attempt):
            self._put(row, state=FAILED_STEP, attempt=attempt, payload=encode_error(error))
            return
        delay_ms = policy.delay_ms(attempt, execution_name(self.execution_id, row.name, str(row.step)))
        self._put(row, state=RETRY, attempt=attempt, due_ms=self._wall_ms() + delay_ms, payload=encode_error(error))
        self._park(f"step {row.name!r}, which is tried again", self._wall_ms() + delay_ms)

    def _encoded(self, name: str, value: Any) -> bytes:
        payload = encode(value)
        most = self._host.partition.settings.max_journal_payload_bytes
        if len(payload) > most:
            raise ValueTooLarge(
                f"{self._host.id}: the result of {name!r} takes {len(payload):,} bytes (`max_journal_payload_bytes` "
                f"{most:,}): keep it in storage and return its key"
            )
        return payload

    # --- sleeps and promises --------------------------------------------------------------------------

    def sleep(self, duration: Any) -> Coroutine[Any, Any, None]:
        """Sleep for a timedelta or "30m", counted from when it is first reached. Await it."""
        return self._sleep(lambda: self._wall_ms() + parse_duration_ms(duration))

    def sleep_until(self, when: Any) -> Coroutine[Any, Any, None]:
        """Sleep until an instant: epoch ms or an aware datetime. What was said the first time counts. Await it."""
        return self._sleep(lambda: parse_when_ms(when, self._wall_ms()))

    def _sleep(self, due: Callable[[], int]) -> Coroutine[Any, Any, None]:
        return self._sleep_until(self._row_of("sleep", "", b""), due)

    async def _sleep_until(self, mine: JournalRow, due: Callable[[], int]) -> None:
        async with self._one_at_a_time:
            known = self._known(mine)
            if known is None:
                known = self._put(mine, state=PENDING, due_ms=due())
            if known.state == PENDING:
                assert known.due_ms is not None
                if known.due_ms > self._wall_ms():
                    self._park("a sleep", known.due_ms)
                known = self._put(known, state=DONE, payload=encode(None))
            self._outcome(known)

    def promise(self, name: str, timeout: Any = None) -> Promise:
        """Something that is resolved from outside: `await` it, and give its `token` to whoever shall resolve it (in a
        step). After `timeout` (a timedelta or "7d") it raises `PromiseTimeout`."""
        mine = self._row_of("promise", name, b"")
        known = self._known(mine)
        if known is None:
            due_ms = None if timeout is None else self._wall_ms() + parse_duration_ms(timeout)
            self._put(mine, state=PENDING, due_ms=due_ms)
        object_id = self._host.id
        name_of_all = execution_name(object_id.type_name, object_id.key, self.execution_id)
        secret = promise_secret(self._row.seed, promise_id(name_of_all, mine.step))
        address = PromiseAddress(object_id.type_name, object_id.key, self.execution_id, mine.step)
        return Promise(address.token(secret), lambda: self._promised(mine))

    async def _promised(self, mine: JournalRow) -> Any:
        async with self._one_at_a_time:
            known = self._known(mine)
            assert known is not None
            if known.state == PENDING:
                if known.due_ms is None or known.due_ms > self._wall_ms():
                    self._park(f"promise {mine.name!r}", known.due_ms)
                error = PromiseTimeout(
                    f"{self._host.id}: nobody resolved promise {mine.name!r} of execution {self.execution_id!r} in time"
                )
                known = self._put(known, state=FAILED_STEP, payload=encode_error(error))
            return self._outcome(known)

    # --- the journal ----------------------------------------------------------------------------------

    def _wall_ms(self) -> int:
        return self._turn.now_ms

    def _row_of(self, kind: str, name: str, arguments: bytes) -> JournalRow:
        """The next step's row, as it would be new."""
        if not isinstance(name, str) or len(name) > 200:
            raise InvalidOption(f"the name of a {kind} is a text of at most 200 characters, not {name!r}")
        if self.waits_for is not None:
            raise Parked
        fingerprint = hashlib.blake2b(arguments, digest_size=8, person=kind.encode(), key=name.encode()[:64]).digest()
        return JournalRow(self._row.oid, self.execution_id, self._steps.take(), kind, name, fingerprint)

    def _known(self, mine: JournalRow) -> JournalRow | None:
        """What the journal has of this step. Raises `ExecutionDiverged` when that is something else."""
        if self.waits_for is not None:
            raise Parked
        known = self._journal.get(mine.step)
        if known is None:
            return None
        if (known.kind, known.name, known.fingerprint) != (mine.kind, mine.name, mine.fingerprint):
            raise ExecutionDiverged(
                f"{self._host.id}: step {mine.step} of execution {self.execution_id!r} is {mine.kind} {mine.name!r} "
                f"now and {known.kind} {known.name!r} in the journal, or its arguments differ. A durable function must "
                "make the same steps at each replay: use ctx.now and ctx.random, and new executions for changed code."
            )
        return known

    def _outcome(self, row: JournalRow) -> Any:
        self._now_ms = max(self._now_ms, row.at_ms)
        if row.state == FAILED_STEP:
            raise decode_error(row.payload)
        return decode(row.payload)

    def _put(self, row: JournalRow, *, state: str, **changes: Any) -> JournalRow:
        fields = {"attempt": row.attempt, "due_ms": row.due_ms, "payload": row.payload, **changes}
        changed = JournalRow(
            row.oid,
            row.execution_id,
            row.step,
            row.kind,
            row.name,
            row.fingerprint,
            state,
            fields["attempt"],
            fields["due_ms"],
            self._wall_ms(),
            fields["payload"],
        )
        outside, self._turn.outside_step = self._turn.outside_step, False
        try:
            self._host.rows.apply(Batch(writes=(Put(changed),)))
        finally:
            self._turn.outside_step = outside
        self._journal[row.step] = changed
        return changed

    def _park(self, waits_for: str, wake_ms: int | None) -> NoReturn:
        self.waits_for, self.wake_ms = waits_for, wake_ms
        raise Parked


class Promise:
    """Something that a durable function waits for until `namespace.resolve_promise(token, value)` resolves it.

    `token` says which promise it is and proves that its holder may resolve it: give it only to them.
    """

    __slots__ = ("_wait", "token")

    def __init__(self, token: str, wait: Callable[[], Awaitable[Any]]) -> None:
        self.token = token
        self._wait = wait

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait().__await__()
