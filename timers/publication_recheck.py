"""Looks again whether a blocked advance has everything that it needs, and publishes it then (kind 12).

There is one timer per blocked advance, and no index from what is needed to who needs it: each looks for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Protocol

from timers.batch import Batch, Equals, NotAfter
from timers.errors import CorruptRow
from timers.firing import Done, DueTimer, Fired, PartitionRole, Reschedule, TimerCtx
from timers.publication_payload import RecheckPayload
from timers.publication_plans import clear
from timers.publication_rows import (
    AdvanceRow,
    Clearance,
    Contents,
    ItemRow,
    LineRow,
    Need,
    StateRow,
    parse_advance_ref,
)
from timers.registry import TimerKind

__all__ = ["COMMIT_WINDOW_MS", "RECHECK_MS", "PublicationRecheck", "Witnesses"]

#: How often a blocked advance looks again by itself. Usually it is woken before.
RECHECK_MS: Final = 5_000
#: What was seen must be committed within this; later it is looked at again.
COMMIT_WINDOW_MS: Final = 10_000
#: Blocked advances that one tick looks at. They have ticks of their own, so that this is about what one tick holds in
#: memory; one at a time, a chain of blocked advances would take a tick and a commit for each.
RECHECKS_PER_TICK: Final = 32
#: Questions to other objects per fire: one advance with thousands of needs must not keep the tick to itself.
READS_PER_FIRE: Final = 128
#: The same for all fires of one tick. The rest continue at their next fire.
READS_PER_TICK: Final = 512
#: Items per question.
REMOTE_PAGE: Final = 8


class Witnesses(Protocol):
    """Knows what other objects have published."""

    async def visible(self, type_name: str, key: str, items: Sequence[str], timer: DueTimer) -> Sequence[bool] | None:
        """For each item whether that object has published it, durably; None when nobody answers now.

        `timer` is who asks: it may be fired early once the first invisible one is published.
        """
        ...

    def waits(self, timer: DueTimer, due_ms: int, position: int, missing: Need | None) -> None:
        """The timer is moved to `due_ms`. It may be fired early once `missing` is published, when that is known."""
        ...


@dataclass(frozen=True)
class _Blocked:
    """A timer's advance with everything that its fire decides by."""

    line: LineRow
    advance: AdvanceRow
    state: StateRow
    contents: Contents
    progress: RecheckPayload


class PublicationRecheck:
    """Serves the timers of blocked advances."""

    kind = TimerKind.PUBLICATION_RECHECK
    max_per_tick = RECHECKS_PER_TICK

    def __init__(self, witnesses: Witnesses) -> None:
        self._witnesses = witnesses
        self._tick_ms = -1
        self._reads_left = 0

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        """Raises `CorruptRow` for rows that do not fit together: nothing is published on their word."""
        if ctx.partition.role is not PartitionRole.PARTITION:
            raise CorruptRow(f"a recheck timer is in a {ctx.partition.role.value}'s table, where there are no advances")
        window = NotAfter(ctx.now_ms + COMMIT_WINDOW_MS)
        key = parse_advance_ref(timer.reference)
        line = await ctx.store.get(LineRow, key[:2])
        advance = await ctx.store.get(AdvanceRow, key)
        state = await ctx.store.get(StateRow, key)
        if line is None and advance is None and state is None:
            return Done(Batch((window,)))  # they went with their object
        if line is None or advance is None or state is None:
            raise CorruptRow(f"advance {key} is incomplete: {line}, {advance}, {state}")
        if timer.generation != state.generation:
            return Done(Batch((window, Equals(state))))  # another timer has taken its place
        blocked = self._read(timer, line, advance, state)
        if state.publishable:
            return Done(Batch((window, Equals(state))))
        if state.clearance != Clearance.PENDING:
            return self._later(ctx, timer, blocked, 0, None)
        return await self._recheck(ctx, timer, blocked)

    @staticmethod
    def _read(timer: DueTimer, line: LineRow, advance: AdvanceRow, state: StateRow) -> _Blocked:
        contents = Contents.from_bytes(advance.contents)
        if (contents.line, contents.sequence) != (advance.line, advance.sequence):
            raise CorruptRow(f"advance {advance.key()} holds the contents of {contents.line} {contents.sequence}")
        if not 0 < advance.sequence < line.next_sequence:
            raise CorruptRow(f"advance {advance.key()} is none of its line, which goes to {line.next_sequence - 1}")
        if state.clearance not in Clearance.__members__.values():
            raise CorruptRow(f"advance {advance.key()} has the unknown clearance {state.clearance}")
        current = RecheckPayload.new(state.generation, line.published, advance.contents)
        return _Blocked(line, advance, state, contents, current.resume(RecheckPayload.from_bytes(timer.value)))

    async def _recheck(self, ctx: TimerCtx, timer: DueTimer, blocked: _Blocked) -> Fired:
        needed = blocked.contents.needed()
        local = list(takewhile(lambda need: need.is_local, needed))
        missing = await self._missing_local(ctx, blocked.line, local)
        if missing is not None:
            return self._later(ctx, timer, blocked, blocked.progress.position, missing)
        remote = needed[len(local) :]
        position, missing = await self._witness(ctx, timer, remote, blocked.progress.position)
        if position < len(remote):
            return self._later(ctx, timer, blocked, position, missing)
        run = await self._unpublished(ctx, blocked.line, blocked.state)
        batch = clear(blocked.line, blocked.state, run, ctx.now_ms)
        return Done(batch.plus([Equals(blocked.advance), NotAfter(ctx.now_ms + COMMIT_WINDOW_MS)]))

    def _later(
        self, ctx: TimerCtx, timer: DueTimer, blocked: _Blocked, position: int, missing: Need | None
    ) -> Reschedule:
        due_ms = ctx.now_ms + RECHECK_MS
        self._witnesses.waits(timer, due_ms, position, missing)
        guards = (Equals(blocked.advance), Equals(blocked.state), NotAfter(ctx.now_ms + COMMIT_WINDOW_MS))
        return Reschedule(due_ms, blocked.progress.at(position).to_bytes(), Batch(guards))

    # --- looking ----------------------------------------------------------------------------------

    @staticmethod
    async def _missing_local(ctx: TimerCtx, own: LineRow, needs: Sequence[Need]) -> Need | None:
        """The first of these items of the object itself that is not published. Nothing is remembered of it."""
        lines: dict[str, LineRow | None] = {own.line: own}
        for need in needs:
            item = await ctx.store.get(ItemRow, (own.oid, need.item))
            if item is None:
                return need
            if item.line not in lines:
                lines[item.line] = await ctx.store.get(LineRow, (own.oid, item.line))
            line = lines[item.line]
            if line is None or item.sequence > line.published:
                return need
        return None

    async def _witness(
        self, ctx: TimerCtx, timer: DueTimer, remote: Sequence[Need], position: int
    ) -> tuple[int, Need | None]:
        """How many of the needs are published, counted on from `position`, and the first that is not, if that is why it
        stopped."""
        if position > len(remote):
            raise CorruptRow(f"a recheck timer has seen {position} witnesses of {len(remote)}")
        for _ in range(READS_PER_FIRE):
            if position == len(remote) or not self._may_read(ctx.now_ms):
                break
            type_name, key, _item = remote[position]
            ahead = remote[position : position + REMOTE_PAGE]
            page = [need.item for need in takewhile(lambda need: need[:2] == (type_name, key), ahead)]  # noqa: B023
            answers = await self._witnesses.visible(type_name, key, page, timer)
            if answers is None:
                break
            if len(answers) != len(page) or any(type(answer) is not bool for answer in answers):
                raise CorruptRow(f"{type_name} {key} answered {len(page)} questions with {answers!r}")
            seen = sum(1 for _ in takewhile(bool, answers))
            position += seen
            if seen < len(page):
                return position, remote[position]
        return position, None

    def _may_read(self, now_ms: int) -> bool:
        """Take one read from what all fires of a tick share."""
        if now_ms != self._tick_ms:
            self._tick_ms, self._reads_left = now_ms, READS_PER_TICK
        self._reads_left -= 1
        return self._reads_left >= 0

    @staticmethod
    async def _unpublished(ctx: TimerCtx, line: LineRow, own: StateRow) -> list[StateRow]:
        """What `clear` wants to know of the line."""
        run: list[StateRow] = []
        for sequence in range(line.published + 1, line.next_sequence):
            state = await ctx.store.get(StateRow, (line.oid, line.line, sequence))
            if state is None:
                raise CorruptRow(f"advance {sequence} of line {line.line!r} has no state")
            run.append(state)
            if state.sequence != own.sequence and not state.publishable:
                break
        return run
