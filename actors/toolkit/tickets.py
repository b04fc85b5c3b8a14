"""An object's tickets: bounded permissions that are consumed once, or expire once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from actors.errors import InvalidOption, TicketConflict, TicketGone, TicketHeld, TooManyTickets
from actors.toolkit.capability import Capability
from actors.toolkit.outcomes import DEFAULT, Default
from actors.toolkit.sinks import Sink
from timers.schedule import parse_duration_ms
from timers.tallies import Tally
from timers.tickets import (
    ALL_TICKETS,
    MAX_LIFETIME_MS,
    TICKET_ID_BYTES,
    TicketName,
    TicketRow,
    TicketTallies,
    close_ticket,
    holder_scope,
    open_ticket,
)

__all__ = ["Ticket", "TicketUsage", "Tickets"]

_Tickets: TypeAlias = "list[Ticket]"  # in Tickets, `list` is its method

#: Rows that `list` gives at most.
MAX_LIST_ROWS = 10_000
#: Sizes add up in one column: a million million of each of the tickets that there may be still fit.
MAX_TICKET_SIZE = 10**12


@dataclass(frozen=True)
class Ticket:
    """One ticket. Times are epoch ms; it is gone once `expires_ms` is reached. `reservation`: who holds it, or None."""

    id: str
    name: str
    holder: str
    size: int
    opened_ms: int
    expires_ms: int
    payload: Any
    reservation: str | None


@dataclass(frozen=True)
class TicketUsage:
    """How many tickets are open, and the sum of their sizes. One that has just expired counts until its timer ran."""

    tickets: int
    size: int


class Tickets(Capability):
    """`self.tickets`: `open`, `consume`, `get`, `find`, `list`, `usage`. Part of the running turn.

    A ticket that is not consumed expires: it is gone at `expires_ms`, and one outcome "ticket.expired" goes to its
    sink; `subject` is the ticket's id, `detail` its name, `payload` its payload.
    """

    __slots__ = ()

    def open(
        self,
        name: str,
        *,
        ttl: Any,
        size: int = 1,
        holder: str = "",
        payload: Any = None,
        sink: Sink | Default = DEFAULT,
    ) -> Ticket:
        """Open a ticket for `ttl` (a timedelta or "10m"; shorter than 7 days).

        When a live ticket of this name has the same size, holder and payload, it is returned as it is. `sink` is where
        its expiry is told, by default where `outcome_sink` of the class says; None tells nobody.

        Raises `TicketConflict` for a live ticket that differs, `TooManyTickets`, `InvalidOption`, `InvalidSchedule`,
        `UnstorableValue`, `ValueTooLarge`.
        """
        self._check_name(name, "name")
        self._check_name(holder, "holder", least=0)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_TICKET_SIZE:
            raise InvalidOption(f"{self._host.id}: size = {size!r}: must be a whole number of 1 to {MAX_TICKET_SIZE:,}")
        lifetime_ms = parse_duration_ms(ttl)
        if not 0 < lifetime_ms < MAX_LIFETIME_MS:
            raise InvalidOption(f"{self._host.id}: ttl = {ttl!r}: must be longer than nothing and shorter than 7 days")
        data = self._encoded(payload, "a ticket")
        stored_sink = self._object.outcomes.sink_text(sink, payload)
        turn = self._host.writing_turn()
        named = self._rows.get(TicketName, name)
        live = None if named is None else self._live(named.ticket_id)
        if live is not None:
            if (live.size, live.holder, live.payload) != (size, holder, data):
                raise TicketConflict(
                    f"{self._host.id}: ticket {name!r} is open until {live.expires_ms} with size {live.size}, holder "
                    f"{live.holder!r} or a payload that differ; consume it first, or take another name"
                )
            return self._shown(live)
        tallies = self._tallies(holder)
        self._check_limits(tallies, holder)
        ticket = TicketRow(
            self._rows.oid,
            turn.unique_id("ticket"),
            name,
            holder,
            size,
            turn.now_ms,
            turn.now_ms + lifetime_ms,
            "",
            stored_sink,
            data,
        )
        self._rows.apply(open_ticket(ticket, named, tallies))
        return self._shown(ticket)

    def consume(self, ticket_id: str) -> Ticket:
        """End a ticket by using it; it does not expire any more.

        Raises `TicketGone` for one that is not there or has expired, `TicketHeld` for one of a reservation.
        """
        ticket = self.live(ticket_id)
        if ticket.reservation:
            raise TicketHeld(
                f"{self._host.id}: ticket {ticket_id} belongs to reservation {ticket.reservation!r}: end that one"
            )
        self.close(ticket)
        return self._shown(ticket)

    def get(self, ticket_id: str) -> Ticket | None:
        """The live ticket of this id, or None."""
        ticket = self._live(ticket_id)
        return None if ticket is None else self._shown(ticket)

    def find(self, name: str) -> Ticket | None:
        """The live ticket of this name, or None."""
        named = self._rows.get(TicketName, self._check_name(name, "name"))
        return None if named is None else self.get(named.ticket_id)

    def list(self, *, limit: int = 100, after: str | None = None) -> _Tickets:
        """Live tickets by id, which is no order that means anything. `after`: the id of the last of the page before.

        Raises `InvalidOption`.
        """
        if isinstance(limit, bool) or not 1 <= limit <= MAX_LIST_ROWS:
            raise InvalidOption(f"{self._host.id}: limit = {limit!r}: must be 1 to {MAX_LIST_ROWS}")
        found: list[Ticket] = []
        while len(found) < limit:
            rows = self._rows.scan(TicketRow, after=None if after is None else (after,), limit=limit)
            found += [self._shown(row) for row in rows if row.expires_ms > self._rows.now_ms]
            if len(rows) < limit:
                break
            after = rows[-1].ticket_id
        return found[:limit]

    def usage(self, holder: str | None = None) -> TicketUsage:
        """How many tickets are open and how large they are together: all, or those of one holder."""
        scope = ALL_TICKETS if holder is None else holder_scope(self._check_name(holder, "holder", least=0))
        tally = self._rows.get(Tally, scope)
        return TicketUsage(0, 0) if tally is None else TicketUsage(tally.rows, tally.size)

    # --- for reservations -----------------------------------------------------------------------------

    def live(self, ticket_id: str) -> TicketRow:
        """The row of a live ticket. Raises `TicketGone`."""
        ticket = self._live(ticket_id)
        if ticket is None:
            raise TicketGone(
                f"{self._host.id}: ticket {ticket_id} was consumed, has expired, or never was: open another"
            )
        return ticket

    def close(self, ticket: TicketRow) -> None:
        """End a ticket without a word."""
        named = self._rows.get(TicketName, ticket.name)
        self._rows.apply(close_ticket(ticket, named, self._tallies(ticket.holder)))

    def row(self, ticket_id: str) -> TicketRow | None:
        """The row of a ticket, expired or not."""
        return self._rows.get(TicketRow, ticket_id)

    # --- inside ---------------------------------------------------------------------------------------

    def _live(self, ticket_id: object) -> TicketRow | None:
        if not isinstance(ticket_id, str) or len(ticket_id) != 2 * TICKET_ID_BYTES:
            raise InvalidOption(f"{self._host.id}: {ticket_id!r} is not the id of a ticket")
        ticket = self.row(ticket_id)
        return None if ticket is None or ticket.expires_ms <= self._rows.now_ms else ticket

    def _tallies(self, holder: str) -> TicketTallies:
        return TicketTallies(self._rows.get(Tally, ALL_TICKETS), self._rows.get(Tally, holder_scope(holder)))

    def _check_limits(self, tallies: TicketTallies, holder: str) -> None:
        settings = self._settings
        if tallies.total is not None and tallies.total.rows >= settings.max_tickets_per_object:
            raise TooManyTickets(
                f"{self._host.id} has {tallies.total.rows:,} tickets open (`max_tickets_per_object`): consume some, or "
                "let them expire"
            )
        if tallies.of_holder is not None and tallies.of_holder.rows >= settings.max_tickets_per_holder:
            raise TooManyTickets(
                f"{self._host.id}: {holder!r} has {tallies.of_holder.rows:,} tickets open (`max_tickets_per_holder`)"
            )

    def _shown(self, row: TicketRow) -> Ticket:
        return Ticket(
            row.ticket_id,
            row.name,
            row.holder,
            row.size,
            row.opened_ms,
            row.expires_ms,
            self._decoded(row.payload),
            row.reservation or None,
        )
