"""Timers and the processes that own them: killed ones, competing ones, and how little an idle timer costs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.testing import LocalRuntime, VirtualClock
from drivers.files import store_files
from tests.crash.timer_owner import Peal, runtime_in

ROOT = Path(__file__).parents[2]


def start(mode: str, data_dir: Path, *more: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.crash.timer_owner", mode, str(data_dir), *map(str, more)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> Any:
    """What the process says before it ends."""
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return json.loads(output) if output else None


def in_the_future(data_dir: Path) -> LocalRuntime:
    """A runtime in this process, whose clock is moved by the test."""
    return LocalRuntime(clock=VirtualClock(time.time_ns() // 1_000_000), data_dir=data_dir)


async def test_a_thousand_cancelled_timers_stay_cancelled_when_their_process_is_killed(tmp_path: Path) -> None:
    """Field complaints 5."""
    owner = start("cancel", tmp_path)
    assert owner.stdout is not None
    line = await asyncio.to_thread(owner.stdout.readline)
    owner.kill()
    owner.communicate()
    assert json.loads(line) == 1_000
    async with in_the_future(tmp_path) as runtime:
        peal = runtime.namespace(Peal).get("p")
        await runtime.advance(days=2)
        assert (await peal.armed(), await peal.rung()) == (0, {})
        assert sum(status["fires"] for status in runtime.status()) == 0


async def test_timers_that_two_processes_compete_for_fire_once_each(tmp_path: Path) -> None:
    """Field complaints 55: one file, two processes; who does not own it is refused and claims nothing."""
    timers = 300
    async with runtime_in(str(tmp_path)) as runtime:
        due_ms = time.time_ns() // 1_000_000 + 1_000
        for first in range(0, timers, 100):
            await runtime.namespace(Peal).get("p").arm(first, 100, due_ms + first)
    owners = [start("compete", tmp_path) for _ in range(2)]
    served = [await asyncio.to_thread(said, owner) for owner in owners]
    assert all(each["served"] for each in served), served
    async with in_the_future(tmp_path) as runtime:
        assert await runtime.namespace(Peal).get("p").rung() == {f"t{number}": 1 for number in range(timers)}


@pytest.mark.parametrize(
    ("timers", "most_bytes"),
    [(10_000, 16 << 20), pytest.param(1_000_000, 100 << 20, marks=[pytest.mark.soak, pytest.mark.timeout(3_600)])],
)
def test_idle_timers_cost_disk_and_hardly_any_memory(tmp_path: Path, timers: int, most_bytes: int) -> None:
    """Field complaints 37: a partition that is opened with many armed timers keeps none of them in memory."""
    empty, full = tmp_path / "empty", tmp_path / "full"
    for data_dir, count in ((empty, 0), (full, timers)):
        said(start("arm", data_dir, count))
    before, after = (said(start("open", data_dir)) for data_dir in (empty, full))
    grown = after["resident"] - before["resident"]
    on_disk = [store_files(str(data_dir), 0).database.stat().st_size for data_dir in (empty, full)]
    print(
        f"{timers:,} idle timers: RSS {before['resident'] >> 20} MiB -> {after['resident'] >> 20} MiB"
        f" ({grown / timers:.0f} bytes each), disk {(on_disk[1] - on_disk[0]) / timers:.0f} bytes each"
    )
    assert after["active_objects"] == 0
    assert grown < most_bytes
