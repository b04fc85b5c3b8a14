"""Claims and crash counting: what ends its process is taken out after three lives, and nothing else is blamed."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from actors import testing
from actors.durable_object import DurableObject
from actors.errors import PoisonCall
from actors.settings import Settings
from actors.testing import LocalRuntime
from tests.support.crash_points import CommitControl, finish, runtime_with
from tests.support.peer import Peer

SETTINGS = Settings(durability="off", ack_delay_ms=1)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that are held wait for the test and for nothing else: virtual time need not wait for them."""
    monkeypatch.setattr(testing, "_PATIENCE_S", 0.0)


class Bomb(DurableObject):
    """Its slow methods are where the test lets the process die."""

    gate: ClassVar[asyncio.Event]
    runs: ClassVar[dict[str, int]] = {}

    async def work(self, name: str) -> str:
        self.runs[name] = self.runs.get(name, 0) + 1
        await self.gate.wait()
        self.storage.put(name, 1)
        return name

    async def call_then_work(self, name: str) -> str:
        await self.namespace(Bomb).get("callee").note(name)
        return await self.work(name)

    def note(self, name: str) -> None:
        self.storage.put(name, self.storage.get(name, 0) + 1)

    def arm(self, name: str, options: dict[str, Any]) -> None:
        self.timers.set(name, method="tick", **options)

    async def tick(self, info: Any) -> None:
        await self.work(info.name)

    def timer(self, name: str) -> tuple[int, int] | None:
        state = self.timers.get(name)
        return None if state is None else (state.due_ms, state.attempt)

    def state(self) -> dict[str, Any]:
        return self.storage.list()

    @classmethod
    def reset(cls) -> None:
        cls.gate, cls.runs = asyncio.Event(), {}


def runtime() -> LocalRuntime:
    Bomb.reset()
    return runtime_with(CommitControl(), settings=SETTINGS)


async def repeat(rt: LocalRuntime, method: str, name: str, *, seq: int = 1, connection: int = 1) -> Peer:
    """The call of a client that has it outstanding, on a new connection."""
    peer = Peer(rt, Bomb, "b", connection=connection)
    await peer.call(seq, method, [name], flags=int(connection > 1))
    await rt.run_until_idle()
    return peer


async def die_until_buried(rt: LocalRuntime) -> None:
    """Crash until there is a dead letter; a timer that was not claimed yet is claimed in the first life, then alone."""
    for _ in range(6):
        await rt.crash()
        await rt.run_until_idle()
        if await rt.dead_letters():
            return


def claims(rt: LocalRuntime) -> list[tuple[Any, ...]]:
    partition = rt.partitions[0]
    assert partition is not None
    return partition.store.scan("claims")


async def test_a_repeated_call_that_ends_its_process_three_times_alone_is_poison() -> None:
    async with runtime() as rt:
        await repeat(rt, "work", "bad")
        await rt.crash()  # it ran beside anything: not counted
        for connection in (2, 3, 4):
            peer = await repeat(rt, "work", "bad", connection=connection)
            assert peer.replies == []
            await rt.crash()
        peer = await repeat(rt, "work", "bad", connection=5)
        with pytest.raises(PoisonCall, match="3 times"):
            await peer.result()
        assert Bomb.runs == {"bad": 4}
        Bomb.gate.set()
        assert await rt.namespace(Bomb).get("b").work("good") == "good"


async def test_a_poison_call_stays_poison_across_restarts_and_a_new_call_runs() -> None:
    async with runtime() as rt:
        await repeat(rt, "work", "bad")
        for connection in (2, 3, 4):
            await rt.crash()
            await repeat(rt, "work", "bad", connection=connection)
        await rt.crash()
        await rt.crash()
        peer = await repeat(rt, "work", "bad", connection=9)
        with pytest.raises(PoisonCall):
            await peer.result()
        Bomb.gate.set()
        again = await repeat(rt, "work", "bad", seq=2, connection=10)
        assert await again.result() == "bad"


async def test_an_intent_that_ends_its_process_three_times_is_poison_and_frees_its_object() -> None:
    async with runtime() as rt:
        await repeat(rt, "call_then_work", "bad")
        lives = 0
        while rt.partitions[0].store.scan("intents") and lives < 8:  # type: ignore[union-attr]
            await rt.crash()
            await rt.run_until_idle()
            lives += 1
        assert lives == 4  # the first crash had it beside nothing that was known to be alone
        peer = await repeat(rt, "call_then_work", "bad", connection=2)
        with pytest.raises(PoisonCall):
            await peer.result()
        Bomb.gate.set()
        assert await finish(rt, rt.namespace(Bomb).get("b").work("good")) == "good"
        assert await rt.namespace(Bomb).get("callee").state() == {"bad": 1}


async def test_a_poison_timer_goes_to_the_dead_letters_and_uses_up_no_attempt() -> None:
    async with runtime() as rt:
        bomb = rt.namespace(Bomb).get("b")
        await bomb.arm("bad", {"after": "1s"})
        await rt.advance(seconds=1)
        await die_until_buried(rt)
        (letter,) = await rt.dead_letters()
        assert (letter.name, letter.crashes, letter.attempts) == ("bad", 3, 0)
        assert "died 3 times" in letter.error
        assert await bomb.timer("bad") is None
        Bomb.gate.set()
        await rt.redrive(letter)
        await rt.run_until_idle()
        assert await bomb.state() == {"bad": 1}


async def test_a_poison_recurring_timer_goes_on_with_its_next_occurrence() -> None:
    async with runtime() as rt:
        bomb = rt.namespace(Bomb).get("b")
        start = rt.clock.wall_ms()
        await bomb.arm("bad", {"every": "1h"})
        await rt.advance(hours=1)
        await die_until_buried(rt)
        assert len(await rt.dead_letters()) == 1
        assert await bomb.timer("bad") == (start + 2 * 3_600_000, 0)
        Bomb.gate.set()
        await rt.advance(hours=1)
        assert await bomb.state() == {"bad": 1}


async def test_a_clean_stop_counts_nothing(tmp_path: Any) -> None:
    for _ in range(6):
        Bomb.reset()
        async with LocalRuntime(data_dir=tmp_path, settings=SETTINGS) as rt:
            bomb = rt.namespace(Bomb).get("b")
            if not await bomb.state():
                await bomb.note("seen")
            await bomb.arm("t", {"at": rt.clock.wall_ms()})
            Bomb.gate.set()
            await rt.run_until_idle()
            assert claims(rt) == []
    async with LocalRuntime(data_dir=tmp_path, settings=SETTINGS) as rt:
        rt.namespace(Bomb)
        assert await rt.dead_letters() == []
        assert not rt.status()[0]["careful"]


async def test_what_takes_longer_than_its_time_alone_is_let_go_on_beside_fresh_work() -> None:
    async with runtime() as rt:
        bomb = rt.namespace(Bomb).get("slow")
        await bomb.arm("t", {"after": "1s"})
        await rt.advance(seconds=1)
        await rt.crash()
        await rt.run_until_idle()  # claimed now, and so a suspect after the next crash
        await rt.crash()
        fresh = asyncio.ensure_future(rt.namespace(Bomb).get("fresh").note("x"))
        for _ in range(10):
            await asyncio.sleep(0.005)
        assert not fresh.done()  # the suspect runs alone
        await finish(rt, fresh)
        assert Bomb.runs["t"] == 3
        Bomb.gate.set()
        await rt.run_until_idle()
        assert await bomb.state() == {"t": 1}


async def test_fresh_work_that_was_held_back_runs_in_its_order() -> None:
    async with runtime() as rt:
        await rt.namespace(Bomb).get("slow").arm("t", {"after": "1s"})
        await rt.advance(seconds=1)
        await rt.crash()
        await rt.run_until_idle()
        await rt.crash()
        peer = Peer(rt, Bomb, "fresh")
        for seq in range(1, 6):
            await peer.call(seq, "note", [f"n{seq}"])
        assert peer.replies == []
        Bomb.gate.set()
        await peer.received(5)
        assert [seq for seq, _, _ in peer.replies] == [1, 2, 3, 4, 5]


async def test_nothing_is_claimed_any_more_once_the_overdue_work_is_done() -> None:
    async with runtime() as rt:
        bomb = rt.namespace(Bomb).get("b")
        for number in range(5):
            await bomb.arm(f"t{number}", {"after": "1s"})
        await repeat(rt, "work", "call")
        await rt.advance(seconds=1)
        await rt.crash()
        Bomb.gate.set()
        peer = await repeat(rt, "work", "call", connection=2)
        assert await peer.result() == "call"
        await rt.run_until_idle()
        assert set(await bomb.state()) == {"call", *(f"t{number}" for number in range(5))}
        assert claims(rt) == []
        assert not rt.status()[0]["careful"]


async def test_a_claim_that_could_not_be_removed_is_removed_later() -> None:
    control = CommitControl()
    Bomb.reset()
    async with runtime_with(control, settings=SETTINGS) as rt:
        await rt.namespace(Bomb).get("b").arm("t", {"after": "1s"})
        await rt.advance(seconds=1)
        await rt.crash()
        await rt.run_until_idle()
        assert len(claims(rt)) == 1
        Bomb.gate.set()
        control.fail_next(3)
        await rt.advance(seconds=10)
        assert claims(rt) == []
        assert await rt.namespace(Bomb).get("b").state() == {"t": 1}


async def test_the_claim_of_a_call_that_nobody_repeats_is_forgotten_with_the_calls_memory() -> None:
    async with runtime() as rt:
        await repeat(rt, "work", "bad")
        await rt.crash()
        await repeat(rt, "work", "bad", connection=2)
        await rt.crash()
        assert len(claims(rt)) == 1
        await rt.advance(ms=SETTINGS.call_memory_ms)
        assert claims(rt) == []
