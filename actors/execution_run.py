"""One run of a durable function: its journal, its branches, and the segments in which it goes on.

A function and the tasks that it starts are *branches*: each numbers its own steps, so that a replay, which runs through
them in another order than the first run did, finds every step again. A segment ends when a step has run, or when all
branches wait. A function that waits itself, and has no other branches, is left as it stands and goes on in the next
segment; it is replayed only when it has left memory. Where there are branches, each segment is a replay.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import inspect
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakKeyDictionary

from actors.codec import decode
from actors.containment import shown
from actors.current import CURRENT, IN_STEP
from actors.errors import ExecutionDiverged, InvalidOption, JournalFull, NestedStep, TurnOver
from actors.execution_rows import DONE, FAILED_STEP, STEP_BITS, ExecutionRow, JournalRow, is_text
from actors.logs import log_event
from actors.wire_errors import decode_error
from timers.durable_sleep import StepCounter

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.turn import Turn
    from timers.backoff import RetryPolicy

__all__ = ["Branch", "ExecutionRun", "Parked", "RunningStep"]

#: Journal rows read at a time.
_PAGE: Final = 500
#: Loop turns without anything new after which all branches are taken to wait: as many as tasks may hand a result on.
_QUIET_TURNS: Final = 30
#: While a call that reads runs beside the branches that wait, they are looked at again after so long.
_LOOK_AGAIN_S: Final = 0.01
_MAX_NAME_CHARACTERS: Final = 200
#: Names of branches: their steps' numbers must fit into 63 bits.
_BRANCH_BITS: Final = 62 - STEP_BITS
_END: Final = 1 << 63


class Parked(BaseException):
    """Unwinds what is left of a segment that is over. Not an `Exception`: the function's code must let it pass."""


class _Suspension:
    """Awaited by the function itself: stops it where it stands, until the next segment sends it on."""

    def __await__(self) -> Generator[Any, None, None]:
        yield self


class _Relay:
    """Hands to the turn's task what the function's code waits for."""

    def __init__(self, awaited: Any) -> None:
        self._awaited = awaited

    def __await__(self) -> Generator[Any, None, None]:
        yield self._awaited


@dataclass(eq=False)
class Branch:
    """The function, or a task that it has started. `number` is the upper part of its steps' numbers; what it knows of
    time and chance follows from the steps that it has seen the end of, and from no other branch's."""

    number: int
    path: bytes
    now_ms: int
    random: random.Random
    parent: Branch | None = None
    taken: int = 0
    children: int = 0
    #: another branch was first: it must do nothing more, also not to clean up, since a replay does not start it
    given_up: bool = False

    def child(self, seed: bytes, now_ms: int) -> Branch:
        """The next task that this branch has started."""
        self.children += 1
        path = b"%b/%d" % (self.path, self.children)
        digest = int.from_bytes(hashlib.blake2b(path, digest_size=8, person=b"ms-branch").digest(), "big")
        return Branch((digest >> (64 - _BRANCH_BITS)) | 1, path, now_ms, random.Random(seed + path), self)

    @property
    def is_given_up(self) -> bool:
        return self.given_up or (self.parent is not None and self.parent.is_given_up)

    def next_step(self) -> int:
        """The number of its next step."""
        step = (self.number << STEP_BITS) | self.taken
        self.taken += 1
        return step


@dataclass(frozen=True)
class _Here:
    """Which branch the running code is, and what time it was for it when this was noted: tasks inherit that."""

    run: ExecutionRun
    task: asyncio.Task[Any] | None
    branch: Branch
    now_ms: int


_HERE: ContextVar[_Here | None] = ContextVar("mainspring_branch", default=None)


@dataclass(eq=False)
class RunningStep:
    """The step that a segment has run. `ambiguous` is what a guarded one has declared, else None."""

    row: JournalRow
    policy: RetryPolicy
    ambiguous: str | None
    branch: Branch
    random: random.Random
    task: asyncio.Task[Any] | None


@dataclass
class _Segment:
    """What belongs to one segment."""

    turn: Turn
    over: asyncio.Future[None]
    #: what branches wait for, in words, and when to look again (None: when the execution is told)
    waits: list[tuple[str, int | None]] = field(default_factory=list)
    ran: RunningStep | None = None


class ExecutionRun:
    """A run from the function's beginning. `begin` a segment, then `drive` it; `close` what is not to go on."""

    def __init__(self, host: ObjectHost, row: ExecutionRow) -> None:
        self.host = host
        self.row = row
        self.instance = host.instance
        settings = host.partition.settings
        self.main = Branch(0, b"", row.began_ms, random.Random(row.seed))
        self.steps = StepCounter(settings.max_journal_steps)
        self.lock = asyncio.Lock()
        self.coroutine: Coroutine[Any, Any, Any] | None = None
        #: bytes of results so far
        self.bytes = 0
        #: steps that were made and not awaited so far: name and coroutine
        self.unawaited: dict[int, tuple[str, Coroutine[Any, Any, Any]]] = {}
        #: what each gather or first waits for, to be dropped with it when it never begins
        self.groups: WeakKeyDictionary[Awaitable[Any], list[Awaitable[Any]]] = WeakKeyDictionary()
        self.diverged: ExecutionDiverged | None = None
        #: why the segment must fail as a whole: nothing that the function may decide by
        self.broken: Exception | None = None
        #: encoded arguments that the function starts over with
        self.next_arguments: bytes | None = None
        self.closed = self._is_closing = False
        self._segment: _Segment | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        #: a task of an earlier segment has come too late: the function waits for it in vain
        self._has_strays = False
        self._activity = 0
        self._is_looking = False
        self._ahead: dict[int, JournalRow] = {}
        self._ahead_from = self._ahead_to = 0
        self._reads_ahead = True

    # --- segments ---------------------------------------------------------------------------------

    @property
    def segment(self) -> _Segment:
        assert self._segment is not None
        return self._segment

    @property
    def turn(self) -> Turn:
        return self.segment.turn

    @property
    def is_over(self) -> bool:
        """Whether the segment has come to its end."""
        return self.closed or self.segment.over.done()

    @property
    def wall_ms(self) -> int:
        """The segment's time: a turn that is run again must decide as it did, or its calls would diverge."""
        return self.turn.now_ms

    @property
    def can_stay(self) -> bool:
        """Whether the function may be left as it stands: it waits itself, and nothing else of it runs."""
        return self.coroutine is not None and not self._tasks and not self._has_strays and not self.closed

    def begin(self, turn: Turn, row: ExecutionRow) -> None:
        """A segment begins."""
        if self._segment is not None:  # what the journal had then is out of date
            self._ahead.clear()
            self._reads_ahead, self._ahead_from, self._ahead_to = False, 0, 0
        self.row = row
        self._segment = _Segment(turn, self.host.partition.loop.create_future())
        turn.execution = self

    async def drive(self) -> Any:
        """Run the function until it ends, whose result is returned, or the segment is over, which `is_over` tells."""
        coroutine, segment = self.coroutine, self.segment
        assert coroutine is not None
        _HERE.set(_Here(self, asyncio.current_task(), self.main, self.main.now_ms))
        go_on: Callable[[], Any] = partial(coroutine.send, None)
        while True:
            try:
                awaited = go_on()
            except StopIteration as end:
                self.coroutine = None
                return end.value
            except BaseException:
                self.coroutine = None
                raise
            go_on = partial(coroutine.send, None)
            if isinstance(awaited, _Suspension):
                self._look_soon()
                await segment.over
                return None
            try:
                if awaited is None or not asyncio.isfuture(awaited) or self._main_runs_a_step():
                    await _Relay(awaited)
                else:
                    awaited._asyncio_future_blocking = False  # the relay is this coroutine and not the task
                    await asyncio.wait({awaited, segment.over}, return_when=asyncio.FIRST_COMPLETED)
                    if segment.over.done():
                        self._abandon(awaited)
                        return None
            except BaseException as error:
                go_on = partial(coroutine.throw, error)

    def _main_runs_a_step(self) -> bool:
        step = self.turn.step
        return isinstance(step, RunningStep) and step.task is self.turn.task

    def _abandon(self, awaited: asyncio.Future[Any]) -> None:
        """The function is not going on from here: what it waits for ends without a word."""
        awaited.add_done_callback(lambda each: each.cancelled() or each.exception())
        awaited.cancel()
        self.close()

    def finish(self) -> None:
        """The segment is over: no branch goes on in it."""
        over = self.segment.over
        if not over.done():
            over.set_result(None)

    async def end_branches(self) -> None:
        """The function has ended: what it has started and not waited for ends too, a step that runs is undone."""
        for task in list(self._tasks):
            task.cancel()
        if self.turn.step is not None:
            await self.segment.over

    def close(self) -> None:
        """The run ends here. `finally` blocks of the function run, and can do nothing durable."""
        if self.closed:
            return
        self.closed = True
        for task in list(self._tasks):
            task.cancel()
        coroutine, self.coroutine = self.coroutine, None
        if coroutine is None:
            return
        self._is_closing = True
        try:
            # outside of whatever turn runs now: what a `finally` block writes is none of its business
            contextvars.Context().run(coroutine.close)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # of a `finally` block, or of code that awaits on
            if not isinstance(error, Parked):
                log_event(
                    logging.INFO, "execution_unwound", f"{self.host.id}: {shown(error)}", object=str(self.host.id)
                )
        finally:
            self._is_closing = False

    # --- where the running code is ------------------------------------------------------------------

    def step_here(self) -> RunningStep | None:
        """The step that the running code is in."""
        turn = CURRENT.get()
        step = None if turn is None or getattr(turn, "execution", None) is not self else IN_STEP.get()
        return step if isinstance(step, RunningStep) and step is turn.step else None  # type: ignore[union-attr]

    def here(self) -> Branch:
        """The branch of the running code. Raises `TurnOver`, `NestedStep`, and `Parked` in a segment that is over."""
        if self._is_closing:
            raise Parked
        turn = CURRENT.get()
        owner: object = getattr(turn, "execution", None)
        if turn is None or owner is not self:
            raise TurnOver(
                f"{self.host.id}: the context of execution {self.row.execution_id!r} is of use in the code of its "
                "function only, while that runs"
            )
        if self.step_here() is not None:
            raise NestedStep(
                f"{self.host.id}: a step of execution {self.row.execution_id!r} uses the context for a step, a sleep "
                "or a promise; do that in the durable function, outside of `ctx.step(...)`"
            )
        if turn is not self.turn or self.is_over or not self.turn.running:
            self._has_strays = self._has_strays or turn is not self.turn
            raise Parked
        self.turn.check()  # not from another thread
        self._touch()
        branch = self._branch()
        if branch.is_given_up:
            raise Parked
        return branch

    def _branch(self) -> Branch:
        task, here = asyncio.current_task(), _HERE.get()
        if here is None or here.run is not self:  # a task that was started outside of everything
            here = _Here(self, None, self.main, self.main.now_ms)
        elif here.task is task:
            return here.branch
        assert task is not None
        branch = here.branch.child(self.row.seed, here.now_ms)
        self._watch(task)
        _HERE.set(_Here(self, task, branch, branch.now_ms))
        return branch

    def _watch(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def start_branch(self, branch: Branch, awaitable: Awaitable[Any]) -> asyncio.Task[Any]:
        """A task that is this branch."""

        async def run() -> Any:
            _HERE.set(_Here(self, asyncio.current_task(), branch, branch.now_ms))
            return await awaitable

        task = asyncio.ensure_future(run())
        self._watch(task)
        task.add_done_callback(lambda each: each.cancelled() or each.exception())  # seen, also of one that is given up
        task.add_done_callback(lambda each: self.drop([awaitable]))  # of a task that was given up before it began
        return task

    def drop(self, awaitables: Iterable[Awaitable[Any]]) -> None:
        """Close what has not begun and never will, with all that it would have waited for."""
        for each in awaitables:
            if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == inspect.CORO_CREATED:
                self.drop(self.groups.pop(each, ()))
                each.close()

    def now_ms(self) -> int:
        """What time it is for the running code."""
        step, here = self.step_here(), _HERE.get()
        if step is not None:
            return step.branch.now_ms
        if here is None or here.run is not self:
            return self.main.now_ms
        return here.branch.now_ms if here.task is asyncio.current_task() else here.now_ms

    # --- waiting ------------------------------------------------------------------------------------

    async def wait(self, waits_for: str, wake_ms: int | None) -> None:
        """This branch waits. Returns in the next segment, if the function is in memory still; tasks never go on."""
        segment = self.segment
        segment.waits.append((waits_for, wake_ms))
        if asyncio.current_task() is segment.turn.task:
            await _Suspension()
            # in the next segment, whose task has a context of its own
        else:
            self._look_soon()
            await self.host.partition.loop.create_future()  # cancelled with the run

    def _touch(self) -> None:
        self._activity += 1
        if self.segment.waits:
            self._look_soon()

    def _look_soon(self) -> None:
        if not self._is_looking and not self.is_over:
            self._is_looking = True
            self.host.partition.loop.call_soon(self._look, self.segment, self._activity, _QUIET_TURNS)

    def _look(self, segment: _Segment, seen: int, left: int) -> None:
        """Whether all branches wait, so that the segment is over: nothing has moved for some loop turns."""
        if segment is not self._segment or self.is_over or segment.turn.step is not None:
            self._is_looking = False  # the end of a step ends the segment
            if segment is not self._segment and self._segment is not None and self._segment.waits:
                self._look_soon()
            return
        loop = self.host.partition.loop
        if segment.turn.outstanding:
            loop.call_later(_LOOK_AGAIN_S, self._look, segment, self._activity, _QUIET_TURNS)
        elif seen != self._activity:
            loop.call_soon(self._look, segment, self._activity, _QUIET_TURNS)
        elif left:
            loop.call_soon(self._look, segment, seen, left - 1)
        else:
            self._is_looking = False
            self.finish()

    # --- the journal --------------------------------------------------------------------------------

    def next_step(self, kind: str, name: str, arguments: bytes) -> JournalRow:
        """The next step's row, as it would be new. Raises `TooManySteps`, and then nothing was taken."""
        branch = self.here()
        if not isinstance(name, str) or len(name) > _MAX_NAME_CHARACTERS or not is_text(name):
            raise InvalidOption(
                f"the name of a {kind} is a text of at most {_MAX_NAME_CHARACTERS} characters, not {name!r}"
            )
        self.steps.take()
        fingerprint = hashlib.blake2b(arguments, digest_size=8, person=kind.encode(), key=name.encode()[:64]).digest()
        return JournalRow(self.row.oid, self.row.execution_id, branch.next_step(), kind, name, fingerprint)

    def known(self, mine: JournalRow) -> JournalRow | None:
        """What the journal has of this step; a step that is something else there ends the execution."""
        known = self.read(mine.step)
        if known is None:
            return None
        if (known.kind, known.name, known.fingerprint) != (mine.kind, mine.name, mine.fingerprint):
            self.diverge(
                f"step {mine.step} is {mine.kind} {mine.name!r} now and {known.kind} {known.name!r} in the journal, or "
                "its arguments differ"
            )
        return known

    def read(self, step: int) -> JournalRow | None:
        """The row of a step, whatever it says."""
        if self._ahead_from <= step < self._ahead_to:
            return self._ahead.get(step)
        if not self._reads_ahead or step < self._ahead_from:
            return self.host.rows.get(JournalRow, self.row.execution_id, step)
        page = self.host.rows.scan(JournalRow, self.row.execution_id, after=(step - 1,), limit=_PAGE)
        self._ahead = {row.step: row for row in page}
        self._ahead_from, self._ahead_to = step, _END if len(page) < _PAGE else page[-1].step + 1
        return self._ahead.get(step)

    def diverge(self, how: str) -> NoReturn:
        """The code does not do what the journal says: the execution is aborted, whatever the code makes of that."""
        self.diverged = ExecutionDiverged(
            f"{self.host.id}, execution {self.row.execution_id!r}: {how}. A durable function must make the same steps "
            "at each replay: take time and chance from the context, and read in steps what may change. Bring the old "
            "code back and call `resume()`, or start a new execution for the new code."
        )
        self.finish()
        raise Parked

    def fail(self, error: Exception) -> NoReturn:
        """The segment fails, and is tried again: the function must not decide by what the platform lacks."""
        self.broken = error
        self.finish()
        raise Parked

    def outcome(self, row: JournalRow) -> Any:
        """What the step gave, or raised."""
        self.saw(row)
        try:
            value = decode_error(row.payload) if row.state == FAILED_STEP else decode(row.payload)
        except Exception as error:
            self.fail(error)
        self.bytes += len(row.payload)
        if row.state == FAILED_STEP:
            raise value
        return value

    def saw(self, row: JournalRow) -> None:
        """The running branch has come to the end of this step, and knows what time it was."""
        self.pass_time(row.at_ms)
        if not self.closed:
            self._touch()

    def pass_time(self, now_ms: int) -> None:
        """It is so late for the running branch, if it was earlier."""
        branch = self._branch()
        branch.now_ms = max(branch.now_ms, now_ms)
        _HERE.set(_Here(self, asyncio.current_task(), branch, branch.now_ms))

    def check_room(self, name: str, payload: bytes) -> None:
        """Raises `JournalFull` when the journal has no room for the result."""
        most = self.host.partition.settings.max_journal_bytes
        if self.bytes + len(payload) > most:
            raise JournalFull(
                f"{self.host.id}: with the result of {name!r} the journal of execution {self.row.execution_id!r} would "
                f"take more than {most:,} bytes (`max_journal_bytes`): keep results in storage, or "
                "`ctx.start_over(...)`"
            )

    def put(self, row: JournalRow, *, state: str, at_ms: int | None = None, **changes: Any) -> JournalRow:
        """Take a row into the turn, under whatever a step has written so far: it is not undone with that."""
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
            self.wall_ms if at_ms is None else at_ms,
            fields["payload"],
        )
        turn = self.turn
        turn.check()
        turn.buffer.layers[0].put_row((JournalRow.table, changed.key()), changed.values())
        if self._ahead_from <= row.step < self._ahead_to:
            self._ahead[row.step] = changed
        turn.wrote()
        return changed

    # --- the end ------------------------------------------------------------------------------------

    def check_complete(self, problem: str) -> None:
        """The function has ended: notes a divergence when it did not come to all steps of its own in the journal.

        Those of other branches are not looked at: a replay may end before a branch that was given up came so far.
        """
        rows = self.host.rows.scan(JournalRow, self.row.execution_id, after=(self.main.taken - 1,), limit=1)
        if rows and rows[0].step >> STEP_BITS == 0:
            with contextlib.suppress(Parked):
                self.diverge(f"the function {problem}, and the journal goes on with step {rows[0].name!r}")

    @property
    def waits_for(self) -> tuple[str, int | None]:
        """What the execution waits for, in words, and when to look again."""
        waits = self.segment.waits
        times = [wake_ms for _, wake_ms in waits if wake_ms is not None]
        words = list(dict.fromkeys(what for what, _ in waits))
        shown_words = ", ".join(words[:3]) + (f" and {len(words) - 3} more" if len(words) > 3 else "")
        return shown_words or "its turn", min(times) if times else None

    @property
    def unfinished(self) -> str | None:
        """A step that was made and never awaited."""
        steps = self.unawaited.values()
        return next((name for name, each in steps if inspect.getcoroutinestate(each) == inspect.CORO_CREATED), None)


#: States in which a step has its outcome.
ENDED_STEP: Final = (DONE, FAILED_STEP)
