"""How late wakes come: the release timer in process, the wheel actor to a partition, and asyncio's own sleep beside.

Each deadline is a whole millisecond of wall time about 30 ms ahead, as due times are, so that it is worth the way to
the wheel and the wait is no whole number of milliseconds. As the machine is, and beside one busy process per core.
Sleeps may end early, which a timer must not: how often they did is shown beside.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from actors.channel import Endpoint
from actors.launch import find_runtime
from actors.node import node_identity
from actors.ray_calls import RELEASE_WHEEL, RayCalls, ray_namespace
from actors.runtime import Runtime
from actors.wheel_waker import WheelWaker
from drivers.clock import SystemClock
from drivers.durable_object import SWITCH_INTERVAL_S, tune_process
from drivers.process_wheel import arm_at, release_timer_backend
from drivers.waker import ProcessWaker
from tests.benchmarks.report import Sample, machine, save

MS = 1_000_000
#: How far ahead each deadline is.
AHEAD_MS = 30
#: How long the wheel actor may take to be found.
FIND_TIMEOUT_S = 30.0

THREAD, PROCESS, WHEEL = "release timer, thread", "release timer, event loop", "wheel actor to partition"
CALL_AT = "clock call-back, uvloop"  # what an alarm has without a waker: sleeps on while it is early
UVLOOP_SLEEP, ASYNCIO_SLEEP = "asyncio.sleep, uvloop", "asyncio.sleep, asyncio"
NEVER_EARLY = (THREAD, PROCESS, WHEEL, CALL_AT)
#: Not "idle": what else the machine did is in `load_before`.
AS_FOUND, LOADED = "as found", "loaded"

console = Console(width=120)
#: Milliseconds of lateness of one wake.
Wake = Callable[[], Awaitable[float]]


def _next_due_ms() -> int:
    return time.time_ns() // MS + AHEAD_MS


def _late_ms(due_ms: int) -> float:
    return (time.time_ns() - due_ms * MS) / MS


def _by_thread() -> float:
    due_ms = _next_due_ms()
    remaining_ns = due_ms * MS - time.time_ns()
    arm_at(time.monotonic_ns() + remaining_ns).wait()
    return _late_ms(due_ms)


def _by(arm: Callable[[int, Callable[[], None]], object]) -> Wake:
    async def wake() -> float:
        done: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        due_ms = _next_due_ms()
        arm(due_ms, lambda: done.set_result(_late_ms(due_ms)))
        return await done

    return wake


async def _by_sleep() -> float:
    due_ms = _next_due_ms()
    await asyncio.sleep((due_ms * MS - time.time_ns()) / 1e9)
    return _late_ms(due_ms)


async def _in_turns(wakes: dict[str, Wake], count: int) -> dict[str, list[float]]:
    """Each of them `count` times, one after the other, so that all meet the same weather."""
    late: dict[str, list[float]] = {name: [] for name in wakes}
    for _ in range(count):
        for name, wake in wakes.items():
            late[name].append(await wake())
    return late


async def _on_uvloop(runtime: Runtime, count: int) -> dict[str, list[float]]:
    calls = RayCalls(ray_namespace(runtime.name))

    async def find() -> Endpoint:
        endpoint: Endpoint = await calls.call_async(RELEASE_WHEEL, "endpoint", timeout_s=FIND_TIMEOUT_S)
        return endpoint

    secret = (await asyncio.to_thread(find_runtime, calls, runtime.name)).secret
    wheel = WheelWaker(find, secret, runtime.settings, node_identity())
    wheel.start()
    while wheel.status()["backend"] != "release-wheel":  # noqa: ASYNC110 - a connection has no event here
        await asyncio.sleep(0.01)
    ways = {
        PROCESS: _by(ProcessWaker().arm),
        WHEEL: _by(wheel.arm),
        CALL_AT: _by(SystemClock().call_at),
        UVLOOP_SLEEP: _by_sleep,
    }
    late = await _in_turns(ways, count)
    woken = wheel.wakes
    wheel.stop()
    calls.close()
    if woken < count * 0.9:
        console.print(f"[red]only {woken} of {count} wakes came from the wheel")
    return late


def _in_a_thread(work: Callable[[], dict[str, list[float]]]) -> dict[str, list[float]]:
    """A loop of its own, whatever loop the main thread has had."""
    result: dict[str, list[float]] = {}
    thread = threading.Thread(target=lambda: result.update(work()))
    thread.start()
    thread.join()
    return result


def _run_asyncio(count: int) -> dict[str, list[float]]:
    loop = asyncio.SelectorEventLoop()
    try:
        return loop.run_until_complete(_in_turns({ASYNCIO_SLEEP: _by_sleep}, count))
    finally:
        loop.close()


def _run_uvloop(runtime: Runtime, count: int) -> dict[str, list[float]]:
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(_on_uvloop(runtime, count))
    finally:
        loop.close()


def _turn_for_ever() -> None:
    while True:
        pass


@contextmanager
def _busy_cores() -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_turn_for_ever, daemon=True) for _ in range(os.cpu_count() or 1)]
    for process in processes:
        process.start()
    try:
        time.sleep(1)  # until they are under way
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def measure(runtime: Runtime, count: int, weather: str) -> list[tuple[Sample, int]]:
    """All ways to wake, in this weather, and how often each was early. Fails when one was that must not be."""
    began = time.perf_counter()
    late = {THREAD: [_by_thread() for _ in range(count)]}
    late |= _in_a_thread(lambda: _run_uvloop(runtime, count))
    late |= _in_a_thread(lambda: _run_asyncio(count))
    for name in NEVER_EARLY:
        if min(late[name]) < 0:
            raise SystemExit(f"{name}: a wake was {-min(late[name]):.3f} ms early")
    seconds = time.perf_counter() - began
    return [
        (Sample.of(f"{name}, {weather}", 1, 1, each, seconds), sum(value < 0 for value in each))
        for name, each in late.items()
    ]


def show(measured: list[tuple[Sample, int]]) -> None:
    """Ratios first: the median lateness of an alarm without a waker, divided by that of each way."""
    found = {sample.who: sample for sample, _ in measured}
    table = Table(title=f"Lateness of a wake {AHEAD_MS} ms ahead, in milliseconds")
    for column in ("", "call-back's p50 / p50", "early", "p50", "p95", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    for sample, early in measured:
        beside = found[f"{CALL_AT}, {sample.who.rpartition(', ')[2]}"]
        ratio = f"{beside.p50_ms / sample.p50_ms:.1f} x" if sample.p50_ms > 0 else ""
        share = f"{early / sample.calls:.0%}"
        times = (f"{value:.3f}" for value in (sample.p50_ms, sample.p95_ms, sample.p99_ms))
        table.add_row(sample.who, ratio, share, *times)
    console.print(table)


def main(
    count: Annotated[int, typer.Option(help="Wakes of each kind, in each weather.")] = 300,
    out: Annotated[Path, typer.Option(help="Where the JSON goes.")] = Path("bench-results"),
) -> None:
    """Measure, print, and save JSON."""
    facts = machine()
    tune_process()  # as in a partition's process
    with tempfile.TemporaryDirectory(prefix="mainspring-bench-") as folder:
        with Runtime.start(Path(folder) / "data", partitions=1) as runtime:
            measured = measure(runtime, count, AS_FOUND)
            with _busy_cores():
                measured += measure(runtime, count, LOADED)
    show(measured)
    backend = release_timer_backend()
    facts |= {"release_timer": backend.value if backend else None, "switch_interval_s": SWITCH_INTERVAL_S}
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    early = {sample.who: count for sample, count in measured}
    document = {"machine": facts, "ahead_ms": AHEAD_MS, "early": early}
    console.print(f"saved to {save('wake', document, [sample for sample, _ in measured], out)}")


if __name__ == "__main__":
    typer.run(main)
