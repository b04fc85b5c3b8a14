"""How turns that a timer starts begin and end: checked again, ended by their own commit, retried, buried."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from actors import interruption
from actors.codec import encode
from actors.durable_object import HOOKS
from actors.early_commit import flush, renew_buffer
from actors.executions import after_failure, bury_execution, segment_handler
from actors.object_timers import EXHAUSTED_TIMER
from actors.timer_work import TimerWork, dead_letter_op
from actors.toolkit.publication_hook import HOOK, announcing, pass_over
from actors.turn import Turn
from actors.write_buffer import DirectoryRow, WriteBuffer
from drivers.tables import Op
from timers.registry import TimerKind
from timers.schedule import TimerSpec

if TYPE_CHECKING:
    from actors.object_host import ObjectHost

__all__ = ["begin", "durable", "end_timer_in", "failed", "handler_of", "succeeded"]


def begin(host: ObjectHost, work: TimerWork) -> bool:
    """Check the timer again; False when it is not the one that was armed, or when it is skipped by its policy."""
    row = host.directory().get(work.row.name)
    if row is None or row.generation != work.row.generation or row.due_ms != work.row.due_ms:
        host.partition.timer_ended(work)
        return False
    now_ms = host.partition.clock.wall_ms()
    if work.resumed and work.began_ms is not None:
        now_ms = work.began_ms  # run again: it is told what it was told the first time, or its calls would diverge
    if row.due_ms > now_ms:  # the wall clock was set back since the tick
        host.partition.timer_ended(work)
        host.partition.timer_armed(row.due_ms)
        return False
    work.begin(now_ms, host.partition.settings.misfire_all_limit)
    assert work.step is not None
    if work.step.run:
        host.partition.metrics.timer_started(row.due_ms, now_ms)
        return True
    buffer = WriteBuffer()
    buffer.top.timers[work.row.name] = work.following()
    write_set = host.state.hand_over(buffer.top, guards=work.guards())
    write_set.waiters.append(lambda error: host.partition.timer_ended(work))
    return False


def succeeded(host: ObjectHost, work: TimerWork, turn: Turn) -> None:
    """Hand over what the turn did, together with the end of its timer."""
    guards = work.guards()
    if host.interleaved:
        known, row = turn.buffer.lookup_timer(work.row.name)
        row = row if known else host.directory().get(work.row.name)
        if row is not None and row.generation == work.row.generation:
            turn.buffer.top.timers[work.row.name] = work.following()
        else:
            guards = []  # replaced or cancelled by another turn of this process
    extra = work.closing_ops(turn)
    write_set = host.state.hand_over(turn.buffer.merged(), extra=extra, guards=guards)
    renew_buffer(host)
    write_set.waiters.append(lambda error: durable(host, turn, error))


def handler_of(host: ObjectHost, work: TimerWork) -> Any:
    """The handler, or None after the timer was failed because its class has none (any more)."""
    name = work.spec.method
    if work.row.kind == TimerKind.DURABLE_SLEEP:
        return segment_handler(work.row.name)
    if name in HOOKS:  # only the runtime itself can have set such a timer
        handler = getattr(host.info.cls, name, None)
        if handler is not None and name == HOOK:
            handler = announcing(host, work, handler)
    else:
        found = host.info.methods.get(name)
        handler = None if found is None else found.call
    if handler is None:
        never_run = interruption.never_resumed(host, work)
        failed(host, work, never_run, AttributeError(f"{host.info.type_name} has no method {name!r} to run"))
    return handler


def end_timer_in(host: ObjectHost, turn: Turn, work: TimerWork) -> None:
    """The turn begins with its timer ended (or moved on): what the handler sets itself takes the place of that.

    Interleaved turns share a buffer that may be committed at any await, so theirs is ended when they return.
    """
    if host.interleaved:
        turn.firing = work.row.generation
        host.firing[turn.firing] = turn
    else:
        turn.buffer.top.timers[work.row.name] = work.following()


def durable(host: ObjectHost, turn: Turn, error: BaseException | None) -> None:
    work = turn.work
    assert isinstance(work, TimerWork)
    if error is None:
        host.partition.fires += 1
        host.partition.release_calls(turn)
        host.partition.timer_ended(work)
    elif turn.recorded and turn.intent_durable:
        interruption.run_again(host, work, turn)
    else:
        host.partition.timer_ended(work, retry=True)


def failed(host: ObjectHost, work: TimerWork, turn: Turn | None, error: BaseException) -> None:
    """One failed run: the retry, or the dead letters, in a commit after the roll-back."""
    now_ms = host.partition.clock.wall_ms()
    retry_row = work.after_failure(now_ms)
    extra: list[Op] = [] if turn is None else work.closing_ops(turn)
    guards = work.guards()
    buffer = WriteBuffer()
    host.log_failure("timer_failed", error, timer=work.row.name, attempt=work.row.attempt)
    own = after_failure(host, turn, work, error)
    if own is not None:
        buffer = own
    elif host.interleaved and is_replaced(host, work):
        guards = []  # nothing is rolled back here, so what was set or cancelled meanwhile stands
    elif retry_row is None:
        bury(host, work, error, buffer, extra)
    else:
        buffer.top.timers[work.row.name] = retry_row
        host.partition.retries += 1
    write_set = host.state.hand_over(buffer.merged(), extra=extra, guards=guards)
    write_set.waiters.append(lambda failure: failure_durable(host, work, turn, failure))


def is_replaced(host: ObjectHost, work: TimerWork) -> bool:
    """Whether this timer of an interleaved object was set again or cancelled while its handler ran."""
    flush(host, host.buffer)
    row = host.directory().get(work.row.name)
    return row is None or row.generation != work.row.generation


def bury(host: ObjectHost, work: TimerWork, error: BaseException, buffer: WriteBuffer, extra: list[Op]) -> None:
    """Into the dead letters; a recurring timer goes on with its next occurrence."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    number = host.partition.counters.take_id()
    attempts = work.row.attempt + 1
    now_ms = host.partition.clock.wall_ms()
    extra.append(dead_letter_op(number, host.id.type_name, host.id.key, work.row, text, now_ms, attempts))
    host.partition.dead_letters += 1
    buffer.top.timers[work.row.name] = work.following()
    if work.spec.method == HOOK:
        pass_over(host, work, buffer)
    if work.row.kind == TimerKind.DURABLE_SLEEP:
        bury_execution(host, work.row.oid, work.row.name, buffer)
    if work.is_alarm and hasattr(host.info.cls, "on_alarm_exhausted"):
        buffer.top.timers[EXHAUSTED_TIMER] = exhausted_row(host, work, now_ms)


def exhausted_row(host: ObjectHost, work: TimerWork, now_ms: int) -> DirectoryRow:
    """`on_alarm_exhausted` runs as a timer of the runtime's own, due now: durable, once, with retries."""
    spec = TimerSpec(mode="at", start_ms=now_ms, method="on_alarm_exhausted", payload=encode(work.info()))
    return DirectoryRow(
        oid=0,
        name=EXHAUSTED_TIMER,
        kind=int(TimerKind.NAMED_TIMER),
        due_ms=now_ms,
        generation=host.partition.counters.take_generation(),
        first_due_ms=now_ms,
        attempt=0,
        crashes=0,
        missed=0,
        spec=spec.to_bytes(),
    )


def failure_durable(host: ObjectHost, work: TimerWork, turn: Turn | None, failure: BaseException | None) -> None:
    if failure is None and turn is not None:
        host.partition.release_calls(turn)
    host.partition.timer_ended(work, retry=failure is not None)
