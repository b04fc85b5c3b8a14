"""After an unclean stop: what ends its process is found out, whenever in its turn it does so, and nothing else is."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from actors import testing
from actors.dead_letters import DeadLetter
from actors.durable_object import DurableObject
from actors.errors import PoisonCall
from actors.object_timers import TimerInfo
from actors.testing import LocalRuntime, VirtualClock

#: More lives than anything may take until it is found out.
LIVES = 15


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers that are held wait for the test and for nothing else: virtual time need not wait for them."""
    monkeypatch.setattr(testing, "_PATIENCE_S", 0.0)


class Suspect(DurableObject):
    """Timers whose handlers the test holds on to, or lets go; what runs is seen from outside."""

    running: ClassVar[dict[str, asyncio.Event]] = {}
    order: ClassVar[list[str]] = []

    def arm(self, names: list[str], method: str, after_ms: int = 1) -> None:
        for number, name in enumerate(names):
            self.timers.set(name, after=f"{after_ms + number}ms", method=method)

    async def hold(self, info: TimerInfo) -> None:
        await self._held(f"{self.key}/{info.name}")
        self.storage.put(info.name, self.storage.get(info.name, 0) + 1)

    def quick(self, info: TimerInfo) -> None:
        self.order.append(info.name)
        self.storage.put(info.name, self.storage.get(info.name, 0) + 1)

    async def call(self, token: str) -> int:
        await self._held(f"{self.key}/{token}")
        self.storage.put(token, self.storage.get(token, 0) + 1)
        return 1

    async def call_and_hold(self, target: str, token: str) -> int:
        await self.namespace(Suspect).get(target).count(token)
        await self._held(f"{self.key}/{token}")
        self.storage.put(token, self.storage.get(token, 0) + 1)
        return 1

    def arm_every(self, name: str, every: str) -> None:
        self.timers.set(name, every=every, method="call_out_and_hold")

    async def call_out_and_hold(self, info: TimerInfo) -> None:
        await self.call_and_hold("called", str(info.due_ms))

    def count(self, token: str) -> None:
        self.storage.put(token, self.storage.get(token, 0) + 1)

    def done(self) -> dict[str, Any]:
        return dict(self.storage.list())

    @classmethod
    async def _held(cls, what: str) -> None:
        event = cls.running[what] = asyncio.Event()
        await event.wait()


async def crash(runtime: LocalRuntime) -> None:
    """kill -9; nothing of the dead process runs on."""
    Suspect.running.clear()
    await runtime.crash()


async def crashes(runtime: LocalRuntime, key: str, name: str) -> int:
    """How many crashes of a timer are counted on disk."""
    store = runtime.partitions[0].store  # type: ignore[union-attr]
    oid = store.find_object("Suspect", key)
    row = None if oid is None else store.get("directory", (oid, name))
    return 0 if row is None else int(row[5])


async def deaths_until_found_out(runtime: LocalRuntime, what: str, lives_ms: int) -> tuple[int, DeadLetter]:
    """Kill the process each time when `what` has run for so long; how often, and the dead letter."""
    for number in range(1, LIVES):
        for _ in range(100):  # others go first
            if what in Suspect.running:
                break
            await runtime.advance(ms=100)
        await runtime.advance(ms=lives_ms)
        await crash(runtime)
        await runtime.run_until_idle()
        letters = await runtime.dead_letters()
        if letters:
            return number, letters[0]
    raise AssertionError("never found out")


async def test_a_timer_that_ends_its_process_before_any_commit_is_found_out() -> None:
    async with LocalRuntime() as runtime:
        suspects = runtime.namespace(Suspect)
        await suspects.get("bad").arm(["poison"], "hold")
        await suspects.get("good").arm(["a", "b"], "quick")
        deaths, letter = await deaths_until_found_out(runtime, "bad/poison", lives_ms=0)
        assert (letter.key, letter.name, letter.attempts, letter.crashes) == ("bad", "poison", 0, 3)
        assert deaths <= 5  # unclaimed, claimed beside others, and three times alone
        assert await suspects.get("good").done() == {"a": 1, "b": 1}


async def test_a_timer_that_ends_its_process_late_is_found_out_and_nothing_that_ran_beside_it_is_blamed() -> None:
    async with LocalRuntime() as runtime:
        suspects = runtime.namespace(Suspect)
        await suspects.get("bad").arm(["poison"], "hold")
        await suspects.get("slow").arm(["innocent"], "hold")
        deaths, letter = await deaths_until_found_out(runtime, "bad/poison", lives_ms=10_000)
        assert (letter.key, letter.name, letter.attempts, letter.crashes) == ("bad", "poison", 0, 3)
        assert deaths <= 8
        assert await crashes(runtime, "slow", "innocent") == 0
        while "slow/innocent" not in Suspect.running:
            await runtime.advance(seconds=1)
        Suspect.running["slow/innocent"].set()
        await runtime.run_until_idle()
        assert await suspects.get("slow").done() == {"innocent": 1}


async def test_timers_that_came_due_before_the_crash_run_in_order_and_are_claimed_many_in_one_commit() -> None:
    clock = VirtualClock()
    async with LocalRuntime(clock=clock) as runtime:
        bell = runtime.namespace(Suspect).get("bell")
        names = [f"t{number:02d}" for number in reversed(range(50))]
        await bell.arm(names, "quick", after_ms=1_000)
        clock.move_to(clock.wall_ms() + 5_000)  # nothing has seen them come due yet
        Suspect.order.clear()
        await crash(runtime)
        await runtime.run_until_idle()
        assert Suspect.order == names
        assert await bell.done() == dict.fromkeys(sorted(names), 1)
        (partition,) = runtime.partitions
        assert partition is not None
        assert partition.committer.commits <= 10
        assert partition.store.scan("claims") == []


async def test_what_is_armed_after_the_opening_waits_for_no_claim() -> None:
    async with LocalRuntime() as runtime:
        bell = runtime.namespace(Suspect).get("bell")
        await bell.arm(["before"], "quick", after_ms=60_000)
        await crash(runtime)
        await runtime.advance(minutes=2)
        assert await bell.done() == {"before": 1}
        (partition,) = runtime.partitions
        assert partition is not None
        before = partition.committer.commits
        await bell.arm(["after"], "quick")
        await runtime.advance(seconds=1)
        assert await bell.done() == {"before": 1, "after": 1}
        assert partition.committer.commits <= before + 3  # armed, fired, acknowledged


async def test_a_recurring_timer_that_dies_after_it_called_out_is_buried_and_its_next_occurrence_runs_anew() -> None:
    async with LocalRuntime() as runtime:
        suspects = runtime.namespace(Suspect)
        await suspects.get("bad").arm_every("each-hour", "1h")
        await runtime.advance(hours=1)
        (first,) = (what for what in Suspect.running if what.startswith("bad/"))
        _, letter = await deaths_until_found_out(runtime, first, lives_ms=0)
        assert (letter.name, letter.attempts, letter.crashes) == ("each-hour", 0, 3)
        assert list((await suspects.get("called").done()).values()) == [1]
        assert await suspects.get("bad").done() == {}
        await runtime.advance(hours=1)
        (second,) = (what for what in Suspect.running if what.startswith("bad/"))
        assert second != first
        Suspect.running[second].set()
        await runtime.run_until_idle()
        assert await suspects.get("bad").done() == {second.removeprefix("bad/"): 1}
        assert list((await suspects.get("called").done()).values()) == [1, 1]
        (partition,) = runtime.partitions
        assert partition is not None
        assert partition.store.scan("intents") == []
        assert partition.store.scan("claims") == []


@pytest.mark.parametrize("lives_ms", [0, 10_000])
async def test_a_call_that_dies_after_it_called_out_is_refused_and_what_it_called_happened_once(lives_ms: int) -> None:
    async with LocalRuntime() as runtime:
        suspects = runtime.namespace(Suspect)
        call = asyncio.ensure_future(suspects.get("bad").call_and_hold("called", "token"))
        for _ in range(LIVES):
            while "bad/token" not in Suspect.running and not call.done():
                await asyncio.sleep(0.01)  # the client connects again, in real time
                await runtime.advance(ms=100)
            if call.done():
                break
            await runtime.advance(ms=lives_ms)
            await crash(runtime)
        with pytest.raises(PoisonCall, match="3 times"):
            await call
        assert await suspects.get("bad").done() == {}
        assert await suspects.get("called").done() == {"token": 1}
