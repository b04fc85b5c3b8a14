"""Callers that keep on calling while things are done to the runtime, and check afterwards what was acknowledged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from actors.runtime import Runtime
from tests.cluster.apps import Ledger

__all__ = ["Load"]

#: How long calls may take to be answered whatever happens: only a bound.
_PATIENCE_S = 120.0


class Load:
    """Each key has one caller. `errors` is what callers saw; `longest_s` the longest pause of a key."""

    def __init__(self, runtime: Runtime, keys: Sequence[str], *, pause_s: float = 0.01) -> None:
        self.ledgers = runtime.namespace(Ledger)
        self.acknowledged: dict[str, list[str]] = {key: [] for key in keys}
        self.longest_s = 0.0
        self._pause_s = pause_s
        self._going = True
        self._running: asyncio.Future[list[None]] | None = None

    def start(self) -> None:
        """Begin to call."""
        self._running = asyncio.gather(*(self._caller(key) for key in self.acknowledged))

    async def stop(self) -> None:
        """Make no more calls, and wait for the answers. Raises what a caller has met."""
        self._going = False
        assert self._running is not None
        await self._running

    async def _caller(self, key: str) -> None:
        number = 0
        while self._going:
            token = f"{key}/{number}"
            began = time.perf_counter()
            await self.ledgers.get(key).apply(token)
            self.longest_s = max(self.longest_s, time.perf_counter() - began)
            self.acknowledged[key].append(token)
            number += 1
            await asyncio.sleep(self._pause_s)

    @property
    def count(self) -> int:
        """How many calls have been answered."""
        return sum(len(tokens) for tokens in self.acknowledged.values())

    async def answered_more(self, than: int, by: int = 100, keys: Sequence[str] = ()) -> int:
        """Wait until so many more calls have been answered, and one more of each of these keys; how many in all."""
        assert self._running is not None
        before = {key: len(self.acknowledged[key]) for key in keys}
        deadline = time.monotonic() + _PATIENCE_S
        while self.count < than + by or any(len(self.acknowledged[key]) <= before[key] for key in keys):
            assert time.monotonic() < deadline, f"{self.count - than} calls have been answered, not {by}"
            if self._running.done():
                self._running.result()
            await asyncio.sleep(0.02)
        return self.count

    async def check(self) -> int:
        """Each acknowledged call was applied once, and nothing else was; how many there were."""
        for key, tokens in self.acknowledged.items():
            assert await self.ledgers.get(key).applied() == dict.fromkeys(tokens, 1)
        return self.count
