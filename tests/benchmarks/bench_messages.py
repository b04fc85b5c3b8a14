"""Messages between objects: sent and applied per second beside the bare SQLite work, over one, 100 and 2,000 pairs.

In one process, without Ray: the partition's own work is what is measured. `synchronous=FULL`; every message writes
state at its receiver, and all of them were sent before the clock starts for their delivery.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from actors import DurableObject
from actors.settings import Settings
from actors.testing import LocalRuntime, SystemClock
from tests.benchmarks.report import Sample, machine, save

#: Pairs of objects that the messages are spread over.
PAIRS = (1, 100, 2_000)
#: Messages that one turn sends.
PER_TURN = 100
#: The floor commits as many messages at a time.
FLOOR_GROUP = 100

console = Console(width=120)
#: When the last message was applied, by `time.perf_counter`.
last_applied: list[float] = [0.0]


class Source(DurableObject):
    """Sends numbered messages."""

    def run(self, first: int, count: int) -> None:
        for number in range(first, first + count):
            self.send(Sink, self.key).take(number)


class Sink(DurableObject):
    """Adds up what it gets."""

    def take(self, number: int) -> None:
        count, total = self.storage.get("got", (0, 0))
        self.storage["got"] = (count + 1, total + number)
        last_applied[0] = time.perf_counter()

    def got(self) -> tuple[int, int]:
        count, total = self.storage.get("got", (0, 0))
        return count, total


async def measure(folder: Path, pairs: int, messages: int) -> tuple[float, float]:
    """(messages sent per second, messages applied per second) while both go on at the same time."""
    each = messages // pairs
    settings = Settings(max_outbox_messages=messages)
    async with LocalRuntime(clock=SystemClock(), data_dir=folder, partitions=1, settings=settings) as runtime:
        sources, sinks = runtime.namespace(Source), runtime.namespace(Sink)
        keys = [f"k{number}" for number in range(pairs)]
        began = time.perf_counter()
        turns = [
            sources.get(key).run(first, min(PER_TURN, each - first))
            for first in range(0, each, PER_TURN)
            for key in keys
        ]
        await asyncio.gather(*turns)
        sent = time.perf_counter()
        while runtime.status()[0]["outbox"]:  # noqa: ASYNC110 - a delivery has no event
            await asyncio.sleep(0.005)
        for key in keys:
            if await sinks.get(key).got() != (each, each * (each - 1) // 2):
                raise SystemExit(f"{key} did not get each of its {each} messages once")
    return pairs * each / (sent - began), pairs * each / (last_applied[0] - began)


def floor(path: Path, messages: int) -> float:
    """Messages per second of the bare statements: sent in one transaction, applied and removed in the next."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute(
        "CREATE TABLE outbox (slot, number, source, target, args BLOB, PRIMARY KEY (slot, number)) WITHOUT ROWID"
    )
    connection.execute("CREATE TABLE received (slot, pair BLOB, number, PRIMARY KEY (slot, pair)) WITHOUT ROWID")
    connection.execute("CREATE TABLE kv (oid, key, value BLOB, PRIMARY KEY (oid, key)) WITHOUT ROWID")

    def commit(write: Callable[[], Any]) -> None:
        connection.execute("BEGIN IMMEDIATE")
        write()
        connection.execute("COMMIT")

    began = time.perf_counter()
    for first in range(0, messages, FLOOR_GROUP):
        numbers = [(number % 100, number) for number in range(first, first + FLOOR_GROUP)]

        def send(rows: list[tuple[int, int]] = numbers) -> None:
            connection.executemany("INSERT INTO outbox VALUES (?, ?, 'Source/k', 'Sink/k', x'9201')", rows)

        def apply(rows: list[tuple[int, int]] = numbers) -> None:
            for slot, number in rows:
                connection.execute("SELECT value FROM kv WHERE oid = ? AND key = 'got'", (slot,)).fetchone()
                connection.execute("INSERT OR REPLACE INTO kv VALUES (?, 'got', x'01')", (slot,))
                connection.execute("INSERT OR REPLACE INTO received VALUES (?, x'00', ?)", (slot, number))
            connection.executemany("DELETE FROM outbox WHERE slot = ? AND number = ?", rows)

        commit(send)
        commit(apply)
    elapsed = time.perf_counter() - began
    connection.close()
    return messages / elapsed


def main(
    messages: Annotated[int, typer.Option(help="Messages of one run.")] = 20_000,
    rounds: Annotated[int, typer.Option(help="Runs for each number of pairs; the median counts.")] = 3,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("bench-results"),
) -> None:
    """Measure, print ratios first, and save JSON."""
    facts = machine()
    table = Table(title="Messages between objects, one partition, synchronous=FULL, a state write with each")
    for column in ("pairs", "share of the floor", "applied /s", "floor /s", "sent /s meanwhile"):
        table.add_column(column, justify="right")
    found: dict[str, Any] = {}
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with tempfile.TemporaryDirectory(prefix="mainspring-bench-") as name:
        folder = Path(name)
        for pairs in PAIRS:
            runs = []
            for number in range(rounds):  # in turns, so that a slow moment of the machine meets both
                bare = floor(folder / f"floor-{pairs}-{number}.sqlite", messages)
                sent, applied = asyncio.run(measure(folder / f"{pairs}-{number}", pairs, messages))
                runs.append((applied, sent, bare))
            applied, sent, bare = sorted(runs)[len(runs) // 2]
            found[str(pairs)] = {"applied_per_second": applied, "sent_per_second": sent, "floor_per_second": bare}
            table.add_row(f"{pairs:,}", f"{applied / bare:.2f}", f"{applied:,.0f}", f"{bare:,.0f}", f"{sent:,.0f}")
    console.print(table)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    samples: list[Sample] = []
    console.print(f"saved to {save('messages', {'machine': facts, 'messages': found}, samples, out)}")


if __name__ == "__main__":
    typer.run(main)
