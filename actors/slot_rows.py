"""Removes everything that a partition holds of some slots, in pages, so that no commit is long."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from actors.address import slot_of
from actors.slot_image import OBJECT_TABLES, SLOT_TABLES
from actors.write_buffer import DirectoryRow
from drivers.store import Store
from drivers.tables import CLEAR, DEAD_LETTERS, DIRECTORY, INTENTS, OBJECTS, TIMERS, Op
from timers.rows import slot_owner

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["has_rows", "remove_slots"]

#: Operations of one page. A cleared prefix counts as one, however many rows it has.
_PAGE_OPS = 500


def has_rows(store: Store, slots: Collection[int]) -> bool:
    """Whether any object of these slots is here, or anything that outlives its objects."""
    return any(
        store.objects_in_slot(slot) or any(store.scan(table, (slot,), limit=1) for table in SLOT_TABLES)
        for slot in slots
    )


async def remove_slots(partition: Partition, slots: Collection[int]) -> None:
    """Delete all rows of these slots, which run nothing here; what the slots' own rows say stays.

    Raises `CommitFailed` when a page was not applied; it may be called again.
    """
    page: list[Op] = []
    for op in list(_slot_ops(partition.store, slots)):
        page.append(op)
        if len(page) >= _PAGE_OPS:
            await partition.commit(page)
            page = []
    if page:
        await partition.commit(page)
    partition.inbox.forget_slots(slots)
    if partition.inbox.has_upkeep:
        partition.committer.poke()


def _slot_ops(store: Store, slots: Collection[int]) -> Iterator[Op]:
    wanted = set(slots)
    for slot in sorted(wanted):
        for oid, _type_name, _key in store.objects_in_slot(slot):
            yield from _object_ops(store, oid)
        for timer in store.engine_timers(slot_owner(slot)):
            yield TIMERS, timer[:5], None
        for table in SLOT_TABLES:
            yield table, (slot,), CLEAR
    for name, key, *_ in store.scan(INTENTS):
        if slot_of(name, key) in wanted:
            yield INTENTS, (name, key), None
    for number, name, key, *_ in store.scan(DEAD_LETTERS):
        if slot_of(name, key) in wanted:
            yield DEAD_LETTERS, (number,), None


def _object_ops(store: Store, oid: int) -> Iterator[Op]:
    for row in store.scan(DIRECTORY, (oid,)):
        yield from DirectoryRow(*row).delete_ops()
    for timer in store.engine_timers(oid):
        yield TIMERS, timer[:5], None
    for table in OBJECT_TABLES:
        yield table, (oid,), CLEAR
    yield OBJECTS, (oid,), None  # last: until then a repeat finds the rest by it
