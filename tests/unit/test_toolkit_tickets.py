"""`self.tickets`: opened, consumed once or expired once, through roll-backs, crashes and evictions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from actors import DurableObject, Outcome, Rejected, Settings, Ticket, TicketUsage, shared
from actors.errors import (
    InvalidOption,
    InvalidSchedule,
    ReadOnlyTurn,
    SerialTurnsNeeded,
    TicketConflict,
    TicketGone,
    TooManyTickets,
    ValueTooLarge,
)
from actors.testing import LocalRuntime
from tests.support.crash_points import CommitControl, crash_when_stopped, finish, key_in, runtime_with, until_forgotten
from tests.support.toolkit import Audit, quiet, scan, until


class Upload(DurableObject):
    """Lets holders upload, for a while."""

    outcome_sink = (Audit, "main", "record")

    def open(self, name: str, ttl: Any = "1m", **options: Any) -> Ticket:
        return self.tickets.open(name, ttl=ttl, **options)

    def open_many(self, count: int, holder: str = "", ttl: Any = "1m") -> list[str]:
        return [self.tickets.open(f"{holder}{number}", ttl=ttl, holder=holder).id for number in range(count)]

    def consume(self, ticket_id: str) -> Ticket:
        ticket = self.tickets.consume(ticket_id)
        self.storage["consumed"] = self.storage.get("consumed", 0) + 1
        return ticket

    def consume_and_raise(self, ticket_id: str) -> None:
        self.consume(ticket_id)
        raise Rejected("no")

    def reopen(self, name: str) -> tuple[str, str]:
        first = self.tickets.open(name, ttl="1m")
        self.tickets.consume(first.id)
        return first.id, self.tickets.open(name, ttl="1m").id

    async def consume_slowly(self, ticket_id: str, gate: str) -> None:
        self.tickets.consume(ticket_id)
        await Audit.gates.setdefault(gate, asyncio.Event()).wait()

    async def open_and_tell(self, audit: str) -> str:
        """The id of a new ticket travels in a call: it must be the same when the turn is run again."""
        ticket = self.tickets.open("told", ttl="10m")
        await self.namespace(Audit).get(audit).record(Outcome(ticket.id, "told", None, 0, ("", "")))
        return ticket.id

    @shared
    def look(self) -> tuple[TicketUsage, list[Ticket]]:
        return self.tickets.usage(), self.tickets.list()

    @shared
    def find(self, name: str) -> Ticket | None:
        return self.tickets.find(name)

    @shared
    def get(self, ticket_id: str) -> Ticket | None:
        return self.tickets.get(ticket_id)

    @shared
    def usage(self, holder: str | None = None) -> TicketUsage:
        return self.tickets.usage(holder)

    @shared
    def page(self, limit: int, after: str | None) -> list[str]:
        return [ticket.id for ticket in self.tickets.list(limit=limit, after=after)]

    @shared
    def open_in_shared(self) -> None:
        self.tickets.open("x", ttl="1m")

    def consumed(self) -> int:
        count: int = self.storage.get("consumed", 0)
        return count


class Quiet(DurableObject):
    """Tells nobody."""

    def open(self) -> str:
        return self.tickets.open("x", ttl="1m").id


class Interleaved(DurableObject):
    """Its turns commit between awaits."""

    turns = "interleaved"

    def open(self) -> None:
        self.tickets.open("x", ttl="1m")


@pytest.fixture(autouse=True)
def clean() -> None:
    Audit.faults, Audit.gates = {}, {}


@pytest.fixture
async def rt() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        yield runtime


async def told(runtime: LocalRuntime) -> list[Outcome]:
    await quiet(runtime)
    outcomes: list[Outcome] = await runtime.namespace(Audit).get("main").outcomes_seen()
    return outcomes


async def test_a_ticket_is_what_was_asked_for(rt: LocalRuntime) -> None:
    upload = rt.namespace(Upload).get("u")
    now_ms = rt.clock.wall_ms()
    ticket = await upload.open("a.txt", timedelta(seconds=90), size=8, holder="ann", payload={"part": 1})
    expected = Ticket(ticket.id, "a.txt", "ann", 8, now_ms, now_ms + 90_000, {"part": 1}, None)
    assert ticket == expected
    assert await upload.get(ticket.id) == await upload.find("a.txt") == expected
    assert await upload.look() == (TicketUsage(1, 8), [expected])
    assert (await upload.usage("ann"), await upload.usage("bob")) == (TicketUsage(1, 8), TicketUsage(0, 0))
    assert await upload.find("b.txt") is None


async def test_opening_an_identical_live_ticket_returns_it_as_it_is(rt: LocalRuntime) -> None:
    upload = rt.namespace(Upload).get("u")
    first = await upload.open("a", size=2, holder="ann", payload="x")
    await rt.advance(seconds=30)
    assert await upload.open("a", size=2, holder="ann", payload="x") == first
    for other in ({"size": 3}, {"holder": "bob"}, {"payload": "y"}):
        with pytest.raises(TicketConflict, match="differ"):
            await upload.open("a", **{"size": 2, "holder": "ann", "payload": "x", **other})
    assert await upload.usage() == TicketUsage(1, 2)


async def test_a_consumed_ticket_is_gone_and_its_timer_finds_nothing(rt: LocalRuntime) -> None:
    upload = rt.namespace(Upload).get("u")
    ticket = await upload.open("a")
    assert await upload.consume(ticket.id) == ticket
    with pytest.raises(TicketGone):
        await upload.consume(ticket.id)
    assert await upload.usage() == TicketUsage(0, 0)
    assert scan(rt, "tallies") == []
    await rt.advance(minutes=2)
    assert await told(rt) == []
    assert scan(rt, "timers") == []


async def test_a_ticket_that_nobody_consumes_expires_once_at_its_instant(rt: LocalRuntime) -> None:
    upload = rt.namespace(Upload).get("u")
    ticket = await upload.open("a", payload=[1])
    await rt.advance(ms=59_999)
    assert await upload.get(ticket.id) == ticket
    await rt.advance(ms=1)
    assert await upload.get(ticket.id) is None
    with pytest.raises(TicketGone):
        await upload.consume(ticket.id)
    (outcome,) = await told(rt)
    assert outcome == replace(
        outcome, kind="ticket.expired", payload=[1], created_ms=ticket.expires_ms, subject=ticket.id, detail="a"
    )
    assert (outcome.reason, outcome.source) == ("expired", ("Upload", "u"))
    assert scan(rt, "tickets") == scan(rt, "ticket_names") == scan(rt, "tallies") == []


async def test_a_turn_that_raises_opens_and_consumes_nothing(rt: LocalRuntime) -> None:
    upload = rt.namespace(Upload).get("u")
    ticket = await upload.open("a")
    with pytest.raises(Rejected):
        await upload.consume_and_raise(ticket.id)
    assert await upload.get(ticket.id) == ticket
    await rt.advance(minutes=1)
    assert len(await told(rt)) == 1


async def test_a_name_can_be_used_again_in_the_same_turn_with_another_id(rt: LocalRuntime) -> None:
    first, second = await rt.namespace(Upload).get("u").reopen("a")
    assert first != second
    await rt.advance(minutes=2)
    assert [outcome.subject for outcome in await told(rt)] == [second]


async def test_a_turn_that_waits_past_the_expiry_keeps_what_it_consumed(rt: LocalRuntime) -> None:
    upload = rt.namespace(Upload).get("u")
    ticket = await upload.open("a", "5s")
    call = asyncio.ensure_future(upload.consume_slowly(ticket.id, "gate"))
    await rt.advance(seconds=10)
    Audit.gates["gate"].set()
    await call
    assert await told(rt) == []
    assert await upload.usage() == TicketUsage(0, 0)


async def test_more_than_one_tick_of_expiries_counts_exactly(rt: LocalRuntime) -> None:
    upload = rt.namespace(Upload).get("u")
    ids = await upload.open_many(30)
    for ticket_id in ids[::3]:
        await upload.consume(ticket_id)
    await rt.advance(minutes=1)
    assert sorted(outcome.subject for outcome in await told(rt)) == sorted(set(ids) - set(ids[::3]))
    assert await upload.usage() == TicketUsage(0, 0)


async def test_tickets_survive_a_crash_and_an_eviction_and_expire_after_downtime(rt: LocalRuntime) -> None:
    upload = rt.namespace(Upload).get("u")
    await upload.open_many(3)
    await until(rt, lambda: rt.evict(upload))
    await rt.crash()
    assert await upload.usage() == TicketUsage(3, 3)
    await rt.advance(minutes=2)
    assert len(await told(rt)) == 3


async def test_deleting_the_object_ends_its_tickets_without_a_word(rt: LocalRuntime) -> None:
    uploads = rt.namespace(Upload)
    await uploads.get("u").open_many(3)
    await rt.run_until_idle()
    assert await uploads.delete("u")
    await rt.advance(minutes=2)
    assert await told(rt) == []
    for table in ("tickets", "ticket_names", "tallies", "timers"):
        assert scan(rt, table) == []


async def test_limits_hold_for_the_object_and_for_each_holder() -> None:
    settings = Settings(durability="off", max_tickets_per_object=5, max_tickets_per_holder=3)
    async with LocalRuntime(memory=True, settings=settings) as runtime:
        upload = runtime.namespace(Upload).get("u")
        with pytest.raises(TooManyTickets, match="max_tickets_per_holder"):
            await upload.open_many(4, "ann")
        ids = await upload.open_many(3, "ann")
        assert await upload.open_many(3, "ann") == ids  # they are there already
        await upload.open_many(2, "bob")
        with pytest.raises(TooManyTickets, match="max_tickets_per_object"):
            await upload.open("another")
        await upload.consume(ids[0])
        await upload.open("another")


async def test_live_tickets_are_listed_in_pages(rt: LocalRuntime) -> None:
    upload = rt.namespace(Upload).get("u")
    ids = sorted(await upload.open_many(7))
    assert await upload.page(7, None) == ids
    assert await upload.page(3, None) == ids[:3]
    assert await upload.page(3, ids[2]) == ids[3:6]
    assert await upload.page(3, ids[5]) == ids[6:]
    with pytest.raises(InvalidOption):
        await upload.page(0, None)


async def test_what_makes_no_sense_is_refused_at_once(rt: LocalRuntime) -> None:
    upload = rt.namespace(Upload).get("u")
    for size in (0, -1, True, 1.5, "1", 10**13):
        with pytest.raises(InvalidOption, match="size"):
            await upload.open("a", size=size)
    for ttl in ("7d", "0s", timedelta(days=8)):
        with pytest.raises(InvalidOption, match="ttl"):
            await upload.open("a", ttl)
    with pytest.raises(InvalidSchedule):
        await upload.open("a", 60)
    for name in ("", "x" * 513, "\ud800", 7):
        with pytest.raises(InvalidOption, match="name"):
            await upload.open(name)
    with pytest.raises(InvalidOption, match="holder"):
        await upload.open("a", holder=None)
    with pytest.raises(InvalidOption, match="id of a ticket"):
        await upload.consume("a")
    with pytest.raises(ValueTooLarge):
        await upload.open("a", payload="x" * 70_000)
    with pytest.raises(InvalidOption, match="no sink"):
        await upload.open("a", sink="no sink")
    with pytest.raises(ReadOnlyTurn):
        await upload.open_in_shared()
    with pytest.raises(SerialTurnsNeeded):
        await rt.namespace(Interleaved).get("i").open()
    assert await upload.usage() == TicketUsage(0, 0)
    assert (await upload.open("a", timedelta(days=7) - timedelta(milliseconds=1))).id


async def test_without_a_sink_a_ticket_expires_in_silence(rt: LocalRuntime) -> None:
    await rt.namespace(Quiet).get("q").open()
    await rt.namespace(Upload).get("u").open("a", sink=None)
    await rt.advance(minutes=2)
    assert scan(rt, "tickets") == scan(rt, "backlogs") == []


# --- crashes ------------------------------------------------------------------------------------------

PARTITIONS = 2
UPLOAD = key_in("Upload", 0, PARTITIONS)


@pytest.mark.parametrize("applied", [True, False], ids=["after_the_commit", "before_the_commit"])
async def test_each_ticket_ends_once_whichever_commit_the_crash_is_at(applied: bool) -> None:
    number = 1
    while await _tickets_with_a_crash_at(number, applied=applied):
        number += 1
    assert number > 8


async def _tickets_with_a_crash_at(number: int, *, applied: bool) -> bool:
    control = CommitControl(number, applied=applied)
    async with runtime_with(control, partitions=PARTITIONS) as runtime:
        upload = runtime.namespace(Upload).get(UPLOAD)
        async with crash_when_stopped(runtime, control, all_partitions=True):
            ids = await finish(runtime, upload.open_many(4, ttl="10m"))
            told_id = await finish(runtime, upload.open_and_tell("other"))
            for ticket_id in ids[:2]:
                await finish(runtime, upload.consume(ticket_id))
            await runtime.advance(minutes=10)
            await until(runtime, lambda: _none_left(runtime))
            await quiet(runtime)
            where = f"crash at commit {number}"
            outcomes = await finish(runtime, runtime.namespace(Audit).get("main").outcomes_seen())
            assert sorted(outcome.subject for outcome in outcomes) == sorted([*ids[2:], told_id]), where
            (called,) = await finish(runtime, runtime.namespace(Audit).get("other").outcomes_seen())
            assert called.id == told_id, where
            assert await finish(runtime, upload.consumed()) == 2, where
            assert await finish(runtime, upload.usage()) == TicketUsage(0, 0), where
        await until_forgotten(runtime)
        return control.stopped


async def _none_left(runtime: LocalRuntime) -> bool:
    return None not in runtime.partitions and not scan(runtime, "tickets")
