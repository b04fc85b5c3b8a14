"""One sender and one receiver, as the relay has them in memory."""

from __future__ import annotations

from actors.address import slot_of
from actors.message_outcomes import NOWHERE
from drivers.clock import Handle
from timers.message_pair import PairQueue
from timers.message_rows import OutboxRow

__all__ = ["Pair"]


class Pair:
    """There as long as there are messages between the two."""

    __slots__ = ("id", "is_ready", "partition", "queue", "slot", "target_slot", "truncated", "undeleted", "wake")

    def __init__(self, row: OutboxRow, most_in_flight: int) -> None:
        self.id = row.pair
        self.slot = row.slot
        self.partition = NOWHERE
        self.target_slot = slot_of(row.target_class, row.target_key)
        self.queue = PairQueue(most_in_flight)
        #: it stands among those that may send
        self.is_ready = False
        #: the table may hold more after the last one
        self.truncated = False
        #: applied, and their rows not yet removed
        self.undeleted = 0
        self.wake: Handle | None = None

    @property
    def is_done(self) -> bool:
        return not self.queue and self.queue.idle and not self.undeleted and not self.truncated
