"""Tickets: permissions that end by themselves. Their rows, and how they are opened and closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Final

from timers.batch import Absent, Batch, Delete, Equals, Precondition, Put, Write
from timers.registry import TimerKind, lane_of
from timers.rows import TimerRow, owned_ref
from timers.tallies import Tally, count_one, discount_one

__all__ = [
    "ALL_TICKETS",
    "MAX_LIFETIME_MS",
    "TICKET_ID_BYTES",
    "TicketName",
    "TicketRow",
    "TicketTallies",
    "close_ticket",
    "holder_scope",
    "open_ticket",
]

#: A ticket lives shorter than a week: what is held longer is a state of the object, and should be one.
MAX_LIFETIME_MS: Final = 7 * 86_400_000

#: Bytes of a ticket's id, which is shown as hexadecimal text.
TICKET_ID_BYTES: Final = 16

#: The scope that counts all tickets of an object.
ALL_TICKETS: Final = "tickets"


def holder_scope(holder: str) -> str:
    """The scope that counts the tickets of one holder."""
    return f"{ALL_TICKETS}/{holder}"


@dataclass(frozen=True)
class TicketRow:
    """One ticket. `reservation` is the id of the one that holds it, "" for none."""

    table: ClassVar[str] = "tickets"

    oid: int
    ticket_id: str
    name: str
    holder: str
    size: int
    opened_ms: int
    expires_ms: int
    reservation: str
    sink: str
    payload: bytes

    def key(self) -> tuple[int, str]:
        return (self.oid, self.ticket_id)

    def values(self) -> tuple[str, str, int, int, int, str, str, bytes]:
        return (
            self.name,
            self.holder,
            self.size,
            self.opened_ms,
            self.expires_ms,
            self.reservation,
            self.sink,
            self.payload,
        )

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> TicketRow:
        return cls(*key, *values)


@dataclass(frozen=True)
class TicketName:
    """The newest ticket of a name."""

    table: ClassVar[str] = "ticket_names"

    oid: int
    name: str
    ticket_id: str

    def key(self) -> tuple[int, str]:
        return (self.oid, self.name)

    def values(self) -> tuple[str]:
        return (self.ticket_id,)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> TicketName:
        return cls(*key, *values)


@dataclass(frozen=True)
class TicketTallies:
    """The two counts that a ticket is in, as read."""

    total: Tally | None
    of_holder: Tally | None


def open_ticket(ticket: TicketRow, named: TicketName | None, tallies: TicketTallies) -> Batch:
    """A batch that opens a ticket, takes its name over, counts it twice and arms its timer.

    `named` is the name's row as read. Raises `CorruptRow` for counts that make no sense.
    """
    name = TicketName(ticket.oid, ticket.name, ticket.ticket_id)
    guards: list[Precondition] = [
        Absent(ticket.table, ticket.key()),
        Absent(name.table, name.key()) if named is None else Equals(named),
    ]
    writes: list[Write] = [Put(ticket), Put(name), Put(_timer(ticket))]
    for tally, scope in ((tallies.total, ALL_TICKETS), (tallies.of_holder, holder_scope(ticket.holder))):
        counted = count_one(tally, ticket.oid, scope, ticket.size)
        guards += counted.preconditions
        writes += counted.writes
    return Batch(tuple(guards), tuple(writes))


def close_ticket(ticket: TicketRow, named: TicketName | None, tallies: TicketTallies) -> Batch:
    """A batch that ends a ticket: the row, its name if that is still its own, and its part of both counts.

    The timer stays, and will find nothing. Raises `CorruptRow` for counts that make no sense.
    """
    guards: list[Precondition] = [Equals(ticket)]
    writes: list[Write] = [Delete(ticket.table, ticket.key())]
    if named is not None and named.ticket_id == ticket.ticket_id:
        guards.append(Equals(named))
        writes.append(Delete(named.table, named.key()))
    for tally, scope in ((tallies.total, ALL_TICKETS), (tallies.of_holder, holder_scope(ticket.holder))):
        discounted = discount_one(tally, ticket.oid, scope, ticket.size)
        guards += discounted.preconditions
        writes += discounted.writes
    return Batch(tuple(guards), tuple(writes))


def _timer(ticket: TicketRow) -> TimerRow:
    kind = TimerKind.TICKET_EXPIRY
    ref = owned_ref(ticket.oid, bytes.fromhex(ticket.ticket_id))
    return TimerRow(lane_of(kind), ticket.expires_ms, int(kind), ref, 0, ticket.expires_ms)
