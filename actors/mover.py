"""Carries out moves: the coordinator's side, which alone decides what becomes of each.

A move has one commit point, its row in the coordinator's file. Before it the source may be told that the move is off;
after it the target owns the slots. Whatever dies on the way, the row says how it goes on: `resume` finishes every move
that is found there.

Telling both sides what was decided goes on beside other moves for as long as it takes: a partition that is gone for
good holds up nothing but itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from actors.errors import ActorUnreachable, InvalidOption, MainspringError, MoveRefused
from actors.logs import log_event
from actors.move_plan import PlannedMove, plan_moves
from actors.move_store import ABORTED, COMMITTED, COPYING, MoveRecord, MoveStore

__all__ = ["MoveLimits", "MovePort", "MoveProgress", "Mover"]

#: Turns of the moving slots get this long to end before the move is put off.
PATIENCE_MS = 5_000
#: After so many tries that found a turn still running, turns are cancelled and run again at the new owner.
CUT_SHORT_AFTER = 3
#: Between tries of a step that got no answer, and between rounds in which nothing moved.
RETRY_S = 0.25
MAX_RETRY_S = 5.0
#: A copy that takes longer than this is called off and planned again.
COPY_TIMEOUT_S = 120.0
#: A target that does not answer by then is left alone for this round.
CHECK_TIMEOUT_S = 5.0
#: How long the next move waits for the two sides of this one: longer than a killed partition needs to be back.
END_PATIENCE_S = 5.0

_NO_ANSWER = (ActorUnreachable, MainspringError, OSError, asyncio.TimeoutError)


class MovePort(Protocol):
    """The partitions, as the mover sees them. Every method raises `ActorUnreachable` or the partition's own error."""

    async def check(self, partition: int) -> None:
        """Whether it serves."""
        ...

    async def send_slots(
        self, source: int, move_id: str, slots: Sequence[int], target: int, patience_ms: int, cut_short: bool
    ) -> int: ...

    async def call_off(self, source: int, move_id: str) -> None: ...

    async def complete(self, source: int, move_id: str) -> None: ...

    async def own(self, target: int, move_id: str, version: int) -> None: ...

    async def discard(self, target: int, move_id: str) -> None: ...


@dataclass
class MoveProgress:
    """How far the moves are: slots that were to move, and have moved; moves that were put off; bytes sent. `errors`
    counts what should not have happened, and was tried again."""

    wanted: int = 0
    moved: int = 0
    put_off: int = 0
    bytes_sent: int = 0
    errors: int = 0
    last_error: str = ""


@dataclass(frozen=True)
class MoveLimits:
    """What moves may take from the work beside them: moves at a time, slots of one move, and bytes per second that each
    of the moves side by side may send, on average: it rests after a move, when no slot waits for it."""

    side_by_side: int = 2
    slots_per_move: int = 64
    bytes_per_s: int = 64 * 1024 * 1024


class Mover:
    """Runs the moves of one coordinator, `limits.side_by_side` at most, and one at a time from each source."""

    def __init__(
        self,
        store: MoveStore,
        port: MovePort,
        *,
        owners: Callable[[], Sequence[int]],
        new_id: Callable[[], str],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        map_changed: Callable[[], None] = lambda: None,
        limits: MoveLimits | None = None,
    ) -> None:
        self._store = store
        self._port = port
        self._owners = owners
        self._new_id = new_id
        self._sleep = sleep
        self._map_changed = map_changed
        self._limits = limits or MoveLimits()
        self._refusals: dict[tuple[int, ...], int] = {}
        self._working = asyncio.Lock()
        #: decided moves whose sides are being told
        self._endings: dict[str, asyncio.Task[None]] = {}
        #: the sides that have not yet done what was decided: nothing new begins with them
        self._owing: dict[str, set[int]] = {}
        #: targets that did not answer in this round, before any slot was frozen for them
        self._silent: set[int] = set()
        #: the record may show moves that nobody is carrying out
        self._must_resume = True
        self._stopped = False
        self.progress = MoveProgress()

    def stop(self) -> None:
        """Tell nobody anything more; what is under way is on record."""
        self._stopped = True
        for ending in self._endings.values():
            ending.cancel()

    async def resume(self) -> None:
        """Bring every move that is on record to its end. One that was still copying is called off. Returns once both
        sides of each have done their part, or have been silent for a while; they are told all the same."""
        for move in self._store.all():
            if move.state == COPYING:
                self._store.abort(move.move_id)
        self._must_resume = False
        await self._end(self._store.all())

    async def spread(self, partitions: Sequence[int]) -> None:
        """Move slots until these partitions own all of them, in equal shares. Raises `InvalidOption`."""
        if not partitions:
            raise InvalidOption("slots need at least one partition")
        async with self._working:
            self.progress = MoveProgress(errors=self.progress.errors)
            await self._until_moved(
                lambda: plan_moves(self._owners(), partitions, self._limits.slots_per_move), counted=True
            )

    async def move(self, slots: Sequence[int], target: int) -> None:
        """Move these slots to a partition, wherever they are."""
        async with self._working:
            await self._until_moved(lambda: self._by_source(slots, target))

    def _by_source(self, slots: Sequence[int], target: int) -> list[PlannedMove]:
        owners = self._owners()
        found: dict[int, list[int]] = {}
        for slot in slots:
            if owners[slot] != target:
                found.setdefault(owners[slot], []).append(slot)
        return [PlannedMove(source, target, tuple(moving)) for source, moving in found.items()]

    async def _until_moved(self, plan: Callable[[], Sequence[PlannedMove]], *, counted: bool = False) -> None:
        """Plan and carry out, round after round, until there is nothing left to move. A round that fails or moves
        nothing is followed by a pause, which grows."""
        pause = RETRY_S
        self._must_resume = True
        while True:
            before = self.progress.moved
            try:
                self._silent.clear()
                if self._must_resume:
                    await self.resume()
                planned = plan()
                if counted:
                    self.progress.wanted = self.progress.moved + sum(len(move.slots) for move in planned)
                if not planned:
                    return
                await self._run(self._possible(planned))
            except Exception as error:  # of this round alone: the next one looks at everything anew
                self._unexpected("planning or moving slots", error)
            if self.progress.moved == before:
                await self._sleep(pause)
                pause = min(pause * 2, MAX_RETRY_S)
            else:
                pause = RETRY_S

    def _possible(self, planned: Sequence[PlannedMove]) -> list[PlannedMove]:
        """What of a plan can be begun now."""
        owing = self._silent.union(*self._owing.values())
        moving = {slot for move in self._store.all() for slot in move.slots}
        possible: list[PlannedMove] = []
        for move in planned:
            silent = owing & {move.source, move.target}
            if silent:
                self.progress.last_error = f"partitions {sorted(silent)} do not answer"
                continue
            slots = tuple(slot for slot in move.slots if slot not in moving)
            if slots:
                possible.append(replace(move, slots=slots))
        return possible

    async def _run(self, plan: Sequence[PlannedMove]) -> None:
        """Carry out the moves, those of different sources side by side."""
        queues: dict[int, list[PlannedMove]] = {}
        for move in plan:
            queues.setdefault(move.source, []).append(move)
        room = asyncio.Semaphore(self._limits.side_by_side)

        async def work(moves: list[PlannedMove]) -> None:
            for move in moves:
                async with room:
                    if self._possible((move,)):  # the moves before it may have shown that a side is silent
                        try:
                            sent = await self._carry_out(move)
                            await self._sleep(sent / self._limits.bytes_per_s)
                        except Exception as error:  # of the record: what it says of this move is looked at again
                            self._must_resume = True
                            self._unexpected("moving slots", error)

        await asyncio.gather(*(work(moves) for moves in queues.values()))

    async def _carry_out(self, planned: PlannedMove) -> int:
        """One move, whatever comes of it; the bytes that it has sent."""
        move_id = self._new_id()
        try:
            await asyncio.wait_for(self._port.check(planned.target), CHECK_TIMEOUT_S)
        except Exception as error:
            self._silent.add(planned.target)
            self._put_off(move_id, planned, error)
            return 0
        self._store.begin(move_id, planned.source, planned.target, planned.slots)
        sent = 0
        try:
            sent = await asyncio.wait_for(self._send(move_id, planned), COPY_TIMEOUT_S)
            if not self._stopped:  # then it is the successor's
                self._store.commit(move_id)
        except Exception as error:
            self._put_off(move_id, planned, error)
        finally:
            # Also when this was cancelled: the slots are frozen at the source until it is told.
            ending = [] if self._stopped else self._decided(move_id)
        for move in ending:
            if move.state == COMMITTED:
                self._refusals.pop(planned.slots, None)
                self.progress.moved += len(planned.slots)
                self.progress.bytes_sent += sent
        await self._end(ending)
        return sent

    async def _send(self, move_id: str, planned: PlannedMove) -> int:
        cut_short = self._refusals.get(planned.slots, 0) >= CUT_SHORT_AFTER
        return await self._port.send_slots(
            planned.source, move_id, planned.slots, planned.target, PATIENCE_MS, cut_short
        )

    def _put_off(self, move_id: str, planned: PlannedMove, error: Exception) -> None:
        self.progress.put_off += 1
        if isinstance(error, MoveRefused):
            self._refusals[planned.slots] = self._refusals.get(planned.slots, 0) + 1
        if isinstance(error, _NO_ANSWER):
            self.progress.last_error = str(error)
            log_event(logging.INFO, "move_put_off", f"move {move_id} was put off: {error}", move_id=move_id)
        else:
            self._unexpected(f"move {move_id}", error)

    def _decided(self, move_id: str) -> list[MoveRecord]:
        """The move as its row says, which is aborted if it was not committed; its sides are being told."""
        self._store.abort(move_id)
        found = [move for move in self._store.all() if move.move_id == move_id]
        for move in found:
            if move.state == COMMITTED:
                self._map_changed()
            self._begin_to_end(move)
        return found

    # --- telling both sides -----------------------------------------------------------------------

    async def _end(self, moves: Iterable[MoveRecord]) -> None:
        """Tell both sides of these moves what was decided, and wait for a while until they have done it."""
        endings = [self._begin_to_end(move) for move in moves]
        if endings:
            await asyncio.wait(endings, timeout=END_PATIENCE_S)

    def _begin_to_end(self, move: MoveRecord) -> asyncio.Task[None]:
        ending = self._endings.get(move.move_id)
        if ending is None:
            self._owing[move.move_id] = {move.source, move.target}
            ending = self._endings[move.move_id] = asyncio.get_running_loop().create_task(self._finish(move))
            ending.add_done_callback(lambda _: self._ended(move.move_id))
        return ending

    def _ended(self, move_id: str) -> None:
        del self._endings[move_id]
        del self._owing[move_id]

    async def _finish(self, move: MoveRecord) -> None:
        """Tell both sides what was decided, until they have done it."""
        if move.state == COMMITTED:
            await self._insist(move, lambda: self._port.own(move.target, move.move_id, move.version))
            self._owing[move.move_id] = {move.source}
            await self._insist(move, lambda: self._port.complete(move.source, move.move_id))
        else:
            assert move.state == ABORTED
            await self._insist(move, lambda: self._port.call_off(move.source, move.move_id))
            # The slots run at the source again: they may go elsewhere, whatever has become of the target.
            await self._insist(move, lambda: self._record(self._store.release, move))
            self._owing[move.move_id] = {move.target}
            await self._insist(move, lambda: self._port.discard(move.target, move.move_id))
        await self._insist(move, lambda: self._record(self._store.end, move))

    async def _record(self, change: Callable[[str], None], move: MoveRecord) -> None:
        change(move.move_id)

    async def _insist(self, move: MoveRecord, step: Callable[[], Awaitable[None]]) -> None:
        pause = RETRY_S
        while True:
            try:
                await step()
                return
            except _NO_ANSWER as error:
                self.progress.last_error = str(error)
                log_event(logging.INFO, "move_waits", f"move {move.move_id} waits: {error}", move_id=move.move_id)
            except Exception as error:
                self._unexpected(f"move {move.move_id}", error)
            await self._sleep(pause)
            pause = min(pause * 2, MAX_RETRY_S)

    def _unexpected(self, what: str, error: Exception) -> None:
        self.progress.errors += 1
        self.progress.last_error = repr(error)
        log_event(logging.ERROR, "moves_failed", f"{what} failed; it is tried again: {error!r}", error=error)
