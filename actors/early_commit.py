"""What is committed before a turn ends: intents, `sync()`, and the writes of interleaved turns."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from actors.timer_work import TimerWork
from actors.write_buffer import WriteBuffer
from drivers.tables import INTENTS, Op
from drivers.write_set import WriteSet

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.turn import Turn

__all__ = [
    "begin_transaction",
    "commit_intent",
    "earlier_durable",
    "end_transaction",
    "outcome_of",
    "renew_buffer",
    "schedule_flush",
    "sync",
    "wait_for",
]


def renew_buffer(host: ObjectHost) -> None:
    """What the turns of an interleaved object shared has been handed over: they go on with an empty buffer."""
    if host.interleaved:
        old, host.buffer = host.buffer, WriteBuffer()
        for turn in host.side_turns:
            if turn.buffer is old:
                turn.buffer = host.buffer


def begin_transaction(host: ObjectHost, turn: Turn) -> bool:
    """An interleaved turn writes to a buffer of its own while it is in a transaction; True when it begins to.

    What was written before commits first, and other turns do not see what may yet be rolled back.
    """
    if turn.buffer is not host.buffer:
        return False
    flush(host, host.buffer)
    turn.buffer = WriteBuffer()
    return True


def end_transaction(host: ObjectHost, turn: Turn) -> None:
    """The outermost transaction of an interleaved turn has ended: hand over what is left of it."""
    written, turn.buffer = turn.buffer, host.buffer
    if turn.running and written.dirty:
        flush(host, host.buffer)  # other turns wrote it first
        host.state.hand_over(written.layers[0])


def commit_intent(host: ObjectHost, turn: Turn) -> asyncio.Future[None]:
    """Make durable that this turn runs. Covers every earlier write set of the object too."""
    return wait_for(host, host.state.hand_over(WriteBuffer().top, extra=[intent_op(host, turn)]))


async def sync(host: ObjectHost, turn: Turn) -> None:
    """Hand over what the turn has so far, with its intent, and wait until it is durable."""
    if host.interleaved or turn.is_activation:
        flush(host, turn.buffer)
        await earlier_durable(host, turn)
        return
    if turn.read_only:
        await earlier_durable(host, turn)
        return
    if turn.buffer.dirty:
        turn.note_intent(hand_over_part(host, turn))
        await turn.ensure_intent()
    else:
        await earlier_durable(host, turn)
    turn.check()


def hand_over_part(host: ObjectHost, turn: Turn) -> asyncio.Future[None]:
    """What a turn has written so far, with its intent; its timer ends with the turn, not with its parts."""
    work = turn.work
    assert work is not None
    layer = turn.buffer.merged()
    turn.buffer = WriteBuffer()
    if isinstance(work, TimerWork) and work.row.name in layer.timers:
        turn.buffer.top.timers[work.row.name] = layer.timers.pop(work.row.name)
    return wait_for(host, host.state.hand_over(layer, extra=[intent_op(host, turn)]))


def intent_op(host: ObjectHost, turn: Turn) -> Op:
    assert turn.work is not None
    return (INTENTS, (host.id.type_name, host.id.key), (turn.turn_id, turn.work.pack_intent(turn)))


async def earlier_durable(host: ObjectHost, turn: Turn) -> None:
    """Wait until every write set handed over so far is durable. Raises what an earlier one failed with."""
    if host.interleaved:
        flush(host, host.buffer)
    last = host.state.last
    if last is not None and not last.done:
        await wait_for(host, last)


def wait_for(host: ObjectHost, write_set: WriteSet) -> asyncio.Future[None]:
    return outcome_of(host.partition.loop, write_set)


def outcome_of(loop: asyncio.AbstractEventLoop, write_set: WriteSet) -> asyncio.Future[None]:
    """Done when the write set is durable; raises why it was not applied."""
    future: asyncio.Future[None] = loop.create_future()

    def ended(error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
            future.exception()  # seen: a turn that was cut short does not ask

    write_set.when_done(ended)
    return future


def schedule_flush(host: ObjectHost) -> None:
    """Writes made without an await between them commit together: hand over at the next loop turn."""
    if not host.flush_scheduled:
        host.flush_scheduled = True
        host.partition.loop.call_soon(partial(flush_scheduled, host))


def flush_scheduled(host: ObjectHost) -> None:
    host.flush_scheduled = False
    flush(host, host.buffer)


def flush(host: ObjectHost, buffer: WriteBuffer) -> None:
    if not buffer.dirty:
        return
    host.state.hand_over(buffer.merged())
    if buffer is host.buffer:
        renew_buffer(host)
    else:
        buffer.reset()
