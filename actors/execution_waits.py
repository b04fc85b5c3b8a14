"""Who waits for executions to end: asked of the partition, answered from what is durable, held in no turn."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from actors.address import ObjectId
from actors.errors import InvalidOption, UnknownExecution
from actors.execution_rows import OUTCOME, RUNNING, ExecutionRow, JournalRow, told

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["MAX_WAIT_MS", "ExecutionWaits"]

#: How long one request is held: after a move who waits finds the new owner when it asks again.
MAX_WAIT_MS: Final = 5_000


class ExecutionWaits:
    """Waiters by object. They are told to look again whenever an execution of theirs may have changed."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._waiting: dict[tuple[str, str], set[asyncio.Future[None]]] = {}

    async def wait(self, type_name: str, key: str, execution_id: str, wait_ms: int) -> dict[str, Any] | None:
        """What is known of the execution, once it does not run any more; None when that takes longer than `wait_ms`.

        Raises `UnknownExecution`, `InvalidOption`.
        """
        if not isinstance(wait_ms, int) or not 0 <= wait_ms <= MAX_WAIT_MS:
            raise InvalidOption(f"wait_ms = {wait_ms!r}: must be 0 to {MAX_WAIT_MS}")
        found = self._read(type_name, key, execution_id)
        if found is None:
            raise UnknownExecution(
                f"{type_name}/{key} has no execution {execution_id!r}: it was never started, or its time of retention "
                "is over"
            )
        if found["status"] != RUNNING or not wait_ms:
            return found
        place = (type_name, key)
        deadline_ns = self._partition.clock.monotonic_ns() + wait_ms * 1_000_000
        while (left_ns := deadline_ns - self._partition.clock.monotonic_ns()) > 0:
            changed: asyncio.Future[None] = self._partition.loop.create_future()
            self._waiting.setdefault(place, set()).add(changed)
            timer = self._partition.clock.call_later(left_ns / 1e6, partial(_settle, changed))
            try:
                await changed
            finally:
                timer.cancel()
                self._forget(place, changed)
            found = self._read(type_name, key, execution_id)
            if found is None or found["status"] != RUNNING:
                return found  # None: it was deleted or has moved; who asks again is told
        return None

    def changed(self, object_id: ObjectId) -> None:
        """Executions of the object have changed, durably."""
        for each in self._waiting.pop((object_id.type_name, object_id.key), ()):
            _settle(each)

    def _forget(self, place: tuple[str, str], changed: asyncio.Future[None]) -> None:
        waiting = self._waiting.get(place)
        if waiting is not None:
            waiting.discard(changed)
            if not waiting:
                del self._waiting[place]

    def _read(self, type_name: str, key: str, execution_id: str) -> dict[str, Any] | None:
        store = self._partition.store
        oid = store.find_object(type_name, key)
        values = None if oid is None else store.get(ExecutionRow.table, (oid, execution_id))
        if values is None:
            return None
        place = (oid, execution_id, OUTCOME)
        outcome = store.get(JournalRow.table, place)
        row = ExecutionRow.from_columns(place[:2], values)
        return told(row, None if outcome is None else JournalRow.from_columns(place, outcome))


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
