"""Carries out moves: the coordinator's side, which alone decides what becomes of each.

A move has one commit point, its row in the coordinator's file. Before it the source may be told that the move is off;
after it the target owns the slots. Whatever dies on the way, the row says how it goes on: `resume` finishes every move
that is found there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from actors.errors import ActorUnreachable, MainspringError, MoveRefused
from actors.logs import log_event
from actors.move_plan import PlannedMove, plan_moves
from actors.move_store import ABORTED, COMMITTED, COPYING, MoveRecord, MoveStore

__all__ = ["MovePort", "MoveProgress", "Mover"]

#: Turns of the moving slots get this long to end before the move is put off.
PATIENCE_MS = 5_000
#: After so many tries that found a turn still running, turns are cancelled and run again at the new owner.
CUT_SHORT_AFTER = 3
#: Between tries of a step that got no answer.
RETRY_S = 0.25
MAX_RETRY_S = 5.0
#: A copy that takes longer than this is called off and planned again.
COPY_TIMEOUT_S = 120.0

_NO_ANSWER = (ActorUnreachable, MainspringError, OSError, asyncio.TimeoutError)


class MovePort(Protocol):
    """The partitions, as the mover sees them. Every method raises `ActorUnreachable` or the partition's own error."""

    async def send_slots(
        self, source: int, move_id: str, slots: Sequence[int], target: int, patience_ms: int, cut_short: bool
    ) -> int: ...

    async def call_off(self, source: int, move_id: str) -> None: ...

    async def complete(self, source: int, move_id: str) -> None: ...

    async def own(self, target: int, move_id: str, version: int) -> None: ...

    async def discard(self, target: int, move_id: str) -> None: ...


@dataclass
class MoveProgress:
    """How far the moves are: slots that were to move, and have moved; moves that were put off; bytes sent."""

    wanted: int = 0
    moved: int = 0
    put_off: int = 0
    bytes_sent: int = 0
    last_error: str = ""


class Mover:
    """Runs the moves of one coordinator, at most `side_by_side` at a time, and one at a time from each source."""

    def __init__(
        self,
        store: MoveStore,
        port: MovePort,
        *,
        owners: Callable[[], Sequence[int]],
        new_id: Callable[[], str],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        map_changed: Callable[[], None] = lambda: None,
        side_by_side: int = 2,
        slots_per_move: int = 64,
    ) -> None:
        self._store = store
        self._port = port
        self._owners = owners
        self._new_id = new_id
        self._sleep = sleep
        self._map_changed = map_changed
        self._side_by_side = side_by_side
        self._slots_per_move = slots_per_move
        self._refusals: dict[tuple[int, ...], int] = {}
        self._working = asyncio.Lock()
        self.progress = MoveProgress()

    async def resume(self) -> None:
        """Bring every move that is on record to its end. One that was still copying is called off."""
        for move in self._store.all():
            if move.state == COPYING:
                self._store.abort(move.move_id)
        await asyncio.gather(*(self._finish(move) for move in self._store.all()))

    async def spread(self, partitions: Sequence[int]) -> None:
        """Move slots until these partitions own all of them, in equal shares."""
        async with self._working:
            await self.resume()
            self.progress = MoveProgress(wanted=self._left(partitions))
            pause = RETRY_S
            while plan := plan_moves(self._owners(), partitions, self._slots_per_move):
                before = self.progress.moved
                await self._run(plan)
                if self.progress.moved == before:
                    await self._sleep(pause)
                    pause = min(pause * 2, MAX_RETRY_S)
                else:
                    pause = RETRY_S

    async def move(self, slots: Sequence[int], target: int) -> None:
        """Move these slots to a partition, wherever they are."""
        async with self._working:
            await self.resume()
            pause = RETRY_S
            while by_source := self._by_source(slots, target):
                for source, moving in by_source.items():
                    await self._run([PlannedMove(source, target, tuple(moving))])
                if self._by_source(slots, target):
                    await self._sleep(pause)
                    pause = min(pause * 2, MAX_RETRY_S)

    def _by_source(self, slots: Sequence[int], target: int) -> dict[int, list[int]]:
        owners = self._owners()
        found: dict[int, list[int]] = {}
        for slot in slots:
            if owners[slot] != target:
                found.setdefault(owners[slot], []).append(slot)
        return found

    def _left(self, partitions: Sequence[int]) -> int:
        return sum(len(move.slots) for move in plan_moves(self._owners(), partitions, self._slots_per_move))

    async def _run(self, plan: Sequence[PlannedMove]) -> None:
        """Carry out the moves, those of different sources side by side."""
        queues: dict[int, list[PlannedMove]] = {}
        for move in plan:
            queues.setdefault(move.source, []).append(move)
        room = asyncio.Semaphore(self._side_by_side)

        async def work(moves: list[PlannedMove]) -> None:
            for move in moves:
                async with room:
                    await self._carry_out(move)

        await asyncio.gather(*(work(moves) for moves in queues.values()))

    async def _carry_out(self, planned: PlannedMove) -> None:
        move_id = self._new_id()
        self._store.begin(move_id, planned.source, planned.target, planned.slots)
        version: int | None = None
        try:
            sent = await asyncio.wait_for(self._send(move_id, planned), COPY_TIMEOUT_S)
            version = self._store.commit(move_id)
        except _NO_ANSWER as error:
            self.progress.put_off += 1
            self.progress.last_error = str(error)
            if isinstance(error, MoveRefused):
                self._refusals[planned.slots] = self._refusals.get(planned.slots, 0) + 1
            log_event(logging.INFO, "move_put_off", f"move {move_id} was put off: {error}", move_id=move_id)
        if version is None:
            self._store.abort(move_id)
        else:
            self._map_changed()
            self._refusals.pop(planned.slots, None)
            self.progress.moved += len(planned.slots)
            self.progress.bytes_sent += sent
        for move in self._store.all():
            if move.move_id == move_id:
                await self._finish(move)

    async def _send(self, move_id: str, planned: PlannedMove) -> int:
        cut_short = self._refusals.get(planned.slots, 0) >= CUT_SHORT_AFTER
        return await self._port.send_slots(
            planned.source, move_id, planned.slots, planned.target, PATIENCE_MS, cut_short
        )

    async def _finish(self, move: MoveRecord) -> None:
        """Tell both sides what was decided, until they have done it."""
        if move.state == COMMITTED:
            await self._insist(move, lambda: self._port.own(move.target, move.move_id, move.version))
            await self._insist(move, lambda: self._port.complete(move.source, move.move_id))
        else:
            assert move.state == ABORTED
            await self._insist(move, lambda: self._port.call_off(move.source, move.move_id))
            await self._insist(move, lambda: self._port.discard(move.target, move.move_id))
        self._store.end(move.move_id)

    async def _insist(self, move: MoveRecord, step: Callable[[], Awaitable[None]]) -> None:
        pause = RETRY_S
        while True:
            try:
                await step()
                return
            except _NO_ANSWER as error:
                self.progress.last_error = str(error)
                log_event(logging.INFO, "move_waits", f"move {move.move_id} waits: {error}", move_id=move.move_id)
            await self._sleep(pause)
            pause = min(pause * 2, MAX_RETRY_S)
