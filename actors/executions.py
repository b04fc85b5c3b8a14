"""Executions inside their object: started, run segment by segment, ended, asked for, and forgotten in the end."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from actors.codec import decode, encode
from actors.errors import (
    ExecutionCanceled,
    ExecutionDiverged,
    ExecutionExists,
    InvalidOption,
    InvalidPromiseToken,
    NoSuchMethod,
    TooManyExecutions,
    UnknownExecution,
    ValueTooLarge,
)
from actors.execution_rows import (
    ABORTED,
    ARGUMENTS,
    BURIED,
    CANCELED,
    COMPLETED,
    DONE,
    FAILED,
    FAILED_STEP,
    OUTCOME,
    PENDING,
    PRUNE_TIMER,
    RUNNING,
    ExecutionRow,
    JournalRow,
    execution_id_of,
    execution_name,
    execution_timer,
    retention_ms,
    timer_name,
)
from actors.promise_token import SECRET_BYTES, is_secret
from actors.wire_errors import encode_error
from actors.workflow import DurableContext, Parked
from timers.batch import Batch, Delete, Put
from timers.durable_sleep import promise_id

if TYPE_CHECKING:
    from actors.durable_object import DurableObject
    from actors.object_host import ObjectHost
    from actors.object_timers import TimerInfo
    from actors.turn import Turn
    from actors.write_buffer import WriteBuffer

__all__ = ["BUILT_IN", "bury_execution", "segment_handler"]

_MAX_ID_BYTES: Final = 200
#: Rows read, and removed, at a time.
_PAGE: Final = 500


# --- what the object is asked for -------------------------------------------------------------------------


def start(instance: DurableObject, method: str, execution_id: str, arguments: bytes) -> str:
    """Begin an execution, unless there is one of that id.

    Raises `ExecutionExists`, `TooManyExecutions`, `NoSuchMethod`, `ValueTooLarge`, `InvalidOption`.
    """
    host, turn = instance._ms_host, instance._ms_host.writing_turn()
    _check_id(execution_id)
    if method not in host.info.durable:
        raise NoSuchMethod(f"{host.info.type_name}.{method} is no durable function: mark it with @durable")
    known = host.rows.get(ExecutionRow, execution_id)
    if known is not None:
        stored = host.rows.get(JournalRow, execution_id, ARGUMENTS)
        if known.method != method or stored is None or stored.payload != arguments:
            raise ExecutionExists(
                f"{host.id}: execution {execution_id!r} was started with another function or other arguments; take "
                "another id"
            )
        return execution_id
    most = host.partition.settings.max_executions_per_object
    if len(host.rows.scan(ExecutionRow, limit=most)) >= most:
        raise TooManyExecutions(
            f"{host.id} keeps {most:,} executions (`max_executions_per_object`), ended ones included: use more objects"
        )
    if len(arguments) > host.partition.settings.max_journal_payload_bytes:
        raise ValueTooLarge(f"{host.id}: the arguments of execution {execution_id!r} take {len(arguments):,} bytes")
    oid = host.rows.oid
    # random, so that nobody can guess the tokens of its promises
    row = ExecutionRow(oid, execution_id, method, RUNNING, os.urandom(SECRET_BYTES), turn.now_ms, waits_for="its turn")
    first = JournalRow(oid, execution_id, ARGUMENTS, "arguments", payload=arguments)
    host.rows.apply(Batch(writes=(Put(row), Put(first))))
    _wake(host, turn, execution_id, turn.now_ms)
    return execution_id


def status(instance: DurableObject, execution_id: str) -> dict[str, Any]:
    """Plain facts about an execution, with its outcome once it has ended. Raises `UnknownExecution`."""
    host = instance._ms_host
    row = _known(host, execution_id)
    outcome = host.rows.get(JournalRow, execution_id, OUTCOME)
    return {
        "execution_id": execution_id,
        "method": row.method,
        "status": row.status,
        "began_ms": row.began_ms,
        "ended_ms": row.ended_ms,
        "steps": row.steps,
        "wake_ms": row.wake_ms,
        "waits_for": row.waits_for,
        "outcome": None if outcome is None else (outcome.state, outcome.payload),
    }


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
    error = ExecutionCanceled(f"{host.id}: execution {execution_id!r} was canceled")
    _end(host, host.writing_turn(), row, CANCELED, FAILED_STEP, encode_error(error))
    return True


def resolve(instance: DurableObject, execution_id: str, step: int, secret: bytes, payload: bytes) -> bool:
    """Resolve a promise; False when that was done before, or it has timed out. Raises `InvalidPromiseToken`."""
    host, turn = instance._ms_host, instance._ms_host.writing_turn()
    row = host.rows.get(ExecutionRow, execution_id)
    name = execution_name(host.id.type_name, host.id.key, execution_id)
    # compared before anything else is told: a wrong token learns nothing
    if not is_secret(secret, b"\0" * SECRET_BYTES if row is None else row.seed, promise_id(name, step)) or row is None:
        raise InvalidPromiseToken(f"{host.id}: this token is not that of a promise here; nothing was resolved")
    if len(payload) > host.partition.settings.max_journal_payload_bytes:
        raise ValueTooLarge(f"{host.id}: the value of a promise takes {len(payload):,} bytes")
    known = host.rows.get(JournalRow, execution_id, step)
    timed_out = known is not None and known.due_ms is not None and known.due_ms <= turn.now_ms
    if known is None or known.kind != "promise" or known.state != PENDING or row.has_ended or timed_out:
        return False
    host.rows.apply(Batch(writes=(Put(replace(known, state=DONE, payload=payload, at_ms=turn.now_ms)),)))
    _wake(host, turn, execution_id, turn.now_ms)
    return True


#: name -> (function, whether it only reads). Names that no method can have, so that nothing is in an application's way.
BUILT_IN: Final[dict[str, tuple[Any, bool]]] = {
    "execution:start": (start, False),
    "execution:status": (status, True),
    "execution:list": (listed, True),
    "execution:cancel": (cancel, False),
    "execution:resolve": (resolve, False),
}


# --- segments ---------------------------------------------------------------------------------------------


def segment_handler(timer: str) -> Any:
    """What runs for a timer of kind durable sleep."""
    if timer == PRUNE_TIMER:
        return _prune
    execution_id = execution_id_of(timer)

    async def run(instance: DurableObject, _info: TimerInfo) -> None:
        await _run_segment(instance, execution_id)

    return run


async def _run_segment(instance: DurableObject, execution_id: str) -> None:
    host, turn = instance._ms_host, instance._ms_host.writing_turn()
    row = host.rows.get(ExecutionRow, execution_id)
    if row is None or row.status not in (RUNNING, BURIED):
        return
    row = replace(row, status=RUNNING)
    function = host.info.durable.get(row.method)
    if function is None:
        raise NoSuchMethod(f"{host.info.type_name}.{row.method} is no durable function any more: bring it back")
    journal = _journal(host, execution_id)
    args, kwargs = decode(journal.pop(ARGUMENTS).payload)
    context = DurableContext(host, turn, row, journal)
    turn.outside_step = True
    ended: tuple[str, str, bytes] | None = None
    try:
        result = await function(instance, context, *args, **kwargs)
        ended = COMPLETED, DONE, _result(host, execution_id, result)
    except Parked:
        pass
    except ExecutionDiverged as error:
        ended = ABORTED, FAILED_STEP, encode_error(error)
    except Exception as error:
        ended = FAILED, FAILED_STEP, encode_error(error)
    finally:
        turn.outside_step = False
    turn.check()
    if context.waits_for is not None:
        # parked: whatever the function made of that
        waiting = replace(row, steps=context.steps, wake_ms=context.wake_ms, waits_for=context.waits_for)
        host.rows.apply(Batch(writes=(Put(waiting),)))
        if context.wake_ms is not None:
            _wake(host, turn, execution_id, context.wake_ms)
        return
    assert ended is not None
    _end(host, turn, replace(row, steps=context.steps), *ended)


def _result(host: ObjectHost, execution_id: str, result: Any) -> bytes:
    payload = encode(result)
    most = host.partition.settings.max_journal_payload_bytes
    if len(payload) > most:
        raise ValueTooLarge(
            f"{host.id}: the result of execution {execution_id!r} takes {len(payload):,} bytes ({most:,})"
        )
    return payload


def _journal(host: ObjectHost, execution_id: str) -> dict[int, JournalRow]:
    journal: dict[int, JournalRow] = {}
    after: tuple[int] | None = None
    while True:
        page = host.rows.scan(JournalRow, execution_id, after=after, limit=_PAGE)
        journal.update((row.step, row) for row in page)
        if len(page) < _PAGE:
            return journal
        after = (page[-1].step,)


def _wake(host: ObjectHost, turn: Turn, execution_id: str, due_ms: int) -> None:
    name = timer_name(execution_id)
    turn.buffer.put_timer(name, execution_timer(name, due_ms, host.partition.counters.take_generation()))
    turn.wrote()


# --- the end ----------------------------------------------------------------------------------------------


def _end(host: ObjectHost, turn: Turn, row: ExecutionRow, status: str, state: str, payload: bytes) -> None:
    ended = replace(row, status=status, ended_ms=turn.now_ms, wake_ms=None, waits_for="")
    outcome = JournalRow(row.oid, row.execution_id, OUTCOME, "outcome", state=state, at_ms=turn.now_ms, payload=payload)
    host.rows.apply(Batch(writes=(Put(ended), Put(outcome))))
    turn.buffer.put_timer(timer_name(row.execution_id), None)
    known = host.timers.row(turn, PRUNE_TIMER)
    over_ms = turn.now_ms + _kept_ms(host, status)
    if known is None or known.due_ms > over_ms:
        _arm_prune(host, turn, over_ms)


def _kept_ms(host: ObjectHost, status: str) -> int:
    settings = host.partition.settings
    return retention_ms(status, settings.execution_retention_ms, settings.failed_execution_retention_ms)


def _arm_prune(host: ObjectHost, turn: Turn, due_ms: int) -> None:
    generation = host.partition.counters.take_generation()
    turn.buffer.put_timer(PRUNE_TIMER, execution_timer(PRUNE_TIMER, due_ms, generation))
    turn.wrote()


def _prune(instance: DurableObject, _info: TimerInfo) -> None:
    """Forget executions whose time is over, some rows at a time, and come back for the next."""
    host, turn = instance._ms_host, instance._ms_host.writing_turn()
    following: int | None = None
    room = _PAGE
    for row in host.rows.scan(ExecutionRow, limit=host.partition.settings.max_executions_per_object):
        if row.ended_ms is None:
            continue
        over_ms = row.ended_ms + _kept_ms(host, row.status)
        if over_ms <= turn.now_ms and room > 0:
            room -= _forget(host, row, room)
            over_ms = turn.now_ms + 1 if room <= 0 else over_ms
            if room > 0:
                continue
        following = over_ms if following is None else min(following, over_ms)
    if following is not None:
        _arm_prune(host, turn, max(following, turn.now_ms + 1))


def _forget(host: ObjectHost, row: ExecutionRow, room: int) -> int:
    """Remove at most `room` rows of the execution, itself last; how many were removed, `room` when some are left."""
    page = host.rows.scan(JournalRow, row.execution_id, limit=room)
    for first in range(0, len(page), 50):
        host.rows.apply(Batch(writes=tuple(Delete(each.table, each.key()) for each in page[first : first + 50])))
    if len(page) >= room:
        return room
    host.rows.apply(Batch(writes=(Delete(row.table, row.key()),)))
    return len(page) + 1


def bury_execution(host: ObjectHost, oid: int, timer: str, buffer: WriteBuffer) -> None:
    """The timer that wakes the execution goes into the dead letters: show that until it is redriven."""
    place = (ExecutionRow.table, (oid, execution_id_of(timer)))
    values = host.state.read_row(place)
    if values is not None:
        row = replace(ExecutionRow.from_columns(place[1], values), status=BURIED, wake_ms=None, waits_for="a redrive")
        buffer.top.put_row(place, row.values())


def _known(host: ObjectHost, execution_id: str) -> ExecutionRow:
    row = host.rows.get(ExecutionRow, _check_id(execution_id))
    if row is None:
        raise UnknownExecution(
            f"{host.id} has no execution {execution_id!r}: it was never started, or its time of retention is over"
        )
    return row


def _check_id(execution_id: object) -> str:
    if not isinstance(execution_id, str) or not 0 < len(execution_id.encode(errors="replace")) <= _MAX_ID_BYTES:
        raise InvalidOption(f"execution_id = {execution_id!r}: must be a text of 1 to {_MAX_ID_BYTES} bytes")
    if "\0" in execution_id:
        raise InvalidOption(f"execution_id = {execution_id!r}: must not contain NUL")
    return execution_id
