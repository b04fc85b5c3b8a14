"""Slots move while everything goes on: nothing is lost, nothing happens twice, and nobody sees an error."""

from __future__ import annotations

import asyncio
from collections import Counter as Count
from typing import Any, ClassVar

import pytest

from actors import DurableObject, Rejected, TimerInfo
from actors.address import SLOTS, slot_of
from actors.departure import Departures
from actors.errors import CommitFailed, InvalidOption, MoveRefused
from actors.mover import CUT_SHORT_AFTER
from actors.settings import Settings
from actors.testing import LocalRuntime

KEYS = [f"key-{number}" for number in range(60)]


class Purse(DurableObject):
    """Counts what it is given, and passes some of it on."""

    gates: ClassVar[dict[str, asyncio.Event]] = {}

    def add(self, amount: int) -> int:
        self.storage["total"] = self.storage.get("total", 0) + amount
        return int(self.storage["total"])

    async def give(self, other: str, amount: int) -> int:
        left = self.add(-amount)
        await self.namespace(Purse).get(other).add(amount)
        return left

    async def wait(self) -> str:
        self.storage["waited"] = self.storage.get("waited", 0) + 1
        await self.gates[self.key].wait()
        return "done"

    async def give_and_wait(self, other: str) -> str:
        await self.give(other, 1)
        await self.gates[self.key].wait()
        return "given"

    def waited(self) -> int:
        return int(self.storage.get("waited", 0))

    def total(self) -> int:
        return int(self.storage.get("total", 0))

    def arm(self, seconds: int) -> None:
        self.timers.set("ring", after=f"{seconds}s", method="on_ring", payload={"for": self.key})

    def on_ring(self, timer: TimerInfo) -> None:
        self.storage["rung"] = [*self.storage.get("rung", []), [timer.due_ms, timer.fired_ms, timer.payload]]

    def rung(self) -> list[Any]:
        return list(self.storage.get("rung", []))

    def refuse(self) -> None:
        raise Rejected("no")

    def timer(self) -> tuple[int, int] | None:
        found = self.timers.get("ring")
        return None if found is None else (found.due_ms, found.generation)


def spread(runtime: LocalRuntime) -> list[int]:
    counts = Count(runtime.moves.partition_of(slot) for slot in range(SLOTS))
    return [counts[number] for number in range(runtime.partition_count)]


@pytest.fixture(params=[pytest.param("memory", marks=pytest.mark.soak), "file"])
def place(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"memory": True} if request.param == "memory" else {}


async def test_state_and_timers_go_along_up_and_down(place: dict[str, Any]) -> None:
    async with LocalRuntime(partitions=2, **place) as runtime:
        purses = runtime.namespace(Purse)
        for number, key in enumerate(KEYS):
            await purses.get(key).add(number)
            await purses.get(key).arm(100 + number)
        before = {key: await purses.get(key).timer() for key in KEYS}
        for partitions in (4, 3, 1, 2):
            await runtime.scale(partitions)
            assert max(spread(runtime)) - min(spread(runtime)) <= 1
            assert [await purses.get(key).total() for key in KEYS] == list(range(len(KEYS)))
        assert {key: await purses.get(key).timer() for key in KEYS} == before
        await runtime.crash()
        await runtime.advance(seconds=99)
        assert [await purses.get(key).rung() for key in KEYS] == [[] for _ in KEYS]
        await runtime.advance(seconds=100)
        for key in KEYS:
            ((due_ms, fired_ms, payload),) = await purses.get(key).rung()
            known = before[key]
            assert known is not None
            assert (due_ms, payload) == (known[0], {"for": key})
            assert fired_ms >= due_ms


async def test_calls_in_flight_follow_without_an_error(place: dict[str, Any]) -> None:
    async with LocalRuntime(partitions=2, **place) as runtime:
        purses = runtime.namespace(Purse)
        made = 0
        going = True

        async def call(key: str, other: str) -> None:
            nonlocal made
            while going:
                await purses.get(key).give(other, 1)
                made += 1

        callers = [asyncio.ensure_future(call(key, f"bank-{number % 7}")) for number, key in enumerate(KEYS)]
        for partitions in (4, 3, 2):
            await runtime.scale(partitions)
        going = False
        await asyncio.gather(*callers)
        assert made > len(KEYS)
        assert sum([await purses.get(key).total() for key in KEYS]) == -made
        assert sum([await purses.get(f"bank-{number}").total() for number in range(7)]) == made


async def test_calls_of_one_client_keep_their_order_through_a_move() -> None:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        purse = runtime.namespace(Purse).get("a")
        first = [purse.add(1) for _ in range(50)]
        moving = asyncio.ensure_future(runtime.scale(3))
        later = [purse.add(1) for _ in range(50)]
        results = await asyncio.gather(*first, *later)
        await moving
        assert results == list(range(1, 101))


async def test_a_move_waits_for_the_turn_that_runs_and_is_refused_when_that_takes_too_long() -> None:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        purse = runtime.namespace(Purse).get("a")
        Purse.gates = {"a": asyncio.Event()}
        waiting = asyncio.ensure_future(purse.wait())
        await asyncio.sleep(0.01)
        slot = slot_of("Purse", "a")
        source = runtime.moves.partition_of(slot)
        departures = _departures(runtime, source)
        sending = asyncio.ensure_future(departures.send("m1", [slot], 1 - source, patience_ms=5_000, cut_short=False))
        behind = asyncio.ensure_future(purse.add(1))
        await runtime.advance(ms=4_999)
        assert not sending.done()
        await runtime.advance(ms=2)
        with pytest.raises(MoveRefused):
            await sending
        Purse.gates["a"].set()
        assert await waiting == "done"
        await runtime.advance(seconds=10)
        assert await behind == 1  # it was sent on to nobody, and runs here after all


async def test_a_turn_that_is_cut_short_runs_again_at_the_new_owner_and_its_calls_happen_once() -> None:
    settings = Settings(turn_timeout_ms=3_600_000)
    async with LocalRuntime(partitions=2, memory=True, settings=settings) as runtime:
        purses = runtime.namespace(Purse)
        Purse.gates = {"a": asyncio.Event()}
        giving = asyncio.ensure_future(purses.get("a").give_and_wait("b"))
        await asyncio.sleep(0.02)
        slot = slot_of("Purse", "a")
        mover = runtime.moves.mover()
        moving = asyncio.ensure_future(mover.move([slot], 1 - runtime.moves.partition_of(slot)))
        while not moving.done():
            await runtime.advance(seconds=1)
            await asyncio.sleep(0.02)  # real time, for what the mover waits between its tries
        assert mover.progress.put_off == CUT_SHORT_AFTER
        assert not giving.done()
        await moving
        Purse.gates["a"].set()
        await runtime.advance(seconds=6)
        assert await asyncio.wait_for(giving, 20) == "given"
        assert await purses.get("a").total() == -1
        assert await purses.get("b").total() == 1


async def test_what_is_frozen_stays_frozen_after_a_crash_until_the_decision_is_read() -> None:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        purse = runtime.namespace(Purse).get("a")
        await purse.add(5)
        await purse.arm(1)
        slot = slot_of("Purse", "a")
        source = runtime.moves.partition_of(slot)
        target = 1 - source
        await _departures(runtime, source).send("m1", [slot], target, patience_ms=100, cut_short=False)
        await runtime.crash()
        calling = asyncio.ensure_future(purse.add(1))
        await runtime.advance(seconds=5)
        assert not calling.done()
        for number in (source, target):
            partition = runtime.partitions[number]
            assert partition is not None
            assert not partition.runs_slot(slot)
            assert partition.fires == 0
        await _departures(runtime, source).call_off("m1")
        arriving = runtime.partitions[target]
        assert arriving is not None
        await arriving.arrivals.discard("m1")
        assert arriving.store.scan("objects") == []
        await runtime.advance(seconds=5)
        assert await calling == 6
        assert len(await purse.rung()) == 1


@pytest.mark.parametrize("decision", ["own", "call off"])
async def test_a_slot_runs_nothing_before_it_is_durable_that_it_may_and_is_asked_for_again_when_that_fails(
    decision: str,
) -> None:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        slot = slot_of("Purse", "a")
        source = runtime.moves.partition_of(slot)
        await runtime.namespace(Purse).get("a").add(1)
        await _departures(runtime, source).send("m1", [slot], 1 - source, patience_ms=100, cut_short=False)
        partition = runtime.partitions[source if decision == "call off" else 1 - source]
        assert partition is not None

        async def decide() -> None:
            assert partition is not None
            await (partition.arrivals.own("m1", 2) if decision == "own" else partition.departures.call_off("m1"))

        commit, partition.commit = partition.commit, _full_disk  # type: ignore[method-assign]
        with pytest.raises(CommitFailed):
            await decide()
        assert not partition.runs_slot(slot)
        partition.commit = commit  # type: ignore[method-assign]
        await asyncio.gather(decide(), decide())
        assert partition.runs_slot(slot)
        state, version, _ = partition.store.get("slots", (slot,)) or ("", 0, None)
        assert (state, version) == ("owned", 1 if decision == "call off" else 2)


def _full_disk(ops: Any) -> asyncio.Future[None]:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    failed.set_exception(CommitFailed("the disk is full; nothing was applied"))
    return failed


async def test_a_repeat_of_an_answered_call_is_answered_by_the_new_owner() -> None:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        keyed = runtime.namespace(Purse).get("a").with_options(idempotency_key="once")
        assert await keyed.add(5) == 5
        await runtime.scale(1)
        await runtime.scale(3)
        assert await keyed.add(5) == 5
        assert await runtime.namespace(Purse).get("a").total() == 5


async def test_data_that_was_scaled_is_found_again(tmp_path: Any) -> None:
    async with LocalRuntime(partitions=1, data_dir=tmp_path) as runtime:
        for key in KEYS:
            await runtime.namespace(Purse).get(key).add(1)
        await runtime.scale(3)
    with pytest.raises(InvalidOption, match="3 partitions"):
        await LocalRuntime(partitions=1, data_dir=tmp_path).start()
    async with LocalRuntime(partitions=3, data_dir=tmp_path) as runtime:
        assert [await runtime.namespace(Purse).get(key).total() for key in KEYS] == [1] * len(KEYS)


def _departures(runtime: LocalRuntime, number: int) -> Departures:
    partition = runtime.partitions[number]
    assert partition is not None
    return partition.departures
