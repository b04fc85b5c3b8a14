"""Durable objects whose tests kill their processes: each keeps what shows a loss or a repeat."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import threading
from typing import Any

from actors.durable_object import DurableObject, shared
from actors.errors import MainspringError
from actors.object_timers import TimerInfo
from timers.backoff import RetryPolicy

#: What was started in this process, in order.
_order = itertools.count()


def die() -> None:
    """End this process at once, as a segmentation fault or the kernel's out-of-memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


class Ledger(DurableObject):
    """Applies tokens; each is counted under its own key, so that one that was applied twice shows."""

    def apply(self, token: str) -> tuple[int, int]:
        """How often it has been applied now, and by which process."""
        count: int = self.storage.get(token, 0) + 1
        self.storage.put(token, count)
        self.storage.put("\x01total", self.storage.get("\x01total", 0) + 1)
        return count, os.getpid()

    def applied(self) -> dict[str, int]:
        """How often each token was applied."""
        return {key: count for key, count in self.storage.list().items() if key != "\x01total"}

    def total(self) -> int:
        total: int = self.storage.get("\x01total", 0)
        return total

    def poison(self, token: str) -> None:
        """Ends its process each time."""
        self.storage.put(token, 1)
        die()

    def keep(self, key: str, value: Any) -> None:
        """Stores whatever it is given."""
        self.storage.put(key, value)

    def keep_lock(self) -> None:
        """Stores something that can't be stored, after something that can."""
        self.storage.put("good", 1)
        self.storage.put("bad", {"list": [1, {"handle": threading.Lock()}]})

    def reply_with_lock(self) -> Any:
        """Returns something that can't travel."""
        self.storage.put("before", 1)
        return [threading.Lock()]

    def keep_blob(self, size: int) -> None:
        self.storage.put("before", 1)
        self.storage.put("blob", b"x" * size)

    def light_fuse(self, path: str, delay_s: float) -> None:
        """Once for each path: this process is killed after `delay_s`, whatever it is doing then; 0: at once."""
        if not os.path.exists(path):
            with open(path, "w") as file:
                file.write(str(os.getpid()))
            if not delay_s:
                die()
            threading.Timer(delay_s, die).start()

    def pid(self) -> int:
        return os.getpid()

    def limit_file_size(self, limit: int) -> None:
        """No file of this process can be written past `limit` bytes, as where a quota is used up."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def _private(self) -> None:
        raise AssertionError("nobody outside can call this")


class Crew(DurableObject):
    """A node of a tree of calls: works itself, then through the crews below it, then itself again."""

    async def work(self, token: str, below: list[Any], hold: str = "") -> int:
        """`below` holds [key, below, hold] for each crew to call. `hold`: the gate to pass before the turn returns.

        Returns how many crews worked.
        """
        self._count(f"begun {token}")
        crews = [self.namespace(Crew).get(key).work(token, deeper, gate) for key, deeper, gate in below]
        done: list[int] = await asyncio.gather(*crews)
        if hold:
            await self.namespace(Gate).get(hold).passed(token)
        self._count(f"ended {token}")
        return sum(done) + 1

    async def ask(self, ledger: str, token: str) -> str:
        """Calls what ends its process each time; returns the error's type."""
        try:
            await self.namespace(Ledger).get(ledger).poison(token)
        except MainspringError as error:
            self._count(f"refused {token}")
            return type(error).__name__
        return "survived"

    def counts(self) -> dict[str, int]:
        return dict(self.storage.list())

    def _count(self, what: str) -> None:
        self.storage.put(what, self.storage.get(what, 0) + 1)


class Gate(DurableObject):
    """Whoever passes waits until it is opened. Both are durable, so a gate stays open across restarts."""

    turns = "interleaved"

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._waiting = 0

    async def passed(self, token: str) -> None:
        if not self.storage.get("open", False):
            self._waiting += 1
            try:
                await self._opened.wait()
            finally:
                self._waiting -= 1
        self.storage.put(token, self.storage.get(token, 0) + 1)

    def open(self) -> None:
        self.storage.put("open", True)
        self._opened.set()

    def waiting(self) -> int:
        """How many wait at it now, in this process."""
        return self._waiting

    def tokens(self) -> dict[str, int]:
        return {key: count for key, count in self.storage.list().items() if key != "open"}


class Bell(DurableObject):
    """Timers that record each fire in the state that the fire commits."""

    def __init__(self) -> None:
        self._go = asyncio.Event()
        self._running: list[str] = []

    def arm(self, due: dict[str, int], method: str = "ring", retry: RetryPolicy | None = None) -> int:
        """Set one timer for each name at its due time (epoch ms)."""
        for name, due_ms in due.items():
            self.timers.set(name, at=due_ms, method=method, retry=retry)
        return len(due)

    def ring(self, info: TimerInfo) -> None:
        self._record(info)

    async def ring_slowly(self, info: TimerInfo) -> None:
        """Waits until `let_go`; the effects lie on both sides of the wait."""
        self.storage.put("begun", self.storage.get("begun", 0) + 1)
        self._running.append(info.name)
        await self._go.wait()
        self._record(info)

    def ring_poison(self, info: TimerInfo) -> None:
        """Ends its process each time."""
        self._record(info)
        die()

    def fail(self, info: TimerInfo) -> None:
        self._record(info)
        raise ValueError("each time")

    def _record(self, info: TimerInfo) -> None:
        number = self.storage.get("fires", 0)
        self.storage.put("fires", number + 1)
        record = (info.name, info.due_ms, info.fired_ms, info.attempt, os.getpid(), next(_order))
        self.storage.put(f"fire {number:06d}", record)

    @shared
    def running(self) -> list[str]:
        """Slow handlers that wait, in this process."""
        return list(self._running)

    @shared
    def let_go(self) -> None:
        self._go.set()

    @shared
    def begun(self) -> int:
        begun: int = self.storage.get("begun", 0)
        return begun

    @shared
    def fires(self) -> list[tuple[str, int, int, int, int, int]]:
        """Every fire that was committed: (name, due, fired, attempt, process, order in that process)."""
        return [tuple(record) for record in self.storage.list(prefix="fire ").values()]

    @shared
    def armed(self) -> list[str]:
        return [timer.name for timer in self.timers.list()]
