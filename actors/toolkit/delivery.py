"""Calls the sinks of outcomes: what the timer kind `OUTCOME_DELIVERY` is given to reach beyond its rows."""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import logging
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Final

from actors.codec import decode, encode
from actors.durable_object import ClassInfo
from actors.errors import CorruptValue, SinkFailed, SinkTimeout, ValueTypeUnavailable
from actors.logs import log_event
from actors.messages import OK, OK_PICKLED, RAISED, REPEAT
from actors.toolkit.http_sink import HttpPoster
from actors.toolkit.outcomes import Outcome
from actors.toolkit.sinks import FunctionSink, HttpSink, ObjectSink, SinkFunction, call_function, read_sink, registered
from actors.turn import inside_call_id
from actors.wire_errors import decode_error
from drivers.clock import Clock
from drivers.tables import BACKLOGS, DELIVERED, OUTCOMES
from timers.errors import SinkRaised, UndeliverableOutcome
from timers.outcome_delivery import SINK_TIMEOUT_MS
from timers.outcomes import Backlog, Delivered, OutcomeRow, Waiting

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["OutcomeDeliveries", "within"]

#: Begins what stands for a turn's id in calls that deliver outcomes.
_CALLER: Final = b"outcome\0"
_NUMBER_BYTES: Final = 8
#: Backlogs that `status` looks at: enough to see that something is wrong.
_MAX_STATUS_ROWS: Final = 1_000
#: Outcomes whose last delivery ended nobody knows how: remembered to have a re-run watched. More are only not watched.
_MAX_DOUBTFUL: Final = 10_000


def caller_id(row: OutcomeRow) -> bytes:
    """Names the try of an outcome as the caller of its sink: recorded replies are kept while it may come again."""
    numbers = (row.oid, row.seq, row.tries)
    return _CALLER + b"".join(number.to_bytes(_NUMBER_BYTES, "big") for number in numbers) + row.outcome_id.encode()


class OutcomeDeliveries:
    """Implements `OutcomeSinks` and `DeliveryWatch` for one partition."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._opened_ms = partition.clock.wall_ms()
        self._doubtful: set[str] = set()
        self._poster = HttpPoster(partition.clock.wall_ms)
        # counters for status
        self._delivered = self._synthetic = self._failed = self._retained = 0

    # --- delivering ---------------------------------------------------------------------------------

    async def deliver(self, outcome: OutcomeRow, source: Backlog) -> None:
        """Give one outcome to its sink. Raises what `OutcomeSinks` says."""
        sink = read_sink(outcome.sink)
        await self._load(source.type_name)  # the payload may hold values of its module
        given = Outcome(
            outcome.outcome_id,
            outcome.kind,
            _payload(outcome),
            outcome.created_ms,
            (source.type_name, source.object_key),
            outcome.subject,
            outcome.reason,
            outcome.detail,
        )
        if isinstance(sink, ObjectSink):
            work = self._call_object(sink, outcome, source, given)
        elif isinstance(sink, FunctionSink):
            work = self._call_function(sink, given)
        else:
            work = self._post(sink, given)
        await within(self._partition.clock, SINK_TIMEOUT_MS, work, f"the sink {outcome.sink!r}")

    async def _call_object(self, sink: ObjectSink, row: OutcomeRow, source: Backlog, outcome: Outcome) -> None:
        """A nested call whose caller is the outcome: its id is stable, so the sink answers a repeat from its record.

        An exception is recorded too. So each try after one has an id of its own.
        """
        turn_id = _CALLER + row.outcome_id.encode()
        may_be_repeat = row.created_ms <= self._opened_ms or row.outcome_id in self._doubtful
        _, status, payload = await self._partition.client.submit(
            sink.ref,
            sink.key,
            sink.method,
            encode([[outcome], {}]),
            flags=REPEAT if may_be_repeat else 0,
            timeout_ms=SINK_TIMEOUT_MS,
            call_id=inside_call_id(turn_id, sink.type_name, sink.key, sink.method, row.tries),
            caller=(source.type_name, source.object_key, caller_id(row)),
        )
        if status in (OK, OK_PICKLED):
            return
        error = decode_error(payload)
        if status == RAISED:
            raise SinkRaised(repr(error), getattr(error, "retry_after_ms", None)) from error
        raise error

    async def _call_function(self, sink: FunctionSink, outcome: Outcome) -> None:
        await call_function(registered(sink.name) or await _import(sink.name), outcome)

    async def _post(self, sink: HttpSink, outcome: Outcome) -> None:
        await self._poster.post(sink.url, outcome)

    async def _load(self, type_name: str) -> None:
        classes = self._partition.classes
        if isinstance(classes.get(type_name), ClassInfo):
            return
        loaded = asyncio.get_running_loop().create_future()
        if classes.get(type_name) is None:
            classes.when_loaded(type_name, lambda: None if loaded.done() else loaded.set_result(None))
            await loaded

    # --- who may ask again --------------------------------------------------------------------------

    def is_waiting(self, type_name: str, key: str, turn_id: bytes) -> bool | None:
        """Whether the outcome that made a call may make it again; None when the id is that of a turn."""
        if not turn_id.startswith(_CALLER):
            return None
        rest = turn_id[len(_CALLER) :]
        oid, seq, tries = (int.from_bytes(rest[at : at + _NUMBER_BYTES], "big") for at in (0, 8, 16))
        outcome_id = rest[3 * _NUMBER_BYTES :].decode()
        store = self._partition.store
        # an object that has moved here has another number; one that was deleted has none
        for number in {oid, store.find_object(type_name, key)} - {None}:
            values = store.get(OUTCOMES, (number, seq))
            if values is not None and values[0] == outcome_id and values[-1] == tries:
                return True
        return False

    # --- watching -----------------------------------------------------------------------------------

    def backlog_seen(self, backlog: Backlog, left: Waiting) -> None:
        where = f"{backlog.type_name}/{backlog.object_key}"
        text = f"{where}: {left.rows:,} outcomes wait"
        log_event(logging.DEBUG, "outcome_backlog", text, object=where, rows=left.rows, bytes=left.bytes)

    def delivered(self, outcome: OutcomeRow) -> None:
        self._delivered += 1
        self._doubtful.discard(outcome.outcome_id)

    def synthetic(self, outcome: OutcomeRow) -> None:
        self._synthetic += 1

    def sink_failed(self, outcome: OutcomeRow, error: Exception) -> None:
        self._failed += 1
        if isinstance(error, SinkRaised):
            self._doubtful.discard(outcome.outcome_id)
        elif len(self._doubtful) < _MAX_DOUBTFUL:
            self._doubtful.add(outcome.outcome_id)
        text = f"outcome {outcome.outcome_id} ({outcome.kind}) is not taken by {outcome.sink!r}: {error!r}"
        log_event(logging.WARNING, "sink_failed", text, outcome=outcome.outcome_id, sink=outcome.sink)

    def retained(self, outcome: OutcomeRow, reason: str) -> None:
        self._retained += 1
        text = f"outcome {outcome.outcome_id} can't be delivered as it is stored, and is kept: {reason}"
        log_event(logging.WARNING, "outcome_retained", text, outcome=str(outcome.outcome_id), reason=reason)

    def status(self) -> dict[str, Any]:
        """What waits, and what was done since the start, as plain data. Looks at a limited number of objects."""
        store = self._partition.store
        backlogs = [Backlog(*columns) for columns in store.scan(BACKLOGS, limit=_MAX_STATUS_ROWS)]
        done = {columns[0]: Delivered(*columns) for columns in store.scan(DELIVERED, limit=_MAX_STATUS_ROWS)}
        waiting = {b.oid: b.next_seq - 1 - (done[b.oid].rows if b.oid in done else 0) for b in backlogs}
        oldest = [done[b.oid].oldest_ms if b.oid in done else b.first_ms for b in backlogs if waiting[b.oid]]
        return {
            "outcome_objects": len(backlogs),
            "outcomes_waiting": sum(waiting.values()),
            "oldest_outcome_ms": min((ms for ms in oldest if ms is not None), default=None),
            "outcomes_delivered": self._delivered,
            "outcomes_synthetic": self._synthetic,
            "outcomes_failed": self._failed,
            "outcomes_retained": self._retained,
        }

    async def close(self) -> None:
        await self._poster.close()


def _payload(row: OutcomeRow) -> Any:
    try:
        return decode(row.payload)
    except ValueTypeUnavailable as error:  # a process that has the class can deliver it
        raise SinkFailed(f"the payload of outcome {row.outcome_id}: {error}") from error
    except CorruptValue as error:
        raise UndeliverableOutcome(f"its payload can't be read: {error}") from error


async def _import(name: str) -> SinkFunction:
    """The function "module:function". A module that is not here yet is imported on a thread, as classes are."""
    module, _, path = name.partition(":")
    try:
        if module not in sys.modules:
            await asyncio.to_thread(importlib.import_module, module)
        found: Any = sys.modules[module]
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:  # an import runs the application's code, which may raise anything
        raise SinkFailed(
            f"the function {name!r} can't be imported in the partition's process: {type(error).__name__}: {error}. "
            "Make its module importable there, or register the function with register_sink."
        ) from error
    if not callable(found):
        raise SinkFailed(f"{name!r} is {found!r}, which can't be called")
    function: SinkFunction = found
    return function


async def within(clock: Clock, timeout_ms: int, work: Coroutine[Any, Any, None], what: str) -> None:
    """Run the work outside any turn, for so long at most. Raises `SinkTimeout`; work that goes on then is let go."""
    loop = asyncio.get_running_loop()
    # a tick may have been started from inside a turn, which must not seem to be the work's
    task: asyncio.Task[None] = contextvars.Context().run(loop.create_task, work)
    ended: asyncio.Future[None] = loop.create_future()
    task.add_done_callback(lambda task: None if ended.done() else ended.set_result(None))
    late = SinkTimeout(f"{what} did not end within {timeout_ms:,} ms")
    handle = clock.call_later(timeout_ms, lambda: None if ended.done() else ended.set_exception(late))
    try:
        await ended
    finally:
        handle.cancel()
        if not task.done():
            task.cancel()
            task.add_done_callback(_seen)
    if task.cancelled():
        raise SinkFailed(f"{what} was cancelled by its own code")
    task.result()


def _seen(task: asyncio.Task[None]) -> None:
    """Nobody waits for it any more: its error must not be reported as never looked at."""
    if not task.cancelled():
        task.exception()
