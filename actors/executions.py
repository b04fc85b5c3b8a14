"""Executions inside their object: started, run segment by segment, ended, asked for, and forgotten in the end."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from actors.codec import decode, encode
from actors.containment import failure_of
from actors.errors import (
    ExecutionCanceled,
    ExecutionExists,
    InvalidArguments,
    InvalidOption,
    InvalidPromiseToken,
    NoSuchMethod,
    StepNotAwaited,
    TooManyExecutions,
    TurnTimeout,
    UnknownExecution,
    ValueTooLarge,
)
from actors.execution_rows import (
    ABORTED,
    ARGUMENTS,
    CANCELED,
    COMPLETED,
    DONE,
    EARLY,
    EXECUTION_TALLY,
    FAILED,
    FAILED_STEP,
    NEXT_ARGUMENTS,
    OUTCOME,
    PENDING,
    PRUNE_TIMER,
    RESUMABLE,
    RUNNING,
    STARTED_WITH,
    ExecutionRow,
    JournalRow,
    buried,
    execution_id_of,
    execution_name,
    execution_timer,
    is_text,
    retention_ms,
    timer_name,
    told,
)
from actors.execution_run import ExecutionRun, Parked
from actors.object_timers import shown_name
from actors.promise_token import SECRET_BYTES, id_of_promise, is_secret
from actors.wire_errors import encode_error
from actors.workflow import DurableContext, ambiguous_error, failed_step
from actors.write_buffer import Layer, WriteBuffer
from timers.batch import Batch, Delete, Put
from timers.tallies import Tally, count_one, discount_one

if TYPE_CHECKING:
    from actors.durable_object import DurableObject
    from actors.object_host import ObjectHost
    from actors.object_timers import TimerInfo
    from actors.timer_work import TimerWork
    from actors.turn import Turn

__all__ = ["BUILT_IN", "after_failure", "bury_execution", "segment_handler"]

_MAX_ID_BYTES: Final = 200
#: Rows read at a time.
_PAGE: Final = 500
#: Journal rows that one turn removes.
_ROWS_PER_TURN: Final = 500
#: Ended executions are looked through this often at most.
_PRUNE_EVERY_MS: Final = 3_600_000


# --- what the object is asked for -------------------------------------------------------------------------


def start(instance: DurableObject, method: str, execution_id: str, arguments: bytes) -> str:
    """Begin an execution, unless there is one of that id.

    Raises `ExecutionExists`, `TooManyExecutions`, `NoSuchMethod`, `InvalidArguments`, `ValueTooLarge`, `InvalidOption`.
    """
    host, turn = instance._ms_host, instance._ms_host.writing_turn()
    _check_id(execution_id)
    function = host.info.durable.get(method)
    if function is None:
        raise NoSuchMethod(f"{host.info.type_name}.{method} is no durable function: mark it with @durable")
    known = host.rows.get(ExecutionRow, execution_id)
    if known is not None:
        stored = host.rows.get(JournalRow, execution_id, STARTED_WITH)
        stored = host.rows.get(JournalRow, execution_id, ARGUMENTS) if stored is None else stored
        if known.method != method or stored is None or stored.payload != arguments:
            raise ExecutionExists(
                f"{host.id}: execution {execution_id!r} was started with another function or other arguments; take "
                "another id"
            )
        return execution_id
    args, kwargs = decode(arguments)
    check_fits(f"{host.info.type_name}.{method}", function, args, kwargs)
    most = host.partition.settings.max_executions_per_object
    tally = host.rows.get(Tally, EXECUTION_TALLY)
    if tally is not None and tally.rows >= most:
        raise TooManyExecutions(
            f"{host.id} keeps {most:,} executions (`max_executions_per_object`), ended ones included: use more objects"
        )
    if len(arguments) > host.partition.settings.max_journal_payload_bytes:
        raise ValueTooLarge(f"{host.id}: the arguments of execution {execution_id!r} take {len(arguments):,} bytes")
    oid = host.rows.oid
    # random, so that nobody can guess the tokens of its promises
    row = ExecutionRow(oid, execution_id, method, RUNNING, os.urandom(SECRET_BYTES), turn.now_ms, waits_for="its turn")
    first = JournalRow(oid, execution_id, ARGUMENTS, "arguments", payload=arguments)
    host.rows.apply(count_one(tally, oid, EXECUTION_TALLY, 1))
    host.rows.apply(Batch(writes=(Put(row), Put(first))))
    _wake(host, turn.buffer.top, execution_id, turn.now_ms)
    return execution_id


def check_fits(title: str, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
    """Raises `InvalidArguments` unless the durable function can be called like this."""
    signature = inspect.signature(function)
    try:
        signature.bind(None, None, *args, **kwargs)
    except TypeError as error:
        raise InvalidArguments(f"{title}{signature} can't be started like this: {error}") from None


def status(instance: DurableObject, execution_id: str) -> dict[str, Any]:
    """Plain facts about an execution, with its outcome once it has ended. Raises `UnknownExecution`."""
    host = instance._ms_host
    return told(_known(host, execution_id), host.rows.get(JournalRow, execution_id, OUTCOME))


def listed(instance: DurableObject, after: str | None, limit: int) -> list[dict[str, Any]]:
    """Executions by id, without their outcomes."""
    host = instance._ms_host
    rows = host.rows.scan(ExecutionRow, after=None if after is None else (after,), limit=max(1, min(limit, _PAGE)))
    return [{**status(instance, row.execution_id), "outcome": None} for row in rows]


def cancel(instance: DurableObject, execution_id: str) -> bool:
    """End an execution that has not ended; a segment that runs ends first. Raises `UnknownExecution`."""
    host = instance._ms_host
    row = _known(host, execution_id)
    if row.has_ended:
        return False
    turn = host.writing_turn()
    error = encode_error(ExecutionCanceled(f"{host.id}: execution {execution_id!r} was canceled"))
    end_execution(host, turn.buffer.top, row, CANCELED, FAILED_STEP, error, turn.now_ms)
    turn.wrote()
    host.runs.drop(execution_id)
    return True


def resume(instance: DurableObject, execution_id: str) -> bool:
    """Let an aborted or buried execution go on from its journal; False for others. Raises `UnknownExecution`."""
    host, turn = instance._ms_host, instance._ms_host.writing_turn()
    row = _known(host, execution_id)
    if row.status not in RESUMABLE:
        return False
    going_on = replace(row, status=RUNNING, ended_ms=None, wake_ms=turn.now_ms, waits_for="its turn")
    host.rows.apply(Batch(writes=(Put(going_on), Delete(JournalRow.table, (row.oid, execution_id, OUTCOME)))))
    _wake(host, turn.buffer.top, execution_id, turn.now_ms)
    return True


def resolve(instance: DurableObject, execution_id: str, step: int, secret: bytes, payload: bytes) -> bool:
    """Resolve a promise; False when that was done before, or it has timed out. Raises `InvalidPromiseToken`."""
    host, turn = instance._ms_host, instance._ms_host.writing_turn()
    row = host.rows.get(ExecutionRow, execution_id)
    name = execution_name(host.id.type_name, host.id.key, execution_id)
    # compared before anything else is told: a wrong token learns nothing
    seed = b"\0" * SECRET_BYTES if row is None else row.seed
    if not is_secret(secret, seed, id_of_promise(name, step)) or row is None:
        raise InvalidPromiseToken(f"{host.id}: this token is not that of a promise here; nothing was resolved")
    if len(payload) > host.partition.settings.max_journal_payload_bytes:
        raise ValueTooLarge(f"{host.id}: the value of a promise takes {len(payload):,} bytes")
    if row.has_ended:
        return False
    known = host.rows.get(JournalRow, execution_id, step)
    if known is None:
        # the token is out, so the function came so far; its process died before that was durable, and it will again
        known = JournalRow(row.oid, execution_id, step, "promise", state=EARLY)
    elif known.state != PENDING or (known.due_ms is not None and known.due_ms <= turn.now_ms):
        return False
    else:
        known = replace(known, state=DONE)
    host.rows.apply(Batch(writes=(Put(replace(known, payload=payload, at_ms=turn.now_ms)),)))
    if row.status == RUNNING:
        _wake(host, turn.buffer.top, execution_id, turn.now_ms)
    return True


#: name -> (function, whether it only reads). Names that no method can have, so that nothing is in an application's way.
BUILT_IN: Final[dict[str, tuple[Any, bool]]] = {
    "execution:start": (start, False),
    "execution:status": (status, True),
    "execution:list": (listed, True),
    "execution:cancel": (cancel, False),
    "execution:resume": (resume, False),
    "execution:resolve": (resolve, False),
}


# --- segments ---------------------------------------------------------------------------------------------


def segment_handler(timer: str) -> Any:
    """What runs for a timer of kind durable sleep."""
    if shown_name(timer) == PRUNE_TIMER:
        return _prune
    execution_id = execution_id_of(timer)

    async def run(instance: DurableObject, _info: TimerInfo) -> None:
        await _run_segment(instance, execution_id)

    return run


async def _run_segment(instance: DurableObject, execution_id: str) -> None:
    host, turn = instance._ms_host, instance._ms_host.writing_turn()
    row = host.rows.get(ExecutionRow, execution_id)
    if row is None or row.has_ended:
        return
    row = replace(row, status=RUNNING)
    if host.rows.get(JournalRow, execution_id, NEXT_ARGUMENTS) is not None:
        _start_over(host, turn, row)
        return
    run = host.runs.take(execution_id, instance) or _new_run(host, row)
    run.begin(turn, row)
    try:
        ended = await _drive(run)
        turn.check()
        if run.broken is not None:
            raise run.broken
        if run.diverged is not None:
            turn.buffer.reset()  # what the wrong code has armed is not the execution's: it may go on with the right one
            ended = ABORTED, FAILED_STEP, encode_error(run.diverged)
        if ended is not None:
            end_execution(host, turn.buffer.top, replace(row, steps=run.steps.taken), *ended, turn.now_ms)
            turn.wrote()
        elif run.next_arguments is not None:
            _plan_to_start_over(host, turn, row, run.next_arguments)
        else:
            _park(run, turn)
    finally:
        if run.can_stay and turn.running and host.instance is run.instance:
            host.runs.keep(execution_id, run)
        else:
            run.close()


def _new_run(host: ObjectHost, row: ExecutionRow) -> ExecutionRun:
    function = host.info.durable.get(row.method)
    if function is None:
        raise NoSuchMethod(f"{host.info.type_name}.{row.method} is no durable function any more: bring it back")
    stored = host.rows.get(JournalRow, row.execution_id, ARGUMENTS)
    assert stored is not None
    args, kwargs = decode(stored.payload)
    run = ExecutionRun(host, row)
    run.bytes = len(stored.payload)
    check_fits(f"{host.info.type_name}.{row.method}", function, args, kwargs)
    run.coroutine = function(host.instance, DurableContext(run), *args, **kwargs)
    return run


async def _drive(run: ExecutionRun) -> tuple[str, str, bytes] | None:
    """Go on with the function: how the execution ended (status, state and payload of its outcome), or None."""
    failure: BaseException | None = None
    try:
        result = await run.drive()
    except (GeneratorExit, KeyboardInterrupt):  # nobody is there to be told anything, not even that the turn is over
        raise
    except BaseException as error:
        run.turn.check()
        if run.is_over or isinstance(error, Parked):
            return None  # whatever the function made of that
        failure = failure_of(error)
    else:
        if run.is_over:
            return None
        try:
            payload = _result(run.host, run.row.execution_id, result)
            if run.unfinished is not None:
                raise StepNotAwaited(
                    f"{run.host.id}: execution {run.row.execution_id!r} made step {run.unfinished!r} and never awaited "
                    "it; it has not run"
                )
        except Exception as error:
            failure = error
    await run.end_branches()
    if failure is not None:
        run.check_complete(f"raised {type(failure).__name__}: {str(failure)[:200]}")
        return FAILED, FAILED_STEP, encode_error(failure)
    run.check_complete("ended")
    return COMPLETED, DONE, payload


def _result(host: ObjectHost, execution_id: str, result: Any) -> bytes:
    payload = encode(result)
    most = host.partition.settings.max_journal_payload_bytes
    if len(payload) > most:
        raise ValueTooLarge(
            f"{host.id}: the result of execution {execution_id!r} takes {len(payload):,} bytes ({most:,})"
        )
    return payload


def _park(run: ExecutionRun, turn: Turn) -> None:
    """Store what the execution waits for. A segment that ended without saying so is run again at once, by replay."""
    waits_for, wake_ms = run.waits_for
    if not run.segment.waits:
        wake_ms = turn.now_ms
    _put(turn.buffer.top, replace(run.row, steps=run.steps.taken, wake_ms=wake_ms, waits_for=waits_for))
    if wake_ms is not None:
        _wake(run.host, turn.buffer.top, run.row.execution_id, wake_ms)
    turn.wrote()


def _wake(host: ObjectHost, layer: Layer, execution_id: str, due_ms: int) -> None:
    name = timer_name(execution_id)
    layer.put_timer(name, execution_timer(name, due_ms, host.partition.counters.take_generation()))


def _put(layer: Layer, *rows: ExecutionRow | JournalRow) -> None:
    for row in rows:
        layer.put_row((row.table, row.key()), row.values())


# --- starting over ----------------------------------------------------------------------------------------


def _plan_to_start_over(host: ObjectHost, turn: Turn, row: ExecutionRow, arguments: bytes) -> None:
    following = JournalRow(row.oid, row.execution_id, NEXT_ARGUMENTS, "arguments", payload=arguments)
    _put(turn.buffer.top, following, replace(row, wake_ms=turn.now_ms, waits_for="starting over"))
    _wake(host, turn.buffer.top, row.execution_id, turn.now_ms)
    turn.wrote()


def _start_over(host: ObjectHost, turn: Turn, row: ExecutionRow) -> None:
    """Remove the journal, some rows at a time, and put the next arguments in the place of the last ones."""
    layer, execution_id = turn.buffer.top, row.execution_id
    page = host.rows.scan(JournalRow, execution_id, after=(-1,), limit=_ROWS_PER_TURN)
    for each in page:
        layer.put_row((each.table, each.key()), None)
    if len(page) < _ROWS_PER_TURN:
        following = host.rows.get(JournalRow, execution_id, NEXT_ARGUMENTS)
        last = host.rows.get(JournalRow, execution_id, ARGUMENTS)
        assert following is not None
        assert last is not None
        if host.rows.get(JournalRow, execution_id, STARTED_WITH) is None:
            _put(layer, replace(last, step=STARTED_WITH))
        _put(layer, replace(following, step=ARGUMENTS))
        layer.put_row((following.table, following.key()), None)
        # tokens of promises that are gone must not resolve those that take their places
        row = replace(row, seed=os.urandom(SECRET_BYTES), began_ms=turn.now_ms, steps=0)
    _put(layer, replace(row, wake_ms=turn.now_ms))
    _wake(host, layer, execution_id, turn.now_ms)
    turn.wrote()


# --- segments that fail -----------------------------------------------------------------------------------


def after_failure(host: ObjectHost, turn: Turn | None, work: TimerWork, error: BaseException) -> WriteBuffer | None:
    """What takes the place of the timer's own retry after a turn that failed in a step, or ran too long: that is the
    step's failure, or the function's, and counts by the step's policy. None: the segment is tried again."""
    run = None if turn is None else turn.execution
    if turn is None or run is None:
        return None
    run.close()  # it has seen what was rolled back
    step, now_ms = run.segment.ran, host.partition.clock.wall_ms()
    buffer = WriteBuffer()
    layer = buffer.top
    layer.put_timer(work.row.name, None)
    if step is None:
        if not isinstance(error, TurnTimeout):
            return None
        end_execution(host, layer, run.row, FAILED, FAILED_STEP, encode_error(error), now_ms)
        return buffer
    if step.ambiguous == "skip":
        changes: dict[str, Any] = {"state": DONE, "payload": encode(None), "at_ms": now_ms}
    elif step.ambiguous == "fail":
        ambiguous = encode_error(ambiguous_error(run, step.row.name))
        changes = {"state": FAILED_STEP, "payload": ambiguous, "at_ms": now_ms}
    else:
        changes = failed_step(run, step, error, now_ms)
    wake_ms = max(now_ms, changes.get("due_ms", now_ms))
    waiting = replace(run.row, steps=run.steps.taken, wake_ms=wake_ms, waits_for=f"step {step.row.name!r}")
    _put(layer, replace(step.row, **changes), waiting)
    _wake(host, layer, run.row.execution_id, wake_ms)
    return buffer


# --- the end ----------------------------------------------------------------------------------------------


def end_execution(
    host: ObjectHost, layer: Layer, row: ExecutionRow, status: str, state: str, payload: bytes, now_ms: int
) -> None:
    """Store the outcome, and see to it that it is forgotten in the end."""
    ended = replace(row, status=status, ended_ms=now_ms, wake_ms=None, waits_for="")
    outcome = JournalRow(row.oid, row.execution_id, OUTCOME, "outcome", state=state, at_ms=now_ms, payload=payload)
    _put(layer, ended, outcome)
    layer.put_timer(timer_name(row.execution_id), None)
    known = host.directory().get(PRUNE_TIMER)
    over_ms = now_ms + _kept_ms(host, status)
    if known is None or known.due_ms > over_ms:
        _arm_prune(host, layer, over_ms)


def _kept_ms(host: ObjectHost, status: str) -> int:
    settings = host.partition.settings
    return retention_ms(status, settings.execution_retention_ms, settings.failed_execution_retention_ms)


def _arm_prune(host: ObjectHost, layer: Layer, due_ms: int) -> None:
    layer.put_timer(PRUNE_TIMER, execution_timer(PRUNE_TIMER, due_ms, host.partition.counters.take_generation()))


def _prune(instance: DurableObject, _info: TimerInfo) -> None:
    """Forget executions whose time is over, some rows at a time, and come back for the next."""
    host, turn = instance._ms_host, instance._ms_host.writing_turn()
    following: int | None = None
    room = _ROWS_PER_TURN
    after: tuple[str] | None = None
    while True:
        page = host.rows.scan(ExecutionRow, after=after, limit=_PAGE)
        for row in page:
            over_ms = None if row.ended_ms is None else row.ended_ms + _kept_ms(host, row.status)
            if over_ms is not None and over_ms <= turn.now_ms and room > 0:
                room -= _forget(host, row, room)
                over_ms = turn.now_ms + 1 if room <= 0 else None
            if over_ms is not None:
                following = over_ms if following is None else min(following, over_ms)
        if len(page) < _PAGE:
            break
        after = (page[-1].execution_id,)
    if following is not None:
        # each look goes through all executions, so those that are over soon after each other wait for one another
        least_ms = 1 if room <= 0 else _PRUNE_EVERY_MS
        _arm_prune(host, turn.buffer.top, max(following, turn.now_ms + least_ms))
        turn.wrote()


def _forget(host: ObjectHost, row: ExecutionRow, room: int) -> int:
    """Remove at most `room` rows of the execution, itself last; how many were removed, `room` when some are left."""
    page = host.rows.scan(JournalRow, row.execution_id, limit=room)
    for first in range(0, len(page), 50):
        host.rows.apply(Batch(writes=tuple(Delete(each.table, each.key()) for each in page[first : first + 50])))
    if len(page) >= room:
        return room
    host.rows.apply(Batch(writes=(Delete(row.table, row.key()),)))
    host.rows.apply(discount_one(host.rows.get(Tally, EXECUTION_TALLY), row.oid, EXECUTION_TALLY, 1))
    return len(page) + 1


def bury_execution(host: ObjectHost, oid: int, timer: str, buffer: WriteBuffer) -> None:
    """The timer that wakes the execution goes into the dead letters: show that until it is resumed."""
    place = (ExecutionRow.table, (oid, execution_id_of(timer)))
    values = host.state.read_row(place)
    row = None if values is None else buried(ExecutionRow.from_columns(place[1], values))
    if row is not None:
        _put(buffer.top, row)


def _known(host: ObjectHost, execution_id: str) -> ExecutionRow:
    row = host.rows.get(ExecutionRow, _check_id(execution_id))
    if row is None:
        raise UnknownExecution(
            f"{host.id} has no execution {execution_id!r}: it was never started, or its time of retention is over"
        )
    return row


def _check_id(execution_id: object) -> str:
    is_kept = isinstance(execution_id, str) and is_text(execution_id)
    if not isinstance(execution_id, str) or not is_kept or not 0 < len(execution_id.encode()) <= _MAX_ID_BYTES:
        raise InvalidOption(f"execution_id = {execution_id!r}: must be a text of 1 to {_MAX_ID_BYTES} bytes")
    if "\0" in execution_id:
        raise InvalidOption(f"execution_id = {execution_id!r}: must not contain NUL")
    return execution_id
