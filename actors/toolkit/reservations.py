"""An object's reservations: held first, then committed or aborted, or abandoned at their deadline; one outcome each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from actors.errors import (
    DuplicateReservation,
    IllegalTransition,
    InvalidOption,
    NoSuchReservation,
    TicketGone,
    TicketHeld,
    TooManyReservations,
)
from actors.toolkit.capability import MAX_NAME_BYTES, Capability
from actors.toolkit.outcomes import DEFAULT, Default
from actors.toolkit.sinks import Sink
from timers.reservations import (
    ALL_RESERVATIONS,
    ReservationKind,
    ReservationRow,
    ReservationState,
    attach_ticket,
    end_reservation,
    hold,
    is_legal,
    outcome_of,
)
from timers.schedule import parse_when_ms
from timers.tallies import Tally
from timers.ticket_expiry import EXPIRED
from timers.tickets import TicketRow

__all__ = ["Reservation", "Reservations"]

Kind = Literal["write", "read"]
State = Literal["pending", "ticketed", "committed", "aborted", "expired", "read_served"]
_Reservations: TypeAlias = "list[Reservation]"  # in Reservations, `list` is its method

#: Rows that `list` gives at most.
MAX_LIST_ROWS = 10_000
#: Why a reservation ends when the application ends it.
REQUESTED = "requested"


@dataclass(frozen=True)
class Reservation:
    """One reservation. Times are epoch ms; `ended_ms` is None while it has not ended. With a ticket it lives as long.

    `reason` says why it ended: "requested", "abandoned" or "expired"; `detail` what the application said of it.
    """

    id: str
    kind: Kind
    state: State
    held_ms: int
    deadline_ms: int
    ended_ms: int | None
    ticket_id: str | None
    reason: str
    detail: str
    payload: Any


class Reservations(Capability):
    """`self.reservations`: `hold`, `use_ticket`, `commit`, `abort`, `serve_read`, `get`, `list`. Part of the turn.

    A pending one that nobody ends is aborted at its deadline, with the reason "abandoned"; one with a ticket expires
    with that. Each end queues one outcome for its sink, such as "reservation.committed"; `subject` is its id, `payload`
    its payload. Ended ones are remembered for `reservation_memory_ms`: whoever comes late learns what became of them.

    Hold in one turn, and do what is reserved in later ones (or after `await self.storage.sync()`): then it is held, and
    will be reconciled, whatever happens.
    """

    __slots__ = ()

    def hold(
        self,
        reservation_id: str,
        *,
        deadline: Any = None,
        kind: Kind = "write",
        payload: Any = None,
        ticket: str | None = None,
        sink: Sink | Default = DEFAULT,
    ) -> Reservation:
        """Begin a reservation.

        `deadline` is when it counts as abandoned: an aware datetime, epoch ms, or a timedelta or "30s" from now. With
        the id of a `ticket` it lives as long as that instead. `sink` is where its end is told, by default where
        `outcome_sink` of the class says; None tells nobody.

        Raises `DuplicateReservation` for an id that is there or remembered, `TooManyReservations`, `TicketGone`,
        `TicketHeld`, `IllegalTransition` for a read with a ticket, `InvalidOption`, `InvalidSchedule`,
        `UnstorableValue`, `ValueTooLarge`.
        """
        self._check_name(reservation_id, "reservation_id")
        if kind not in get_args(Kind):
            raise InvalidOption(f"{self._host.id}: kind = {kind!r}: must be 'write' or 'read'")
        if (deadline is None) is (ticket is None):
            raise InvalidOption(f"{self._host.id}: a reservation has a deadline or a ticket: give one of them")
        turn = self._host.writing_turn()
        known = self._rows.get(ReservationRow, reservation_id)
        if known is not None:
            raise DuplicateReservation(
                f"{self._host.id}: there is a reservation {reservation_id!r} already, {known.state}: take another id"
            )
        tally = self._rows.get(Tally, ALL_RESERVATIONS)
        if tally is not None and tally.rows >= self._settings.max_reservations_per_object:
            raise TooManyReservations(
                f"{self._host.id} has {tally.rows:,} reservations (`max_reservations_per_object`), those included that "
                f"ended in the last {self._settings.reservation_memory_ms:,} ms"
            )
        row = ReservationRow(
            self._rows.oid,
            reservation_id,
            turn.unique_id("reservation"),
            kind,
            ReservationState.PENDING.value,
            self._deadline_ms(deadline, ticket, turn.now_ms),
            turn.now_ms,
            self._object.outcomes.sink_text(sink, payload),
            self._encoded(payload, "a reservation"),
        )
        free = None if ticket is None else self._free_ticket(row, ticket)
        self._rows.apply(hold(row, tally))
        if free is None:
            return self._shown(row)
        self._rows.apply(attach_ticket(row, free))
        return self._shown(self._row(reservation_id))

    def use_ticket(self, reservation_id: str, ticket_id: str) -> Reservation:
        """Let a pending write live as long as a ticket, and no longer until its deadline.

        Raises `NoSuchReservation`, `IllegalTransition`, `TicketGone`, `TicketHeld`.
        """
        row = self._row(reservation_id)
        self._rows.apply(attach_ticket(row, self._free_ticket(row, ticket_id)))
        return self._shown(self._row(reservation_id))

    def commit(self, reservation_id: str, *, detail: str = "") -> Reservation:
        """End a write: it was done. Its ticket, if it has one, is consumed.

        Raises `NoSuchReservation`, and `IllegalTransition` for one that has ended: who comes late has lost.
        """
        return self._end(reservation_id, ReservationState.COMMITTED, detail)

    def abort(self, reservation_id: str, *, detail: str = "") -> Reservation:
        """End a write or a read: it was not done. Otherwise as `commit`."""
        return self._end(reservation_id, ReservationState.ABORTED, detail)

    def serve_read(self, reservation_id: str, *, detail: str = "") -> Reservation:
        """End a read: it was served. Otherwise as `commit`."""
        return self._end(reservation_id, ReservationState.READ_SERVED, detail)

    def get(self, reservation_id: str) -> Reservation | None:
        """The reservation of this id, one that has ended and is remembered too; or None."""
        row = self._rows.get(ReservationRow, self._check_name(reservation_id, "reservation_id"))
        return None if row is None else self._shown(row)

    def list(self, *, limit: int = 100, after: str | None = None) -> _Reservations:
        """Reservations by id, in its order. `after`: the id of the last of the page before. Raises `InvalidOption`."""
        if isinstance(limit, bool) or not 1 <= limit <= MAX_LIST_ROWS:
            raise InvalidOption(f"{self._host.id}: limit = {limit!r}: must be 1 to {MAX_LIST_ROWS}")
        rows = self._rows.scan(ReservationRow, after=None if after is None else (after,), limit=limit)
        return [self._shown(row) for row in rows]

    # --- inside ---------------------------------------------------------------------------------------

    def _deadline_ms(self, deadline: Any, ticket: str | None, now_ms: int) -> int:
        if ticket is not None:
            return self._object.tickets.live(ticket).expires_ms
        deadline_ms = parse_when_ms(deadline, now_ms)
        if deadline_ms <= now_ms:
            raise InvalidOption(f"{self._host.id}: deadline = {deadline!r}: is over already")
        return deadline_ms

    def _free_ticket(self, row: ReservationRow, ticket_id: str) -> TicketRow:
        self._check_legal(row, ReservationState.TICKETED)
        ticket = self._object.tickets.live(ticket_id)
        if ticket.reservation:
            raise TicketHeld(f"{self._host.id}: ticket {ticket_id} belongs to reservation {ticket.reservation!r}")
        return ticket

    def _end(self, reservation_id: str, state: ReservationState, detail: str) -> Reservation:
        row = self._row(reservation_id)
        if not isinstance(detail, str) or len(detail) > MAX_NAME_BYTES:
            raise InvalidOption(
                f"{self._host.id}: detail = {detail!r}: must be text of at most {MAX_NAME_BYTES} characters"
            )
        self._check_legal(row, state)
        if row.state == ReservationState.TICKETED.value:
            self._object.tickets.close(self._living_ticket(row, state))
        memory_ms = self._settings.reservation_memory_ms
        self._rows.apply(end_reservation(row, state, self._rows.now_ms, memory_ms, reason=REQUESTED, detail=detail))
        new = outcome_of(row, state, reason=REQUESTED, detail=detail)
        if new is not None:
            self._object.outcomes.queue(new)
        return self._shown(self._row(reservation_id))

    def _living_ticket(self, row: ReservationRow, state: ReservationState) -> TicketRow:
        """The ticket of the reservation. Once that is over it has expired, although its timer may not have run yet."""
        try:
            return self._object.tickets.live(row.ticket_id)
        except TicketGone:
            raise self._refusal(replace(row, reason=EXPIRED), state) from None

    def _row(self, reservation_id: str) -> ReservationRow:
        row = self._rows.get(ReservationRow, self._check_name(reservation_id, "reservation_id"))
        if row is None:
            raise NoSuchReservation(
                f"{self._host.id}: there is no reservation {reservation_id!r}: it never was, or it ended more than "
                f"{self._settings.reservation_memory_ms:,} ms ago (`reservation_memory_ms`)"
            )
        return row

    def _check_legal(self, row: ReservationRow, state: ReservationState) -> None:
        if not is_legal(row, state):
            raise self._refusal(row, state)

    def _refusal(self, row: ReservationRow, state: ReservationState) -> IllegalTransition:
        why = f" ({row.reason})" if row.reason else ""
        return IllegalTransition(
            f"{self._host.id}: reservation {row.reservation_id!r} for a {row.kind} is {row.state}{why}, "
            f"and can't become {state.value}",
            row.state,
            row.reason,
        )

    def _shown(self, row: ReservationRow) -> Reservation:
        return Reservation(
            row.reservation_id,
            ReservationKind(row.kind).value,
            ReservationState(row.state).value,
            row.held_ms,
            row.deadline_ms,
            row.ended_ms or None,
            row.ticket_id or None,
            row.reason,
            row.detail,
            self._decoded(row.payload),
        )
