"""Slots as data: everything that belongs to the objects of some slots, in chunks that another partition can take in.

Objects travel under their class and key, never under their number, which each partition gives anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from actors.address import slot_of
from actors.errors import MalformedFrame
from drivers.store import Store
from drivers.tables import CLASSES, DEAD_LETTERS, DIRECTORY, INTENTS, KV, TABLES, TIMERS, Key, Values
from timers.rows import slot_owner

__all__ = ["CHUNK_BYTES", "ObjectPart", "SlotImage", "slot_images"]

#: Bytes of one chunk, about: reading and packing one is a short slice of the loop's time.
CHUNK_BYTES: Final = 256 * 1024
#: Rows of one object that are read at a time.
_PAGE: Final = 500
#: What a row costs besides its values, about.
_ROW_BYTES: Final = 24
#: Tables of rows that belong to an object and are keyed by its number.
OBJECT_TABLES: Final = (KV, DIRECTORY, *(spec.name for spec in TABLES.values() if spec.per_object))
#: Tables whose key begins with a slot.
SLOT_TABLES: Final = tuple(spec.name for spec in TABLES.values() if spec.per_slot)


@dataclass
class ObjectPart:
    """Some rows of one object: (table, key without the object's number, values), and timers of the engine's own as
    (lane, due, kind, name, generation, first due, attempt, payload)."""

    type_name: str
    key: str
    slot: int
    rows: list[tuple[str, Key, Values]] = field(default_factory=list)
    timers: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass
class SlotImage:
    """One chunk. `rows` are those that are keyed by class and key, or by slot; `letters` are dead letters without
    their number; `entries` are recorded outcomes, as the inbox packs them."""

    objects: list[ObjectPart] = field(default_factory=list)
    rows: list[tuple[str, Key, Values]] = field(default_factory=list)
    letters: list[Values] = field(default_factory=list)
    entries: list[tuple[Any, ...]] = field(default_factory=list)

    def pack(self) -> bytes:
        """The chunk as bytes."""
        objects = [[part.type_name, part.key, part.slot, part.rows, part.timers] for part in self.objects]
        packed: bytes = msgpack.packb([objects, self.rows, self.letters, self.entries])
        return packed

    @classmethod
    def unpack(cls, data: bytes) -> SlotImage:
        """Read what `pack` wrote. Raises `MalformedFrame`."""
        try:
            objects, rows, letters, entries = msgpack.unpackb(data, use_list=False)
            return cls(
                [ObjectPart(name, key, slot, list(part), list(timers)) for name, key, slot, part, timers in objects],
                list(rows),
                list(letters),
                list(entries),
            )
        except (ValueError, TypeError) as error:
            raise MalformedFrame(f"a chunk of moving slots can't be read: {error}") from error


class _Packer:
    """Gathers rows and says when a chunk is full."""

    def __init__(self) -> None:
        self.image = SlotImage()
        self._size = 0

    def add(self, values: Values) -> None:
        self._size += _ROW_BYTES + sum(len(value) for value in values if isinstance(value, str | bytes))

    @property
    def is_full(self) -> bool:
        return self._size >= CHUNK_BYTES

    def take(self) -> SlotImage:
        image, self.image, self._size = self.image, SlotImage(), 0
        return image


def slot_images(store: Store, slots: Collection[int], entries: Collection[tuple[Any, ...]]) -> Iterator[SlotImage]:
    """The durable rows of these slots, chunk by chunk; `entries` are the outcomes recorded for their objects."""
    packer = _Packer()
    for slot in sorted(slots):
        for oid, type_name, key in store.objects_in_slot(slot):
            part = ObjectPart(type_name, key, slot)
            packer.image.objects.append(part)
            for row in _object_rows(store, oid):
                part.rows.append(row)
                packer.add(row[2])
                if packer.is_full:
                    yield packer.take()
                    part = ObjectPart(type_name, key, slot)
                    packer.image.objects.append(part)
            for timer in store.engine_timers(oid):
                lane, due_ms, kind, ref, generation, *values = timer
                part.timers.append((lane, due_ms, kind, ref[8:], generation, *values))
                packer.add(timer)
    for slot_row in _slot_rows(store, slots):
        packer.image.rows.append(slot_row)
        packer.add(slot_row[2])
        if packer.is_full:
            yield packer.take()
    for letter in _letters(store, set(slots)):
        packer.image.letters.append(letter)
        packer.add(letter)
        if packer.is_full:
            yield packer.take()
    for entry in entries:
        packer.image.entries.append(entry)
        packer.add(entry)
        if packer.is_full:
            yield packer.take()
    yield packer.take()


def _object_rows(store: Store, oid: int) -> Iterator[tuple[str, Key, Values]]:
    for table in OBJECT_TABLES:
        size = len(TABLES[table].key)
        after: Key | None = None
        while True:
            page = store.scan(table, (oid,), start_after=after, limit=_PAGE)
            for columns in page:
                yield table, columns[1:size], columns[size:]
            if len(page) < _PAGE:
                break
            after = page[-1][1:size]


def _slot_rows(store: Store, slots: Collection[int]) -> Iterator[tuple[str, Key, Values]]:
    """Rows keyed by slot and their timers, the classes, and the intents of objects in these slots."""
    for slot in sorted(slots):
        for table in SLOT_TABLES:
            yield from _rows_of_slot(store, table, slot)
        for timer in store.engine_timers(slot_owner(slot)):
            yield TIMERS, timer[:5], timer[5:]
    for name, *values in store.scan(CLASSES):
        yield CLASSES, (name,), tuple(values)
    wanted = set(slots)
    for name, key, *values in store.scan(INTENTS):
        if slot_of(name, key) in wanted:
            yield INTENTS, (name, key), tuple(values)


def _rows_of_slot(store: Store, table: str, slot: int) -> Iterator[tuple[str, Key, Values]]:
    size = len(TABLES[table].key)
    after: Key | None = None
    while True:
        page = store.scan(table, (slot,), start_after=after, limit=_PAGE)
        for columns in page:
            yield table, columns[:size], columns[size:]
        if len(page) < _PAGE:
            return
        after = page[-1][1:size]


def _letters(store: Store, slots: set[int]) -> Iterator[Values]:
    for columns in store.scan(DEAD_LETTERS):
        if slot_of(columns[1], columns[2]) in slots:
            yield columns[1:]
