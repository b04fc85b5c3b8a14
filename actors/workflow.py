"""Durable functions as applications write them: `@durable`, and the context that their steps go through.

An execution runs in *segments*, each a turn of its object (`execution_run`): a step's result and its state writes are
one commit, which also wakes the next segment. So a step's effects on state happen exactly once, an execution that waits
holds no turn, and a crash costs the step that was running, which runs again.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Generator
from datetime import datetime, timezone
from typing import Any, Final, Literal, NoReturn, TypeVar

from actors.codec import encode
from actors.containment import failure_of
from actors.current import IN_STEP
from actors.errors import AmbiguousEffect, InvalidOption, PromiseTimeout, Rejected, TransactionClosed, ValueTooLarge
from actors.execution_rows import DONE, EARLY, FAILED_STEP, INTENT, PENDING, RETRY, JournalRow, execution_name
from actors.execution_run import ENDED_STEP, ExecutionRun, Parked, RunningStep
from actors.execution_ways import gather, wait_for_first
from actors.promise_token import PromiseAddress, id_of_promise, promise_secret
from actors.wire_errors import encode_error
from timers.backoff import RetryPolicy
from timers.schedule import parse_duration_ms, parse_when_ms

__all__ = ["DurableContext", "Promise", "ambiguous_error", "durable", "failed_step", "is_durable"]

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


def ambiguous_error(run: ExecutionRun, name: str) -> AmbiguousEffect:
    """The process ended, or the turn, in a guarded step: nobody knows whether its effect happened."""
    return AmbiguousEffect(
        f"{run.host.id}: the process or the turn ended in step {name!r} of execution {run.row.execution_id!r}; whether "
        "its effect happened is not known"
    )


def failed_step(run: ExecutionRun, step: RunningStep, error: BaseException, now_ms: int) -> dict[str, Any]:
    """What becomes of the row of a step that has failed once more: the next try, or its end. `Rejected` is the end."""
    attempt = step.row.attempt + 1
    payload = encode_error(error)
    if step.policy.is_exhausted(attempt) or isinstance(error, Rejected):  # that is an answer
        return {"state": FAILED_STEP, "attempt": attempt, "payload": payload, "at_ms": now_ms}
    seed = execution_name(run.row.execution_id, step.row.name, str(step.row.step))
    due_ms = now_ms + step.policy.delay_ms(attempt, seed)
    return {"state": RETRY, "attempt": attempt, "due_ms": due_ms, "payload": payload, "at_ms": now_ms}


class DurableContext:
    """What a durable function does things with.

    Steps, sleeps and promises are numbered in the order in which the function makes them, which must be the same at
    each replay; tasks that it starts (`asyncio.gather`) number their own. Of several steps that are awaited together,
    one runs after the other; sleeps and promises wait beside each other.
    """

    def __init__(self, run: ExecutionRun) -> None:
        self._run = run

    # --- what a function may know -------------------------------------------------------------------

    @property
    def execution_id(self) -> str:
        """The id of this execution."""
        return self._run.row.execution_id

    @property
    def steps(self) -> int:
        """Steps, sleeps and promises since the function began, or started over."""
        return self._run.steps.taken

    @property
    def steps_left(self) -> int:
        """How many more there may be (`max_journal_steps`), unless it starts over."""
        return self._run.host.partition.settings.max_journal_steps - self._run.steps.taken

    @property
    def now_ms(self) -> int:
        """When the last step, sleep or promise that was awaited here ended, or else the execution began, in epoch ms.
        Replays agree. What other tasks have awaited counts once `gather` or `first` has returned."""
        return self._run.now_ms()

    @property
    def now(self) -> datetime:
        """`now_ms` as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.now_ms / 1_000, tz=timezone.utc)

    @property
    def random(self) -> random.Random:
        """Random numbers of this execution: the same at each replay. Ask for it anew in each task and in steps."""
        step = self._run.step_here()
        return self._run.here().random if step is None else step.random

    def uuid(self) -> uuid.UUID:
        """A new id, the same at each replay."""
        return uuid.UUID(int=self.random.getrandbits(128), version=4)

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
        end raised; `Rejected`, the application's own "no", is raised at once. What the step does to the outside world
        happens at least once. With `effect="guarded"` it is on record before that the step begins, and `ambiguous` says
        what to do if the process died in it: "fail" (raise `AmbiguousEffect`), "rerun", or "skip" (take it as done; the
        result is None).

        Raises `InvalidOption`, `UnstorableValue`, `TooManySteps`, `NestedStep`, and what the step raises: `JournalFull`
        and `TurnTimeout` among others.
        """
        if effect not in ("at_least_once", "guarded") or (effect == "guarded") is not (ambiguous is not None):
            raise InvalidOption(
                f"step {name!r}: effect is 'at_least_once', or 'guarded' and then with ambiguous = 'fail', 'rerun' or "
                "'skip'"
            )
        if ambiguous not in (None, "fail", "rerun", "skip"):
            raise InvalidOption(f"step {name!r}: ambiguous = {ambiguous!r}: must be 'fail', 'rerun' or 'skip'")
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise InvalidOption(f"step {name!r}: retry = {retry!r}: must be a RetryPolicy, or None for one run")
        mine = self._run.next_step("step", name, encode([list(args), kwargs]))
        policy = _ONE_RUN if retry is None else retry
        step = self._step(mine, policy, ambiguous, lambda: function(*args, **kwargs))
        self._run.unawaited[mine.step] = name, step
        return step

    async def _step(
        self, mine: JournalRow, policy: RetryPolicy, ambiguous: Ambiguous | None, call: Callable[[], Any]
    ) -> Any:
        run = self._run
        run.unawaited.pop(mine.step, None)
        what = f"step {mine.name!r}"
        while True:
            run.here()
            known = run.known(mine)
            if known is not None and known.state in ENDED_STEP:
                return run.outcome(known)
            row = mine if known is None else known
            if row.state == RETRY and row.due_ms is not None and row.due_ms > run.wall_ms:
                await run.wait(f"{what}, which is tried again", row.due_ms)
                continue
            async with run.lock:
                if not run.is_over:  # else another branch has run one
                    if row.state == INTENT and ambiguous != "rerun":
                        self._settle_ambiguous(row, ambiguous)
                    else:
                        if ambiguous is not None:
                            await self._declare(row)
                        await self._run_step(row, policy, ambiguous, call)
                    run.finish()
            await run.wait(what, run.wall_ms)

    def _settle_ambiguous(self, row: JournalRow, ambiguous: Ambiguous | None) -> None:
        if ambiguous == "skip":
            self._run.put(row, state=DONE, payload=encode(None))
        else:
            self._run.put(row, state=FAILED_STEP, payload=encode_error(ambiguous_error(self._run, row.name)))

    async def _declare(self, row: JournalRow) -> None:
        """Make durable that the step begins, together with this turn's intent."""
        self._run.put(row, state=INTENT)
        await self._run.host.storage.sync()

    async def _run_step(
        self, row: JournalRow, policy: RetryPolicy, ambiguous: Ambiguous | None, call: Callable[[], Any]
    ) -> None:
        run, turn = self._run, self._run.turn
        buffer, clock = turn.buffer, run.host.partition.clock
        layer = buffer.begin()
        draws = random.Random(run.row.seed + b"step %d" % row.step)
        step = RunningStep(row, policy, ambiguous, run.here(), draws, asyncio.current_task())
        turn.step = run.segment.ran = step
        mark = IN_STEP.set(step)
        try:
            result = call()
            if inspect.isawaitable(result):
                result = await result
            payload = self._encoded(row.name, result)
            if buffer.top is not layer:
                raise TransactionClosed(f"{run.host.id}: step {row.name!r} returned with a transaction open")
        except (Exception, asyncio.CancelledError, SystemExit) as error:
            turn.check()
            buffer.roll_back_to(layer)
            if not isinstance(error, run.host.info.cls.harmless_errors):
                run.host.discard_instance()  # rebuilt for the next turn, as after any turn that raised
            # what it called may have answered late: the next run is at its own time, after the failure
            run.put(row, **failed_step(run, step, failure_of(error), clock.wall_ms()))
        else:
            buffer.commit_top()
            run.put(row, state=DONE, payload=payload, at_ms=clock.wall_ms())
        finally:
            IN_STEP.reset(mark)
            turn.step = None

    def _encoded(self, name: str, value: Any) -> bytes:
        payload = encode(value)
        most = self._run.host.partition.settings.max_journal_payload_bytes
        if len(payload) > most:
            raise ValueTooLarge(
                f"{self._run.host.id}: the result of {name!r} takes {len(payload):,} bytes "
                f"(`max_journal_payload_bytes` {most:,}): keep it in storage and return its key"
            )
        self._run.check_room(name, payload)
        return payload

    # --- sleeps and promises --------------------------------------------------------------------------

    def sleep(self, duration: Any) -> Coroutine[Any, Any, None]:
        """Sleep for a timedelta or "30m", counted from when this is first called. Await it."""
        return self._sleep(lambda now_ms: now_ms + parse_duration_ms(duration))

    def sleep_until(self, when: Any) -> Coroutine[Any, Any, None]:
        """Sleep until an instant: epoch ms or an aware datetime. What was said the first time counts. Await it."""
        return self._sleep(lambda now_ms: parse_when_ms(when, now_ms))

    def _sleep(self, due: Callable[[int], int]) -> Coroutine[Any, Any, None]:
        run = self._run
        run.here()
        due_ms = due(run.host.partition.clock.wall_ms())
        mine = run.next_step("sleep", "", b"")
        if run.known(mine) is None:
            run.put(mine, state=PENDING, due_ms=due_ms)
        return self._sleeping(mine)

    async def _sleeping(self, mine: JournalRow) -> None:
        run = self._run
        while True:
            run.here()
            known = run.known(mine)
            assert known is not None
            if known.state != PENDING:
                return run.outcome(known)  # type: ignore[no-any-return]
            assert known.due_ms is not None
            if known.due_ms > run.wall_ms:
                await run.wait("a sleep", known.due_ms)
            else:
                run.put(known, state=DONE, payload=encode(None))

    def promise(self, name: str, timeout: Any = None) -> Promise:
        """Something that is resolved from outside: `await` it, and give its `token` to whoever shall resolve it (in a
        step). After `timeout` (a timedelta or "7d") it raises `PromiseTimeout`."""
        run = self._run
        run.here()
        due_ms = None
        if timeout is not None:
            due_ms = run.host.partition.clock.wall_ms() + parse_duration_ms(timeout)
        mine = run.next_step("promise", name, b"")
        known = run.read(mine.step)
        if known is not None and known.kind == mine.kind and known.state == EARLY:
            run.put(mine, state=DONE, payload=known.payload, at_ms=known.at_ms)
        elif run.known(mine) is None:
            run.put(mine, state=PENDING, due_ms=due_ms)
        object_id = run.host.id
        name_of_all = execution_name(object_id.type_name, object_id.key, self.execution_id)
        secret = promise_secret(run.row.seed, id_of_promise(name_of_all, mine.step))
        address = PromiseAddress(object_id.type_name, object_id.key, self.execution_id, mine.step)
        return Promise(address.token(secret), lambda: self._promised(mine))

    async def _promised(self, mine: JournalRow) -> Any:
        run = self._run
        while True:
            run.here()
            known = run.known(mine)
            assert known is not None
            if known.state != PENDING:
                return run.outcome(known)
            if known.due_ms is None or known.due_ms > run.wall_ms:
                await run.wait(f"promise {mine.name!r}", known.due_ms)
                continue
            error = PromiseTimeout(
                f"{run.host.id}: nobody resolved promise {mine.name!r} of execution {self.execution_id!r} in time"
            )
            run.put(known, state=FAILED_STEP, payload=encode_error(error))

    # --- several at once ------------------------------------------------------------------------------

    def gather(self, *awaitables: Awaitable[Any]) -> Coroutine[Any, Any, list[Any]]:
        """Wait until all of several have ended (steps, sleeps, promises, coroutines that use the context): their
        results, in this order. If some raised, the first of those in this order is raised, once all have ended.
        `now` is then when the last of them ended. Await it. Raises `InvalidOption` for tasks and futures.
        """
        return gather(self._run, awaitables)

    def first(self, *awaitables: Awaitable[Any]) -> Coroutine[Any, Any, tuple[int, Any]]:
        """Wait until one of several has ended (sleeps, promises, coroutines that use the context): its place and its
        result. If it raised, so does this. Await it. Raises `InvalidOption` for tasks and futures.

        The others are given up: their tasks are cancelled, a step of theirs that runs is undone, and they do nothing
        more, also not in `finally` blocks. Who was first is in the journal, so replays agree.
        """
        return wait_for_first(self._run, awaitables)

    # --- starting over --------------------------------------------------------------------------------

    def start_over(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Begin the function anew with these arguments and an empty journal, as the same execution: for what goes on
        for longer than a journal may. Sleeps and promises that are left end with it, and tokens are good no more.
        """
        run = self._run
        run.here()
        data = encode([list(args), kwargs])
        self._run.check_room("start_over", data)
        run.next_arguments = data
        run.finish()
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
