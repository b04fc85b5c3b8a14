"""The coordinator's moves on Ray: what it asks of partition actors, and how it settles what it finds left over."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from actors.coordinator_store import CoordinatorStore
from actors.logs import log_event
from actors.mover import CHECK_TIMEOUT_S, COPY_TIMEOUT_S, MoveLimits, Mover
from actors.ray_calls import RayCalls, partition_actor
from actors.settings import Settings
from actors.slot_table import FROZEN

__all__ = ["SlotMoves"]

#: How long a partition may take for a step that only writes a few rows.
_STEP_TIMEOUT_S = 15.0
#: Deleting what has moved goes in pages, and can take as long as the copy did.
_DELETE_TIMEOUT_S = COPY_TIMEOUT_S


class _Actors:
    """Partition actors. See `MovePort`."""

    def __init__(self, calls: RayCalls) -> None:
        self._calls = calls

    async def check(self, partition: int) -> None:
        await self._ask(partition, "endpoint", timeout_s=CHECK_TIMEOUT_S)

    async def send_slots(
        self, source: int, move_id: str, slots: Sequence[int], target: int, patience_ms: int, cut_short: bool
    ) -> int:
        args = (move_id, list(slots), target, patience_ms, cut_short)
        sent: int = await self._ask(source, "send_slots", *args, timeout_s=COPY_TIMEOUT_S)
        return sent

    async def call_off(self, source: int, move_id: str) -> None:
        await self._ask(source, "call_off_move", move_id, timeout_s=_STEP_TIMEOUT_S)

    async def complete(self, source: int, move_id: str) -> None:
        await self._ask(source, "complete_move", move_id, timeout_s=_DELETE_TIMEOUT_S)

    async def own(self, target: int, move_id: str, version: int) -> None:
        await self._ask(target, "own_slots", move_id, version, timeout_s=_STEP_TIMEOUT_S)

    async def discard(self, target: int, move_id: str) -> None:
        await self._ask(target, "discard_slots", move_id, timeout_s=_DELETE_TIMEOUT_S)

    async def _ask(self, partition: int, method: str, *args: Any, timeout_s: float) -> Any:
        return await self._calls.call_async(partition_actor(partition), method, *args, timeout_s=timeout_s)


def _limits(settings: Settings) -> MoveLimits:
    return MoveLimits(settings.moves_side_by_side, settings.slots_per_move, settings.move_bytes_per_s)


class SlotMoves:
    """Belongs to the coordinator's event loop."""

    def __init__(self, store: CoordinatorStore, calls: RayCalls, settings: Settings | None = None) -> None:
        self._store = store
        self._port = _Actors(calls)
        self._map_changed = asyncio.Event()
        self.mover = Mover(
            store.moves,
            self._port,
            owners=lambda: store.slot_map().owners(),
            new_id=lambda: uuid.uuid4().hex,
            map_changed=self._tell,
            limits=_limits(settings or Settings()),
        )
        self._goal: tuple[int, ...] | None = None
        self._spreading: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Bring what an earlier coordinator has begun to its end."""
        self._spawn(self.mover.resume())

    def stop(self) -> None:
        """Begin nothing more; what is under way is on record."""
        self.mover.stop()
        for task in (*self._tasks, *([self._spreading] if self._spreading is not None else ())):
            task.cancel()

    async def wait_for_map(self, version: int, wait_ms: int) -> None:
        """Until the map is newer than this version, for at most `wait_ms`."""
        if self._store.slot_map().version > version:
            return
        try:
            await asyncio.wait_for(self._map_changed.wait(), wait_ms / 1_000)
        except asyncio.TimeoutError:
            return

    def _tell(self) -> None:
        self._map_changed.set()
        self._map_changed = asyncio.Event()

    # --- what the operator asks for ---------------------------------------------------------------

    def spread(self, partitions: Sequence[int]) -> None:
        """Begin to move slots until these partitions have equal shares. The newest goal counts."""
        goal = tuple(sorted(partitions))
        if self._spreading is not None and not self._spreading.done():
            if goal == self._goal:
                return
            self._spreading.cancel()
        self._goal = goal
        self._spreading = asyncio.get_running_loop().create_task(self.mover.spread(goal))

    def progress(self) -> dict[str, Any]:
        """Plain facts about the moves: goal, whether it is reached, and how far they are."""
        spreading = self._spreading
        error = None
        if spreading is not None and spreading.done() and not spreading.cancelled():
            error = spreading.exception()
        return {
            **asdict(self.mover.progress),
            "goal": None if self._goal is None else list(self._goal),
            "running": spreading is not None and not spreading.done(),
            "error": None if error is None else str(error),
            "moves": [asdict(move) for move in self._store.moves.all()],
        }

    async def move(self, slots: Sequence[int], target: int) -> None:
        """Move these slots to a partition; returns when it owns them."""
        self._store.partition(target)
        await self.mover.move(slots, target)

    # --- what partitions tell ---------------------------------------------------------------------

    def settle(self, partition: int, moves: Mapping[str, tuple[str, int]]) -> None:
        """A partition has slots of these moves: with their state there, and one of the slots. What is not on record has
        ended without it (a request came after its time), so the map says how it ended."""
        known = {move.move_id for move in self._store.moves.all()}
        for move_id, (state, slot) in moves.items():
            if move_id not in known:
                self._spawn(self._settle(partition, move_id, state, slot))

    async def _settle(self, partition: int, move_id: str, state: str, slot: int) -> None:
        slot_map = self._store.slot_map()
        is_owner = slot_map.owners()[slot] == partition
        if state == FROZEN:
            await (self._port.call_off if is_owner else self._port.complete)(partition, move_id)
        elif is_owner:
            await self._port.own(partition, move_id, slot_map.version)
        else:
            await self._port.discard(partition, move_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log_event(logging.ERROR, "moves_failed", f"a move could not be settled: {error}", error=error)
