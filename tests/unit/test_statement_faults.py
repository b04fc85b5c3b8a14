"""What can happen between any two statements of a partition's writer: its process dies, or somebody holds the lock."""

from __future__ import annotations

import sqlite3
import subprocess
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from actors.coordinator_store import CoordinatorStore
from actors.durable_object import DurableObject
from actors.testing import LocalRuntime, VirtualClock
from drivers.files import partition_directory
from tests.support.statements import ToldConnection, told_driver

#: What the default settings must outlast.
LOCK_HELD_MS = 10_000
#: So long the lock is held here at each statement, which makes the writer wait all the same.
HELD_S = 0.05


class Clockwork(DurableObject):
    """Notes each occurrence of its recurring timers."""

    def wind(self) -> int:
        self.timers.set("interval", every="1s", method="tick", misfire="all")
        self.timers.set("cron", cron="*/2 * * * * *", method="tick", misfire="all", tz="UTC")
        return self.turn.now_ms

    async def tick(self, info: Any) -> None:
        # a call out, so that the turn has an intent and several commits
        await self.namespace(Striker).get("s").strike(f"{info.name} {info.due_ms}")
        self.storage[f"{info.name} {info.due_ms}"] = self.storage.get(f"{info.name} {info.due_ms}", 0) + 1

    def ticks(self) -> dict[str, int]:
        return self.storage.list()


class Striker(DurableObject):
    """Is called by each occurrence."""

    def strike(self, what: str) -> None:
        self.storage[what] = self.storage.get(what, 0) + 1

    def strikes(self) -> dict[str, int]:
        return self.storage.list()


def runtime_in(directory: Path, clock: VirtualClock) -> LocalRuntime:
    return LocalRuntime(clock=clock, data_dir=directory, driver=told_driver(clock))


def occurrences(start_ms: int, until_ms: int) -> dict[str, int]:
    """What both timers have run once by then."""
    due = [f"interval {start_ms + 1_000 * k}" for k in range(1, (until_ms - start_ms) // 1_000 + 1)]
    due += [f"cron {at_ms}" for at_ms in range(start_ms + 1, until_ms + 1) if at_ms % 2_000 == 0]
    return dict.fromkeys(due, 1)


async def test_a_schedule_recovers_from_a_kill_before_each_statement_of_its_advance(tmp_path: Path) -> None:
    """The files as they are before each statement are what a process that is killed there leaves behind."""
    clock = VirtualClock()
    live = tmp_path / "live"
    left: list[tuple[Path, int, str]] = []

    def leave(sql: str) -> None:
        copy = tmp_path / f"left-{len(left)}"
        # by another process: closing a file here would give up the locks that SQLite holds on it
        subprocess.run(["cp", "-r", str(live), str(copy)], check=True)
        left.append((copy, clock.wall_ms(), sql))

    async with runtime_in(live, clock) as runtime:
        clockwork = runtime.namespace(Clockwork).get("c")
        start_ms = await clockwork.wind()
        await runtime.advance(ms=1_500)
        with ToldConnection.telling(leave):
            await runtime.advance(ms=1_000)  # one advance of each
        assert await clockwork.ticks() == occurrences(start_ms, clock.wall_ms())
    told = Counter(sql.split()[0] for _, _, sql in left)
    assert told["BEGIN"] >= 4
    assert told["COMMIT"] >= 4
    assert told["INSERT"] + told["REPLACE"] >= 4
    for directory, killed_ms, sql in left:
        again = VirtualClock(killed_ms)
        async with runtime_in(directory, again) as runtime:
            clockwork = runtime.namespace(Clockwork).get("c")
            striker = runtime.namespace(Striker).get("s")
            await runtime.advance(ms=2_600)
            expected = occurrences(start_ms, again.wall_ms())
            assert await clockwork.ticks() == expected, f"killed before {sql}"
            assert await striker.strikes() == expected, f"killed before {sql}"


class Holder:
    """Another program that takes the write lock whenever it can, and holds it for a while."""

    def __init__(self, path: Path, held_s: float = HELD_S) -> None:
        self._path = path
        self._held_s = held_s
        self.held: Counter[str] = Counter()

    def __call__(self, sql: str) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None, timeout=0, check_same_thread=False)
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:  # the partition has it: nobody else can hold it now
            connection.close()
            return
        self.held[sql.split()[0]] += 1
        # SQLite lets the interpreter go while it waits, so that this comes although the statement blocks its thread
        threading.Timer(self._held_s, connection.close).start()


async def use(directory: Path, hold: Holder) -> None:
    """Every kind of thing that a partition does: opening, calls, timers, nested calls, a crash, opening again."""
    clock = VirtualClock()
    async with runtime_in(directory, clock) as runtime:
        clockwork = runtime.namespace(Clockwork).get("c")
        start_ms = await clockwork.wind()
    with ToldConnection.telling(hold):
        async with runtime_in(directory, clock) as runtime:
            clockwork = runtime.namespace(Clockwork).get("c")
            await runtime.advance(ms=2_100)
            await runtime.crash()
            await runtime.advance(ms=1_000)
            assert await clockwork.ticks() == occurrences(start_ms, clock.wall_ms())
            assert await runtime.dead_letters() == []
            assert [status["resets"] for status in runtime.status()] == [0]
    assert hold.held["BEGIN"] >= 6
    assert hold.held["PRAGMA"] >= 2


async def test_a_lock_that_is_held_at_every_statement_is_waited_for_and_nobody_sees_an_error(tmp_path: Path) -> None:
    await use(tmp_path, Holder(partition_directory(tmp_path, 0) / "partition.sqlite"))


@pytest.mark.soak
@pytest.mark.timeout(1_800)
async def test_a_lock_that_is_held_for_ten_seconds_at_every_statement_is_waited_for(tmp_path: Path) -> None:
    await use(tmp_path, Holder(partition_directory(tmp_path, 0) / "partition.sqlite", LOCK_HELD_MS / 1_000))


async def test_the_default_patience_of_every_writer_is_longer_than_ten_seconds(tmp_path: Path) -> None:
    async with LocalRuntime(data_dir=tmp_path / "p") as runtime:
        await runtime.namespace(Clockwork).get("c").wind()
        (partition,) = runtime.partitions
        store: Any = partition.store if partition is not None else None
        ((patience_ms,),) = store._writer.execute("PRAGMA busy_timeout").fetchall()
        assert patience_ms > LOCK_HELD_MS
    path = tmp_path / "c" / "coordinator.sqlite"
    CoordinatorStore.create(path, "c1", 2, bytes(32))
    with closing(CoordinatorStore.open(path, "c1")) as record:
        ((patience_ms,),) = record._db.execute("PRAGMA busy_timeout").fetchall()
        assert patience_ms > LOCK_HELD_MS


def test_a_lock_on_the_coordinators_file_is_waited_for_at_every_change(tmp_path: Path) -> None:
    path = tmp_path / "c" / "coordinator.sqlite"
    CoordinatorStore.create(path, "c1", 2, bytes(32))
    hold = Holder(path)
    hold("open")
    with closing(CoordinatorStore.open(path, "c1")) as record:
        moves = record.moves
        for change in (
            lambda: record.raise_partition(0, 1, 10),
            lambda: record.mark_initialised(0),
            lambda: record.add_partition(2),
            lambda: moves.begin("m1", 0, 2, [1, 2]),
            lambda: moves.commit("m1"),
            lambda: moves.end("m1"),
            lambda: moves.begin("m2", 0, 2, [3]),
            lambda: moves.abort("m2"),
            lambda: moves.release("m2"),
            lambda: moves.end("m2"),
        ):
            hold("change")
            change()
        assert hold.held["change"] == 10
        assert record.slot_map().owners()[:4] == [0, 2, 2, 0]
