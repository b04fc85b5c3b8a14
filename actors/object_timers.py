"""An object's timers as the application sees them: set, look at, cancel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from actors.codec import decode, encode
from actors.errors import InvalidOption, TooManyTimers, ValueTooLarge
from actors.write_buffer import DirectoryRow
from timers.backoff import NAMED_TIMER_RETRY, RetryPolicy
from timers.registry import TimerKind
from timers.schedule import Misfire, TimerSpec, make_spec

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.turn import Turn

__all__ = ["ObjectTimers", "TimerInfo", "TimerState"]

#: Bytes of a timer's name: it is part of the timer table's key.
_MAX_NAME_BYTES = 512
ALARM_NAME = ""
#: Runs `on_alarm_exhausted`: a timer of the runtime's own; the NUL keeps it apart from what applications may name.
EXHAUSTED_TIMER = "\0exhausted"
#: Begins the name of a timer that wakes an execution of a durable function; its id follows.
EXECUTION_TIMER = "\0execution\0"
#: Begins the name of a dead letter's timer that is run again; the number keeps several apart.
_REDRIVEN = "\0redriven\0"


def redriven_name(number: int, name: str) -> str:
    """The name under which dead letter `number` of the timer `name` is run again."""
    return f"{_REDRIVEN}{number}\0{name}"


def shown_name(name: str) -> str:
    """The name that the application gave: of the timer, or of the execution that it wakes."""
    if name.startswith(_REDRIVEN):
        name = name[len(_REDRIVEN) :].partition("\0")[2]
    return name.removeprefix(EXECUTION_TIMER)


def is_internal(name: str) -> bool:
    """Whether the timer is the alarm or one of the runtime's own, and not one that the application named."""
    return name == ALARM_NAME or name.startswith("\0")


@dataclass(frozen=True)
class TimerInfo:
    """What a handler learns about the timer it runs for. Times are epoch ms; `fired_ms >= due_ms` always.

    `attempt` counts the failed runs before this one, `missed` the earlier occurrences that this run stands for.
    """

    name: str
    due_ms: int
    fired_ms: int
    attempt: int
    generation: int
    missed: int
    payload: Any

    @property
    def retry_count(self) -> int:
        """How often this occurrence has failed so far; 0 for the first run."""
        return self.attempt

    @property
    def is_retry(self) -> bool:
        return self.attempt > 0

    @property
    def scheduled_ms(self) -> int:
        """The instant it was set for."""
        return self.due_ms


@dataclass(frozen=True)
class TimerState:
    """One timer that is set. `next_ms` is when it runs next; after a failure that is later than `due_ms`."""

    name: str
    due_ms: int
    next_ms: int
    attempt: int
    generation: int
    mode: str
    every_ms: int | None
    cron: str | None
    method: str
    payload: Any


class ObjectTimers:
    """Named timers of one object: `set`, `get`, `cancel`, `list`. Part of the running turn, like storage."""

    __slots__ = ("_host",)

    def __init__(self, host: ObjectHost) -> None:
        self._host = host

    def set(
        self,
        name: str,
        *,
        at: Any = None,
        after: Any = None,
        every: Any = None,
        cron: str | None = None,
        method: str,
        payload: Any = None,
        misfire: Misfire = "coalesce",
        retry: RetryPolicy | None = None,
        jitter_ms: int = 0,
        tz: str | None = None,
        if_absent: bool = False,
    ) -> TimerState:
        """Set the timer `name`; exactly one of `at`, `after`, `every` and `cron` says when.

        The same name replaces, with a new generation; setting the same thing again changes nothing (`at` and `after`
        are the same when their instant is, `every` and `cron` when spec, payload, method and zone are). `if_absent`
        leaves an existing timer alone. The handler `method(info)` runs never early, its effects once.

        Raises `InvalidSchedule`, `InvalidOption` (name, method), `UnstorableValue`, `ValueTooLarge`, `TooManyTimers`.
        """
        turn = self._host.writing_turn()
        self._check_name(name)
        self._host.info.method(method)
        now_ms = self._host.partition.clock.wall_ms()
        spec = make_spec(
            now_ms,
            at=at,
            after=after,
            every=every,
            cron=cron,
            tz=tz,
            misfire=misfire,
            retry=NAMED_TIMER_RETRY if retry is None else retry,
            jitter_ms=jitter_ms,
            method=method,
            payload=self._payload(payload),
        )
        existing = self.row(turn, name)
        if existing is not None and (if_absent or TimerSpec.from_bytes(existing.spec).same_as(spec)):
            return self._state(existing)
        return self._state(self._put(turn, name, TimerKind.NAMED_TIMER, spec))

    def get(self, name: str) -> TimerState | None:
        """The timer of this name, or None."""
        turn = self._host.reading_turn()
        self._check_name(name)
        row = self.row(turn, name)
        return None if row is None else self._state(row)

    def cancel(self, name: str) -> bool:
        """Call the timer off, its retries too; whether it was set. A running handler goes on."""
        turn = self._host.writing_turn()
        self._check_name(name)
        return self.cancel_row(turn, name)

    def list(self) -> list[TimerState]:
        """All named timers, by name. The alarm is not among them."""
        rows = self.rows(self._host.reading_turn())
        return [self._state(row) for row in sorted(rows, key=lambda row: row.name) if not is_internal(row.name)]

    # --- rows, for storage and turns ------------------------------------------------------------

    def row(self, turn: Turn, name: str) -> DirectoryRow | None:
        known, row = turn.buffer.lookup_timer(name)
        if not known:
            row = self._host.directory().get(name)
        firing = self._host.firing.get(row.generation) if row is not None else None
        if firing is not None:
            return firing.following()  # it has begun, so what is set is what follows it, if anything does
        return row

    def rows(self, turn: Turn) -> Iterator[DirectoryRow]:
        """Every timer as the turn sees it, the alarm too."""
        names = set(self._host.directory())
        for layer in turn.buffer.layers:
            names.update(layer.timers)
        for name in names:
            row = self.row(turn, name)
            if row is not None:
                yield row

    def set_alarm(self, turn: Turn, due_ms: int) -> None:
        existing = self.row(turn, ALARM_NAME)
        if existing is not None and existing.first_due_ms == due_ms and existing.attempt == 0:
            return
        spec = TimerSpec(mode="at", start_ms=due_ms, method="alarm", retry=self._host.info.cls.alarm_retry)
        self._put(turn, ALARM_NAME, TimerKind.OBJECT_ALARM, spec)

    def cancel_row(self, turn: Turn, name: str) -> bool:
        if self.row(turn, name) is None:
            return False
        turn.buffer.put_timer(name, None)
        turn.wrote()
        return True

    def _put(self, turn: Turn, name: str, kind: TimerKind, spec: TimerSpec) -> DirectoryRow:
        most = self._host.partition.settings.max_timers_per_object
        # counting looks at every timer, so it is left aside while there can't be too many
        could_be = len(self._host.directory()) + sum(len(layer.timers) for layer in turn.buffer.layers)
        if could_be >= most and self.row(turn, name) is None and self._own(turn) >= most:
            raise TooManyTimers(f"{self._host.id} has {most:,} timers already: cancel some, or use more objects")
        generation = self._host.partition.counters.take_generation()
        row = DirectoryRow(
            oid=0,  # given when the turn's changes are handed over
            name=name,
            kind=int(kind),
            due_ms=spec.wake_ms(spec.first_due_ms, self.seed(name)),
            generation=generation,
            first_due_ms=spec.first_due_ms,
            attempt=0,
            crashes=0,
            missed=0,
            spec=spec.to_bytes(),
        )
        turn.buffer.put_timer(name, row)
        turn.wrote()
        return row

    def _own(self, turn: Turn) -> int:
        """How many there are, without those of executions, which have a limit of their own."""
        return sum(row.kind != TimerKind.DURABLE_SLEEP for row in self.rows(turn))

    def _payload(self, payload: Any) -> bytes:
        data = encode(payload)
        most = self._host.partition.settings.max_timer_payload_bytes
        if len(data) > most:
            raise ValueTooLarge(
                f"the payload of a timer of {self._host.id} takes {len(data):,} bytes (limit {most:,}): "
                "keep it in storage and give the timer its key"
            )
        return data

    def seed(self, name: str) -> bytes:
        """What the timer's jitter is drawn from."""
        return f"{self._host.id.type_name}\0{self._host.id.key}\0{name}".encode()

    @staticmethod
    def _check_name(name: Any) -> None:
        if not isinstance(name, str) or not name or "\0" in name:
            raise InvalidOption(f"a timer's name must be a text of at least one character and no NUL, not {name!r}")
        try:
            size = len(name.encode())
        except UnicodeEncodeError as error:
            raise InvalidOption(f"a timer's name must be valid text: {error.reason}") from error
        if size > _MAX_NAME_BYTES:
            raise InvalidOption(f"a timer's name of {size} bytes (limit {_MAX_NAME_BYTES}): shorten it")

    @staticmethod
    def _state(row: DirectoryRow) -> TimerState:
        spec = TimerSpec.from_bytes(row.spec)
        return TimerState(
            name=row.name,
            due_ms=row.first_due_ms,
            next_ms=row.due_ms,
            attempt=row.attempt,
            generation=row.generation,
            mode=spec.mode,
            every_ms=spec.every_ms or None,
            cron=spec.cron or None,
            method=spec.method,
            payload=decode(spec.payload) if spec.payload else None,
        )


def timer_info(row: DirectoryRow, spec: TimerSpec, fired_ms: int, missed: int) -> TimerInfo:
    """What the handler of this row is told."""
    payload = decode(spec.payload) if spec.payload else None
    return TimerInfo(shown_name(row.name), row.first_due_ms, fired_ms, row.attempt, row.generation, missed, payload)


def failed_row(row: DirectoryRow, spec: TimerSpec, now_ms: int, seed: bytes) -> DirectoryRow | None:
    """The row after one more failed run, or None when its retries are used up."""
    attempt = row.attempt + 1
    if spec.retry.is_exhausted(attempt):
        return None
    return replace(row, attempt=attempt, due_ms=now_ms + spec.retry.delay_ms(attempt, seed))
