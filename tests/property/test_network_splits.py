"""Seeded schedules of a network that splits and heals while objects call each other, timers fire and slots move.

Whatever is cut, and whoever dies meanwhile: nothing is lost or happens twice, no slot has two owners, and once
everybody reaches everybody again, everything goes on within a lease's time.
`SEED=n pytest tests/property/test_network_splits.py` runs one seed again.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from typing import Any

import pytest

from actors.address import SLOTS, slot_of
from actors.durable_object import DurableObject
from actors.errors import CallExpired, CallOutcomeUnknown, TurnTimeout
from actors.settings import Settings
from actors.testing import VirtualClock
from tests.support.simulated_loop import run_simulated
from tests.support.split_network import APP, COORDINATOR, Network, SplitRuntime

PARTITIONS = 3
KEYS = [f"k{number}" for number in range(8)]
STEPS = 40
TICK_MS = 250
SEEDS = [int(os.environ["SEED"])] if "SEED" in os.environ else list(range(6))
SOAK_SEEDS = range(1_000, 1_500)
#: What a caller may be told after a split: it was not sent, it may have run, or its turn waited for too long.
TOLD = (CallExpired, CallOutcomeUnknown, TurnTimeout)


class Ledger(DurableObject):
    """Notes each operation under its number, here and at the objects along a path, and sends and arms others."""

    def _note(self, kind: str, op: int) -> None:
        self.storage[f"{kind} {op}"] = self.storage.get(f"{kind} {op}", 0) + 1

    def add(self, op: int) -> int:
        self._note("added", op)
        return op

    async def pass_on(self, op: int, path: list[str]) -> int:
        self._note("added", op)
        if path:
            await self.namespace(Ledger).get(path[0]).pass_on(op, path[1:])
        return op

    def post(self, op: int, to: str) -> int:
        self._note("added", op)
        self.send(Ledger, to).receive(op)
        return op

    def receive(self, op: int) -> None:
        self._note("received", op)

    def arm(self, op: int, after_ms: int) -> int:
        self._note("added", op)
        self.timers.set(f"t{op}", after=f"{after_ms}ms", method="fire", payload=op)
        return op

    def fire(self, info: Any) -> None:
        self._note("fired", info.payload)

    def everything(self) -> dict[str, int]:
        return self.storage.list()


class Splits:
    """One run."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._network = Network(self._chance)
        settings = Settings(durability="off", ack_delay_ms=1, crash_limit=1_000_000)
        self._runtime = SplitRuntime(
            self._network, partitions=PARTITIONS, memory=True, clock=VirtualClock(), settings=settings
        )
        self._lease_s = settings.partition_lease_ms / 1_000
        self._moving: set[asyncio.Task[None]] = set()
        #: number -> kind, keys it is about, and the call
        self.ops: dict[int, tuple[str, list[str], asyncio.Task[Any]]] = {}
        self.events: list[str] = []
        self.states: dict[str, dict[str, int]] = {}

    async def run(self) -> None:
        async with self._runtime as runtime:
            runtime.restart_coordinator()
            runtime.namespace(Ledger)
            for _ in range(STEPS):
                await self._step()
            await self._all_is_well()
            self._check()

    async def _step(self) -> None:
        chance = self._chance
        dice = chance.random()
        if dice < 0.5:
            for _ in range(chance.randint(1, 6)):
                self._call()
        elif dice < 0.62:
            self._move()
        elif dice < 0.72:
            places = [APP, COORDINATOR, *map(str, range(PARTITIONS))]
            if chance.random() < 0.3:  # one place loses everybody
                alone = chance.choice(places)
                pairs = [(alone, other) for other in places if other != alone]
            else:
                pairs = [tuple(chance.sample(places, 2)) for _ in range(chance.randint(1, 3))]  # type: ignore[misc]
            for one, other in pairs:
                self._network.cut(one, other)
            self._log(f"cut {pairs}")
        elif dice < 0.84:
            self._log("healed")
            self._network.heal()
        elif dice < 0.88:
            self._log("the coordinator is killed")
            self._runtime.restart_coordinator()
            for task in self._moving:
                task.cancel()
        elif dice < 0.92:
            victim = chance.randrange(PARTITIONS)
            self._log(f"partition {victim} is killed")
            await self._runtime.crash(victim)
        await self._pass_time(chance.choice([0, 0, 250, 1_000, 7_000, 25_000]))

    def _call(self) -> None:
        chance, op = self._chance, len(self.ops)
        kind, key = chance.choice(["add", "pass_on", "post", "arm"]), chance.choice(KEYS)
        stub = self._runtime.namespace(Ledger).get(key)
        later = KEYS[KEYS.index(key) + 1 :]  # from lower to higher keys, so that no two wait for each other
        keys = [key]
        if kind == "pass_on":
            keys += sorted(chance.sample(later, min(len(later), 2)))
            call = stub.pass_on(op, keys[1:])
        elif kind == "post":
            keys.append(chance.choice(KEYS))
            call = stub.post(op, keys[1])
        elif kind == "arm":
            call = stub.arm(op, chance.choice([0, 100, 3_000, 20_000]))
        else:
            call = stub.add(op)
        self._log(f"{op}: {kind} {keys}")
        self.ops[op] = (kind, keys, asyncio.ensure_future(_outcome(call)))

    def _move(self) -> None:
        chance = self._chance
        if chance.random() < 0.3:
            goal = sorted(chance.sample(range(PARTITIONS), chance.randint(1, PARTITIONS)))
            self._log(f"spread over {goal}")
            work = self._runtime.moves.mover().spread(goal)
        else:
            slots, target = [slot_of("Ledger", key) for key in chance.sample(KEYS, 3)], chance.randrange(PARTITIONS)
            self._log(f"move {slots} to {target}")
            work = self._runtime.moves.mover().move(slots, target)
        for task in self._moving:  # the newest wish counts
            task.cancel()
        task = asyncio.ensure_future(work)
        self._moving.add(task)
        task.add_done_callback(self._moving.discard)

    async def _pass_time(self, ms: int) -> None:
        for _ in range(0, ms, TICK_MS):
            await asyncio.sleep(TICK_MS / 1_000)
            await self._runtime.advance(ms=TICK_MS)
            self._one_owner()
        await asyncio.sleep(0)
        self._one_owner()

    def _one_owner(self) -> None:
        running = [partition for partition in self._runtime.partitions if partition is not None]
        owned = Counter(slot for partition in running for slot in partition.slot_table.owned)
        twice = [slot for slot, count in owned.items() if count > 1]
        assert not twice, f"slots with two owners: {twice}"

    async def _all_is_well(self) -> None:
        """The network is whole again. Within a lease's time everything that was begun has ended."""
        self._log("healed for good")
        self._network.heal()
        fresh = [asyncio.ensure_future(self._runtime.namespace(Ledger).get(key).everything()) for key in KEYS]
        await self._pass_time(int(self._lease_s * 1_000))
        assert all(call.done() for call in fresh), "an object does not answer"
        open_ops = [op for op, (_, _, call) in self.ops.items() if not call.done()]
        assert not open_ops, f"never answered: {open_ops}"
        spreading = asyncio.ensure_future(self._runtime.moves.mover().spread(range(PARTITIONS)))
        for task in self._moving:
            task.cancel()
        await self._pass_time(int(self._lease_s * 1_000))
        assert spreading.done(), f"slots still move: {self._runtime.moves.mover().progress}"
        await self._pass_time(20_000)  # the last timers, and messages whose tries were paused
        for key in KEYS:
            self.states[key] = await self._runtime.namespace(Ledger).get(key).everything()

    def _check(self) -> None:
        moves = self._runtime.moves
        counts = Counter(moves.partition_of(slot) for slot in range(SLOTS))
        assert max(counts.values()) - min(counts.values()) <= 1
        assert moves.mover()._store.all() == []
        for number, partition in enumerate(self._runtime.partitions):
            assert partition is not None
            assert partition.moves == {}
            assert sorted(partition.slot_table.owned) == moves.slots_of(number)
        for key, state in self.states.items():
            assert set(state.values()) <= {1}, f"{key}: happened twice: {state}"
        for op, (kind, keys, call) in self.ops.items():
            error = call.result()
            assert error is None or isinstance(error, TOLD), f"{op} {kind} {keys}: {error!r}"
            first = f"added {op}" in self.states[keys[0]]
            assert first or error is not None, f"{op} {kind} {keys} is lost"
            if kind == "pass_on":
                there = [f"added {op}" in self.states[key] for key in keys]
                assert all(there) or not first, f"{op} {keys} is torn: {there}"
            elif kind == "post":
                assert (f"received {op}" in self.states[keys[1]]) is first, f"the message of {op} {keys}"
            elif kind == "arm":
                assert (f"fired {op}" in self.states[keys[0]]) is first, f"the timer of {op} {keys}"

    def _log(self, what: str) -> None:
        self.events.append(f"{self._runtime.clock.wall_ms() % 10_000_000:>8} {what}")


async def _outcome(call: Any) -> Exception | None:
    try:
        await call
    except Exception as error:
        return error
    return None


def check(seed: int) -> None:
    """Run one seed; a failure tells the seed and what happened."""
    splits: list[Splits] = []

    async def main() -> None:
        splits.append(Splits(seed))
        await splits[0].run()

    try:
        run_simulated(main())
    except BaseException:
        print(f"seed {seed} (SEED={seed} pytest {__file__} runs it again):")
        print("\n".join(event for each in splits for event in each.events))
        raise


@pytest.mark.parametrize("seed", SEEDS)
def test_after_any_splits_everything_goes_on_within_a_leases_time(seed: int) -> None:
    check(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SOAK_SEEDS)
def test_after_many_more_splits_everything_goes_on_within_a_leases_time(seed: int) -> None:
    check(seed)
