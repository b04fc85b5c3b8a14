"""The numbers of messages: one counter per slot, which outlives objects and moves along with its slot.

The receiver takes a number below one that it has applied for a repeat, so messages must become durable in the order of
their numbers. A turn's messages are numbered when its write set is handed over, which is the order of commits. The
engine draws a number when a delayed message fires, some steps before its batch is handed over; `in_order` says whether
that still is its place.
"""

from __future__ import annotations

from collections.abc import Collection

from drivers.store import Store
from drivers.tables import OUTBOX, SLOT_NUMBERS
from timers.batch import Batch, Put
from timers.message_rows import OutboxRow, SlotNumber

__all__ = ["MessageNumbers"]


class MessageNumbers:
    """Implements `timers.outbox_relay.Departures`. Numbers of write sets that failed are skipped."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._given: dict[int, int] = {}
        self._handed_over: dict[int, int] = {}
        #: (slot, number) of delayed messages whose batch was handed over, and whose end nobody has heard of
        self._departing: list[tuple[int, int]] = []

    def take(self, slot: int) -> int:
        """The next number of the slot, for a write set that is handed over now."""
        number = self._handed_over[slot] = self._next(slot)
        return number

    def draw(self, slot: int) -> int:
        """The next number, for a batch of the engine that is handed over later."""
        return self._next(slot)

    def in_order(self, batch: Batch) -> bool:
        """Whether the batch, handed over now, keeps the order of its slot's numbers."""
        for write in batch.writes:
            if isinstance(write, Put) and isinstance(write.row, SlotNumber):
                slot, number = write.row.slot, write.row.last
                last = self._handed_over.get(slot)
                if (self._durable(slot) if last is None else last) >= number:  # the slot may have left, and come back
                    return False
                self._handed_over[slot] = number
                self._departing.append((slot, number))
        return True

    def departed(self) -> list[OutboxRow]:
        """The delayed messages that have departed, durably, since this was asked last."""
        departing, self._departing = self._departing, []
        rows = []
        for place in departing:
            values = self._store.get(OUTBOX, place)
            if values is not None:
                rows.append(OutboxRow.from_columns(place, values))
            elif self._durable(place[0]) < place[1]:
                self._departing.append(place)  # still on its way to disk
        return rows

    def forget(self, slots: Collection[int]) -> None:
        """These slots go elsewhere, with their counters. Nothing of them is on its way to disk."""
        for slot in slots:
            self._given.pop(slot, None)
            self._handed_over.pop(slot, None)

    def _durable(self, slot: int) -> int:
        row = self._store.get(SLOT_NUMBERS, (slot,))
        return 0 if row is None else int(row[0])

    def _next(self, slot: int) -> int:
        last = self._given.get(slot)
        if last is None:
            last = self._durable(slot)
        self._given[slot] = last + 1
        return last + 1
