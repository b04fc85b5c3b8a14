"""Reservations: something is held until it is committed or aborted, or its deadline passes. Rows and transitions."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

from timers.batch import Absent, Batch, Delete, Equals, Put, Write
from timers.errors import CorruptRow
from timers.outcomes import NewOutcome
from timers.registry import TimerKind, lane_of
from timers.rows import TimerRow, owned_ref
from timers.tallies import Tally, count_one, discount_one
from timers.tickets import TicketRow

__all__ = [
    "ABANDONED",
    "ALL_RESERVATIONS",
    "PRUNE",
    "ReservationKind",
    "ReservationRow",
    "ReservationState",
    "attach_ticket",
    "end_reservation",
    "forget_reservation",
    "hold",
    "is_legal",
    "outcome_of",
]

#: The scope that counts the reservations of an object, ended ones that are still remembered too.
ALL_RESERVATIONS: Final = "reservations"

#: Why the timer ends a reservation.
ABANDONED: Final = "abandoned"

#: Payload of the timer that forgets an ended reservation; that of the deadline is empty.
PRUNE: Final = b"prune"

#: The generation of the timer that forgets; it and that of the deadline may be due in the same millisecond.
_PRUNE_GENERATION: Final = 1


class ReservationKind(enum.Enum):
    """What it is held for."""

    WRITE = "write"
    READ = "read"


class ReservationState(enum.Enum):
    """Where a reservation stands. All but the first two are final."""

    PENDING = "pending"
    TICKETED = "ticketed"
    COMMITTED = "committed"
    ABORTED = "aborted"
    EXPIRED = "expired"
    READ_SERVED = "read_served"

    @property
    def is_final(self) -> bool:
        return self not in (ReservationState.PENDING, ReservationState.TICKETED)


_LEGAL: Final[Mapping[tuple[str, str], frozenset[ReservationState]]] = {
    (ReservationKind.WRITE.value, ReservationState.PENDING.value): frozenset(
        {ReservationState.TICKETED, ReservationState.COMMITTED, ReservationState.ABORTED}
    ),
    (ReservationKind.WRITE.value, ReservationState.TICKETED.value): frozenset(
        {ReservationState.COMMITTED, ReservationState.ABORTED, ReservationState.EXPIRED}
    ),
    (ReservationKind.READ.value, ReservationState.PENDING.value): frozenset(
        {ReservationState.READ_SERVED, ReservationState.ABORTED}
    ),
}


@dataclass(frozen=True)
class ReservationRow:
    """One reservation. `serial` is the id of its outcome: no other reservation has it, whatever it is called.

    `ended_ms` is 0 while it has not ended. A ticketed one lives as long as its ticket, others until `deadline_ms`.
    """

    table: ClassVar[str] = "reservations"

    oid: int
    reservation_id: str
    serial: str
    kind: str
    state: str
    deadline_ms: int
    held_ms: int
    sink: str
    payload: bytes
    ticket_id: str = ""
    ended_ms: int = 0
    reason: str = ""
    detail: str = ""

    def key(self) -> tuple[int, str]:
        return (self.oid, self.reservation_id)

    def values(self) -> tuple[str, str, str, int, int, str, bytes, str, int, str, str]:
        return (
            self.serial,
            self.kind,
            self.state,
            self.deadline_ms,
            self.held_ms,
            self.sink,
            self.payload,
            self.ticket_id,
            self.ended_ms,
            self.reason,
            self.detail,
        )

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> ReservationRow:
        return cls(*key, *values)


def is_legal(row: ReservationRow, state: ReservationState) -> bool:
    """Whether the reservation may come into this state."""
    return state in _LEGAL.get((row.kind, row.state), ())


def hold(row: ReservationRow, tally: Tally | None) -> Batch:
    """A batch that begins a reservation: its row, its timer at the deadline and its count, or none of them."""
    counted = count_one(tally, row.oid, ALL_RESERVATIONS, 1)
    return counted.plus([Absent(row.table, row.key())], [Put(row), Put(_timer(row, row.deadline_ms, b"", 0))])


def attach_ticket(row: ReservationRow, ticket: TicketRow) -> Batch:
    """A batch that binds a reservation to the life of a ticket. Raises `CorruptRow` where that is illegal."""
    ticketed = _moved(row, ReservationState.TICKETED, ticket_id=ticket.ticket_id)
    held = replace(ticket, reservation=row.reservation_id)
    return Batch((Equals(row), Equals(ticket)), (Put(ticketed), Put(held)))


def end_reservation(
    row: ReservationRow, state: ReservationState, now_ms: int, memory_ms: int, *, reason: str, detail: str = ""
) -> Batch:
    """A batch that ends a reservation, guarded on all of it, and arms the timer that forgets it `memory_ms` later.

    Raises `CorruptRow` where the transition is illegal.
    """
    ended = _moved(row, state, ended_ms=now_ms, reason=reason, detail=detail)
    writes: list[Write] = [Put(ended), Put(_timer(row, now_ms + memory_ms, PRUNE, _PRUNE_GENERATION))]
    return Batch((Equals(row),), tuple(writes))


def outcome_of(row: ReservationRow, state: ReservationState, *, reason: str, detail: str = "") -> NewOutcome | None:
    """What is told of the reservation's end; None when it has no sink."""
    if not row.sink:
        return None
    kind = f"reservation.{state.value}"
    return NewOutcome(row.serial, kind, row.sink, row.payload, row.reservation_id, reason, detail)


def forget_reservation(row: ReservationRow, tally: Tally | None) -> Batch:
    """A batch that removes an ended reservation. Raises `CorruptRow` when it is not counted."""
    discounted = discount_one(tally, row.oid, ALL_RESERVATIONS, 1)
    return discounted.plus([Equals(row)], [Delete(row.table, row.key())])


def _moved(row: ReservationRow, state: ReservationState, **columns: Any) -> ReservationRow:
    if not is_legal(row, state):
        raise CorruptRow(f"{row} can't become {state.value}")
    return replace(row, state=state.value, **columns)


def _timer(row: ReservationRow, due_ms: int, payload: bytes, generation: int) -> TimerRow:
    kind = TimerKind.RESERVATION_RECONCILE
    ref = owned_ref(row.oid, row.reservation_id.encode())
    return TimerRow(lane_of(kind), due_ms, int(kind), ref, generation, due_ms, 0, payload)
