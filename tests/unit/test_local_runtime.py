"""What `LocalRuntime` promises to those who test with it: time that moves when told to, and nothing left out."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from actors import DurableContext, DurableObject, TimerInfo, durable
from actors.partition_leases import PartitionLeases
from actors.process_id import ProcessId
from actors.settings import Settings
from actors.testing import LocalRuntime
from actors.watchdog import Watchdog
from tests.support.simulated_loop import run_simulated

MINUTE_MS = 60_000
DAY_MS = 86_400_000


class Meter(DurableObject):
    """Counts the minutes, and every fire that is not at its own instant."""

    def start(self) -> None:
        self.timers.set("minute", every="1m", method="on_minute")

    def on_minute(self, timer: TimerInfo) -> None:
        last_ms = self.storage.get("last_ms")
        on_time = timer.fired_ms == timer.due_ms and last_ms in (None, timer.due_ms - MINUTE_MS)
        self.storage.put_many(
            {
                "fires": self.storage.get("fires", 0) + 1,
                "astray": self.storage.get("astray", 0) + (not on_time or timer.missed > 0),
                "last_ms": timer.due_ms,
            }
        )

    def counts(self) -> tuple[int, int]:
        return self.storage.get("fires", 0), self.storage.get("astray", 0)


async def test_thirty_days_of_a_one_minute_interval_are_43200_fires_each_at_its_instant() -> None:
    async with LocalRuntime() as runtime:
        meter = runtime.namespace(Meter).get("a")
        await meter.start()
        await runtime.advance(days=30)
        assert await meter.counts() == (43_200, 0)


class Waiter(DurableObject):
    """Ends a day later, in every way in which a caller can wait."""

    turn_timeout_ms = 2 * DAY_MS
    gates: ClassVar[dict[str, asyncio.Event]] = {}

    async def wait(self) -> int:
        """A turn that waits until another object's timer opens its gate."""
        gate = self.gates[self.key] = asyncio.Event()
        await self.namespace(Waiter).get(f"{self.key}, opener").open_later(self.key)
        await gate.wait()
        return 1

    async def nested(self) -> int:
        """A turn that waits for a call that waits."""
        return int(await self.namespace(Waiter).get(f"{self.key}, below").wait())

    def open_later(self, key: str) -> None:
        self.timers.set("open", after="1d", method="on_open", payload=key)

    def on_open(self, timer: TimerInfo) -> None:
        self.gates[timer.payload].set()

    @durable
    async def sleeper(self, ctx: DurableContext) -> int:
        await ctx.sleep("1d")
        return 1


async def wait_on_a_call(runtime: LocalRuntime) -> Any:
    return await runtime.namespace(Waiter).get("a").wait()


async def wait_on_a_nested_call(runtime: LocalRuntime) -> Any:
    return await runtime.namespace(Waiter).get("a").nested()


async def wait_on_an_execution(runtime: LocalRuntime) -> Any:
    handle = await runtime.namespace(Waiter).get("a").sleeper.start(execution_id="e")
    return await handle.result()


@pytest.mark.parametrize("wait", [wait_on_a_call, wait_on_a_nested_call, wait_on_an_execution])
def test_a_day_of_timers_takes_less_than_a_second_of_waiting_whatever_the_caller_waits_on(wait: Any) -> None:
    """Field complaints 61: the loop counts the time that it would have slept; work itself takes none there."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        settings = Settings(durability="off", call_timeout_ms=2 * DAY_MS, call_memory_ms=5 * DAY_MS)
        async with LocalRuntime(memory=True, settings=settings) as runtime:
            meter = runtime.namespace(Meter).get("a")
            await meter.start()
            waiting = asyncio.ensure_future(wait(runtime))
            await runtime.run_until_idle()
            began_s = loop.time()
            await runtime.advance(days=1, seconds=1)
            assert loop.time() - began_s < 1
            assert await meter.counts() == (1_440, 0)
            assert await waiting == 1

    run_simulated(scenario())


class Alarms(DurableObject):
    """Set themselves again when they fire."""

    def start(self, count: int) -> None:
        for number in range(count):
            self.timers.set(f"t{number}", after="1h", method="on_hour")

    def on_hour(self, timer: TimerInfo) -> None:
        self.storage["late_ms"] = self.storage.get("late_ms", 0) + timer.fired_ms - timer.due_ms
        self.storage["fires"] = self.storage.get("fires", 0) + 1
        self.timers.set(timer.name, at=timer.due_ms + 60 * MINUTE_MS, method="on_hour")

    def counts(self) -> tuple[int, int]:
        return self.storage.get("fires", 0), self.storage.get("late_ms", 0)


async def test_time_does_not_move_on_while_due_timers_wait_for_room() -> None:
    """More are due at once than an object may have under way: the rest follows at the same instant."""
    settings = Settings(durability="off", max_timer_turns_per_object=4, max_timer_turns_per_class=6)
    async with LocalRuntime(memory=True, settings=settings) as runtime:
        stubs = [runtime.namespace(Alarms).get(f"a{number}") for number in range(5)]
        for stub in stubs:
            await stub.start(20)
        await runtime.advance(days=1)
        for stub in stubs:
            assert await stub.counts() == (20 * 24, 0)


async def test_the_clock_of_a_runtime_drives_neither_leases_nor_the_watchdog() -> None:
    """Field complaints 62: what watches over processes has clocks of its own."""
    ended: list[int] = []

    async def end(partition: int, process: ProcessId | None) -> None:
        ended.append(partition)

    settings = Settings()
    leases = PartitionLeases(settings.partition_lease_ms, end)
    leases.renew(0, ProcessId.own())
    exits: list[int] = []
    watchdog = Watchdog(
        asyncio.get_running_loop(),
        0,
        name="test",
        blocked_ms=settings.loop_blocked_ms,
        hang_ms=settings.loop_hang_ms,
        exit_process=exits.append,
    )
    async with LocalRuntime(memory=True) as runtime:
        meter = runtime.namespace(Meter).get("a")
        await meter.start()
        for _ in range(10):
            await runtime.advance(hours=1)
            await leases.look()
            watchdog.look()
        assert await meter.counts() == (600, 0)
    assert (ended, exits) == ([], [])
    assert leases.silent_s()[0] < settings.partition_lease_ms / 1_000
