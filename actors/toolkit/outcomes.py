"""An object's outcomes: queued with the state that caused them, delivered to a sink at least once."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Final

from actors.errors import InvalidOption, TooManyOutcomes
from actors.toolkit.capability import Capability
from actors.toolkit.sinks import HttpSink, Sink, check_json, read_sink, register_sink, sink_of
from timers.errors import UndeliverableOutcome
from timers.outcomes import SYNTHETIC, Backlog, Delivered, NewOutcome, OutcomeRow, queue_outcome, waiting

__all__ = ["DEFAULT", "Default", "Outcome", "OutcomeBacklog", "Outcomes", "PendingOutcome", "register_sink"]


class Default(enum.Enum):
    """Stands for the sink that the object's class names in `outcome_sink`."""

    SINK = "outcome_sink"


#: The default of every parameter `sink`. None is something else: nobody is told.
DEFAULT: Final = Default.SINK
#: Rows that `pending` gives at most.
MAX_PENDING_ROWS: Final = 10_000


@dataclass(frozen=True)
class Outcome:
    """What a sink gets. `id` is the same each time it is delivered, and no other outcome has it.

    `kind` says what happened; of the runtime's own: "ticket.expired", "reservation.committed", "reservation.aborted",
    "reservation.expired", "reservation.read_served". `subject` is the id of the ticket or the reservation, `reason` a
    word for why, `detail` more about it. `created_ms` (epoch ms) is when it happened; `source` is (class, key) of the
    object where it did.
    """

    id: str
    kind: str
    payload: Any
    created_ms: int
    source: tuple[str, str]
    subject: str = ""
    reason: str = ""
    detail: str = ""


@dataclass(frozen=True)
class PendingOutcome:
    """An outcome that waits. `tries` counts the sink's runs that raised; `problem` says why it can never be delivered
    as it is stored, or is None. `number` counts the outcomes of the object in their order."""

    number: int
    id: str
    kind: str
    subject: str
    sink: str
    created_ms: int
    tries: int
    problem: str | None


@dataclass(frozen=True)
class OutcomeBacklog:
    """How many outcomes of an object wait, and their size in bytes."""

    rows: int
    bytes: int


class Outcomes(Capability):
    """`self.outcomes`: `add`, `pending`, `backlog`."""

    __slots__ = ()

    def add(self, kind: str, payload: Any = None, *, sink: Sink | Default = DEFAULT, synthetic: bool = False) -> str:
        """Queue an outcome in this turn's commit; returns its id, the same when the turn is run again.

        `sink` is where it goes, by default where `outcome_sink` of the class says: `(Class, key, method)`, a stub's
        method, the name of a method of this object, "module:function", or a URL. The sink gets an `Outcome` until it
        has taken it: an object's method in effect once, functions and URLs at least once (they know it by its id). A
        `synthetic` one goes the whole way except for the call: a probe.

        Raises `InvalidOption` for a sink that is none or does not exist, `TooManyOutcomes`, `UnstorableValue`,
        `ValueTooLarge`.
        """
        self._check_name(kind, "kind")
        stored = self.sink_text(sink, payload)
        if not stored:
            raise InvalidOption(f"{self._host.id}: an outcome needs a sink: give one, or set outcome_sink in the class")
        outcome_id = self._host.writing_turn().unique_id("outcome")
        new = NewOutcome(
            f"{SYNTHETIC}{outcome_id}" if synthetic else outcome_id, kind, stored, self._encoded(payload, "an outcome")
        )
        most = self._settings.max_outcomes_per_object
        if self.backlog().rows >= most:
            raise TooManyOutcomes(
                f"{self._host.id} has {most:,} outcomes waiting (`max_outcomes_per_object`): its sink does not take "
                "them; self.outcomes.pending() shows what waits"
            )
        self.queue(new)
        return new.outcome_id

    def backlog(self) -> OutcomeBacklog:
        """How much waits."""
        left = waiting(self._rows.get(Backlog), self._rows.get(Delivered))
        return OutcomeBacklog(left.rows, left.bytes)

    def pending(self, *, limit: int = 100, after: int | None = None) -> list[PendingOutcome]:
        """What waits, oldest first. `after` is the number of the last one of the page before.

        Raises `InvalidOption`.
        """
        if isinstance(limit, bool) or not 1 <= limit <= MAX_PENDING_ROWS:
            raise InvalidOption(f"{self._host.id}: limit = {limit!r}: must be 1 to {MAX_PENDING_ROWS}")
        rows = self._rows.scan(OutcomeRow, after=None if after is None else (after,), limit=limit)
        return [_pending(row) for row in rows]

    # --- for tickets and reservations ---------------------------------------------------------------

    def sink_text(self, sink: Sink | Default, payload: Any) -> str:
        """The sink as it is stored, "" for none. Raises `InvalidOption`."""
        stored = sink_of(self._object.outcome_sink if isinstance(sink, Default) else sink, self._host)
        if isinstance(stored, HttpSink):
            check_json(payload, self._host)
        return "" if stored is None else stored.to_text()

    def queue(self, new: NewOutcome) -> None:
        """Queue what the runtime itself has to say: no limit applies."""
        self._rows.apply(queue_outcome(self._rows.get(Backlog), self._place, new, self._rows.now_ms))


def _pending(row: OutcomeRow) -> PendingOutcome:
    problem = row.fault()
    if problem is None:
        try:
            read_sink(row.sink)
        except UndeliverableOutcome as error:
            problem = str(error)
    return PendingOutcome(row.seq, row.outcome_id, row.kind, row.subject, row.sink, row.created_ms, row.tries, problem)
