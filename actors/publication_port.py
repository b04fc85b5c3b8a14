"""What publications of a partition reach beyond their rows: witnesses elsewhere, `on_published`, and early rechecks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Final

from actors.address import ClassRef, ObjectId, slot_of
from actors.durable_object import ClassInfo
from actors.errors import InvalidOption, MainspringError
from actors.logs import log_event
from actors.publication_hints import PublicationHints, Waiter
from actors.toolkit.publication_hook import HOOK, hook_name, hook_spec
from drivers.tables import OBJECTS
from drivers.write_set import WriteSet
from timers.firing import DueTimer
from timers.publication_rows import ItemRow, LineRow, Need, advance_ref, parse_advance_ref
from timers.registry import TimerKind

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["MAX_WITNESSES", "PublicationPort"]

#: How long another partition may take to answer: its neighbours in the tick wait as well.
ANSWER_MS: Final = 2_000
#: A partition that did not answer is not asked again for this long, so that it costs a tick its time only once.
SILENCE_MS: Final = 3_000
#: Items that one question may name.
MAX_WITNESSES: Final = 1_000


class PublicationPort:
    """Implements `Witnesses` and `Subscribers` for one partition, and answers those of others."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self.hints = PublicationHints(partition)
        self._silent_until_ms: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Future[None] = partition.loop.create_future()

    @property
    def busy(self) -> bool:
        """Whether hints are on their way."""
        return bool(self._tasks)

    def stop(self) -> None:
        """Wait for nobody any more."""
        if not self._stopping.done():
            self._stopping.set_result(None)
        for task in list(self._tasks):
            task.cancel()

    # --- Witnesses --------------------------------------------------------------------------------

    async def visible(self, type_name: str, key: str, items: Sequence[str], timer: DueTimer) -> Sequence[bool] | None:
        waiter = self._waiter(timer.reference)
        if waiter is None:
            return None  # its object is being deleted
        partition = self._partition
        slot = slot_of(type_name, key)
        if partition.runs_slot(slot):
            return self._answer(type_name, key, items, waiter)
        number = partition.client.directory.partition_of(slot)
        if self._silent_until_ms.get(number, 0) > partition.clock.wall_ms():
            return None
        try:
            answers: Sequence[bool] | None = await self._ask(
                type_name, key, "witnesses", [type_name, key, list(items), list(waiter)]
            )
        except MainspringError as error:
            answers = None
            log_event(logging.INFO, "witness_waits", f"partition {number} does not answer: {error}")
        if answers is None:
            self._silent_until_ms[number] = partition.clock.wall_ms() + SILENCE_MS
        return answers

    def waits(self, timer: DueTimer, due_ms: int, position: int, missing: Need | None) -> None:
        self.hints.armed(timer, due_ms, position)
        waiter = self._waiter(timer.reference)
        if missing is not None and missing.is_local and waiter is not None:
            self.hints.register(waiter.type_name, waiter.key, missing.item, waiter)

    # --- Subscribers ------------------------------------------------------------------------------

    async def published(self, line: LineRow) -> bool:
        object_id = self._object(line.oid)
        if object_id is None or (object_id.type_name, object_id.key) in self._partition.deletions:
            return True  # nobody is left to be told
        if not self._partition.starts_timers(object_id.slot):
            return False  # told where it is going
        self._hint(object_id)
        if line.announced >= line.published:
            return True
        info = self._partition.classes.get(object_id.type_name)
        if info is None:
            self._partition.classes.when_loaded(object_id.type_name, lambda: None)
            return False
        if not isinstance(info, ClassInfo):
            return False  # the timers of the class say what is wrong with it
        if not hasattr(info.cls, HOOK):
            return True
        return await self._durable(self._arm_hook(info, object_id, line))

    def _arm_hook(self, info: ClassInfo, object_id: ObjectId, line: LineRow) -> WriteSet | None:
        """Set the timer that runs `on_published`, unless it is set. What the result says must become durable first."""
        host = self._partition.host(info, object_id)
        if hook_name(line.line) in host.directory():
            return host.state.last
        spec = hook_spec(line.line, line.announced + 1, self._partition.clock.wall_ms())
        return host.put_timer(hook_name(line.line), int(TimerKind.NAMED_TIMER), spec, [])

    async def _durable(self, write_set: WriteSet | None) -> bool:
        """Whether it became durable; False also when the partition stops first."""
        if write_set is None:
            return True
        landed: asyncio.Future[bool] = self._partition.loop.create_future()
        write_set.when_done(lambda error: None if landed.done() else landed.set_result(error is None))
        either: set[asyncio.Future[Any]] = {landed, self._stopping}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return landed.done() and landed.result()

    # --- what others ask --------------------------------------------------------------------------

    def answer(self, type_name: str, key: str, items: Sequence[str], waiter: Sequence[Any] | None) -> list[bool]:
        """For each item whether the object has published it, from durable rows. Raises `InvalidOption`."""
        if not _are_texts((type_name, key, *items)) or len(items) > MAX_WITNESSES:
            raise InvalidOption(f"a question for witnesses names at most {MAX_WITNESSES} items, all of them texts")
        return self._answer(type_name, key, items, None if waiter is None else _checked(waiter))

    def wake(self, type_name: str, key: str, line: str, sequence: int) -> bool:
        """Let a blocked advance of an object here look again now; whether the object is there."""
        waiter = _checked((type_name, key, line, sequence))
        oid = self._partition.store.find_object(waiter.type_name, waiter.key)
        if oid is None:
            return False
        self.hints.wanted(advance_ref(oid, waiter.line, waiter.sequence))
        self.tick_ended()
        return True

    def tick_ended(self) -> None:
        """Timers may be where they were expected now: move those that are to be fired early."""
        moves = self.hints.moves()
        if moves and not self._partition.stopped:
            self._spawn(self._move(moves))

    def _answer(self, type_name: str, key: str, items: Sequence[str], waiter: Waiter | None) -> list[bool]:
        oid = self._partition.store.find_object(type_name, key)
        answers = [oid is not None and self._is_published(oid, item) for item in items]
        if waiter is not None and False in answers:
            self.hints.register(type_name, key, items[answers.index(False)], waiter)
        return answers

    def _is_published(self, oid: int, item: str) -> bool:
        store = self._partition.store
        values = store.get(ItemRow.table, (oid, item))
        if values is None:
            return False
        row = ItemRow.from_columns((oid, item), values)
        line = store.get(LineRow.table, (oid, row.line))
        return line is not None and row.sequence <= LineRow.from_columns((oid, row.line), line).published

    # --- hints ------------------------------------------------------------------------------------

    def _hint(self, object_id: ObjectId) -> None:
        """Wake those whose item of this object is published now."""
        place = (object_id.type_name, object_id.key)
        waiting = self.hints.waiting_for(*place)
        oid = self._partition.store.find_object(*place) if waiting else None
        if oid is None:
            return
        ready = [waiter for waiter, item in waiting.items() if self._is_published(oid, item)]
        self.hints.told(*place, ready)
        for waiter in ready:
            if self._partition.runs_slot(slot_of(waiter.type_name, waiter.key)):
                self.wake(*waiter)
            else:
                self._spawn(self._send_wake(waiter))

    async def _send_wake(self, waiter: Waiter) -> None:
        try:
            await self._ask(waiter.type_name, waiter.key, "wake_publication", list(waiter))
        except MainspringError as error:
            log_event(logging.INFO, "wake_lost", f"{waiter} looks again by itself: {error}")

    async def _move(self, moves: Sequence[Any]) -> None:
        try:
            await self._partition.committer.apply(moves)
        except MainspringError as error:
            log_event(logging.INFO, "wake_lost", f"{len(moves)} blocked advances look again by themselves: {error}")
        else:
            self._partition.timer_armed(self._partition.clock.wall_ms())

    # --- the way there ----------------------------------------------------------------------------

    async def _ask(self, type_name: str, key: str, op: str, args: list[Any]) -> Any:
        """The owner's answer, or None when the partition stops first. Raises what the client raises."""
        request = self._partition.client.admin_object(ClassRef(type_name, "", ""), key, op, args, timeout_ms=ANSWER_MS)
        asked = self._partition.loop.create_task(request)
        try:
            await asyncio.wait({asked, self._stopping}, return_when=asyncio.FIRST_COMPLETED)
            return asked.result() if asked.done() else None
        finally:
            asked.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._partition.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _object(self, oid: int) -> ObjectId | None:
        values = self._partition.store.get(OBJECTS, (oid,))
        return None if values is None else ObjectId(values[1], values[2], values[0])

    def _waiter(self, ref: bytes) -> Waiter | None:
        oid, line, sequence = parse_advance_ref(ref)
        object_id = self._object(oid)
        return None if object_id is None else Waiter(object_id.type_name, object_id.key, line, sequence)


def _are_texts(values: Sequence[Any]) -> bool:
    return all(type(value) is str for value in values)


def _checked(waiter: Sequence[Any]) -> Waiter:
    if len(waiter) != 4 or not _are_texts(waiter[:3]) or type(waiter[3]) is not int or waiter[3] < 1:
        raise InvalidOption(f"a blocked advance is named by type, key, line and number, not by {waiter!r}")
    return Waiter(*waiter)
