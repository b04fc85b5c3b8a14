"""Where blocking work runs: a thread in production, inline in tests and simulations."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["Executor", "InlineExecutor", "ThreadExecutor"]

Done = Callable[[Any, BaseException | None], None]


class Executor(Protocol):
    """Runs one job after the other; tells the loop thread how each ended."""

    def submit(self, job: Callable[[], Any], done: Done) -> None: ...

    def close(self) -> None: ...


class InlineExecutor:
    """Runs each job at once, on the calling thread: the same results, one interleaving."""

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        try:
            result = job()
        except Exception as error:
            done(None, error)
        else:
            done(result, None)

    def close(self) -> None:
        return None


class ThreadExecutor:
    """One thread of its own for what waits (COMMIT and fsync), so that the loop thread never does."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Done] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self._jobs.put((job, done))

    def _run(self) -> None:
        while (work := self._jobs.get()) is not None:
            job, done = work
            try:
                result, error = job(), None
            except Exception as caught:
                result, error = None, caught
            try:
                self._loop.call_soon_threadsafe(done, result, error)
            except RuntimeError:  # the loop is closed: nobody is left to tell, and nobody waits
                return

    def close(self) -> None:
        """Let the jobs that were submitted end, then stop the thread."""
        self._jobs.put(None)
        self._thread.join()
