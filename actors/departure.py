"""Slots that leave: turns come to their end, the slots are frozen, and their rows go to the partition that gets them.

From the freeze on, which is durable, the slots run nothing here, also after a restart, until the coordinator's
decision has been read: `call_off` or `complete`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from actors import interruption
from actors.ended_moves import EndedMoves
from actors.errors import MoveRefused
from actors.logs import log_event
from actors.messages import STALE
from actors.object_host import ObjectHost
from actors.slot_image import slot_images
from actors.slot_rows import remove_slots
from actors.slot_table import FROZEN, OWNED, as_ranges
from actors.timer_work import TimerWork
from actors.work import CallWork, Work

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["Departures"]

#: How long the target may take to store one chunk. The slots run nowhere meanwhile, and callers wait for them: a target
#: that is gone must be found out long before their deadlines.
CHUNK_TIMEOUT_MS = 10_000


class Departures:
    """The source's side of moves. Every step may be asked for again after its answer was lost."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._sending: dict[str, asyncio.Future[int]] = {}
        self._ended = EndedMoves()
        #: held while slots are emptied: a step that took too long and is asked for again waits for the first
        self._emptying = asyncio.Lock()

    async def send(self, move_id: str, slots: Sequence[int], target: int, *, patience_ms: int, cut_short: bool) -> int:
        """Freeze the slots and send all that belongs to them; the bytes sent, once all of it is durable there.

        Turns that run get `patience_ms` to end. With `cut_short` those that are left then are cancelled, and run again
        at the new owner; without it the slots go on here. Raises `MoveRefused` when it did not come about.
        """
        if move_id in self._ended:
            raise MoveRefused(f"move {move_id} has ended already")
        sending = self._sending.get(move_id)
        if sending is None:
            sending = asyncio.ensure_future(self._send(move_id, slots, target, patience_ms, cut_short))
            self._sending[move_id] = sending
            sending.add_done_callback(lambda ended: self._sent(move_id, ended))
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            if sending.cancelled():
                raise MoveRefused(f"move {move_id} was called off while it was under way") from None
            raise

    def _sent(self, move_id: str, ended: asyncio.Future[int]) -> None:
        self._sending.pop(move_id, None)
        if not ended.cancelled() and ended.exception() is not None:  # whoever asked may have gone
            text = f"the slots of move {move_id} were not sent: {ended.exception()}"
            log_event(logging.INFO, "move_not_sent", text, partition=self._number, move_id=move_id)

    async def _send(self, move_id: str, slots: Sequence[int], target: int, patience_ms: int, cut_short: bool) -> int:
        table = self._partition.slot_table
        if table.slots_in(FROZEN, move_id) != sorted(slots):
            strange = [slot for slot in slots if table.state(slot) != OWNED]
            if strange:
                raise MoveRefused(
                    f"partition {self._number} does not own slots {as_ranges(strange)}; nothing was moved"
                )
            await self._come_to_rest(set(slots), patience_ms, cut_short)
            self._partition.relay.slots_left(slots)
            await self._partition.commit(table.freeze(slots, move_id))
        return await self._transfer(move_id, slots, target)

    async def call_off(self, move_id: str) -> None:
        """The move was aborted: its slots run here again."""
        self._ended.add(move_id)
        sending = self._sending.get(move_id)
        if sending is not None:
            sending.cancel()
            await asyncio.wait((sending,))
        table = self._partition.slot_table
        slots = table.slots_in(FROZEN, move_id)
        if slots:
            # Everything before it is durable then too: what the relay has removed is not read, and sent, again.
            thawed = table.thaw(slots)
            await self._partition.commit(thawed)
            if table.slots_in(FROZEN, move_id):  # else the same request, which came again, was faster
                table.take_up(thawed)
                self._partition.slots_arrived(slots)

    async def complete(self, move_id: str) -> None:
        """The slots belong to the target, which runs them: delete what is left of them here."""
        self._ended.add(move_id)
        table = self._partition.slot_table
        async with self._emptying:
            slots = table.slots_in(FROZEN, move_id)
            if slots:
                await remove_slots(self._partition, slots)
                await self._partition.commit(table.forget(slots))

    @property
    def _number(self) -> int:
        return self._partition.config.partition

    # --- coming to rest ---------------------------------------------------------------------------

    async def _come_to_rest(self, slots: set[int], patience_ms: int, cut_short: bool) -> None:
        """Until no object of these slots is in memory. Nothing awaits between the last look and the return."""
        partition = self._partition
        partition.slot_table.leaving |= slots
        try:
            for host in partition.hosts_in(slots):
                self._turn_away(host)
            await self._rest(slots, patience_ms)
            busy = [host for host in partition.hosts_in(slots) if host.busy]
            if busy and cut_short:
                for host in busy:
                    self._cut_short(host)
                await self._rest(slots, patience_ms)
                busy = [host for host in partition.hosts_in(slots) if host.busy]
            if busy:
                raise MoveRefused(
                    f"{busy[0].id} was still busy after {patience_ms} ms; its slot stays where it is for now"
                )
        except BaseException:
            partition.slot_table.leaving -= slots
            partition.slots_arrived(slots)
            raise
        for host in partition.hosts_in(slots):
            partition.evict(host)

    async def _rest(self, slots: set[int], patience_ms: int) -> None:
        """Wait until the objects of these slots have nothing to do, for at most `patience_ms`."""
        partition = self._partition
        expired = asyncio.Event()

        def expire() -> None:
            expired.set()
            partition.host_idle.set()

        timer = partition.clock.call_later(patience_ms, expire)
        try:
            while not expired.is_set() and any(host.busy for host in partition.hosts_in(slots)):
                partition.host_idle.clear()
                await partition.host_idle.wait()
        finally:
            timer.cancel()

    def _turn_away(self, host: ObjectHost) -> None:
        """What waits at the object and has not begun goes to the new owner. Calls of turns stay: their callers may be
        what the move waits for."""
        kept: deque[Work] = deque()
        for work in host.queue:
            if work.resumed or work.claimed or (isinstance(work, CallWork) and work.is_of_turn):
                kept.append(work)
            else:
                self._send_away(work)
        host.queue = kept
        if not host.busy:
            self._partition.host_idle.set()

    def _send_away(self, work: Work) -> None:
        if isinstance(work, CallWork):
            for target in work.targets:
                target.turn_away(work.host.id.slot)
            work.answer(STALE, b"")
            self._partition.admission.work_ended(work)
        else:
            assert isinstance(work, TimerWork)
            self._partition.timer_ended(work)

    def _cut_short(self, host: ObjectHost) -> None:
        """Cancel the turns of the object; the new owner runs them again."""
        for turn in [*host.side_turns, *([host.current] if host.current is not None else [])]:
            interruption.supersede(host, turn)
            if turn.work is not None:
                log_event(logging.INFO, "turn_moved", f"{host.id}: a turn was cancelled to move its object")
                self._partition.claims.ended(turn.work)
                self._send_away(turn.work)
        for work in list(host.queue):
            self._send_away(work)
        host.queue.clear()
        self._partition.host_idle.set()

    # --- sending ----------------------------------------------------------------------------------

    async def _transfer(self, move_id: str, slots: Collection[int], target: int) -> int:
        partition = self._partition
        entries = partition.inbox.entries_of(slots)
        facts = [as_ranges(slots), partition.counters.generation]
        sent = number = 0
        for number, image in enumerate(slot_images(partition.store, slots, entries)):
            data = image.pack()
            await partition.client.admin(target, "take_in", [move_id, number, facts, data], timeout_ms=CHUNK_TIMEOUT_MS)
            sent += len(data)
        log_event(
            logging.INFO,
            "slots_sent",
            f"Partition {self._number} has sent {len(slots)} slots to partition {target}",
            move_id=move_id,
            chunks=number + 1,
            bytes=sent,
        )
        return sent
