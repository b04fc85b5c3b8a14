"""Callers of everything at once: calls, timers and messages, whose whole history is checked in the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from actors.runtime import Runtime
from tests.cluster.message_apps import Inbox
from tests.cluster.soak_apps import Witness
from tests.support.soak_history import History

__all__ = ["MixedLoad"]

INBOXES = ["inbox-0", "inbox-1", "inbox-2"]
#: How long anything may take to come right once nothing is done any more.
PATIENCE_S = 120.0


class MixedLoad:
    """Calls, timers and messages; raises in `stop` what a caller has met.

    Each key has one caller, which begins a call each `period_s`, or as soon as the one before is answered if that takes
    longer; timers are due at most `spread_ms` after they are set.
    """

    def __init__(
        self, runtime: Runtime, keys: Sequence[str], seed: int, *, period_s: float = 0.05, spread_ms: int = 15_000
    ) -> None:
        self._runtime = runtime
        self._witnesses = runtime.namespace(Witness)
        self._keys = keys
        self._period_s = period_s
        self._spread_ms = spread_ms
        self._random = random.Random(seed)
        self._going = True
        self._tasks: list[asyncio.Task[None]] = []
        self.history = History()
        self.due: dict[str, dict[str, int]] = defaultdict(dict)
        self.told: Counter[str] = Counter()
        self.longest_s = 0.0

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._call(key)) for key in self._keys]
        self._tasks += [asyncio.ensure_future(self._arm()), asyncio.ensure_future(self._tell())]

    async def stop(self) -> None:
        self._going = False
        await asyncio.gather(*self._tasks)

    def raise_if_failed(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _timed(self, call: Awaitable[object]) -> object:
        began = time.perf_counter()
        answer = await call
        self.longest_s = max(self.longest_s, time.perf_counter() - began)
        return answer

    async def _call(self, key: str) -> None:
        number, next_at = 0, time.perf_counter()
        while self._going:
            answer = await self._timed(self._witnesses.get(key).apply(f"{number}"))
            assert isinstance(answer, tuple)
            assert answer[0] == 1, (key, number, answer)
            self.history.answered(key, f"{number}", answer[1])
            number += 1
            now = time.perf_counter()
            next_at = max(next_at + self._period_s, now)
            await asyncio.sleep(next_at - now)

    async def _arm(self) -> None:
        """Timers that are due at once, soon, or a while from now."""
        number = 0
        while self._going:
            key = self._random.choice(self._keys)
            now_ms = time.time_ns() // 1_000_000
            due = {f"t{number + each}": now_ms + self._random.randrange(self._spread_ms) for each in range(10)}
            await self._timed(self._witnesses.get(key).arm(due))
            self.due[key].update(due)
            number += 10
            await asyncio.sleep(0.25)

    async def _tell(self) -> None:
        while self._going:
            key = self._random.choice(self._keys)
            count = self._random.randrange(1, 6)
            await self._timed(self._witnesses.get(key).tell(INBOXES, count))
            self.told[key] += count
            await asyncio.sleep(0.2)

    # --- afterwards ---------------------------------------------------------------------------------

    async def check(self) -> tuple[int, int, int]:
        """Everything happened once, in order, in time and with one owner each; how many calls, fires, messages."""
        fires = await self.check_timers()
        messages = await self.check_messages()
        for key in self._keys:
            self.history.check_tokens(key, await self._witnesses.get(key).applied())
        self.history.check_owners()
        return self.history.count, fires, messages

    async def check_timers(self) -> int:
        """Each timer's effects once, at its own time, never early; how many. Their sightings go to the history."""
        for key, timers in self.due.items():
            witness = self._witnesses.get(key)
            fires = await until(witness.fires, partial(has, len(timers)), f"the timers of {key}")
            assert sorted(fire[0] for fire in fires) == sorted(timers), "each timer's effects once"
            for name, due_ms, fired_ms, seen in fires:
                assert due_ms == timers[name], "the due time is what it was, to the millisecond"
                assert fired_ms >= due_ms, "never early"
                self.history.fired(key, seen)
        return sum(map(len, self.due.values()))

    async def check_messages(self) -> int:
        """Each message of each pair once, in order; how many."""
        total = sum(self.told.values())
        for key in INBOXES:
            inbox = self._runtime.namespace(Inbox).get(key)
            messages = await until(inbox.messages, partial(has, total), f"the messages to {key}")
            arrived: dict[str, list[int]] = defaultdict(list)
            for sender, number in messages:
                arrived[sender].append(number)
            assert arrived == {sender: list(range(count)) for sender, count in self.told.items()}
        return total * len(INBOXES)


def has(count: int, found: Sequence[Any]) -> bool:
    return len(found) >= count


async def until(look: Callable[[], Awaitable[Any]], good: Callable[[Any], bool], what: str) -> Any:
    """The first good answer."""
    deadline = time.monotonic() + PATIENCE_S
    while not good(found := await look()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s in vain for {what}"
        await asyncio.sleep(0.1)
    return found
