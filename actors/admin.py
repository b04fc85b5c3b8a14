"""Requests that are not calls of a method: listing objects, dead letters, status."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actors import live_files
from actors.address import ObjectId, slot_of
from actors.codec import decode, encode
from actors.dead_letters import DeadLetter
from actors.durable_object import ClassInfo
from actors.errors import InvalidOption, MainspringError, Overloaded
from actors.logs import log_event
from actors.message_outcomes import dead_message
from actors.messages import OK, REFUSED, STALE
from actors.object_timers import redriven_name
from actors.slot_table import INCOMING
from actors.wire_errors import encode_error
from drivers.tables import DEAD_LETTERS, OUTBOX, SLOT_NUMBERS, Op
from drivers.write_set import WriteSet
from timers.registry import TimerKind
from timers.schedule import TimerSpec

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["Admin"]

Reply = Callable[[int, bytes], None]
#: Rows that one request may ask for.
MAX_ROWS = 10_000


class Admin:
    """Answers admin requests of a partition's clients."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        #: dead letters that are being dealt with, until that is durable: how, and the answer
        self._dealt: dict[int, tuple[str, _Durable]] = {}
        self._ops: dict[str, Callable[..., Any]] = {
            "list_objects": self._list_objects,
            "dead_letters": self._dead_letters,
            "redrive": lambda number: self._deal(number, "redrive", self._redrive),
            "discard": lambda number: self._deal(number, "discard", self._discard),
            "status": partition.status,
            "read": lambda query, parameters: live_files.read(partition.config, query, parameters),
            "check": lambda: live_files.check(partition.config),
            "take_in": partition.arrivals.take_in,
            "witnesses": self._witnesses,
            "wake_publication": self._wake_publication,
            "await_execution": self._await_execution,
        }

    def handle(self, op: str, args: bytes, reply: Reply) -> None:
        """Run one request. The reply waits for the commit when the request wrote something."""
        handler = self._ops.get(op)
        try:
            if handler is None:
                raise InvalidOption(f"unknown admin request {op!r}")
            positional = decode(args)
            result = handler(*positional) if isinstance(positional, list | tuple) else handler(positional)
        except MainspringError as error:
            reply(REFUSED, encode_error(error))
            return
        except Exception as error:  # whatever a strange argument sets off: who asked is told
            log_event(logging.WARNING, "request_refused", f"admin request {op!r}: {error!r}", error=error)
            reply(REFUSED, encode_error(InvalidOption(f"admin request {op!r}: {error}")))
            return
        if result is _NOT_HERE:
            reply(STALE, b"")
        elif inspect.iscoroutine(result):
            task = self._partition.loop.create_task(result)
            task.add_done_callback(partial(self._answer_later, reply))
        elif isinstance(result, _Durable):
            result.write_set.when_done(lambda error: self._durable(reply, result.value, error))
        else:
            reply(OK, encode(result))

    @staticmethod
    def _answer_later(reply: Reply, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            return  # the partition stops; it is asked again elsewhere
        error = task.exception()
        if error is None:
            reply(OK, encode(task.result()))
        else:
            reply(REFUSED, encode_error(error))

    @staticmethod
    def _durable(reply: Reply, value: Any, error: BaseException | None) -> None:
        if error is None:
            reply(OK, encode(value))
        else:
            reply(REFUSED, encode_error(error))

    # --- objects ----------------------------------------------------------------------------------

    def _list_objects(
        self, type_name: str, prefix: str | None, after: str | None, limit: int
    ) -> list[tuple[str, int | None]]:
        store, table = self._partition.store, self._partition.slot_table
        found: list[tuple[str, int | None]] = []
        while True:
            rows = store.list_objects(type_name, prefix or "", after, limit)
            for _, key, due_ms in rows:
                # what is arriving is still listed where it comes from
                if not table.moving or table.state(slot_of(type_name, key)) != INCOMING:
                    found.append((key, due_ms))
            if len(rows) < limit or len(found) >= limit:
                return found[:limit]
            after = rows[-1][1]

    # --- publications -----------------------------------------------------------------------------

    def _witnesses(self, type_name: str, key: str, items: list[str], waiter: list[Any] | None) -> Any:
        return self._of_object(
            type_name, key, lambda: self._partition.publications.answer(type_name, key, items, waiter)
        )

    def _wake_publication(self, type_name: str, key: str, line: str, sequence: int) -> Any:
        return self._of_object(
            type_name, key, lambda: self._partition.publications.wake(type_name, key, line, sequence)
        )

    # --- executions -------------------------------------------------------------------------------

    def _await_execution(self, type_name: str, key: str, execution_id: str, wait_ms: int) -> Any:
        waits = self._partition.execution_waits
        return self._of_object(type_name, key, lambda: waits.wait(type_name, key, execution_id, wait_ms))

    def _of_object(self, type_name: str, key: str, answer: Callable[[], Any]) -> Any:
        """The answer about an object that is here. Elsewhere nothing is known of it: the client looks for its owner."""
        return answer() if self._partition.runs_slot(slot_of(type_name, key)) else _NOT_HERE

    # --- dead letters -----------------------------------------------------------------------------

    def _dead_letters(self, limit: int, after: int | None) -> list[DeadLetter]:
        rows = self._partition.store.scan(
            DEAD_LETTERS, start_after=None if after is None else (after,), limit=max(1, min(limit, MAX_ROWS))
        )
        return [self._letter(row) for row in rows]

    def _letter(self, row: tuple[Any, ...]) -> DeadLetter:
        number, type_name, key, kind, name, due_ms, attempts, crashes, error, _spec, created_ms = row
        return DeadLetter(
            number,
            self._partition.config.partition,
            type_name,
            key,
            kind,
            name,
            due_ms,
            attempts,
            crashes,
            error,
            created_ms,
        )

    def _deal(self, number: int, how: str, act: Callable[[tuple[Any, ...]], WriteSet]) -> bool | _Durable:
        """Do away with a letter; False when there is none any more: it was dealt with, perhaps by this very request,
        which is repeated after a lost connection.

        Until the first request is durable the letter is still there, and the next one joins it: what is run again is
        run again once.
        """
        partition = self._partition
        under_way = self._dealt.get(number)
        if under_way is not None:
            return _Durable(under_way[1].write_set, how == under_way[0])
        letter = partition.store.get(DEAD_LETTERS, (number,))
        if letter is None:
            return False
        if not partition.runs_slot(slot_of(letter[0], letter[1])):
            raise Overloaded(f"{letter[0]}/{letter[1]} is moving to another partition: try again")
        answer = _Durable(act((number, *letter)), True)
        self._dealt[number] = how, answer
        answer.write_set.when_done(partial(self._dealt_with, number))
        return answer

    def _dealt_with(self, number: int, _error: BaseException | None) -> None:
        del self._dealt[number]

    def _discard(self, letter: tuple[Any, ...]) -> WriteSet:
        return self._commit([(DEAD_LETTERS, (letter[0],), None)])

    def _redrive(self, letter: tuple[Any, ...]) -> WriteSet:
        """Run the letter's timer again, due now, as a one-shot with all its tries."""
        partition = self._partition
        number, type_name, key, kind, name, _due, _attempts, _crashes, _error, packed, _created = letter
        if kind == TimerKind.OUTBOX_RELAY:
            return self._send_again(number, type_name, key, packed)
        info = partition.classes.get(type_name)
        if not isinstance(info, ClassInfo):
            raise info if info is not None else Overloaded(f"class {type_name} is being loaded: try again")
        host = partition.host(info, ObjectId(type_name, key, slot_of(type_name, key)))
        # A recurring timer goes on beside its dead letters, and an alarm may have been set again: this run has a
        # name of its own, so that it takes nobody's place.
        spec = TimerSpec.from_bytes(packed).once(partition.clock.wall_ms())
        return host.put_timer(redriven_name(number, name), kind, spec, [(DEAD_LETTERS, (number,), None)])

    def _send_again(self, number: int, type_name: str, key: str, packed: bytes) -> WriteSet:
        """A new message at the end of the order, also when its sender is gone."""
        partition = self._partition
        slot = slot_of(type_name, key)
        taken = partition.numbers.take(slot)
        row = dead_message(packed, slot, taken, type_name, key, partition.clock.wall_ms())
        ops: list[Op] = [(SLOT_NUMBERS, (slot,), (taken,)), (OUTBOX, row.key(), row.values())]
        write_set = self._commit([*ops, (DEAD_LETTERS, (number,), None)])
        write_set.when_done(lambda error: None if error else partition.messages_left([row]))
        return write_set

    def _commit(self, ops: list[Op]) -> WriteSet:
        write_set = WriteSet(ops)
        self._partition.submit(write_set)
        return write_set


#: The answer of a request about an object of another partition.
_NOT_HERE: Final = object()


@dataclass(frozen=True)
class _Durable:
    """The answer of a request that wrote something."""

    write_set: WriteSet
    value: Any
