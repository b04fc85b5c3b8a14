"""An event loop without real time: when nothing is ready it jumps to its next timer, and threads run inline.

What runs on it runs in one order, so that a failing seed fails again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["run_simulated"]

T = TypeVar("T")


class _InlineExecutor(ThreadPoolExecutor):
    """Runs each job at once; the loop insists on a thread pool."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class _SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__()
        executor: Executor = _InlineExecutor(max_workers=1)
        self.set_default_executor(executor)  # type: ignore[arg-type]

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        loop: Any = self  # what is ready and what is scheduled are the base class's own
        if not loop._ready:
            first = min((handle._when for handle in loop._scheduled if not handle._cancelled), default=self._now_s)
            self._now_s = max(self._now_s, first)
        super()._run_once()  # type: ignore[misc]


def run_simulated(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a loop of its own."""
    loop = _SimulatedLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
