"""Deleting an object whole: a call like others, which takes its place among them and happens once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from actors import call_turns, early_commit
from actors.durable_object import MethodInfo
from actors.messages import DELETE
from actors.turn import Turn
from actors.work import CallWork, Work
from actors.write_buffer import WriteBuffer
from drivers.tables import CLEAR, KV, OBJECTS, TABLES, Op

if TYPE_CHECKING:
    from actors.object_host import ObjectHost

__all__ = ["DELETION", "begin", "is_deletion"]


def _never_called(*_: Any) -> Any:
    raise AssertionError("a deletion runs no code of the class")


DELETION: Final = MethodInfo(DELETE, _never_called, _never_called, is_shared=False)


def is_deletion(work: Work) -> bool:
    """Whether the work is a deletion: it starts when nothing else of the object runs, and needs no instance."""
    return work.method is DELETION


def begin(host: ObjectHost, work: CallWork) -> None:
    """Remove everything of the object, in one commit. What comes after it meets an object that has never written.

    Its inbox rows and whatever else others still wait for stay until they are released.
    """
    partition = host.partition
    early_commit.flush(host, host.buffer)
    turn = Turn(host, work, work.turn_id, WriteBuffer(), partition.clock.wall_ms(), work.attempt)
    turn.end()
    oid = host.state.oid
    reply = work.encode_result(oid is not None, partition.settings.max_args_bytes)
    if oid is None and not work.claimed:
        call_turns.answer_when_durable(host, turn, reply)
        return
    ops = [] if oid is None else _ops(host, oid)
    entry = work.inbox_entry(reply, partition.settings.max_reply_memory_bytes)
    write_set = host.state.hand_over_deletion([*ops, *work.closing_ops(turn)], entry)
    if work.claimed:
        partition.careful.handed_over(work)
    partition.deletion_began(host.id, write_set)
    host.stop_instance()
    write_set.waiters.append(lambda error: call_turns.durable(host, turn, reply, error))


def _ops(host: ObjectHost, oid: int) -> list[Op]:
    ops: list[Op] = [(KV, (oid,), CLEAR), (OBJECTS, (oid,), None)]
    ops += [(spec.name, (oid,), CLEAR) for spec in TABLES.values() if spec.per_object and not spec.outlives_object]
    for row in host.directory().values():
        ops.extend(row.delete_ops())
    return ops
