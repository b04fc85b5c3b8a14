"""Durable keyed calls per second and their latency: ours beside a plain Ray actor that commits per call.

Both run in one process tree on one Ray, take turns, and do the same read-modify-write with `synchronous=FULL`.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import ray
import typer
import uvloop
from rich.console import Console
from rich.table import Table

from actors.runtime import Runtime
from tests.benchmarks.objects import Counter, PlainCounter
from tests.benchmarks.report import Sample, machine, save

#: Callers at the same time, as the design lists them.
CALLERS = (1, 64, 1_024)
KEYS = 100
#: The floor: rows of one transaction, about what a group commit gathers at 1,024 callers.
FLOOR_GROUP = 250

Call = Callable[[int], Awaitable[Any]]
console = Console(width=120)


async def measure(who: str, call: Call, callers: int, seconds: float) -> Sample:
    """Let `callers` call as fast as they are answered, each its own key in turn, for about `seconds`."""
    latencies: list[float] = []
    start = time.perf_counter()
    until = start + seconds

    async def caller(number: int) -> None:
        while True:
            began = time.perf_counter()
            await call(number)
            ended = time.perf_counter()
            latencies.append((ended - began) * 1_000)
            if ended >= until:
                return

    await asyncio.gather(*(caller(number) for number in range(callers)))
    return Sample.of(who, callers, KEYS, latencies, time.perf_counter() - start)


def floor(path: Path, seconds: float) -> float:
    """Rows per second of the bare SQLite work: the same rows, the same durability, no runtime."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("CREATE TABLE kv (oid INTEGER, key TEXT, value BLOB, PRIMARY KEY (oid, key)) WITHOUT ROWID")
    done, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        connection.execute("BEGIN IMMEDIATE")
        for number in range(FLOOR_GROUP):
            oid = number % KEYS
            connection.execute("SELECT value FROM kv WHERE oid = ? AND key = ?", (oid, "total")).fetchone()
            connection.execute("INSERT OR REPLACE INTO kv VALUES (?, ?, ?)", (oid, "total", b"\x01"))
        connection.execute("COMMIT")
        done += FLOOR_GROUP
    connection.close()
    return done / (time.perf_counter() - start)


async def run(runtime: Runtime, plain: Any, rounds: int, seconds: float) -> list[Sample]:
    stubs = [runtime.namespace(Counter).get(f"key-{number}") for number in range(KEYS)]

    def ours(number: int) -> Awaitable[Any]:
        return stubs[number % KEYS].add(1)

    def theirs(number: int) -> Awaitable[Any]:
        return plain.add.remote(f"key-{number % KEYS}", 1)

    samples: list[Sample] = []
    for callers in CALLERS:
        for _ in range(rounds):  # in turns, so that a slow moment of the machine meets both
            for who, call in (("mainspring", ours), ("plain Ray actor", theirs)):
                await measure(who, call, callers, seconds / 4)  # warm
                sample = await measure(who, call, callers, seconds)
                samples.append(sample)
                console.print(f"  {who:16} {callers:5} callers  {sample.per_second:10,.0f}/s  p50 {sample.p50_ms} ms")
    return samples


def best(samples: list[Sample], who: str, callers: int) -> Sample:
    """The median round by rate."""
    rounds = sorted((s for s in samples if s.who == who and s.callers == callers), key=lambda s: s.per_second)
    return rounds[len(rounds) // 2]


def show(samples: list[Sample], floor_per_second: float, facts: dict[str, Any]) -> None:
    table = Table(title="Durable keyed calls (read-modify-write, synchronous=FULL)")
    for column in (
        "callers",
        "ratio",
        "ours /s",
        "plain /s",
        "ours p50",
        "p95",
        "p99 ms",
        "plain p50",
        "p95",
        "p99 ms",
    ):
        table.add_column(column, justify="right")
    for callers in CALLERS:
        ours, plain = best(samples, "mainspring", callers), best(samples, "plain Ray actor", callers)
        table.add_row(
            f"{callers:,}",
            f"{ours.per_second / plain.per_second:.1f} x",
            f"{ours.per_second:,.0f}",
            f"{plain.per_second:,.0f}",
            *(f"{value:.2f}" for value in (ours.p50_ms, ours.p95_ms, ours.p99_ms)),
            *(f"{value:.2f}" for value in (plain.p50_ms, plain.p95_ms, plain.p99_ms)),
        )
    console.print(table)
    console.print(f"floor (bare SQLite, {FLOOR_GROUP} rows a commit): {floor_per_second:,.0f} rows/s")
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))


def main(
    seconds: Annotated[float, typer.Option(help="Length of one measured run.")] = 4.0,
    rounds: Annotated[int, typer.Option(help="Runs of each kind, in turns; the median counts.")] = 3,
    partitions: Annotated[int, typer.Option(help="Partitions of the runtime.")] = 1,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("bench-results"),
) -> None:
    """Measure, print ratios first, and save JSON."""
    facts = machine()
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with tempfile.TemporaryDirectory(prefix="mainspring-bench-") as folder:
        floor_per_second = floor(Path(folder) / "floor.sqlite", seconds)
        with Runtime.start(Path(folder) / "data", partitions=partitions) as runtime:
            plain = ray.remote(PlainCounter).options(num_cpus=0).remote(str(Path(folder) / "plain.sqlite"))
            samples = asyncio.run(run(runtime, plain, rounds, seconds))
    show(samples, floor_per_second, facts)
    saved = save("calls", {"machine": facts, "floor_rows_per_second": floor_per_second}, samples, out)
    console.print(f"saved to {saved}")


if __name__ == "__main__":
    typer.run(main)
