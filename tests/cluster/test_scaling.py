"""Partitions come and go under load: no caller sees an error, nothing is lost, nothing happens twice."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from actors.client import Client
from actors.errors import InvalidOption, WrongPartition
from actors.ray_calls import COORDINATOR, RayCalls, ray_namespace
from actors.ray_directory import RayDirectory
from actors.runtime import Runtime
from actors.scaling import ScaleProgress
from tests.cluster.apps import Ledger
from tests.cluster.mixed_load import MixedLoad
from tests.cluster.soak_apps import Witness
from tests.support.killing import kill_9, wait_for
from tests.support.ledger_load import Load
from tests.support.owner_checker import owners_watched

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(150)]

KEYS = [f"scaled-{number}" for number in range(100)]


@pytest.fixture
def runtime(local_ray: None, tmp_path: Path) -> Iterator[Runtime]:
    with Runtime.start(tmp_path / "data", 2, name="scaled") as started:
        yield started


def slot_counts(runtime: Runtime) -> list[int]:
    """How many slots each partition owns, by the coordinator's own file."""
    slot_map = runtime._calls.call(COORDINATOR, "slot_map", timeout_s=10)
    counts = Counter(slot_map.owners())
    return [counts[number] for number in sorted(counts)]


async def capacity(runtime: Runtime, seconds: float = 2.0) -> float:
    """Calls per second, roughly, that this process and the partitions can do now, beside whatever else runs here."""
    witnesses = runtime.namespace(Witness)
    until = time.perf_counter() + seconds
    count = 0

    async def caller(key: str) -> None:
        nonlocal count
        while time.perf_counter() < until:
            await witnesses.get(key).apply(f"{count}")
            count += 1

    await asyncio.gather(*(caller(f"capacity-{number}") for number in range(100)))
    return count / seconds


async def test_scaling_up_and_down_at_half_of_the_capacity_shows_no_error_and_loses_nothing(runtime: Runtime) -> None:
    per_second = await capacity(runtime) / 2
    load = MixedLoad(runtime, KEYS, seed=1, period_s=len(KEYS) / per_second, spread_ms=8_000)
    load.start()
    began = time.perf_counter()
    await asyncio.sleep(0.5)
    for partitions in (4, 3):
        await runtime.ascale(partitions)
    await load.stop()
    took_s = time.perf_counter() - began
    calls, fires, messages = await load.check()
    counts = await asyncio.to_thread(slot_counts, runtime)
    assert (len(counts), max(counts) - min(counts)) == (3, 1)
    assert set((await asyncio.to_thread(runtime.status)).partitions) == {0, 1, 2}
    print(
        f"half of the capacity: {per_second:.0f} calls/s; made {calls / took_s:.0f}/s: "
        f"{calls} calls, {fires} fires, {messages} messages; "
        f"longest pause of a key {load.longest_s * 1_000:.0f} ms"
    )


@pytest.mark.parametrize("victim", ["source", "target", "coordinator"])
async def test_a_process_that_dies_while_slots_move_costs_nothing_but_time(runtime: Runtime, victim: str) -> None:
    load = Load(runtime, KEYS)
    load.start()
    await asyncio.sleep(0.3)
    with owners_watched(runtime.data_dir) as seen:
        await scale_and_kill(runtime, victim)
    await load.stop()
    await load.check()
    counts = await asyncio.to_thread(slot_counts, runtime)
    assert (len(counts), max(counts) - min(counts)) == (3, 1)
    print(f"a process of its own has looked at all owners {seen['looks']} times")


async def scale_and_kill(runtime: Runtime, victim: str) -> None:
    killed = asyncio.Event()
    loop = asyncio.get_running_loop()

    def progress(told: ScaleProgress) -> None:
        if told.slots_moved and not killed.is_set():
            loop.call_soon_threadsafe(killed.set)

    scaling = asyncio.ensure_future(runtime.ascale(3, progress=progress))
    await killed.wait()
    await asyncio.to_thread(kill, runtime, victim)
    await scaling


def kill(runtime: Runtime, victim: str) -> None:
    if victim == "coordinator":
        ray.kill(runtime._calls.handle(COORDINATOR), no_restart=False)
        return
    number = {"source": 0, "target": 2}[victim]
    kill_9(wait_for(lambda: runtime.partition_pids().get(number, 0), f"partition {number}"))


async def test_a_slot_can_be_moved_on_its_own(runtime: Runtime) -> None:
    stub = runtime.namespace(Ledger).get("one")
    await stub.apply("a")
    for partition in (1, 0, 1):
        await asyncio.to_thread(runtime.move, stub, partition)
        await stub.apply(f"on {partition}")
        slot_map = await asyncio.to_thread(runtime._calls.call, COORDINATOR, "slot_map", timeout_s=10)
        assert slot_map.owners()[stub.id.slot] == partition
    assert await stub.total() == 4
    with pytest.raises(WrongPartition):
        await asyncio.to_thread(runtime.move, stub, 7)


def test_a_runtime_that_was_scaled_starts_again_with_what_it_has(local_ray: None, tmp_path: Path) -> None:
    with Runtime.start(tmp_path / "data", 1, name="scaled-again") as runtime:
        for key in KEYS[:10]:
            runtime.namespace(Ledger).get(key).apply.sync("x")
        runtime.scale(2)
    with pytest.raises(InvalidOption, match="2 partitions"):
        Runtime.start(tmp_path / "data", 1, name="scaled-again")
    with Runtime.start(tmp_path / "data", name="scaled-again") as runtime:
        assert len(runtime.status().partitions) == 2
        assert [runtime.namespace(Ledger).get(key).total.sync() for key in KEYS[:10]] == [1] * 10


async def test_new_code_is_rolled_out_under_load_without_an_error(runtime: Runtime) -> None:
    load = Load(runtime, KEYS[:30])
    load.start()
    before = await asyncio.to_thread(runtime.partition_pids)
    await asyncio.to_thread(runtime.deploy, timeout_s=90)
    await load.stop()
    after = await asyncio.to_thread(runtime.partition_pids)
    assert before.keys() == after.keys()
    assert not set(before.values()) & set(after.values()), "every process is a new one"
    await load.check()
    with pytest.raises(InvalidOption, match="can't leave"):
        await asyncio.to_thread(runtime.drain, "elsewhere")


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_ten_deployments_in_a_row_under_load_show_no_error_to_old_callers_or_new_ones(runtime: Runtime) -> None:
    load = Load(runtime, KEYS[:60])
    newcomers = Newcomers(runtime)
    load.start()
    calling = asyncio.ensure_future(newcomers.run())
    for _ in range(10):
        before = await asyncio.to_thread(runtime.partition_pids)
        await asyncio.to_thread(runtime.deploy, timeout_s=120)
        after = await asyncio.to_thread(runtime.partition_pids)
        assert not set(before.values()) & set(after.values())
        seen = await newcomers.more(newcomers.count)
        await load.answered_more(load.count, 100, KEYS[:60])
    newcomers.going = False
    await calling
    await load.stop()
    assert await runtime.namespace(Ledger).get("newcomers").total() == newcomers.count
    print(f"{await load.check()} calls, longest pause {load.longest_s:.2f} s; {seen} calls of new clients")


class Newcomers:
    """Clients that have never spoken to any partition, one after the other, each with one call."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._ref = runtime.namespace(Ledger).get("newcomers")._target.ref
        self.count = 0
        self.going = True

    async def run(self) -> None:
        while self.going:
            runtime = self._runtime
            directory = RayDirectory(
                RayCalls(ray_namespace(runtime.name)),
                runtime._directory.slot_map,
                runtime._description.secret,
                runtime.settings,
            )
            client = Client(directory, runtime.settings)
            try:
                answer = await client.call(self._ref, "newcomers", "apply", (f"{self.count}",), {})
            finally:
                await client.close()
            assert answer[0] == 1
            self.count += 1

    async def more(self, than: int) -> int:
        deadline = time.monotonic() + 60
        while self.count <= than:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        return self.count
