"""Processes that carry out durable functions and are killed at any moment: each step counts once all the same."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

from tests.crash.executions import EXECUTIONS, NAP_MS, STEPS, Ledger, Worker, runtime_in, start_all
from tests.crash.test_kill_native import ROOT, fast_dir

__all__ = ["fast_dir"]

KILLS = 8
#: How long a child lives at most. The naps of an execution alone take longer, so the first one is killed for certain.
LONGEST_LIFE_S = 0.6
assert LONGEST_LIFE_S * 1_000 < STEPS * NAP_MS


def _killed_child(directory: Path, life_s: float) -> bool:
    """Whether it had ended all executions before it was killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", f"from tests.crash.executions import child; child({str(directory)!r})"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    started = child.stdout.readline()  # its life counts from here: starting takes as long as the machine likes
    assert started == "started\n"
    killer = threading.Timer(life_s, child.kill)
    killer.start()
    said = child.stdout.read()
    child.wait(30)
    killer.cancel()
    child.stdout.close()
    return "ended" in said


async def test_steps_and_what_they_call_count_once_however_often_the_process_is_killed(
    fast_dir: Path,
) -> None:
    moments = random.Random(34)
    kills = 0
    while kills < KILLS and not _killed_child(fast_dir, moments.uniform(0.0, LONGEST_LIFE_S)):
        kills += 1
    async with runtime_in(str(fast_dir)) as runtime:
        names = await start_all(runtime)
        for name in names:
            assert await runtime.namespace(Worker).get(name).taken() == STEPS
        counts: Counter[str] = Counter()
        for number in range(3):
            counts.update(await runtime.namespace(Ledger).get(f"ledger-{number}").counts())
        assert set(counts.values()) == {1}
        assert len(counts) == EXECUTIONS * STEPS
        assert await runtime.dead_letters() == []
    assert kills > 0
