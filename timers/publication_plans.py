"""What becomes of publications, as batches: an advance is made, cleared, held back, let go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from timers.batch import Absent, Batch, Equals, Precondition, Put, Write
from timers.publication_payload import RecheckPayload
from timers.publication_rows import (
    AdvanceRow,
    Clearance,
    Contents,
    ItemRow,
    LineRow,
    StateRow,
    advance_ref,
    notice_timer,
)
from timers.registry import TimerKind, lane_of
from timers.rows import TimerRow

__all__ = ["MAX_UNPUBLISHED_ADVANCES", "change", "clear", "make", "recheck_timer", "release"]

#: Unpublished advances of a line. When the first of them clears, all may be published at once, and that is one batch:
#: a guard for each, which with the rest stays below the 100 operations of a batch.
MAX_UNPUBLISHED_ADVANCES: Final = 64
#: Items per batch: a guard and a row each, below the 100 operations of a batch.
_ITEMS_PER_BATCH: Final = 48


def make(line: LineRow, contents: Contents, now_ms: int, *, hooked: bool) -> Iterator[Batch]:
    """The next advance of a line, pending and without its timer. The batches belong into one commit."""
    advance = AdvanceRow(line.oid, line.line, line.next_sequence, contents.to_bytes(), now_ms)
    state = StateRow(*advance.key())
    is_new = line.next_sequence == 1
    after = replace(line, next_sequence=line.next_sequence + 1, hooked=int(hooked))
    guard: Precondition = Absent(line.table, line.key()) if is_new else Equals(line)
    yield Batch((guard, Absent(advance.table, advance.key())), (Put(after), Put(advance), Put(state)))
    rows = [ItemRow(line.oid, item, line.line, advance.sequence) for item in contents.items]
    for start in range(0, len(rows), _ITEMS_PER_BATCH):
        page = rows[start : start + _ITEMS_PER_BATCH]
        yield Batch(tuple(Absent(row.table, row.key()) for row in page), tuple(Put(row) for row in page))


def clear(
    line: LineRow, state: StateRow, run: Sequence[StateRow], now_ms: int, clearance: Clearance = Clearance.CLEARED
) -> Batch:
    """The advance becomes publishable, and with it the longest publishable prefix of its line is published.

    `run`: the states of the line's unpublished advances in order, up to and with the first one, other than `state`,
    that is not publishable. All of them are guards: two that clear at one time must not each take the other for
    pending, since nobody would publish them then.
    """
    published = line.published
    for each in run:
        if each.sequence != state.sequence and not each.publishable:
            break
        published = each.sequence
    guards = [Equals(line), Equals(state), *(Equals(each) for each in run if each.sequence != state.sequence)]
    writes: list[Write] = [Put(replace(state, clearance=clearance))]
    if published > line.published:
        after = replace(line, published=published, announced=line.announced if line.hooked else published)
        writes += [Put(after), Put(notice_timer(after, now_ms))]
    return Batch(tuple(guards), tuple(writes))


def change(line: LineRow, state: StateRow, clearance: Clearance) -> Batch:
    """An unpublished advance is held back. A timer that it has goes on, and clears nothing."""
    return Batch((Equals(line), Equals(state)), (Put(replace(state, clearance=clearance)),))


def release(line: LineRow, state: StateRow) -> Batch:
    """An advance that was held back is pending again. A timer of before no longer counts."""
    after = replace(state, clearance=Clearance.PENDING, generation=state.generation + 1)
    return Batch((Equals(line), Equals(state)), (Put(after),))


def recheck_timer(line: LineRow, state: StateRow, contents: bytes, now_ms: int) -> TimerRow:
    """The one timer of a blocked advance, due at once: what it needs elsewhere may be there already."""
    kind = TimerKind.PUBLICATION_RECHECK
    ref = advance_ref(*state.key())
    payload = RecheckPayload.new(state.generation, line.published, contents).to_bytes()
    return TimerRow(lane_of(kind), now_ms, kind, ref, state.generation, now_ms, payload=payload)
