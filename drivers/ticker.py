"""The tick: what is due in the engine's lanes runs here, the user lane is handed on, the alarm is armed again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from drivers.alarm import Alarm
from drivers.clock import Clock
from drivers.store import Store
from drivers.waker import Waker
from timers.batch import Batch, Outcome
from timers.budget import TickBudget, TickState
from timers.engine import RunReport, TimerStore, run_due_with_state
from timers.firing import PartitionName
from timers.registry import TimerRegistry, lane_of
from timers.rows import USER_LANE, MalformedTimer, Row, TimerKey, TimerRow

__all__ = ["Ticker"]

logger = logging.getLogger("mainspring.ticker")

R = TypeVar("R", bound=Row)

#: A tick whose reads failed is tried again after this; the error is logged each time.
TICK_ERROR_DELAY_MS = 5_000


def _ignore() -> None:
    return None


class Ticker:
    """Runs the ticks of one timer table.

    `user_tick` dispatches due rows of the user lane and says when it wants to be asked again (epoch ms, or None).
    `remote_kinds` are those whose handlers wait for others: each has ticks of its own, so that one that waits delays
    nobody else. `ended` is told when a tick has run to its end.
    """

    def __init__(
        self,
        store: Store,
        timer_store: TimerStore,
        registry: TimerRegistry,
        clock: Clock,
        *,
        partition: PartitionName,
        user_tick: Callable[[], int | None],
        poll_ms: int | None,
        budget: TickBudget | None = None,
        remote_kinds: Collection[int] = (),
        ended: Callable[[], None] = _ignore,
        waker: Waker | None = None,
    ) -> None:
        self._store = store
        self._clock = clock
        self._user_tick = user_tick
        self._stopped = False
        #: ticks that failed, and ticks that left due work behind without having got any of it done
        self.failed_ticks = self.stalled_ticks = 0
        remote_lanes = frozenset(lane_of(kind) for kind in remote_kinds)
        self.alarm = Alarm(clock, self.tick, earliest_ms=store.next_due_ms, poll_ms=poll_ms, waker=waker)
        views: list[_Lanes] = [_Lanes(timer_store, remote_lanes, among=False)]
        views += [_Lanes(timer_store, frozenset({lane}), among=True) for lane in sorted(remote_lanes)]
        self._ticks = [
            _Ticks(view, registry, clock, partition, budget or TickBudget(), self._reported, ended) for view in views
        ]

    def start(self) -> None:
        """Look at what is stored and arm the alarm for it."""
        self.alarm.start()

    def tick(self) -> None:
        """Run what is due now. While a tick runs, another one follows it."""
        if self._stopped:
            return
        try:
            self.alarm.arm(self._user_tick())
            lanes = [lane for lane in self._store.lanes() if lane != USER_LANE]
        except Exception:
            self._reported(None)
            return
        for ticks in self._ticks:
            if any(lane in ticks.lanes for lane in lanes):
                ticks.run()

    def status(self) -> dict[str, Any]:
        """How the ticks go and how wakes come, as plain data."""
        return {
            "failed_ticks": self.failed_ticks,
            "stalled_ticks": self.stalled_ticks,
            "alarm": self.alarm.status(),
        }

    @property
    def busy(self) -> bool:
        return any(ticks.running is not None for ticks in self._ticks)

    def _reported(self, report: RunReport | None) -> None:
        """A tick has ended; None: with the error that is being handled."""
        if report is not None:
            self.stalled_ticks += report.stalled
            self.alarm.arm(report.next_wake_ms)
            return
        self.failed_ticks += 1
        logger.exception("a tick failed; it is tried again", extra={"event": "tick_failed"})
        self.alarm.arm(self._clock.wall_ms() + TICK_ERROR_DELAY_MS)

    async def stop(self) -> None:
        """Start no more ticks, and let the running ones end. Those of remote kinds are cut short: what they wait for
        may never come, and what they have not recorded is done again under the same ids."""
        self._stopped = True
        self.alarm.stop()
        for ticks in self._ticks:
            ticks.stop(cut_short=ticks is not self._ticks[0])
        running = [ticks.running for ticks in self._ticks if ticks.running is not None]
        if running:
            await asyncio.wait(running)


class _Ticks:
    """Engine ticks over some of the lanes, one at a time."""

    def __init__(
        self,
        lanes: _Lanes,
        registry: TimerRegistry,
        clock: Clock,
        partition: PartitionName,
        budget: TickBudget,
        report: Callable[[RunReport | None], None],
        ended: Callable[[], None],
    ) -> None:
        self.lanes = lanes
        self.running: asyncio.Task[None] | None = None
        self._registry = registry
        self._clock = clock
        self._partition = partition
        self._budget = budget
        self._report = report
        self._ended = ended
        self._rotation = 0
        self._again = False
        self._stopped = False

    def run(self) -> None:
        if self._stopped:
            return
        if self.running is not None:
            self._again = True
            return
        self.running = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        try:
            state = TickState.new(self._budget, lambda: self._clock.monotonic_ns() // 1_000_000, self._rotation)
            self._rotation += 1
            now_ms = self._clock.wall_ms()
            self._report(await run_due_with_state(self.lanes, self._registry, now_ms, state, partition=self._partition))
        except Exception:
            self._report(None)
        finally:
            self.running = None
            self._ended()
            if self._again:
                self._again = False
                self.run()

    def stop(self, *, cut_short: bool) -> None:
        self._stopped = True
        if cut_short and self.running is not None:
            self.running.cancel()


class _Lanes:
    """A timer store that shows some of its lanes: those among the given ones, or all the others."""

    def __init__(self, store: TimerStore, lanes: frozenset[int], *, among: bool) -> None:
        self._store = store
        self._lanes = lanes
        self._among = among

    def __contains__(self, lane: int) -> bool:
        return (lane in self._lanes) is self._among

    async def lanes(self) -> Sequence[int]:
        return [lane for lane in await self._store.lanes() if lane in self]

    async def scan_due(
        self, lane: int, now_ms: int, after: TimerKey | None, limit: int
    ) -> Sequence[TimerRow | MalformedTimer]:
        return await self._store.scan_due(lane, now_ms, after, limit)

    async def next_due_ms(self, lane: int, after_ms: int) -> int | None:
        return await self._store.next_due_ms(lane, after_ms)

    async def apply(self, batches: Sequence[Batch]) -> Sequence[Outcome]:
        return await self._store.apply(batches)

    async def get(self, row_type: type[R], key: tuple[object, ...]) -> R | None:
        return await self._store.get(row_type, key)

    async def scan(
        self, row_type: type[R], prefix: tuple[object, ...], *, after: tuple[object, ...] | None = None, limit: int
    ) -> Sequence[R]:
        return await self._store.scan(row_type, prefix, after=after, limit=limit)
