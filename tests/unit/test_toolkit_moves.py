"""Outcomes, tickets and reservations of slots that move to another partition: nothing lost, nothing twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors import DurableObject
from actors.testing import LocalRuntime
from tests.support.crash_points import finish
from tests.support.toolkit import Audit, NotNow, quiet, scan, until
from timers.outcome_delivery import SINK_TIMEOUT_MS

OBJECTS = 16


class Desk(DurableObject):
    """Uses everything."""

    outcome_sink = (Audit, "main", "record")

    def begin(self) -> None:
        self.outcomes.add("begun")
        self.tickets.open("t", ttl="10m")
        self.reservations.hold("r", deadline="20m")
        self.reservations.hold("s", ticket=self.tickets.open("of s", ttl="30m").id)
        self.reservations.hold("c", deadline="20m")

    def commit(self) -> None:
        self.reservations.commit("c")

    def left(self) -> tuple[int, int, list[str]]:
        states = [reservation.state for reservation in self.reservations.list()]
        return self.outcomes.backlog().rows, self.tickets.usage().tickets, states


@pytest.fixture(autouse=True)
def clean() -> None:
    Audit.faults, Audit.gates = {}, {}


async def everything_is_told_once(runtime: LocalRuntime) -> None:
    desks = runtime.namespace(Desk)
    for number in range(OBJECTS):
        await finish(runtime, desks.get(f"d{number}").commit())
    await runtime.advance(minutes=31)
    await until(runtime, lambda: _all_told(runtime))
    await quiet(runtime)
    outcomes = await finish(runtime, runtime.namespace(Audit).get("main").outcomes_seen())
    kinds = sorted((outcome.source[1], outcome.kind) for outcome in outcomes)
    ends = ["begun", "reservation.aborted", "reservation.committed", "reservation.expired", "ticket.expired"]
    assert kinds == sorted((f"d{number}", kind) for number in range(OBJECTS) for kind in ends)
    for number in range(OBJECTS):
        left = await finish(runtime, desks.get(f"d{number}").left())
        assert left == (0, 0, ["committed", "aborted", "expired"])


async def _all_told(runtime: LocalRuntime) -> bool:
    await runtime.run_until_idle()
    return not scan(runtime, "tickets")


async def test_what_is_pending_moves_along_and_ends_once() -> None:
    async with LocalRuntime(memory=True) as runtime:
        Audit.faults["main"] = [NotNow() for _ in range(OBJECTS)]
        for number in range(OBJECTS):
            await runtime.namespace(Desk).get(f"d{number}").begin()
        await runtime.run_until_idle()
        assert scan(runtime, "outcomes")
        await runtime.scale(3)
        assert all(each is not None and each.store.scan("tickets") for each in runtime.partitions)
        await everything_is_told_once(runtime)


async def test_an_outcome_in_the_hands_of_its_sink_while_its_slot_moves_takes_effect_once() -> None:
    async with LocalRuntime(memory=True) as runtime:
        gate = Audit.gates["main"] = asyncio.Event()
        for number in range(OBJECTS):
            await runtime.namespace(Desk).get(f"d{number}").begin()
        await runtime.run_until_idle()  # a call of the sink is under way
        scaling: Any = asyncio.ensure_future(runtime.scale(3))
        for _ in range(8):
            await runtime.advance(ms=SINK_TIMEOUT_MS // 4)
        gate.set()
        await finish(runtime, scaling)
        await everything_is_told_once(runtime)


async def test_back_and_forth_with_crashes_between() -> None:
    async with LocalRuntime(memory=True) as runtime:
        Audit.faults["main"] = [NotNow() for _ in range(OBJECTS)]
        for number in range(OBJECTS):
            await runtime.namespace(Desk).get(f"d{number}").begin()
        for partitions in (3, 2, 4):
            await runtime.crash()
            await finish(runtime, runtime.scale(partitions))
        await everything_is_told_once(runtime)
