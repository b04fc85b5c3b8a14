"""Minutes in which processes of every role are killed and suspended at random, under load and while slots move.

`make soak`; MAINSPRING_SOAK_S says how long, MAINSPRING_SOAK_SEED which schedule.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import ray

from actors.errors import MainspringError
from actors.runtime import Runtime
from actors.settings import Settings
from tests.cluster.mixed_load import MixedLoad
from tests.cluster.soak_apps import Witness
from tests.cluster.soak_client import KEYS as CLIENT_KEYS
from tests.support.killing import is_alive, kill_9
from tests.support.readme import ROOT
from tests.support.soak_history import History

pytestmark = [pytest.mark.soak, pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(0)]

SECONDS = float(os.environ.get("MAINSPRING_SOAK_S", "300"))
SEED = int(os.environ.get("MAINSPRING_SOAK_SEED", str(time.time_ns() % 1_000_000)))
#: A process that hangs is found within the soak's pauses; suspensions last from far less to more than that.
SETTINGS = Settings(partition_lease_ms=6_000, partition_renew_ms=1_000)
SUSPENDED_S = (0.2, 9.0)
KEYS = [f"soak-{number}" for number in range(50)]
#: Between two deeds: longer than a restart takes, so that the runtime is not only ever starting.
PAUSE_S = (1.0, 4.0)
NAME = "soak"


class Client:
    """The client process: killed, and started again with the same notes."""

    def __init__(self, directory: Path) -> None:
        self._notes = directory / "client-notes"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        address = ray.get_runtime_context().gcs_address
        command = [sys.executable, "-m", "tests.cluster.soak_client", address, NAME, str(self._notes), "client"]
        with open(self._directory / f"client-{self.starts}.log", "wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def kill(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            log = self._directory / f"client-{self.starts}.log"
            raise AssertionError(f"the client ended by itself:\n{log.read_text()[-4_000:]}")
        self._process.kill()
        self._process.wait()

    def tell(self, history: History) -> None:
        for line in self._notes.read_text().splitlines(keepends=True) if self._notes.exists() else ():
            if line.endswith("\n"):  # else the process died in the middle of its note
                key, token, count, seen = json.loads(line)
                assert count == 1, line
                history.answered(key, token, seen)


class Chaos:
    """Does something bad now and then; `done` counts what."""

    def __init__(self, runtime: Runtime, client: Client, seed: int) -> None:
        self._runtime = runtime
        self._client = client
        self._random = random.Random(seed)
        self.done: Counter[str] = Counter()

    async def run(self, seconds: float, load: MixedLoad) -> None:
        until = time.monotonic() + seconds
        deeds: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (4, self._kill_partition),
            (2, self._kill_coordinator),
            (2, self._kill_wheel),
            (2, self._kill_client),
            (3, self._suspend),
            (2, self._scale),
            (2, self._move),
            (1, self._deploy),
        ]
        while time.monotonic() < until:
            (deed,) = self._random.choices([each for _, each in deeds], [weight for weight, _ in deeds])
            await deed()
            load.raise_if_failed()
            await asyncio.sleep(self._random.uniform(*PAUSE_S))

    def _pids(self) -> dict[str, int]:
        """The processes that answer now, by role."""
        status = self._runtime.status()
        found = {f"partition {number}": report.pid for number, report in status.partitions.items()}
        found["coordinator"] = status.coordinator.engine.pid
        for name, report in status.release_wheels.items():
            found[f"wheel {name}"] = report.get("pid") if isinstance(report, dict) else None
        return {role: pid for role, pid in found.items() if pid}

    async def _pick(self, role: str) -> tuple[str, int] | None:
        pids = await asyncio.to_thread(self._pids)
        names = sorted(name for name in pids if name.startswith(role))
        if not names:
            return None  # it is just being started
        name = self._random.choice(names)
        return name, pids[name]

    async def _kill(self, role: str) -> None:
        picked = await self._pick(role)
        if picked is not None and is_alive(picked[1]):
            await asyncio.to_thread(kill_9, picked[1])
            self.done[f"{role} killed"] += 1

    async def _kill_partition(self) -> None:
        await self._kill("partition")

    async def _kill_coordinator(self) -> None:
        await self._kill("coordinator")

    async def _kill_wheel(self) -> None:
        await self._kill("wheel")

    async def _kill_client(self) -> None:
        await asyncio.to_thread(self._client.kill)
        self._client.start()
        self.done["client killed"] += 1

    async def _suspend(self) -> None:
        """Stop a process for a while, which may be longer than its lease; then let it go on, if it is still there."""
        role = self._random.choice(("partition", "partition", "coordinator", "wheel"))
        picked = await self._pick(role)
        if picked is None or not is_alive(picked[1]):
            return
        os.kill(picked[1], signal.SIGSTOP)
        await asyncio.sleep(self._random.uniform(*SUSPENDED_S))
        try:
            os.kill(picked[1], signal.SIGCONT)
            self.done[f"{role} suspended"] += 1
        except ProcessLookupError:
            self.done[f"{role} suspended until it was ended"] += 1

    async def _scale(self) -> None:
        partitions = self._random.choice((2, 3, 4))
        scaling = asyncio.ensure_future(self._runtime.ascale(partitions))
        await asyncio.sleep(self._random.uniform(0.1, 1.5))
        await self._kill(self._random.choice(("partition", "coordinator")))  # in the middle of it, perhaps
        await scaling
        self.done["scaled"] += 1

    async def _move(self) -> None:
        """Some slots, one by one; one that is not moved in time is left to the coordinator."""
        for key in self._random.sample(KEYS, 5):
            numbers = sorted(await asyncio.to_thread(self._runtime._partitions))
            stub = self._runtime.namespace(Witness).get(key)
            try:
                await asyncio.to_thread(self._runtime.move, stub, self._random.choice(numbers), timeout_s=30)
                self.done["slots moved by hand"] += 1
            except MainspringError as error:
                self.done[f"moves put off: {type(error).__name__}"] += 1

    async def _deploy(self) -> None:
        await asyncio.to_thread(self._runtime.deploy)
        self.done["deployed"] += 1


async def test_nothing_is_lost_twice_or_early_and_slots_have_one_owner_while_every_role_dies_at_random(
    tmp_path: Path,
) -> None:
    print(f"MAINSPRING_SOAK_SEED={SEED}")
    runtime = await asyncio.to_thread(Runtime.start, tmp_path / "data", 2, name=NAME, settings=SETTINGS)
    async with runtime:
        client = Client(tmp_path)
        load = MixedLoad(runtime, KEYS, SEED)
        chaos = Chaos(runtime, client, SEED)
        client.start()
        load.start()
        try:
            await chaos.run(SECONDS, load)
            await load.stop()
        finally:
            await asyncio.to_thread(client.kill)
        client.tell(load.history)
        calls, fires, messages = await load.check()
        witnesses = runtime.namespace(Witness)
        for key in (f"client-{number}" for number in range(CLIENT_KEYS)):
            load.history.check_tokens(key, await witnesses.get(key).applied(), under_way=client.starts)
        print(
            f"\n{calls} calls, {fires} fires, {messages} messages, "
            f"{load.history.incarnations()} processes of partitions, {load.history.slot_owners()} owners of slots, "
            f"longest pause of a call {load.longest_s:.1f} s\n"
            + "\n".join(f"{count:4} {what}" for what, count in sorted(chaos.done.items()))
        )
