"""Processes without Ray that are really killed: at every step of opening, at any moment of work, on a full disk."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.errors import DataMissing, InvalidOption
from actors.testing import LocalRuntime
from drivers.files import partition_directory
from tests.cluster.apps import Bell, Crew, Ledger
from tests.crash.child import local_runtime

ROOT = Path(__file__).parents[2]
#: Every third step of an opening: each kind of step comes many times.
STRIDE = 3
KILLS = 25


class Children:
    """Asks the process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, data_dir: Path, partitions: int = 1, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request.update(data_dir=str(data_dir), partitions=partitions)
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    started = Children()
    yield started
    started.close()


@pytest.fixture
def fast_dir() -> Iterator[Path]:
    """In memory where there is such a place: SIGKILL takes nothing that was written, so no test needs a slow fsync."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="mainspring-test-", dir=parent) as directory:
        yield Path(directory)


# --- opening ------------------------------------------------------------------------------------------


def test_a_first_creation_that_is_killed_at_any_step_is_finished_by_the_next_opening(
    children: Children, fast_dir: Path
) -> None:
    steps = children.ask(fast_dir / "whole", token="t", kill_at=0)["steps"]
    assert steps > 50
    for step in range(1, steps + 1, STRIDE):
        data_dir = fast_dir / f"step-{step}"
        assert children.ask(data_dir, token="t", kill_at=step)["signal"] == signal.SIGKILL
        assert children.ask(data_dir, token="t", kill_at=0).get("applied") == {"t": 1}, f"after a kill at step {step}"
        shutil.rmtree(data_dir)


def test_an_opening_that_is_killed_at_any_step_loses_nothing(children: Children, fast_dir: Path) -> None:
    children.ask(fast_dir, token="first", kill_at=0)
    steps = children.ask(fast_dir, token="second", kill_at=0)["steps"]
    for step in range(1, steps + 1, STRIDE):
        assert children.ask(fast_dir, token="never", kill_at=step)["signal"] == signal.SIGKILL
    assert children.ask(fast_dir, token="last", kill_at=0)["applied"] == {"first": 1, "second": 1, "last": 1}


@pytest.mark.parametrize("killed", [False, True])
async def test_a_partition_that_had_data_and_lost_its_file_is_never_made_anew(
    children: Children, tmp_path: Path, killed: bool
) -> None:
    assert children.ask(tmp_path, partitions=2, token="t", kill_at=0)["applied"] == {"t": 1}
    if killed:
        children.ask(tmp_path, partitions=2, token="u", kill_after=3)
    for partition in (0, 1):
        directory = partition_directory(tmp_path, partition)
        aside = tmp_path / "aside"
        directory.rename(aside)
        with pytest.raises(DataMissing):
            await local_runtime(str(tmp_path), 2).start()
        directory.mkdir()  # an empty mount point
        with pytest.raises(DataMissing):
            await local_runtime(str(tmp_path), 2).start()
        shutil.rmtree(directory)
        aside.rename(directory)
    async with local_runtime(str(tmp_path), 2) as runtime:
        assert (await runtime.namespace(Ledger).get("ledger").applied())["t"] == 1


async def test_another_number_of_partitions_than_the_directory_has_is_refused(
    children: Children, tmp_path: Path
) -> None:
    children.ask(tmp_path, partitions=2, token="t", kill_at=0)
    for partitions in (1, 3):
        with pytest.raises(InvalidOption, match="has 2 partitions"):
            await local_runtime(str(tmp_path), partitions).start()


async def test_a_second_process_is_refused_and_told_who_holds_the_data(children: Children, tmp_path: Path) -> None:
    async with local_runtime(str(tmp_path), 1) as runtime:
        ledger = runtime.namespace(Ledger).get("ledger")
        await ledger.apply("before")
        refused = await asyncio.to_thread(children.ask, tmp_path, token="theirs", kill_at=0)
        assert refused["error"] == "PartitionBusy"
        assert f"pid {os.getpid()}" in refused["message"]
        await ledger.apply("after")
    assert children.ask(tmp_path, token="theirs", kill_at=0)["applied"] == {"before": 1, "after": 1, "theirs": 1}


# --- work ---------------------------------------------------------------------------------------------


async def test_after_kills_at_any_moment_each_acknowledged_effect_is_there_exactly_once(
    children: Children, tmp_path: Path
) -> None:
    """Calls, trees of calls over two partitions, and timers; the process is killed after some acknowledgements."""
    chance = random.Random(7)
    acknowledged: Counter[str] = Counter()
    for number in range(KILLS):
        request = {"token": f"life{number}", "kill_after": chance.randint(1, 150)}
        answer = await asyncio.to_thread(children.ask, tmp_path, 2, **request)
        assert answer.get("signal") == signal.SIGKILL, answer
        acknowledged.update(answer["acknowledged"])
    assert set(acknowledged.values()) == {1}
    async with local_runtime(str(tmp_path), 2) as runtime:
        found = await effects(runtime)
        assert await runtime.dead_letters() == []
    assert set(found.values()) == {1}
    assert acknowledged.keys() <= found.keys()


async def effects(runtime: LocalRuntime) -> Counter[str]:
    """What happened, how often, once everything that was begun has ended."""
    ledgers, crews, bells = (runtime.namespace(cls) for cls in (Ledger, Crew, Bell))
    found: Counter[str] = Counter()
    below: Counter[str] = Counter()
    for number in range(4):
        bell = bells.get(f"bell-{number}")
        while await bell.armed():
            await runtime.run_until_idle()
        for name, *_ in await bell.fires():
            found[f"armed {name}"] += 1
        for token, count in (await ledgers.get(f"ledger-{number}").applied()).items():
            found[f"applied {token}"] += count
        for what, count in (await crews.get(f"crew-{number}").counts()).items():
            begun, token = what.split()
            found[f"worked {token}" if begun == "ended" else f"begun {token}"] += count
        for what, count in (await crews.get(f"crew-{number}-below").counts()).items():
            below[what.split()[1]] += count
    # two crews below each, which began and ended: no tree is there by half
    assert below == {what.split()[1]: 4 for what in found if what.startswith("worked")}
    assert {what.split()[1] for what in found if what.startswith("begun")} == set(below)
    return found


# --- a full disk --------------------------------------------------------------------------------------


def test_on_a_full_disk_callers_get_commit_failed_and_once_there_is_space_calls_work_again(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=16m none {tmp_path}"
    unshare = ["unshare", "--user", "--map-root-user", "--mount"] if os.getuid() else ["unshare", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "sh", "-c", mount], check=False).returncode:
        pytest.skip("this machine lets nobody mount a small file system")
    script = f"{mount} && exec {sys.executable} -m tests.crash.full_disk {tmp_path}"
    done = subprocess.run([*unshare, "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert said["outcomes"]["before"] == {"applied": 160}
    assert said["outcomes"]["full"]["CommitFailed"] > 0
    assert said["outcomes"]["after"] == {"applied": 160}
    assert said["exact"]
