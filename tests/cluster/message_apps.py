"""Durable objects that send each other messages, for the cluster tests: in a module that worker processes import."""

from __future__ import annotations

import os
import signal

from actors.durable_object import DurableObject, shared
from actors.errors import Rejected
from timers.backoff import RetryPolicy

__all__ = ["Inbox", "Sender"]

#: Many tries and short pauses: what refuses now and then never becomes a dead letter, and holds its pair up for little.
RETRY = RetryPolicy(max_attempts=100, base_ms=20, cap_ms=100)


class Inbox(DurableObject):
    """Keeps every message in the order in which it was applied, so that a loss, a repeat or a swap shows."""

    def take(self, sender: str, number: int) -> None:
        place: int = self.storage.get("count", 0)
        self.storage.put("count", place + 1)
        self.storage.put(f"message {place:06d}", (sender, number))

    def take_if_lucky(self, sender: str, number: int) -> None:
        """Refuses one run in five, after it has written."""
        self.take(sender, number)
        if not self.turn.random.randrange(5):
            raise Rejected("not this time")

    def poison(self) -> None:
        """Ends its process each time."""
        self.storage.put("poisoned", 1)
        os.kill(os.getpid(), signal.SIGKILL)

    @shared
    def count(self) -> int:
        count: int = self.storage.get("count", 0)
        return count

    @shared
    def messages(self) -> list[tuple[str, int]]:
        """(sender, number), in the order of application."""
        return [tuple(message) for message in self.storage.list(prefix="message ").values()]

    @shared
    def poisoned(self) -> bool:
        return "poisoned" in self.storage


class Sender(DurableObject):
    """Sends numbered messages, a few in each turn."""

    def run(self, to: list[str], count: int, method: str = "take") -> None:
        """Send the next `count` numbers to each of these."""
        first: int = self.storage.get("next", 0)
        for number in range(first, first + count):
            for key in to:
                getattr(self.send(Inbox, key, retry=RETRY), method)(self.key, number)
        self.storage.put("next", first + count)

    def send_poison(self, to: str) -> None:
        self.send(Inbox, to).poison()
        self.send(Inbox, to).take(self.key, 0)
