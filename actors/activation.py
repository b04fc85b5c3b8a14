"""Bringing an object into memory: its instance, `__init__`, migrations of its state, and `on_start`."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from actors import interruption, timer_turns
from actors.containment import failure_of, start_body
from actors.current import CURRENT
from actors.durable_object import DurableObject
from actors.errors import TurnTimeout
from actors.migrations import pending_start
from actors.timer_work import TimerWork
from actors.turn import Turn
from actors.work import CallWork, raised
from actors.write_buffer import WriteBuffer

if TYPE_CHECKING:
    from actors.object_host import ObjectHost

__all__ = ["activate", "activation_failed", "lost"]


def activate(host: ObjectHost) -> bool:
    """Make the instance and run `on_start`; False while it runs, or when it failed and took the head with it."""
    turn = Turn(host, None, b"", WriteBuffer(), host.partition.clock.wall_ms(), 1)
    host.activation = turn
    token = CURRENT.set(turn)
    try:
        instance = host.info.cls.__new__(host.info.cls)
        instance._ms_host = host
        instance.__init__()  # type: ignore[misc]
        started = pending_start(host, instance, host.info.migrations)
        if inspect.isawaitable(started):
            turn.task = start_body(started) if inspect.iscoroutine(started) else asyncio.ensure_future(started)
    except BaseException as error:
        activation_failed(host, turn, failure_of(error))
        return False
    finally:
        CURRENT.reset(token)
    if turn.task is None:
        return activated(host, turn, instance)
    interruption.set_timeout(host, turn, interruption.timeout_ms(host, None))
    turn.task.add_done_callback(lambda task: on_start_ended(host, turn, instance, task))
    return False


def on_start_ended(host: ObjectHost, turn: Turn, instance: DurableObject, task: asyncio.Future[Any]) -> None:
    interruption.clear_timeout(turn)
    if turn.superseded:
        return
    error: BaseException | None
    if turn.timed_out:
        error = TurnTimeout(f"{host.id}: on_start ran longer than {interruption.timeout_ms(host, None):,} ms")
    else:
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is not None:
        activation_failed(host, turn, error)
        host.pump()
    elif activated(host, turn, instance):
        host.pump()


def activated(host: ObjectHost, turn: Turn, instance: DurableObject) -> bool:
    turn.end()
    host.partition.activations += 1
    if not turn.buffer.dirty:
        host.activation = None
        host.instance = instance
        return True
    # what on_start wrote is a write set of its own, durable before the first turn starts
    write_set = host.state.hand_over(turn.buffer.merged())
    write_set.waiters.append(lambda error: on_start_durable(host, turn, instance, error))
    return False


def on_start_durable(host: ObjectHost, turn: Turn, instance: DurableObject, error: BaseException | None) -> None:
    if turn.superseded:
        return
    host.activation = None
    if error is None:
        host.instance = instance
        host.pump()


def lost(host: ObjectHost, error: BaseException) -> None:
    """The object was reset. What `on_start` wrote was not applied: that fails the call at the head of the queue.

    When it had not ended yet, it was cut short by an earlier write set and simply starts again.
    """
    turn = host.activation
    assert turn is not None
    had_ended = not turn.running
    interruption.supersede(host, turn)
    host.activation = None
    if not had_ended or not host.queue:
        return
    work = host.queue.popleft()
    if work.resumed:
        interruption.put_back(host, work)
    elif isinstance(work, CallWork):
        work.refuse(error)
        host.partition.admission.work_ended(work)
    else:
        assert isinstance(work, TimerWork)
        host.partition.timer_ended(work, retry=True)


def activation_failed(host: ObjectHost, turn: Turn, error: BaseException) -> None:
    """The call at the head gets the exception; the next one tries again."""
    turn.end()
    host.activation = None
    host.log_failure("on_start_failed", error)
    work = host.queue.popleft()
    if isinstance(work, TimerWork) and not timer_turns.begin(host, work):
        return
    resumed = interruption.never_resumed(host, work)
    if resumed is not None:
        host.turn_failed(resumed, error)
    elif isinstance(work, CallWork):
        work.answer(*raised(error))
        host.partition.admission.work_ended(work)
    else:
        assert isinstance(work, TimerWork)
        timer_turns.failed(host, work, None, error)
