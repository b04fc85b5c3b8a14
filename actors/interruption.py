"""Turns that are cut short: timeouts, swallowed cancellation, resets, and what must be run again."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from actors import activation
from actors.errors import ObjectReset, TurnTimeout
from actors.logs import log_event
from actors.timer_work import TimerWork
from actors.turn import Turn
from actors.work import CallWork, Work
from actors.write_buffer import WriteBuffer

if TYPE_CHECKING:
    from actors.object_host import ObjectHost

__all__ = [
    "clear_timeout",
    "never_resumed",
    "put_back",
    "reset",
    "run_again",
    "set_timeout",
    "supersede",
    "timeout_error",
    "timeout_ms",
]

#: After a failed commit, work that must be run again waits this long: the cause (a full disk) needs time to pass.
RERUN_DELAY_MS = 1_000


def timeout_ms(host: ObjectHost, work: Work | None) -> int:
    settings = host.partition.settings
    if isinstance(work, TimerWork):
        return settings.timer_turn_timeout_ms
    return host.info.cls.turn_timeout_ms or settings.turn_timeout_ms


def set_timeout(host: ObjectHost, turn: Turn, timeout_ms: int) -> None:
    turn.timeout_handle = host.partition.clock.call_later(timeout_ms, lambda: time_out(host, turn))


def clear_timeout(turn: Turn) -> None:
    if turn.timeout_handle is not None:
        turn.timeout_handle.cancel()
        turn.timeout_handle = None


def timeout_error(host: ObjectHost, turn: Turn) -> TurnTimeout:
    name = turn.work.method.name if isinstance(turn.work, CallWork) else "a timer's handler"
    limit = timeout_ms(host, turn.work)
    return TurnTimeout(f"{host.id}: {name} ran longer than {limit:,} ms; it was cancelled and rolled back")


def time_out(host: ObjectHost, turn: Turn) -> None:
    turn.time_out()
    turn.cancel()
    grace_ms = host.partition.settings.cancel_grace_ms
    turn.timeout_handle = host.partition.clock.call_later(grace_ms, lambda: abandon_turn(host, turn))


def abandon_turn(host: ObjectHost, turn: Turn) -> None:
    """The code swallowed its cancellation: it runs on without its object, which is rebuilt."""
    log_event(logging.ERROR, "turn_abandoned", f"{host.id}: a cancelled turn goes on running", object=str(host.id))
    host.ended_bodies.pop(turn, None)
    turn.outstanding = 0
    if turn is host.activation:
        turn.supersede()
        activation.activation_failed(host, turn, timeout_error(host, turn))
        host.pump()
    else:
        host.body_ended(turn, None, None)


def supersede(host: ObjectHost, turn: Turn) -> None:
    """The turn no longer counts, whatever its code goes on to do."""
    turn.supersede()
    turn.cancel()
    clear_timeout(turn)
    host.ended_bodies.pop(turn, None)
    host.side_turns.pop(turn, None)
    host.firing.pop(turn.firing, None)
    host.section.drop(turn)
    if turn is host.current:
        host.current = None
        host.partition.gate.turn_ended(host)


def reset(host: ObjectHost, error: BaseException) -> None:
    """A write set was not applied: back to what is durable; what ran on top of it is cut short."""
    host.partition.resets += 1
    log_event(logging.WARNING, "object_reset", f"{host.id}: {error}", object=str(host.id))
    host.instance = None
    host.runs.clear()
    host.buffer = WriteBuffer()
    if host.activation is not None:
        activation.lost(host, error)
    running = [*reversed(host.side_turns), *([host.current] if host.current else [])]  # each goes before the last
    for turn in running:
        supersede(host, turn)
        work = turn.work
        if isinstance(work, CallWork) and work.method.is_shared:
            host.queue.appendleft(work)
        elif work is not None and turn.recorded and turn.intent_durable:
            run_again(host, work, turn)
        elif isinstance(work, CallWork):
            lost = ObjectReset(f"{host.id} went back to its last durable state; nothing of this turn was applied")
            lost.__cause__ = error
            work.refuse(lost)
            host.partition.admission.work_ended(work)
        elif isinstance(work, TimerWork):
            host.partition.timer_ended(work, retry=True)
    host.partition.loop.call_soon(host.pump)
    # timers that a lost write set had moved or deleted are set again, and the tick may have passed their rows
    host.partition.clock.call_later(RERUN_DELAY_MS, partial(rearm, host))


def rearm(host: ObjectHost) -> None:
    """Look again at the earliest timer of the object, as it is on disk."""
    if host.partition.stopped:
        return
    earliest_ms = min((row.due_ms for row in host.directory().values()), default=None)
    if earliest_ms is not None:
        host.partition.timer_armed(earliest_ms)


def run_again(host: ObjectHost, work: Work, turn: Turn) -> None:
    """Its calls have happened, its own outcome is not recorded: the same turn, again, before any other."""
    work.attempt = turn.attempt + 1
    work.began_ms = turn.now_ms
    work.resumed = True
    put_back(host, work)


def never_resumed(host: ObjectHost, work: Work) -> Turn | None:
    """The turn of work that can't be run again after all; None when it has not run before. What it had called has
    happened, so its end must be recorded, as if its own code had raised."""
    if not work.resumed:
        return None
    work.resumed = False
    turn = Turn(host, work, work.turn_id, WriteBuffer(), host.partition.clock.wall_ms(), work.attempt)
    turn.resume()
    return turn


def put_back(host: ObjectHost, work: Work) -> None:
    """Let the work run before any other, once the cause of the failure has had time to pass."""
    host.queue.appendleft(work)
    if host.rerun is None:
        host.rerun = host.partition.clock.call_later(RERUN_DELAY_MS, partial(rerun_now, host))


def rerun_now(host: ObjectHost) -> None:
    host.rerun = None
    host.pump()
