"""Five minutes in which processes of every role die at random, under load and while slots move.

`make soak`; MAINSPRING_SOAK_S says how long, MAINSPRING_SOAK_SEED which schedule.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import ray

from actors.launch import find_wheels
from actors.ray_calls import COORDINATOR, ActorUnreachable
from actors.runtime import Runtime
from tests.cluster.apps import Bell
from tests.support.killing import kill_9
from tests.support.ledger_load import Load

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(0)]

SECONDS = float(os.environ.get("MAINSPRING_SOAK_S", "300"))
SEED = int(os.environ.get("MAINSPRING_SOAK_SEED", str(time.time_ns() % 1_000_000)))
KEYS = [f"soak-{number}" for number in range(60)]
BELLS = 20
#: Between two deeds: longer than a restart takes, so that the runtime is not only ever starting.
PAUSE_S = (2.0, 5.0)


class Chaos:
    """Does something bad now and then; `done` counts what."""

    def __init__(self, runtime: Runtime, seed: int) -> None:
        self._runtime = runtime
        self._random = random.Random(seed)
        self.done: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        deeds = (self._kill_partition, self._kill_partition, self._kill_coordinator, self._kill_wheel, self._scale)
        while time.monotonic() < until:
            deed = self._random.choice(deeds)
            await deed()
            await asyncio.sleep(self._random.uniform(*PAUSE_S))

    async def _kill_partition(self) -> None:
        pids = await asyncio.to_thread(self._runtime.partition_pids)
        if pids:
            number = self._random.choice(sorted(pids))
            await asyncio.to_thread(kill_9, pids[number])
            self.done["partition killed"] += 1

    async def _kill_coordinator(self) -> None:
        await self._kill_actor(COORDINATOR)

    async def _kill_wheel(self) -> None:
        for name in await asyncio.to_thread(find_wheels, self._runtime._calls):
            await self._kill_actor(name)

    async def _kill_actor(self, name: str) -> None:
        try:
            handle = await self._runtime._calls.handle_async(name)
        except ActorUnreachable:
            return  # it is just being started
        await asyncio.to_thread(ray.kill, handle, no_restart=False)
        self.done[f"{name} killed"] += 1

    async def _scale(self) -> None:
        partitions = self._random.choice((2, 3))
        scaling = asyncio.ensure_future(self._runtime.ascale(partitions))
        await asyncio.sleep(self._random.uniform(0.1, 1.5))
        await self._kill_partition()  # in the middle of it, perhaps
        await scaling
        self.done[f"scaled to {partitions}"] += 1


async def test_nothing_is_lost_and_nothing_happens_twice_while_every_role_dies_at_random(tmp_path: Path) -> None:
    print(f"MAINSPRING_SOAK_SEED={SEED}")
    runtime = await asyncio.to_thread(Runtime.start, tmp_path / "data", 2, name="soak")
    async with runtime:
        bells = runtime.namespace(Bell)
        now_ms = int(time.time() * 1_000)
        spread_ms = int(SECONDS * 1_000)
        due = {
            f"bell-{number}": {
                f"t{each}": now_ms + 2_000 + (each * 997 + number * 131) % spread_ms for each in range(50)
            }
            for number in range(BELLS)
        }
        for key, timers in due.items():
            await bells.get(key).arm(timers)
        load = Load(runtime, KEYS, pause_s=0.02)
        load.start()
        chaos = Chaos(runtime, SEED)
        await chaos.run(SECONDS)
        await load.stop()
        calls = await load.check()
        for key, timers in due.items():
            fires = []
            for _ in range(600):
                fires = await bells.get(key).fires()
                if len(fires) >= len(timers):
                    break
                await asyncio.sleep(0.1)
            assert sorted(fire[0] for fire in fires) == sorted(timers), "each timer's effects once"
            for name, due_ms, fired_ms, *_ in fires:
                assert due_ms == timers[name]
                assert fired_ms >= due_ms, "never early"
        print(f"{calls} calls, {BELLS * 50} timers, longest pause {load.longest_s:.1f} s, {dict(chaos.done)}")
