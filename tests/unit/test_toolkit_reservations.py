"""`self.reservations`: held, then ended once, by the application or by the deadline, through crashes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import DurableObject, Outcome, Rejected, Reservation, Settings, shared
from actors.errors import (
    DuplicateReservation,
    IllegalTransition,
    InvalidOption,
    NoSuchReservation,
    ReadOnlyTurn,
    SerialTurnsNeeded,
    TicketGone,
    TicketHeld,
    TooManyReservations,
)
from actors.testing import LocalRuntime
from tests.support.crash_points import CommitControl, crash_when_stopped, finish, key_in, runtime_with, until_forgotten
from tests.support.toolkit import Audit, quiet, scan, until


class Hotel(DurableObject):
    """Holds rooms."""

    outcome_sink = (Audit, "main", "record")

    def hold(self, name: str, deadline: Any = "1m", **options: Any) -> Reservation:
        return self.reservations.hold(name, deadline=deadline, **options)

    def hold_with_ticket(self, name: str, ttl: str = "1m") -> Reservation:
        ticket = self.tickets.open(f"ticket of {name}", ttl=ttl)
        return self.reservations.hold(name, ticket=ticket.id, payload="p")

    def open(self, name: str, ttl: str = "1m") -> str:
        return self.tickets.open(name, ttl=ttl).id

    def use_ticket(self, name: str, ticket_id: str) -> Reservation:
        return self.reservations.use_ticket(name, ticket_id)

    def consume(self, ticket_id: str) -> None:
        self.tickets.consume(ticket_id)

    def commit(self, name: str, detail: str = "") -> Reservation:
        self.storage["committed"] = self.storage.get("committed", 0) + 1
        return self.reservations.commit(name, detail=detail)

    def commit_and_raise(self, name: str) -> None:
        self.commit(name)
        raise Rejected("no")

    def abort(self, name: str, detail: str = "") -> Reservation:
        return self.reservations.abort(name, detail=detail)

    def serve_read(self, name: str) -> Reservation:
        return self.reservations.serve_read(name)

    async def commit_slowly(self, name: str, gate: str) -> Reservation:
        ended = self.reservations.commit(name)
        await Audit.gates.setdefault(gate, asyncio.Event()).wait()
        return ended

    @shared
    def get(self, name: str) -> Reservation | None:
        return self.reservations.get(name)

    @shared
    def state(self, name: str) -> tuple[str, str] | None:
        reservation = self.reservations.get(name)
        return None if reservation is None else (reservation.state, reservation.reason)

    @shared
    def page(self, limit: int, after: str | None) -> list[str]:
        return [reservation.id for reservation in self.reservations.list(limit=limit, after=after)]

    @shared
    def tickets_open(self) -> int:
        return self.tickets.usage().tickets

    @shared
    def hold_in_shared(self) -> None:
        self.reservations.hold("x", deadline="1m")

    def committed(self) -> int:
        count: int = self.storage.get("committed", 0)
        return count


class Interleaved(DurableObject):
    """Its turns commit between awaits."""

    turns = "interleaved"

    def hold(self) -> None:
        self.reservations.hold("x", deadline="1m")


@pytest.fixture(autouse=True)
def clean() -> None:
    Audit.faults, Audit.gates = {}, {}


@pytest.fixture
async def rt() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        yield runtime


@pytest.fixture
async def hotel(rt: LocalRuntime) -> Any:
    return rt.namespace(Hotel).get("h")


async def told(runtime: LocalRuntime) -> list[tuple[str, str, str, str]]:
    await quiet(runtime)
    outcomes: list[Outcome] = await runtime.namespace(Audit).get("main").outcomes_seen()
    return [(outcome.kind, outcome.subject, outcome.reason, outcome.detail) for outcome in outcomes]


async def test_a_reservation_is_what_was_asked_for(rt: LocalRuntime, hotel: Any) -> None:
    now_ms = rt.clock.wall_ms()
    reservation = await hotel.hold("r", timedelta(seconds=41), payload=[1])
    assert reservation == Reservation("r", "write", "pending", now_ms, now_ms + 41_000, None, None, "", "", [1])
    assert await hotel.get("r") == reservation
    at = datetime.fromtimestamp(now_ms / 1_000 + 5, tz=timezone.utc)
    assert (await hotel.hold("s", at)).deadline_ms == (await hotel.hold("t", now_ms + 5_000)).deadline_ms
    assert await hotel.get("u") is None


async def test_a_write_is_committed_or_aborted_and_a_read_served_or_aborted(rt: LocalRuntime, hotel: Any) -> None:
    for name, kind in (("a", "write"), ("b", "write"), ("c", "read"), ("d", "read")):
        await hotel.hold(name, kind=kind)
    ended = [
        await hotel.commit("a", "done"),
        await hotel.abort("b"),
        await hotel.serve_read("c"),
        await hotel.abort("d", "gone"),
    ]
    assert [each.state for each in ended] == ["committed", "aborted", "read_served", "aborted"]
    assert await told(rt) == [
        ("reservation.committed", "a", "requested", "done"),
        ("reservation.aborted", "b", "requested", ""),
        ("reservation.read_served", "c", "requested", ""),
        ("reservation.aborted", "d", "requested", "gone"),
    ]


@pytest.mark.parametrize("kind", ["write", "read"])
async def test_one_that_nobody_ends_is_abandoned_at_its_deadline_and_a_late_commit_loses(
    rt: LocalRuntime, hotel: Any, kind: str
) -> None:
    await hotel.hold("r", kind=kind)
    await rt.advance(ms=59_999)
    assert await hotel.state("r") == ("pending", "")
    await rt.advance(ms=1)
    assert await hotel.state("r") == ("aborted", "abandoned")
    with pytest.raises(IllegalTransition, match="abandoned") as refusal:
        await (hotel.commit("r") if kind == "write" else hotel.serve_read("r"))
    assert (refusal.value.state, refusal.value.reason) == ("aborted", "abandoned")
    assert await told(rt) == [("reservation.aborted", "r", "abandoned", "")]
    assert await hotel.committed() == 0


async def test_what_is_forgotten_refuses_a_late_commit_too_and_its_id_is_free_again(
    rt: LocalRuntime, hotel: Any
) -> None:
    await hotel.hold("r")
    await rt.advance(minutes=61)
    assert scan(rt, "reservations") == scan(rt, "tallies") == []
    with pytest.raises(NoSuchReservation, match="reservation_memory_ms"):
        await hotel.commit("r")
    await hotel.hold("r")
    await hotel.commit("r")
    await rt.advance(minutes=61)
    assert [kind for kind, *_ in await told(rt)] == ["reservation.aborted", "reservation.committed"]
    assert scan(rt, "timers") == []


async def test_a_duplicate_is_refused_while_the_first_is_there_or_remembered(rt: LocalRuntime, hotel: Any) -> None:
    await hotel.hold("r")
    with pytest.raises(DuplicateReservation, match="pending"):
        await hotel.hold("r")
    await hotel.commit("r")
    with pytest.raises(DuplicateReservation, match="committed"):
        await hotel.hold("r")


async def test_illegal_transitions_change_nothing(rt: LocalRuntime, hotel: Any) -> None:
    await hotel.hold("w")
    await hotel.hold("r", kind="read")
    for call in (hotel.serve_read("w"), hotel.commit("r")):
        with pytest.raises(IllegalTransition, match="pending"):
            await call
    ticket_id = await hotel.open("t")
    with pytest.raises(IllegalTransition, match="ticketed"):
        await hotel.use_ticket("r", ticket_id)
    await hotel.commit("w")
    for call in (hotel.commit("w"), hotel.abort("w"), hotel.serve_read("w"), hotel.use_ticket("w", ticket_id)):
        with pytest.raises(IllegalTransition, match="committed"):
            await call
    assert [subject for _, subject, *_ in await told(rt)] == ["w"]
    with pytest.raises(NoSuchReservation):
        await hotel.abort("unknown")


async def test_a_turn_that_raises_ends_nothing(rt: LocalRuntime, hotel: Any) -> None:
    await hotel.hold("r")
    with pytest.raises(Rejected):
        await hotel.commit_and_raise("r")
    assert await hotel.state("r") == ("pending", "")
    await rt.advance(minutes=1)
    assert await told(rt) == [("reservation.aborted", "r", "abandoned", "")]


async def test_a_commit_that_began_before_the_deadline_wins_over_the_timer(rt: LocalRuntime, hotel: Any) -> None:
    await hotel.hold("r", "5s")
    call = asyncio.ensure_future(hotel.commit_slowly("r", "gate"))
    await rt.advance(seconds=10)
    Audit.gates["gate"].set()
    assert (await call).state == "committed"
    assert await told(rt) == [("reservation.committed", "r", "requested", "")]


# --- with tickets -------------------------------------------------------------------------------------


async def test_a_ticketed_reservation_lives_as_long_as_its_ticket(rt: LocalRuntime, hotel: Any) -> None:
    reservation = await hotel.hold_with_ticket("r")
    assert reservation.state == "ticketed"
    await rt.advance(minutes=1)
    assert await hotel.state("r") == ("expired", "expired")
    assert await hotel.tickets_open() == 0
    assert await told(rt) == [("reservation.expired", "r", "expired", "")]  # and nothing of its ticket
    with pytest.raises(IllegalTransition, match="expired"):
        await hotel.commit("r")


@pytest.mark.parametrize("ending", ["commit", "abort"])
async def test_the_end_of_a_reservation_ends_its_ticket(rt: LocalRuntime, hotel: Any, ending: str) -> None:
    await hotel.hold_with_ticket("r")
    await getattr(hotel, ending)("r")
    assert await hotel.tickets_open() == 0
    await rt.advance(minutes=2)
    assert len(await told(rt)) == 1


async def test_a_ticket_can_be_given_later_and_outlives_the_deadline(rt: LocalRuntime, hotel: Any) -> None:
    await hotel.hold("r", "10s")
    ticket_id = await hotel.open("t", "1m")
    assert (await hotel.use_ticket("r", ticket_id)).ticket_id == ticket_id
    await rt.advance(seconds=30)
    assert await hotel.state("r") == ("ticketed", "")
    with pytest.raises(TicketHeld):
        await hotel.consume(ticket_id)
    await hotel.hold("s")
    with pytest.raises(TicketHeld):
        await hotel.use_ticket("s", ticket_id)
    assert (await hotel.commit("r")).state == "committed"


async def test_a_ticket_that_is_gone_holds_nothing(rt: LocalRuntime, hotel: Any) -> None:
    ticket_id = await hotel.open("t")
    await hotel.consume(ticket_id)
    with pytest.raises(TicketGone):
        await hotel.hold("r", None, ticket=ticket_id)
    await hotel.hold("s")
    with pytest.raises(TicketGone):
        await hotel.use_ticket("s", ticket_id)
    assert await hotel.get("r") is None


async def test_once_its_ticket_is_over_a_commit_is_too_late_although_no_timer_has_run(rt: LocalRuntime) -> None:
    hotel = rt.namespace(Hotel).get("h")
    await hotel.hold_with_ticket("r")
    rt.clock.move_to(rt.clock.wall_ms() + 60_000)  # type: ignore[attr-defined]
    with pytest.raises(IllegalTransition, match="expired"):
        await hotel.commit("r")
    assert await told(rt) == [("reservation.expired", "r", "expired", "")]


# --- bounds -------------------------------------------------------------------------------------------


async def test_what_makes_no_sense_is_refused_at_once(rt: LocalRuntime, hotel: Any) -> None:
    for name in ("", "x" * 513, "\ud800", 7):
        with pytest.raises(InvalidOption, match="reservation_id"):
            await hotel.hold(name)
    with pytest.raises(InvalidOption, match="kind"):
        await hotel.hold("r", kind="both")
    with pytest.raises(InvalidOption, match="deadline or a ticket"):
        await hotel.hold("r", None)
    with pytest.raises(InvalidOption, match="over already"):
        await hotel.hold("r", rt.clock.wall_ms())
    await hotel.hold("r")
    with pytest.raises(InvalidOption, match="detail"):
        await hotel.commit("r", "x" * 1_000)
    with pytest.raises(ReadOnlyTurn):
        await hotel.hold_in_shared()
    with pytest.raises(SerialTurnsNeeded):
        await rt.namespace(Interleaved).get("i").hold()
    with pytest.raises(InvalidOption, match="limit"):
        await hotel.page(0, None)


async def test_reservations_are_listed_in_pages(rt: LocalRuntime, hotel: Any) -> None:
    for name in "cabd":
        await hotel.hold(name)
    assert await hotel.page(3, None) == ["a", "b", "c"]
    assert await hotel.page(3, "c") == ["d"]


async def test_the_limit_counts_those_that_are_remembered() -> None:
    options = Settings(durability="off", max_reservations_per_object=2, reservation_memory_ms=1_000)
    async with LocalRuntime(memory=True, settings=options) as runtime:
        hotel = runtime.namespace(Hotel).get("h")
        await hotel.hold("a")
        await hotel.hold("b")
        await hotel.commit("a")
        with pytest.raises(TooManyReservations, match="max_reservations_per_object"):
            await hotel.hold("c")
        await runtime.advance(seconds=1)
        await hotel.hold("c")


async def test_deleting_the_object_ends_its_reservations_without_a_word(rt: LocalRuntime, hotel: Any) -> None:
    await hotel.hold("a")
    await hotel.hold_with_ticket("b")
    await rt.run_until_idle()
    assert await rt.namespace(Hotel).delete("h")
    await rt.advance(hours=2)
    assert await told(rt) == []
    for table in ("reservations", "tickets", "tallies", "timers"):
        assert scan(rt, table) == []


async def test_reservations_survive_a_crash_and_an_eviction(rt: LocalRuntime, hotel: Any) -> None:
    await hotel.hold("a")
    await hotel.hold_with_ticket("b")
    await until(rt, lambda: rt.evict(hotel))
    await rt.crash()
    await rt.advance(minutes=2)
    assert sorted(await told(rt)) == [
        ("reservation.aborted", "a", "abandoned", ""),
        ("reservation.expired", "b", "expired", ""),
    ]


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["hold", "ticketed", "commit", "abort", "wait", "crash"])),
        max_size=14,
    )
)
async def test_whatever_happens_each_reservation_has_one_outcome_and_counts_end_at_nothing(
    steps: list[tuple[str, str]],
) -> None:
    async with LocalRuntime(memory=True) as runtime:
        hotel = runtime.namespace(Hotel).get("h")
        held = 0
        for name, step in steps:
            try:
                if step == "hold":
                    await hotel.hold(name, "7s", payload=held)
                    held += 1
                elif step == "ticketed":
                    await hotel.hold_with_ticket(name, "9s")
                    held += 1
                elif step == "wait":
                    await runtime.advance(seconds=3)
                elif step == "crash":
                    await runtime.crash()
                else:
                    await finish(runtime, getattr(hotel, step)(name))
            except (DuplicateReservation, IllegalTransition, NoSuchReservation):
                continue
        await runtime.advance(hours=2)
        assert len(await told(runtime)) == held
        for table in ("reservations", "tickets", "ticket_names", "tallies", "timers"):
            assert scan(runtime, table) == []


# --- crashes ------------------------------------------------------------------------------------------

PARTITIONS = 2
HOTEL = key_in("Hotel", 0, PARTITIONS)


@pytest.mark.parametrize("applied", [True, False], ids=["after_the_commit", "before_the_commit"])
@pytest.mark.parametrize("everything", [True, False], ids=["all_partitions", "the_committing_partition"])
async def test_each_reservation_ends_once_whichever_commit_the_crash_is_at(applied: bool, everything: bool) -> None:
    number = 1
    while await _reservations_with_a_crash_at(number, applied=applied, everything=everything):
        number += 1
    assert number > 12


async def _reservations_with_a_crash_at(number: int, *, applied: bool, everything: bool) -> bool:
    control = CommitControl(number, applied=applied)
    async with runtime_with(control, partitions=PARTITIONS) as runtime:
        hotel = runtime.namespace(Hotel).get(HOTEL)
        async with crash_when_stopped(runtime, control, all_partitions=everything):
            await finish(runtime, hotel.hold("committed", "10m"))
            await finish(runtime, hotel.hold("abandoned", "10m"))
            await finish(runtime, hotel.hold_with_ticket("expired", "10m"))
            await finish(runtime, hotel.commit("committed"))
            await runtime.advance(minutes=10)
            await until(runtime, lambda: _all_ended(runtime))
            await quiet(runtime)
            where = f"crash at commit {number}"
            outcomes = await finish(runtime, runtime.namespace(Audit).get("main").outcomes_seen())
            assert sorted((outcome.subject, outcome.kind) for outcome in outcomes) == [
                ("abandoned", "reservation.aborted"),
                ("committed", "reservation.committed"),
                ("expired", "reservation.expired"),
            ], where
            assert await finish(runtime, hotel.committed()) == 1, where
            assert await finish(runtime, hotel.tickets_open()) == 0, where
            with pytest.raises(IllegalTransition, match="abandoned"):
                await finish(runtime, hotel.commit("abandoned"))
        await until_forgotten(runtime)
        await runtime.advance(hours=2)
        for table in ("reservations", "tickets", "tallies", "outcomes", "backlogs", "timers"):
            assert scan(runtime, table) == [], where
        return control.stopped


async def _all_ended(runtime: LocalRuntime) -> bool:
    if None in runtime.partitions:
        return False
    return all(row[4] not in ("pending", "ticketed") for row in scan(runtime, "reservations"))
