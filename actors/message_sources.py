"""Asks the partitions of senders whether they have messages left."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from actors.address import slot_of
from actors.errors import MainspringError
from actors.logs import log_event
from actors.message_ids import pair_question
from timers.message_rows import ReceivedRow

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["MessageSources"]


class MessageSources:
    """Implements `timers.inbox_sweep.Sources` over the partition's own client."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    async def anything_left(self, row: ReceivedRow) -> bool | None:
        client = self._partition.client
        number = client.directory.partition_of(slot_of(row.source_class, row.source_key))
        question = (row.source_class, row.source_key, pair_question(row.pair))
        try:
            (left,) = await client.ask(number, [question])
        except MainspringError as error:
            log_event(logging.INFO, "inbox_sweep_waits", f"a sender's partition does not answer: {error}")
            return None
        return left
