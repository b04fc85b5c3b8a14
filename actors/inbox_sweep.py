"""Forgets recorded outcomes that nobody can ask for any more: by age for vanished clients, by asking for callers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from actors.address import slot_of
from actors.errors import MainspringError
from actors.logs import log_event

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["InboxSweep"]

#: How often what vanished clients and callers have left is looked through.
SWEEP_MS = 30_000


class InboxSweep:
    """Looks through the inbox now and then."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._asking = False
        self._scheduled = False

    def nudge(self) -> None:
        """There is something to look after: look once the interval has passed."""
        if not self._scheduled:
            self._scheduled = True
            self._partition.clock.call_later(SWEEP_MS, self._run)

    def _run(self) -> None:
        self._scheduled = False
        partition = self._partition
        if partition.stopped:
            return
        asked = partition.inbox.sweep(partition.serving_ms(), partition.settings.call_memory_ms)
        if partition.inbox.has_upkeep:
            partition.committer.poke()
        if asked and not self._asking:
            self._asking = True
            partition.loop.create_task(self._ask_callers(asked))
        if partition.inbox.needs_sweep:
            self.nudge()

    async def _ask_callers(self, entries: Sequence[Any]) -> None:
        """Outcomes of nested calls are forgotten when their caller says that it is finished, never by age."""
        try:
            by_partition: dict[int, list[Any]] = {}
            for entry in entries:
                type_name, key, _ = entry.caller
                number = self._partition.client.directory.partition_of(slot_of(type_name, key))
                by_partition.setdefault(number, []).append(entry)
            for number, asked in by_partition.items():
                unfinished = await self._partition.client.ask(number, [entry.caller for entry in asked])
                done = [entry.call_id for entry, still in zip(asked, unfinished, strict=True) if not still]
                self._partition.inbox.release(done, self._partition.serving_ms())
            if self._partition.inbox.has_upkeep and not self._partition.stopped:
                self._partition.committer.poke()
        except MainspringError as error:
            log_event(logging.INFO, "inbox_sweep_waits", f"a caller's partition does not answer: {error}")
        finally:
            self._asking = False
