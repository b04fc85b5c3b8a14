"""A thread with an event loop under a watchdog: where partitions and wheels live in their Ray actors."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from actors.settings import Settings
from actors.watchdog import Watchdog

__all__ = ["LoopThread"]

T = TypeVar("T")


class LoopThread:
    """A thread that runs one event loop under a watchdog. Other threads only post to it."""

    def __init__(self, name: str, settings: Settings, *, exit_process: Callable[[int], object] = os._exit) -> None:
        self._name = name
        self._settings = settings
        self._exit_process = exit_process
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"mainspring-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread, its loop and its watchdog."""
        self._thread.start()

    def post(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop; the future belongs to the calling side."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        watchdog = Watchdog(
            self.loop,
            threading.get_ident(),
            name=self._name,
            blocked_ms=self._settings.loop_blocked_ms,
            hang_ms=self._settings.loop_hang_ms,
            exit_process=self._exit_process,
        )
        watchdog.start(backstop=True)
        try:
            self.loop.run_forever()
        finally:
            watchdog.stop()
