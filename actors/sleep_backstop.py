"""The backstop of durable functions: executions that nothing would wake are found and woken.

The timer of an execution is set in the commit that stores what it waits for, so there should be none. What a damaged
file or a mistake of ours takes away must not let somebody's order sleep for ever.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.address import ObjectId
from actors.durable_object import ClassInfo
from actors.execution_rows import RUNNING, ExecutionRow, execution_name, execution_timer, timer_name
from actors.logs import log_event
from actors.write_buffer import WriteBuffer
from drivers.tables import OBJECTS
from timers.durable_sleep import DurableTimerService, Sleep, timer_id

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.partition import Partition

__all__ = ["SleepBackstop"]


class SleepBackstop:
    """The executions of one partition, as the `DurableTimerService` sees them: due ones without a timer."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._found: dict[uuid.UUID, tuple[ObjectId, int, str]] = {}
        self._running: asyncio.Task[None] | None = None
        self.service = DurableTimerService(
            self,
            now_ms=partition.clock.wall_ms,
            monotonic_ms=lambda: partition.clock.monotonic_ns() // 1_000_000,
            sleep=lambda ms: asyncio.sleep(ms / 1_000),
            notify=lambda _id: None,  # who is woken is the object, by its timer
        )
        #: executions that were woken by this
        self.woken = 0

    def start(self) -> None:
        """Look now and then, until `stop`."""
        self._running = self._partition.loop.create_task(self.service.run())

    def stop(self) -> None:
        """Look no more."""
        if self._running is not None:
            self._running.cancel()

    async def due(self, now_ms: int) -> Sequence[Sleep]:
        """See `DueSleeps.due`."""
        self._found.clear()
        sleeps = []
        for oid, execution_id, wake_ms in self._partition.store.unwatched_executions(now_ms, RUNNING, timer_name("")):
            values = self._partition.store.get(OBJECTS, (oid,))
            if values is None:
                continue
            object_id = ObjectId(values[1], values[2], values[0])
            name = execution_name(object_id.type_name, object_id.key, execution_id)
            sleeps.append(Sleep(timer_id(name, 0), name, wake_ms))
            self._found[sleeps[-1].timer_id] = object_id, oid, execution_id
        return sleeps

    async def mark_fired(self, timer_id: uuid.UUID) -> bool:
        """Set the timer that is missing; False when there is one by now, or when it is not for us to set it."""
        object_id, oid, execution_id = self._found[timer_id]
        info = self._partition.classes.get(object_id.type_name)
        if not self._partition.starts_timers(object_id.slot) or not isinstance(info, ClassInfo):
            return False
        host = self._partition.host(info, object_id)
        if host.state.oid != oid or not self._is_unwatched(host, oid, execution_id):
            return False
        name, now_ms = timer_name(execution_id), self._partition.clock.wall_ms()
        buffer = WriteBuffer()
        buffer.top.put_timer(name, execution_timer(name, now_ms, self._partition.counters.take_generation()))
        host.state.hand_over(buffer.top)
        self.woken += 1
        log_event(
            logging.ERROR,
            "execution_woken",
            f"{object_id}: nothing would have woken execution {execution_id!r}, which was due; it goes on now",
            execution=execution_id,
        )
        return True

    def _is_unwatched(self, host: ObjectHost, oid: int, execution_id: str) -> bool:
        """By what is durable and what is on its way."""
        place = ExecutionRow.table, (oid, execution_id)
        values = host.state.read_row(place)
        if values is None or timer_name(execution_id) in host.directory():
            return False
        row = ExecutionRow.from_columns(place[1], values)
        return row.status == RUNNING and row.wake_ms is not None and row.wake_ms <= self._partition.clock.wall_ms()
