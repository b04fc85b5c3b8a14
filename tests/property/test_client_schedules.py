"""Whatever breaks and moves, each call is answered once, runs once, and in the order of its object."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from random import Random
from unittest import mock

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors import lane
from actors.address import slot_of
from tests.support.fake_cluster import World

PARTITIONS = 2
KEYS = ["alice", "bob"]

indexes = st.integers(0, PARTITIONS - 1)
keys = st.sampled_from(KEYS)
calls = st.tuples(st.just("calls"), keys, st.booleans(), st.integers(1, 3))
exchange = st.tuples(st.just("exchange"), indexes, st.integers(1, 9), st.integers(0, 9), st.randoms())
steps = st.one_of(
    calls,
    calls,
    exchange,
    exchange,
    exchange,
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("drop"), indexes),
    st.tuples(st.just("down"), indexes),
    st.tuples(st.just("up"), indexes),
    st.tuples(st.just("move"), keys, indexes),
    st.tuples(st.just("move"), keys, indexes),
    st.tuples(st.just("late map"), st.booleans()),
    st.tuples(st.just("advance"), st.sampled_from([0.01, 0.05, 1.0])),
)


class Schedule:
    def __init__(self) -> None:
        self.world = World(
            PARTITIONS, {"max_waiting": 2}, max_in_flight_calls=4, call_timeout_ms=300_000, call_memory_ms=600_000
        )
        self.calls: list[tuple[str, int, asyncio.Future[int]]] = []

    async def step(self, name: str, *given: object) -> None:
        await getattr(self, "do_" + name.replace(" ", "_"))(*given)

    async def do_calls(self, key: str, nested: bool, count: int) -> None:
        # calls of turns and calls from outside pass each other, so each kind has objects of its own
        key += "/nested" if nested else ""
        for _ in range(count):
            number = len(self.calls)
            options = {"call_id": b"i%16d" % number, "caller": ("Cart", "root", b"turn")} if nested else {}
            self.calls.append((key, number, self.world.call(key, "add", number, **options)))

    async def do_cancel(self, number: int) -> None:
        if number < len(self.calls):
            self.calls[number][2].cancel()

    async def do_exchange(self, index: int, count: int, answers: int, chance: Random) -> None:
        """Some frames arrive, some of what has arrived is run, some of the answers come back in any order."""
        await self.world.ticks()
        for connection in list(self.world.cluster.all[index].connections.values()):
            connection.client.deliver(count)
            connection.run(count)
            seqs = [seq for seq, _, _ in connection.ready]
            chance.shuffle(seqs)
            for seq in seqs[:answers]:
                connection.reply([seq])
            connection.server.deliver(chance.randint(0, answers))

    async def do_drop(self, index: int) -> None:
        self.world.cluster.all[index].drop()

    async def do_down(self, index: int) -> None:
        self.world.cluster.all[index].is_down = True
        self.world.cluster.all[index].drop()

    async def do_up(self, index: int) -> None:
        self.world.cluster.all[index].is_down = False

    async def do_move(self, key: str, index: int) -> None:
        for name in (key, f"{key}/nested"):
            self.world.cluster.move(slot_of("Cart", name), index)

    async def do_late_map(self, late: bool) -> None:
        self.world.cluster.map_is_late = late

    async def do_advance(self, seconds: float) -> None:
        await self.world.advance(seconds)

    async def heal(self) -> None:
        """Everything works again, and time passes until every call is answered."""
        self.world.cluster.map_is_late = False
        for index in range(PARTITIONS):
            await self.do_up(index)
        for _ in range(60):
            await self.world.round_trip()
            await self.world.advance(1)
        await self.world.round_trip()

    def check(self) -> None:
        executed = self.world.cluster.executed
        assert len({run.call_id for run in executed}) == len(executed)
        assert len({run.args[0] for run in executed}) == len(executed), "a call ran under two ids"
        for key, number, future in self.calls:
            assert future.done(), f"call {number} of {key} was never answered"
            if not future.cancelled():
                run = executed[future.result() - 1]
                assert (run.key, run.args) == (key, [number]), "a caller got another call's answer"
        order = defaultdict(list)
        for run in executed:
            order[run.key].append(run.args[0])
        for key, numbers in order.items():
            assert numbers == sorted(numbers), f"the calls of {key} ran out of order"
        client = self.world.client
        assert not client.routes.detours
        assert client.routes.waiting == 0

    def check_acknowledged(self) -> None:
        for partition in self.world.cluster.all:
            for session in partition.connections:
                to_it = self.world.client.lane(partition.number)
                assert to_it.session == session
                assert not to_it.held, "a number was held back for ever"
                assert not to_it.in_flight


@given(st.lists(steps, min_size=5, max_size=80))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_call_is_answered_once_and_runs_once_in_order(schedule: list[tuple[object, ...]]) -> None:
    async def run() -> None:
        state = Schedule()
        for name, *given_ in schedule:
            await state.step(str(name), *given_)
        await state.heal()
        state.check()
        state.check_acknowledged()
        await state.world.client.close()

    with mock.patch.object(lane, "FRAME_BYTES", 1):  # every call in a frame of its own
        asyncio.run(run())
