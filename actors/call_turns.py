"""How turns that a call or a message starts end: recorded with what they wrote, and answered once that is durable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors import early_commit, interruption, message_turns
from actors.turn import Turn
from actors.work import CallWork, Reply, raised
from actors.write_buffer import WriteBuffer

if TYPE_CHECKING:
    from actors.object_host import ObjectHost

__all__ = ["answer_when_durable", "durable", "failed", "succeeded"]


def succeeded(host: ObjectHost, work: CallWork, turn: Turn, result: Any) -> BaseException | None:
    """Hand over what the turn did, with its outcome; the error when its result can't travel."""
    settings = host.partition.settings
    applied = None
    if work.message is not None:
        reply, applied = message_turns.NOTHING, message_turns.applied(host, work)
    else:
        try:
            reply = work.encode_result(result, settings.max_args_bytes)
        except Exception as error:
            return error
    if turn.read_only or not (turn.buffer.dirty or _must_record(turn, work)):
        answer_when_durable(host, turn, reply)
        return None
    entry = work.inbox_entry(reply, settings.max_reply_memory_bytes)
    extra = work.closing_ops(turn)
    write_set = host.state.hand_over(turn.buffer.merged(), extra=extra, inbox=entry, applied=applied)
    if work.claimed:
        host.partition.careful.handed_over(work)
    early_commit.renew_buffer(host)
    write_set.waiters.append(lambda error: durable(host, turn, reply, error))
    return None


def failed(host: ObjectHost, work: CallWork, turn: Turn, error: BaseException) -> None:
    """Answer with the exception; recorded where the caller must meet the same when it asks again."""
    reply = raised(error)
    if turn.read_only or not (_must_record(turn, work) or (host.interleaved and turn.buffer.dirty)):
        answer_when_durable(host, turn, reply)
        return
    entry = work.inbox_entry(reply, host.partition.settings.max_reply_memory_bytes)
    layer = turn.buffer.merged() if host.interleaved else WriteBuffer().top
    write_set = host.state.hand_over(layer, extra=work.closing_ops(turn), inbox=entry)
    if work.claimed:
        host.partition.careful.handed_over(work)
    early_commit.renew_buffer(host)
    write_set.waiters.append(lambda failure: durable(host, turn, reply, failure))


def _must_record(turn: Turn, work: CallWork) -> bool:
    """Whether the outcome is recorded although nothing was written.

    That of a call from another turn always is: the caller may decide by it, and must meet the same when run again.
    """
    return bool(turn.recorded or turn.called or work.claimed or work.caller)


def answer_when_durable(host: ObjectHost, turn: Turn, reply: Reply) -> None:
    """The gate: nothing that rests on an undurable write leaves the object."""
    if host.state.last is None or host.state.last.done:
        durable(host, turn, reply, None)
    else:
        host.state.last.waiters.append(lambda error: durable(host, turn, reply, error))


def durable(host: ObjectHost, turn: Turn, reply: Reply, error: BaseException | None) -> None:
    """What the answer rests on is on disk, or has failed."""
    work = turn.work
    assert isinstance(work, CallWork)
    if error is None:
        work.answer(*reply)
        host.partition.admission.work_ended(work)
        host.partition.release_calls(turn)
    elif turn.recorded and turn.intent_durable:
        # what it called has happened, so the turn must be run again until its own outcome is recorded
        interruption.run_again(host, work, turn)
    else:
        work.refuse(error)
        host.partition.admission.work_ended(work)
    if not host.queue and not host.busy:
        host.became_idle()
