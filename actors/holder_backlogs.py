"""What an object has sent and has not arrived: asked for by the sweep of leases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from actors.address import slot_of
from actors.errors import PartitionStopped
from drivers.tables import INTENTS, OUTBOX
from timers.lease_sweep import HolderBacklog
from timers.leases import Holder
from timers.message_rows import OutboxRow

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["LocalBacklogs", "holder_backlog"]


#: Messages read at a time: they may be large.
_PAGE: Final = 100


def holder_backlog(partition: Partition, holder: Holder) -> HolderBacklog:
    """Counts what waits in the outbox. A turn that runs, or must be run again, may send yet: it counts as a message."""
    now_ms = partition.clock.wall_ms()
    host = partition.find_host(holder.type_name, holder.object_key)
    if host is not None and host.current is not None:
        return HolderBacklog(1, host.current.now_ms)
    if partition.store.get(INTENTS, (holder.type_name, holder.object_key)) is not None:
        return HolderBacklog(1, 0)
    sent_ms = [row.created_ms for row in _under_way(partition, holder)]
    return HolderBacklog(len(sent_ms), min(sent_ms, default=now_ms))


def _under_way(partition: Partition, holder: Holder) -> Iterator[OutboxRow]:
    """The holder's messages in the outbox, which has those of a slot together, in the order in which they were sent.
    Delayed ones are not under way yet."""
    slot, after = slot_of(holder.type_name, holder.object_key), 0
    while True:
        page = partition.store.scan(OUTBOX, (slot,), start_after=(after,), limit=_PAGE)
        for columns in page:
            row = OutboxRow.from_columns(columns[:2], columns[2:])
            if (row.source_class, row.source_key) == (holder.type_name, holder.object_key):
                yield row
        if len(page) < _PAGE:
            return
        after = page[-1][1]


class LocalBacklogs:
    """Asks the partitions of this process. `find` gives the one that has the slot, if it runs."""

    def __init__(self, find: Callable[[int], Partition | None]) -> None:
        self._find = find

    async def backlog(self, holder: Holder) -> HolderBacklog:
        partition = self._find(slot_of(holder.type_name, holder.object_key))
        if partition is None or partition.stopped:
            raise PartitionStopped(f"the partition of {holder} is not running; its lease is kept")
        return holder_backlog(partition, holder)
