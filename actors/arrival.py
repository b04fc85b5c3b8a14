"""Slots that arrive: their rows are stored as they come, and run nothing before the slots are owned."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.address import ClassRef
from actors.ended_moves import EndedMoves
from actors.errors import MoveRefused
from actors.slot_image import ObjectPart, SlotImage
from actors.slot_rows import has_rows, remove_slots
from actors.slot_table import FROZEN, INCOMING, OWNED, as_ranges, owned_ops, slots_of
from actors.write_buffer import DirectoryRow
from drivers.tables import CLASSES, DEAD_LETTERS, DIRECTORY, OBJECTS, TIMERS, Op
from drivers.write_set import InboxEntry
from timers.rows import owned_ref

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["Arrivals"]


class Arrivals:
    """The target's side of moves. Every step may be asked for again after its answer was lost."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        #: move -> its last chunk that came, and the storing of it
        self._storing: dict[str, tuple[int, asyncio.Future[None]]] = {}
        self._ended = EndedMoves()
        #: held while slots are emptied: a step that took too long and is asked for again waits for the first
        self._emptying = asyncio.Lock()

    async def take_in(
        self, move_id: str, number: int, facts: tuple[Sequence[tuple[int, int]], int], data: bytes
    ) -> None:
        """Store one chunk; returns when it is durable. The first one replaces whatever was here of its slots.

        `facts`: the slots as inclusive ranges, and the source's counter of generations. Raises `MoveRefused` when the
        chunk is not the next one, as after a restart of this process: the source begins again then.
        """
        self._refuse_ended(move_id, number)
        last, storing = self._storing.get(move_id, (-1, None))
        if number != last or storing is None:
            if number not in (0, last + 1):
                raise MoveRefused(f"move {move_id}: chunk {number} came where {last + 1} belongs; begin again")
            storing = asyncio.ensure_future(self._store(move_id, number, facts, data))
            self._storing[move_id] = (number, storing)
        try:
            await asyncio.shield(storing)  # a chunk that comes again waits for the same end
        except BaseException:
            if storing.done():
                self._storing.pop(move_id, None)
            raise

    async def own(self, move_id: str, version: int) -> None:
        """The move is decided: run the slots from now on."""
        partition, table = self._partition, self._partition.slot_table
        await self._end(move_id)
        slots = table.slots_in(INCOMING, move_id)
        if slots:
            owned = owned_ops(slots, version)
            await partition.commit(owned)  # before it is durable they run nothing; if it fails they are asked for again
            if table.slots_in(INCOMING, move_id):  # else the same request, which came again, was faster
                table.take_up(owned)
                partition.slots_arrived(slots)

    async def discard(self, move_id: str) -> None:
        """The move was aborted: nothing of it stays, and nothing of it is taken in from now on."""
        partition = self._partition
        await self._end(move_id)
        async with self._emptying:
            slots = partition.slot_table.slots_in(INCOMING, move_id)
            if slots:
                await remove_slots(partition, slots)
                await partition.commit(partition.slot_table.forget(slots))

    def _refuse_ended(self, move_id: str, number: int) -> None:
        if move_id in self._ended:
            raise MoveRefused(f"move {move_id} has ended; its chunk {number} came after its time")

    async def _end(self, move_id: str) -> None:
        """Take in nothing more of the move. Returns when nothing of it is being stored: its rows are only found, and
        removed, once they are durable."""
        self._ended.add(move_id)
        _, storing = self._storing.pop(move_id, (-1, None))
        if storing is not None and not storing.done():
            await asyncio.wait((storing,))

    async def _begin(self, move_id: str, slots: Sequence[int]) -> None:
        partition = self._partition
        for earlier in partition.slot_table.moves_into(slots) - {move_id}:
            await self._end(earlier)  # it was aborted, and this process has not been told
        async with self._emptying:
            self._refuse_ended(move_id, 0)
            strange = [slot for slot in slots if partition.slot_table.state(slot) in (OWNED, FROZEN)]
            if strange:
                own = f"partition {partition.config.partition} has slots {as_ranges(strange)} itself"
                raise MoveRefused(f"{own}; they can't come again")
            await partition.commit(partition.slot_table.expect(slots, move_id))
            if has_rows(partition.store, slots) or partition.inbox.entries_of(slots):
                await remove_slots(partition, slots)

    async def _store(
        self, move_id: str, number: int, facts: tuple[Sequence[tuple[int, int]], int], data: bytes
    ) -> None:
        ranges, generation = facts
        if number == 0:
            await self._begin(move_id, slots_of([(low, high) for low, high in ranges]))
        await self._partition.commit(self._ops(SlotImage.unpack(data), generation))

    # --- chunks as operations ---------------------------------------------------------------------

    def _ops(self, image: SlotImage, generation: int) -> list[Op]:
        partition = self._partition
        counters = partition.counters
        counters.generation = max(counters.generation, generation)
        ops: list[Op] = []
        for part in image.objects:
            self._object_ops(part, ops)
        for table, key, values in image.rows:
            if table == CLASSES:
                partition.classes.learn(ClassRef(key[0], values[0], values[1]))
            else:
                ops.append((table, key, values))
        ops += [(DEAD_LETTERS, (counters.take_id(),), letter) for letter in image.letters]
        partition.inbox.take_in([InboxEntry.unpack(list(entry)) for entry in image.entries])
        return ops

    def _object_ops(self, part: ObjectPart, ops: list[Op]) -> None:
        store = self._partition.store
        oid = store.find_object(part.type_name, part.key)  # of an earlier chunk, which is durable
        if oid is None:
            oid = self._partition.counters.take_id()
            ops.append((OBJECTS, (oid,), (part.slot, part.type_name, part.key)))
        for table, key, values in part.rows:
            if table == DIRECTORY:
                ops.extend(DirectoryRow(oid, key[0], *values).put_ops(None))
            else:
                ops.append((table, (oid, *key), values))
        for lane, due_ms, kind, name, generation, *rest in part.timers:
            ops.append((TIMERS, (lane, due_ms, kind, owned_ref(oid, name), generation), tuple(rest)))
