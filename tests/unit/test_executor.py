"""Where blocking work runs: one job after the other, each end told on the loop's thread."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from drivers.executor import InlineExecutor, ThreadExecutor


class Ends:
    """Collects how jobs ended."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, BaseException | None]] = []
        self.threads: set[int] = set()
        self.changed = asyncio.Event()

    def __call__(self, result: Any, error: BaseException | None) -> None:
        self.told.append((result, error))
        self.threads.add(threading.get_ident())
        self.changed.set()

    async def wait(self, count: int) -> None:
        while len(self.told) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 10)


def fail() -> None:
    raise OSError("the disk is gone")


async def test_inline_runs_at_once_and_tells_results_and_errors() -> None:
    ends = Ends()
    executor = InlineExecutor()
    executor.submit(lambda: 1, ends)
    executor.submit(fail, ends)
    executor.close()
    assert ends.told[0] == (1, None)
    assert isinstance(ends.told[1][1], OSError)


async def test_inline_lets_errors_of_the_one_who_is_told_through() -> None:
    def done(result: Any, error: BaseException | None) -> None:
        raise KeyError("a mistake of the caller")

    with pytest.raises(KeyError):
        InlineExecutor().submit(lambda: 1, done)


async def test_a_thread_runs_jobs_in_order_and_tells_on_the_loop() -> None:
    ends = Ends()
    executor = ThreadExecutor("test-commit", asyncio.get_running_loop())
    for number in range(20):
        executor.submit(lambda number=number: (number, threading.current_thread().name), ends)  # type: ignore[misc]
    executor.submit(fail, ends)
    await ends.wait(21)
    assert [result for result, _ in ends.told[:20]] == [(number, "test-commit") for number in range(20)]
    assert isinstance(ends.told[20][1], OSError)
    assert ends.threads == {threading.get_ident()}
    executor.close()


async def test_jobs_do_not_overlap_and_the_loop_goes_on_meanwhile() -> None:
    loop = asyncio.get_running_loop()
    ends, gate, started = Ends(), threading.Event(), asyncio.Event()
    running: list[int] = []

    def slow() -> None:
        running.append(1)
        loop.call_soon_threadsafe(started.set)
        gate.wait(10)

    executor = ThreadExecutor("test-commit", loop)
    executor.submit(slow, ends)
    executor.submit(lambda: running.append(2), ends)
    await asyncio.wait_for(started.wait(), 10)
    assert running == [1]
    assert ends.told == []
    gate.set()
    await ends.wait(2)
    assert running == [1, 2]
    executor.close()


async def test_closing_lets_the_submitted_jobs_end() -> None:
    ends = Ends()
    executor = ThreadExecutor("test-commit", asyncio.get_running_loop())
    done: list[int] = []
    for number in range(5):
        executor.submit(lambda number=number: done.append(number), ends)  # type: ignore[misc]
    executor.close()
    assert done == [0, 1, 2, 3, 4]
    await ends.wait(5)


def test_a_loop_that_is_gone_is_nobody_to_tell() -> None:
    loop = asyncio.new_event_loop()
    executor = ThreadExecutor("test-commit", loop)
    loop.close()
    executor.submit(lambda: 1, lambda result, error: None)
    executor.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "test-commit"]
