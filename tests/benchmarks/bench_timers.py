"""Timers: armed and fired per second beside the bare SQLite work, catching up after downtime, and lateness.

In one process, without Ray: the partition's own work is what is measured. `synchronous=FULL`; every fire writes state.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from actors import DurableObject, TimerInfo
from actors.testing import LocalRuntime, SystemClock
from drivers.durable_object import tune_process
from tests.benchmarks.report import Sample, machine, save

#: Timers of one object, armed by one call each: a write set of 100 timers.
PER_OBJECT = 100
#: The floor commits as many rows at a time.
FLOOR_GROUP = 100
#: Timers per second while lateness is measured.
LATENESS_RATE = 100

console = Console(width=120)
#: When each timer of the lateness run fired, in milliseconds after it was due.
late_ms: list[float] = []


class Clockwork(DurableObject):
    """Arms timers and counts their fires."""

    def arm(self, start_ms: int, step_ms: int) -> None:
        for number in range(PER_OBJECT):
            self.timers.set(f"t{number}", at=start_ms + number * step_ms, method="on_time")

    def on_time(self, timer: TimerInfo) -> None:
        late_ms.append(time.time_ns() / 1e6 - timer.due_ms)
        self.storage["fires"] = self.storage.get("fires", 0) + 1

    def fires(self) -> int:
        count: int = self.storage.get("fires", 0)
        return count


@dataclass(frozen=True)
class Rate:
    """How many a second, and what share of the floor that is."""

    what: str
    per_second: float
    floor_per_second: float

    @property
    def share(self) -> float:
        return self.per_second / self.floor_per_second


async def _arm_all(runtime: LocalRuntime, objects: int, start_ms: int, step_ms: int = 0) -> float:
    """Arm `PER_OBJECT` timers at each object; the seconds it took."""
    clockworks = runtime.namespace(Clockwork)
    began = time.perf_counter()
    await asyncio.gather(*(clockworks.get(f"c{number}").arm(start_ms, step_ms) for number in range(objects)))
    return time.perf_counter() - began


async def _fired(runtime: LocalRuntime, expected: int) -> float:
    """Wait until so many timers have fired; the seconds it took."""
    began = time.perf_counter()
    while sum(each["fires"] for each in runtime.status()) < expected:  # noqa: ASYNC110 - durable fires have no event
        await asyncio.sleep(0.005)
    return time.perf_counter() - began


async def rates(folder: Path, timers: int) -> tuple[float, float]:
    """Timers armed per second, and fired per second when all of them came due in downtime."""
    objects = timers // PER_OBJECT
    runtime = LocalRuntime(clock=SystemClock(), data_dir=folder, partitions=1)
    async with runtime:
        arm_s = await _arm_all(runtime, objects, time.time_ns() // 1_000_000 + 10_000)
    await asyncio.sleep(max(0.0, 10.0 - arm_s))  # they come due while nothing runs
    runtime = LocalRuntime(clock=SystemClock(), data_dir=folder, partitions=1)
    async with runtime:
        runtime.namespace(Clockwork)
        fire_s = await _fired(runtime, timers)
        counts = [await runtime.namespace(Clockwork).get(f"c{number}").fires() for number in range(objects)]
        if sum(counts) != timers:
            raise SystemExit(f"{timers} timers were armed and {sum(counts)} fired")
    return timers / arm_s, timers / fire_s


async def lateness(folder: Path, seconds: float) -> Sample:
    """How late timers run, at `LATENESS_RATE` a second on an idle machine."""
    count = max(1, int(seconds * LATENESS_RATE) // PER_OBJECT)
    runtime = LocalRuntime(clock=SystemClock(), data_dir=folder, partitions=1)
    async with runtime:
        start_ms = time.time_ns() // 1_000_000 + 500
        clockworks = runtime.namespace(Clockwork)
        step_ms = 1_000 // LATENESS_RATE
        for number in range(count):
            await clockworks.get(f"late{number}").arm(start_ms + number * PER_OBJECT * step_ms, step_ms)
        late_ms.clear()
        await _fired(runtime, count * PER_OBJECT)
    return Sample.of("lateness", LATENESS_RATE, count, list(late_ms), count * PER_OBJECT / LATENESS_RATE)


# --- the floor ----------------------------------------------------------------------------------------


def _floor_database(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(
        "CREATE TABLE timers (lane, due_ms, kind, ref BLOB, generation, first_due_ms, attempt, payload BLOB,"
        " PRIMARY KEY (lane, due_ms, kind, ref, generation)) WITHOUT ROWID"
    )
    connection.execute("CREATE TABLE directory (oid, name, spec BLOB, PRIMARY KEY (oid, name)) WITHOUT ROWID")
    connection.execute("CREATE TABLE kv (oid, key, value BLOB, PRIMARY KEY (oid, key)) WITHOUT ROWID")
    return connection


def _in_groups(connection: sqlite3.Connection, count: int, write: Callable[[list[int]], None]) -> float:
    """Rows per second when `FLOOR_GROUP` of them share a transaction."""
    began = time.perf_counter()
    for first in range(0, count, FLOOR_GROUP):
        connection.execute("BEGIN IMMEDIATE")
        write(list(range(first, min(first + FLOOR_GROUP, count))))
        connection.execute("COMMIT")
    return count / (time.perf_counter() - began)


def floor(path: Path, count: int) -> tuple[float, float]:
    """Timers armed and fired per second by the bare statements: pointer and directory row, and a state write."""
    connection = _floor_database(path)

    def ref(number: int) -> bytes:
        return (number // PER_OBJECT).to_bytes(8, "big") + b"t%d" % number

    def arm(numbers: list[int]) -> None:
        connection.executemany(
            "INSERT OR REPLACE INTO timers VALUES (32, ?, 33, ?, ?, ?, 0, x'')",
            [(1_000_000, ref(number), number, 1_000_000) for number in numbers],
        )
        connection.executemany(
            "INSERT OR REPLACE INTO directory VALUES (?, ?, ?)",
            [(number // PER_OBJECT, f"t{number}", bytes(80)) for number in numbers],
        )

    def fire(numbers: list[int]) -> None:
        connection.executemany(
            "DELETE FROM timers WHERE lane = 32 AND due_ms = 1000000 AND kind = 33 AND ref = ? AND generation = ?",
            [(ref(number), number) for number in numbers],
        )
        connection.executemany(
            "DELETE FROM directory WHERE oid = ? AND name = ?",
            [(number // PER_OBJECT, f"t{number}") for number in numbers],
        )
        connection.executemany(
            "INSERT OR REPLACE INTO kv VALUES (?, 'fires', x'01')", [(number // PER_OBJECT,) for number in numbers]
        )

    armed, fired = _in_groups(connection, count, arm), _in_groups(connection, count, fire)
    connection.close()
    return armed, fired


# --- the command --------------------------------------------------------------------------------------


def show(found: list[Rate], late: Sample, timers: int, facts: dict[str, Any]) -> None:
    table = Table(title="Durable timers, one partition, synchronous=FULL, a state write with each fire")
    for column in ("", "share of the floor", "/s", "floor /s"):
        table.add_column(column, justify="right")
    for rate in found:
        table.add_row(rate.what, f"{rate.share:.2f}", f"{rate.per_second:,.0f}", f"{rate.floor_per_second:,.0f}")
    console.print(table)
    fire = found[1]
    console.print(f"catching up with {timers:,} overdue timers: {timers / fire.per_second:.1f} s")
    console.print(f"late at {LATENESS_RATE}/s: p50 {late.p50_ms:.2f}, p95 {late.p95_ms:.2f}, p99 {late.p99_ms:.2f} ms")
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))


def main(
    timers: Annotated[int, typer.Option(help="Timers armed, and then fired.")] = 20_000,
    seconds: Annotated[float, typer.Option(help="Length of the lateness run.")] = 10.0,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("bench-results"),
) -> None:
    """Measure, print ratios first, and save JSON."""
    tune_process()  # as in a partition's process
    facts = machine()
    with tempfile.TemporaryDirectory(prefix="mainspring-bench-") as name:
        folder = Path(name)
        floor_arm, floor_fire = floor(folder / "floor.sqlite", timers)
        arm, fire = uvloop.run(rates(folder / "rates", timers))
        late = uvloop.run(lateness(folder / "lateness", seconds))
    found = [Rate("arm", arm, floor_arm), Rate("fire", fire, floor_fire)]
    if min(late_ms) < 0:
        raise SystemExit(f"a timer fired {-min(late_ms):.3f} ms early")
    show(found, late, timers, facts)
    facts = {"machine": facts, **{rate.what: vars(rate) | {"share": rate.share} for rate in found}}
    console.print(f"saved to {save('timers', facts, [late], out)}")


if __name__ == "__main__":
    typer.run(main)
