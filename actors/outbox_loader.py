"""Reads the outbox table into the relay's memory, slot by slot and page by page, as far as there is room.

A slot is complete when everything of it that is durable has been looked at; until then new messages of the slot are
left to the pass over it, so that those of one pair are met in the order of their numbers, whatever else comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from drivers.store import Store
from drivers.tables import OUTBOX
from timers.message_rows import OutboxRow

__all__ = ["OutboxLoader"]

#: Rows read at a time: about a millisecond, so that turns are not held up while a large outbox is read.
_PAGE_ROWS: Final = 128
_KEY_COLUMNS: Final = 2
_START: Final = 0


class OutboxLoader:
    """`take` gets each row and says whether there was room for it; the pass stops at the first that had none."""

    def __init__(self, store: Store, take: Callable[[OutboxRow], bool]) -> None:
        self._store = store
        self._take = take
        #: slots to be read -> the number after which reading begins
        self._wanted: dict[int, int] = {}
        self._is_full = False

    def find_slots(self) -> Iterator[int]:
        """The slots that have messages."""
        rows = self._store.scan(OUTBOX, limit=1)
        while rows:
            slot: int = rows[0][0]
            yield slot
            rows = self._store.scan(OUTBOX, start_after=(slot,), limit=1)  # skips from slot to slot by the primary key

    def want(self, slot: int, after: int = _START) -> None:
        """Read the slot's messages with higher numbers than this."""
        self._wanted[slot] = min(after, self._wanted.get(slot, after))

    def forget(self, slot: int) -> None:
        """Do not read it."""
        self._wanted.pop(slot, None)

    def is_complete(self, slot: int) -> bool:
        """Whether the relay knows everything of the slot that is durable, or knows that it left something out."""
        return slot not in self._wanted

    @property
    def has_work(self) -> bool:
        """Whether there is something to read, and room for it."""
        return bool(self._wanted) and not self._is_full

    def has_room(self) -> None:
        """There may be room again."""
        self._is_full = False

    def read_page(self) -> None:
        """Read some rows of the slot whose turn it is."""
        slot, after = next(iter(self._wanted.items()))
        rows = self._store.scan(OUTBOX, (slot,), start_after=(after,), limit=_PAGE_ROWS)
        for columns in rows:
            row = OutboxRow.from_columns(columns[:_KEY_COLUMNS], columns[_KEY_COLUMNS:])
            if not self._take(row):
                self._is_full = True
                return
            self._wanted[slot] = row.number
        if len(rows) < _PAGE_ROWS:
            del self._wanted[slot]
