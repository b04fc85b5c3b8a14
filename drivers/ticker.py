"""The tick: what is due in the engine's lanes runs here, the user lane is handed on, the alarm is armed again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from drivers.alarm import Alarm
from drivers.clock import Clock
from drivers.store import Store
from drivers.timer_store import CommittingTimerStore
from timers.budget import TickBudget, TickState
from timers.engine import run_due_with_state
from timers.firing import PartitionName
from timers.registry import TimerRegistry
from timers.rows import USER_LANE

__all__ = ["Ticker"]

logger = logging.getLogger("mainspring.ticker")

#: A tick whose reads failed is tried again after this; the error is logged each time.
TICK_ERROR_DELAY_MS = 5_000


class Ticker:
    """Runs one tick at a time. `user_tick` dispatches due rows of the user lane and says when it wants to be asked
    again (epoch ms, or None)."""

    def __init__(
        self,
        store: Store,
        timer_store: CommittingTimerStore,
        registry: TimerRegistry,
        clock: Clock,
        *,
        partition: PartitionName,
        user_tick: Callable[[], int | None],
        poll_ms: int | None,
        budget: TickBudget | None = None,
    ) -> None:
        self._store = store
        self._timer_store = timer_store
        self._registry = registry
        self._clock = clock
        self._partition = partition
        self._user_tick = user_tick
        self._budget = budget or TickBudget()
        self._rotation = 0
        self._running: asyncio.Task[None] | None = None
        self._again = False
        self._stopped = False
        self.alarm = Alarm(clock, self.tick, earliest_ms=self._earliest_ms, poll_ms=poll_ms)

    def start(self) -> None:
        """Look at what is stored and arm the alarm for it."""
        self.alarm.start()

    def tick(self) -> None:
        """Run what is due now. While a tick runs, another one follows it."""
        if self._stopped:
            return
        try:
            self.alarm.arm(self._user_tick())
            if not self._engine_has_work():
                return
        except Exception:
            self._failed()
            return
        if self._running is not None:
            self._again = True
            return
        self._running = asyncio.get_running_loop().create_task(self._engine_tick())

    @property
    def busy(self) -> bool:
        return self._running is not None

    def _engine_has_work(self) -> bool:
        return any(lane != USER_LANE for lane in self._store.lanes())

    async def _engine_tick(self) -> None:
        try:
            state = TickState.new(self._budget, lambda: self._clock.monotonic_ns() // 1_000_000, self._rotation)
            self._rotation += 1
            report = await run_due_with_state(
                self._timer_store, self._registry, self._clock.wall_ms(), state, partition=self._partition
            )
            self.alarm.arm(report.next_wake_ms)
        except Exception:
            self._failed()
        finally:
            self._running = None
            if self._again:
                self._again = False
                self.tick()

    def _failed(self) -> None:
        logger.exception("a tick failed; it is tried again", extra={"event": "tick_failed"})
        self.alarm.arm(self._clock.wall_ms() + TICK_ERROR_DELAY_MS)

    def _earliest_ms(self) -> int | None:
        return self._store.next_due_ms()

    async def stop(self) -> None:
        """Start no more ticks, and let the running one end."""
        self._stopped = True
        self.alarm.stop()
        if self._running is not None:
            await asyncio.wait([self._running])
