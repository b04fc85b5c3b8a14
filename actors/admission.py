"""How calls come in: answered from the inbox, joined to their running original, refused, or queued at their object."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from actors.address import ObjectId, check_key, slot_of
from actors.deletion import DELETION
from actors.durable_object import ClassInfo, MethodInfo
from actors.errors import CallDiverged, InvalidOption, MainspringError, Overloaded, ReplyLost
from actors.message_ids import read_mark, read_pair_question
from actors.messages import (
    DELETE,
    PICKLED,
    RAISED,
    REFUSED,
    REPEAT,
    RESUMED,
    STALE,
    CallExtra,
    CallRow,
    outside_call_id,
)
from actors.partition_connection import ReplyTo
from actors.wire_errors import encode_error
from actors.work import MAY_PICKLE, REPLY_LOST, CallWork, Work, call_fingerprint, comparable_args
from drivers.tables import INTENTS

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.partition import Partition
    from actors.partition_connection import PartitionConnection

__all__ = ["Admission"]


class Admission:
    """The calls that a partition holds, by id, and the bounds on them."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._running: dict[bytes, CallWork] = {}
        self._held = 0
        self.calls = 0
        self.repeats = 0

    @property
    def held(self) -> int:
        """Calls from outside that have not been answered."""
        return self._held

    @property
    def busy(self) -> bool:
        """Whether any call has not been answered."""
        return bool(self._running)

    def adopt(self, work: CallWork) -> None:
        """A call that runs again after a crash: repeats of it join it."""
        self._running[work.turn_id] = work

    def admit(self, connection: PartitionConnection, row: CallRow) -> None:
        """A call has arrived: answer it from the inbox, join it to its running original, refuse it, or queue it."""
        seq, type_name, key, method_name, args, flags, _, extra = row
        partition = self._partition
        target = ReplyTo(connection, seq)
        call_id = extra[0] if extra is not None else None
        if call_id is None:
            call_id = outside_call_id(connection.session, seq)
        elif extra is not None and extra[2] is None:
            connection.aliases[seq] = call_id
        if flags & REPEAT:
            self.repeats += 1
        # a repeat is looked up before every bound
        comparable = comparable_args(args, flags, extra is not None and extra[2] is not None)
        running = self._running.get(call_id)
        if running is not None:
            known = comparable_args(running.args, running.flags, not running.is_outside)
            if known != comparable or running.method.name != method_name:
                target(REFUSED, encode_error(_diverged(type_name, method_name)))
            else:
                running.targets.append(target)
            return
        entry, is_released = partition.inbox.look_up(call_id)
        if entry is not None:
            self._answer_again(entry.fingerprint, entry.status, entry.reply, method_name, comparable, target)
            return
        if is_released:
            return  # its caller has the reply, or will never ask: a frame that was late
        host = partition.find_host(type_name, key)
        slot = slot_of(type_name, key) if host is None else host.id.slot
        if self._is_stale(connection, slot, flags, _belongs_to_turn(extra)):
            target(STALE, b"")
            return
        refused = connection.refused_classes.get(type_name)
        try:
            if refused is not None:
                raise refused
            if host is None:
                info = partition.classes.get(type_name)
                if info is None:
                    partition.classes.when_loaded(type_name, partial(self.admit, connection, row))
                    return
                if not isinstance(info, ClassInfo):
                    raise info
                check_key(key)
                _method(info, method_name)  # a call that is refused does not bring its object into memory
                host = partition.host(info, ObjectId(type_name, key, slot))
            work = self._work(host, row, call_id, connection.trusted_pickle)
        except MainspringError as error:
            target(REFUSED, encode_error(error))
            return
        work.targets.append(target)
        self._take(work)

    def _answer_again(
        self, fingerprint: bytes, status: int, reply: bytes, method: str, args: bytes, target: Any
    ) -> None:
        if fingerprint and fingerprint != call_fingerprint(method, args):
            target(REFUSED, encode_error(_diverged("", method)))
        elif status == REPLY_LOST:
            lost = ReplyLost(
                f"{method} ran and is durable, but its reply was larger than "
                f"{self._partition.settings.max_reply_memory_bytes:,} bytes and was not kept. Read the state instead."
            )
            target(RAISED, encode_error(lost))
        else:
            target(status, reply)

    def _is_stale(self, connection: PartitionConnection, slot: int, flags: int, of_turn: bool) -> bool:
        if slot in connection.stale_slots:
            if not flags & RESUMED:
                return True
            connection.stale_slots.discard(slot)
        table = self._partition.slot_table
        # what has begun may need more calls to come to its end; nothing new begins in a slot that is leaving
        if slot in table.owned and (of_turn or not (self._partition.draining or slot in table.leaving)):
            return False
        connection.stale_slots.add(slot)
        return True

    def _work(self, host: ObjectHost, row: CallRow, call_id: bytes, trusted: bool) -> CallWork:
        """The call as work. Raises what refuses it."""
        _, _, _, method_name, args, flags, timeout_ms, extra = row
        method = _method(host.info, method_name)
        settings = self._partition.settings
        waiting = len(host.queue)
        if waiting and waiting >= (host.info.cls.max_queued_turns or settings.max_queued_turns):
            raise Overloaded(f"{host.id} has {waiting} turns waiting, its max_queued_turns: call again later")
        caller = extra[2] if extra is not None else None
        if caller is None and self._held >= settings.max_partition_calls:
            raise Overloaded(
                f"partition {self._partition.config.partition} holds {self._held} calls, its max_partition_calls: "
                "call again later, or add partitions"
            )
        deadline_ns = self._partition.clock.monotonic_ns() + timeout_ms * 1_000_000 if timeout_ms else 0
        kept = flags & PICKLED
        # A turn that is run again may repeat its plain calls over a link, so their replies must fit one.
        if trusted and (kept or caller is None):
            kept |= MAY_PICKLE
        work = CallWork(host, method, call_id, args, kept, deadline_ns)
        if extra is not None:
            work.chain = extra[1]
            work.made_by(caller)
        if work.message is not None and method.is_shared:
            raise InvalidOption(f"{work.title} only reads, and nobody gets a message's result: call it through a stub")
        work.is_repeat = flags & REPEAT != 0
        return work

    def _take(self, work: CallWork) -> None:
        self.calls += 1
        self._running[work.turn_id] = work
        start = partial(work.host.enqueue, work)
        careful = self._partition.careful
        is_suspect = work.is_repeat and careful.unclean
        if work.message is not None:
            if careful.unclean or careful.active:
                careful.admit_message(work, work.host.expect(start))
            else:
                start()
            return
        if work.caller is not None:  # belongs to a turn that has been admitted already
            if is_suspect:
                careful.suspect_inner(work, work.host.expect(start))
            else:
                start()
            return
        self._held += 1
        work.counted = True
        if is_suspect:
            careful.suspect(work, work.host.expect(start))
        elif careful.active:
            careful.admit(work.host.expect(start))
        else:
            start()

    def work_ended(self, work: Work) -> None:
        """The call has been answered."""
        if isinstance(work, CallWork):
            self._running.pop(work.turn_id, None)
            if work.counted:
                work.counted = False
                self._held -= 1

    def unfinished(self, callers: Sequence[tuple[str, str, bytes]]) -> list[bool]:
        """Which of these turns have not reached a durable outcome yet, so that they may ask again."""
        return [self._is_unfinished(*caller) for caller in callers]

    def _is_unfinished(self, type_name: str, key: str, turn_id: bytes) -> bool:
        slot = slot_of(type_name, key)
        if turn_id in self._running or not self._partition.runs_slot(slot):
            return True  # of a slot that is elsewhere nothing is known here
        mark, pair = read_mark(turn_id), read_pair_question(turn_id)
        if mark is not None:
            return self._partition.relay.is_unfinished(slot, mark)
        if pair is not None:
            return self._partition.relay.anything_left(slot, pair)
        is_waiting = self._partition.deliveries.is_waiting(type_name, key, turn_id)
        if is_waiting is not None:
            return is_waiting
        intent = self._partition.store.get(INTENTS, (type_name, key))
        host = self._partition.find_host(type_name, key)
        return (intent is not None and intent[0] == turn_id) or (host is not None and host.busy)


def _belongs_to_turn(extra: CallExtra | None) -> bool:
    """Whether a turn waits for the call; nobody waits for a message."""
    return extra is not None and extra[2] is not None and read_mark(extra[2][2]) is None


def _method(info: ClassInfo, name: str) -> MethodInfo:
    return DELETION if name == DELETE else info.method(name)


def _diverged(type_name: str, method: str) -> CallDiverged:
    return CallDiverged(
        f"a call of {type_name}.{method} came with an id that was used with other arguments; nothing was run. "
        "A turn that is run again must make the same calls: use self.turn.now and self.turn.random."
    )
