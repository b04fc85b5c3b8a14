"""Many timers at once: none lost, none twice, none late because of the others, whoever owns them meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from actors import DurableObject, TimerInfo, shared
from actors.settings import Settings
from actors.testing import LocalRuntime, VirtualClock
from actors.timer_dispatcher import TimerDispatcher
from actors.timer_work import TimerWork

SECOND_MS = 1_000
#: Timers of one object.
PER_OBJECT = 100


class Clockwork(DurableObject):
    """Counts its fires, and what is wrong with them."""

    gate: ClassVar[asyncio.Event]
    #: lateness of each fire in this process, in milliseconds
    late_ms: ClassVar[list[int]] = []

    def arm(self, due_ms: list[int], method: str = "on_time") -> None:
        for number, each in enumerate(due_ms):
            self.timers.set(f"t{number}", at=each, method=method, payload=each)

    def _count(self, timer: TimerInfo) -> None:
        self.storage["fires"] = self.storage.get("fires", 0) + 1
        if timer.due_ms != timer.payload or timer.fired_ms < timer.due_ms:
            self.storage["astray"] = self.storage.get("astray", 0) + 1
        self.late_ms.append(timer.fired_ms - timer.due_ms)

    def on_time(self, timer: TimerInfo) -> None:
        self._count(timer)

    async def linger(self, timer: TimerInfo) -> None:
        await self.gate.wait()

    def every_minute(self) -> None:
        self.timers.set("minute", every="1m", method="on_minute", misfire="all")

    def on_minute(self, timer: TimerInfo) -> None:
        self.storage["minutes"] = [*self.minutes(), timer.due_ms]

    def minutes(self) -> list[int]:
        return list(self.storage.get("minutes", []))

    def open_ticket(self) -> None:
        self.tickets.open("seat", ttl="5m")

    @shared
    def tickets_open(self) -> int:
        return self.tickets.usage().tickets

    def counts(self) -> tuple[int, int, int]:
        """Fires, fires that were not as they had been set, and timers that are set."""
        return self.storage.get("fires", 0), self.storage.get("astray", 0), len(self.timers.list())


async def arm(runtime: LocalRuntime, due_ms: list[int], method: str = "on_time") -> list[Any]:
    """Arm one timer for each due time, `PER_OBJECT` at each object."""
    stubs = []
    for first in range(0, len(due_ms), PER_OBJECT):
        stub = runtime.namespace(Clockwork).get(f"c{first}")
        await stub.arm(due_ms[first : first + PER_OBJECT], method)
        stubs.append(stub)
    return stubs


async def totals(stubs: list[Any]) -> tuple[int, int, int]:
    """What the objects have counted, together."""
    counts = [await stub.counts() for stub in stubs]
    return sum(count[0] for count in counts), sum(count[1] for count in counts), sum(count[2] for count in counts)


def percentile_99(values: list[int]) -> int:
    return sorted(values)[len(values) * 99 // 100]


async def down_for(runtime: LocalRuntime, ms: int) -> None:
    """All partitions die, and are opened again by their next owners after so long."""
    clock = runtime.clock
    assert isinstance(clock, VirtualClock)
    for number, partition in enumerate(runtime.partitions):
        assert partition is not None
        runtime.partitions[number] = None
        await partition.abandon()
    clock.move_to(clock.wall_ms() + ms)
    await runtime.crash()


async def test_after_a_change_of_owner_ten_thousand_armed_timers_are_late_by_no_more_than_the_lease() -> None:
    """Field complaints 32: what hangs is found when its lease ends; the next owner then fires what is overdue, and all
    that comes due later on time."""
    lease_ms = Settings().partition_lease_ms
    async with LocalRuntime(memory=True) as runtime:
        start = runtime.clock.wall_ms() + SECOND_MS
        stubs = await arm(runtime, [start + number * 10 for number in range(10_000)])  # over 100 s
        Clockwork.late_ms.clear()
        await runtime.advance(seconds=31)
        await down_for(runtime, lease_ms)
        await runtime.advance(seconds=60)
        assert await totals(stubs) == (10_000, 0, 0)
        assert percentile_99(Clockwork.late_ms) < lease_ms + SECOND_MS
        assert sum(late > 0 for late in Clockwork.late_ms) <= lease_ms / 10, "only what came due meanwhile was late"


async def test_a_handler_that_takes_thirty_seconds_changes_nobody_elses_lateness() -> None:
    """Field complaints 35."""
    lateness = []
    for slow in (False, True):
        async with LocalRuntime(memory=True) as runtime:
            Clockwork.gate = asyncio.Event()
            runtime.clock.call_later(31 * SECOND_MS, Clockwork.gate.set)
            start = runtime.clock.wall_ms() + SECOND_MS
            if slow:
                await runtime.namespace(Clockwork).get("slow").arm([start], "linger")
            stubs = await arm(runtime, [start + number * 60 for number in range(500)])
            Clockwork.late_ms.clear()
            await runtime.advance(seconds=32)
            assert await totals(stubs) == (500, 0, 0)
            lateness.append(list(Clockwork.late_ms))
    assert percentile_99(lateness[1]) == percentile_99(lateness[0]) == max(lateness[1]) == 0


async def test_after_a_restart_overdue_timers_are_started_within_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field complaints 37: a storm of overdue timers is worked off a window at a time."""
    most = 0
    adopt = TimerDispatcher.adopt

    def watched(dispatcher: TimerDispatcher, work: TimerWork) -> None:
        nonlocal most
        adopt(dispatcher, work)
        most = max(most, dispatcher.in_flight)

    monkeypatch.setattr(TimerDispatcher, "adopt", watched)
    settings = Settings(durability="off", max_timer_turns=100, max_timer_turns_per_class=60)
    async with LocalRuntime(memory=True, settings=settings) as runtime:
        stubs = await arm(runtime, [runtime.clock.wall_ms() + SECOND_MS] * 5_000)
        await down_for(runtime, 10 * SECOND_MS)
        await runtime.run_until_idle()
        assert await totals(stubs) == (5_000, 0, 0)
        assert most == 60


async def test_while_every_handler_is_busy_the_engine_keeps_time_and_no_occurrence_is_lost() -> None:
    """Field complaints 47."""
    settings = Settings(durability="off", max_timer_turns=4)
    async with LocalRuntime(memory=True, settings=settings) as runtime:
        Clockwork.gate = asyncio.Event()
        start = runtime.clock.wall_ms()
        for number in range(4):
            await runtime.namespace(Clockwork).get(f"busy{number}").arm([start + SECOND_MS], "linger")
        periodic, seat = runtime.namespace(Clockwork).get("periodic"), runtime.namespace(Clockwork).get("seat")
        await periodic.every_minute()
        await seat.open_ticket()
        await runtime.advance(minutes=5)
        assert [status["timer_turns"] for status in runtime.status()] == [4], "there is room for none"
        assert await seat.tickets_open() == 0, "the engine's own timer was on time"
        await runtime.advance(minutes=5)
        assert await periodic.minutes() == []
        Clockwork.gate.set()
        await runtime.run_until_idle()
        assert await periodic.minutes() == [start + 60 * SECOND_MS * k for k in range(1, 11)]
