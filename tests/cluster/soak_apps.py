"""Durable objects for the soak: each answers with who it is that commits, so that a second owner would show."""

from __future__ import annotations

import os

from actors.durable_object import DurableObject, shared
from actors.object_timers import TimerInfo
from tests.cluster.message_apps import RETRY, Inbox
from tests.support.soak_history import Sighting

__all__ = ["Witness"]


class Witness(DurableObject):
    """Applies tokens, fires timers and sends messages; everything in one order of its own."""

    def apply(self, token: str) -> tuple[int, tuple[int, ...]]:
        """How often the token has been applied now, and the sighting."""
        count: int = self.storage.get(f"token {token}", 0) + 1
        self.storage.put(f"token {token}", count)
        return count, tuple(self._see())

    def arm(self, due: dict[str, int]) -> None:
        """Set one timer for each name at its due time (epoch ms)."""
        for name, due_ms in due.items():
            self.timers.set(name, at=due_ms, method="ring")

    def ring(self, info: TimerInfo) -> None:
        number: int = self.storage.get("fires", 0)
        self.storage.put("fires", number + 1)
        self.storage.put(f"fire {number:06d}", (info.name, info.due_ms, info.fired_ms, *self._see()))

    def tell(self, to: list[str], count: int) -> None:
        """Send the next `count` numbers to each of these inboxes."""
        first: int = self.storage.get("next", 0)
        for number in range(first, first + count):
            for key in to:
                self.send(Inbox, key, retry=RETRY).take(self.key, number)
        self.storage.put("next", first + count)

    @shared
    def applied(self) -> dict[str, int]:
        """How often each token was applied."""
        return {key.removeprefix("token "): count for key, count in self.storage.list(prefix="token ").items()}

    @shared
    def fires(self) -> list[tuple[str, int, int, tuple[int, ...]]]:
        """Every fire that was committed: (name, due, fired, sighting)."""
        return [(name, due, at, tuple(seen)) for name, due, at, *seen in self.storage.list(prefix="fire ").values()]

    def _see(self) -> Sighting:
        place: int = self.storage.get("place", 0) + 1
        self.storage.put("place", place)
        partition = self._ms_host.partition
        version = partition.slot_table.version(self.id.slot) or 0
        return Sighting(place, self.id.slot, version, partition.config.partition, partition.epoch, os.getpid())
