"""The tick: one at a time, the engine's lanes and the user lane, armed again for what comes next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from drivers.clock import VIRTUAL_START_MS, VirtualClock
from drivers.executor import InlineExecutor
from drivers.group_commit import GroupCommitter
from drivers.ticker import TICK_ERROR_DELAY_MS, Ticker
from drivers.timer_store import CommittingTimerStore
from drivers.write_set import WriteSet
from tests.support.stores import MemoryPlace
from timers.batch import Batch, Present
from timers.firing import NO_EFFECTS, Done, DueTimer, Fired, PartitionName, PartitionRole, TimerCtx
from timers.registry import TimerRegistry
from timers.rows import USER_LANE, TimerRow

START = VIRTUAL_START_MS
KIND = 0xF0


class Handler:
    kind = KIND
    max_per_tick = None

    def __init__(self) -> None:
        self.fired: list[int] = []
        self.running = 0
        self.gate: asyncio.Event | None = None
        self.most_running = 0
        self.effects = NO_EFFECTS

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.gate is not None:
            await self.gate.wait()
        self.running -= 1
        self.fired.append(timer.due_at_ms - START)
        return Done(self.effects)


class Bench:
    def __init__(self, poll_ms: int | None = None) -> None:
        self.clock = VirtualClock()
        self.store = MemoryPlace().open()
        self.committer = GroupCommitter(
            self.store, InlineExecutor(), wall_ms=self.clock.wall_ms, on_fatal=lambda error: None
        )
        self.committer.start()
        self.handler = Handler()
        self.user_ticks: list[int] = []
        self.user_next_ms: int | None = None
        self.user_error: Exception | None = None
        self.ticker = Ticker(
            self.store,
            CommittingTimerStore(self.store, self.committer),
            TimerRegistry([self.handler]),
            self.clock,
            partition=PartitionName(PartitionRole.PARTITION, 3),
            user_tick=self._user_tick,
            poll_ms=poll_ms,
        )

    def _user_tick(self) -> int | None:
        self.user_ticks.append(self.clock.wall_ms() - START)
        if self.user_error is not None:
            raise self.user_error
        following, self.user_next_ms = self.user_next_ms, None
        return following

    async def put(self, *due: int, lane: int = KIND) -> None:
        rows = [TimerRow(lane, START + each, KIND, b"%d" % each, 0, START + each) for each in due]
        self.committer.submit(WriteSet([("timers", row.key(), row.values()) for row in rows]))
        await self.committer.drain()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def advance(self, ms: int) -> None:
        target = self.clock.wall_ms() + ms
        await self.settle()
        while (next_ms := self.clock.next_ms()) is not None and next_ms <= target:
            self.clock.move_to(next_ms)
            self.clock.run_due()
            await self.settle()
        self.clock.move_to(target)

    def left(self) -> list[int]:
        return [row[1] - START for row in self.store.scan("timers")]


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.store.close()


async def test_each_timer_fires_at_its_own_instant_in_one_run_of_time(bench: Bench) -> None:
    await bench.put(100, 250, 251)
    bench.ticker.start()
    await bench.advance(99)
    assert bench.handler.fired == []
    await bench.advance(1)
    assert bench.handler.fired == [100]
    await bench.advance(1_000)
    assert bench.handler.fired == [100, 250, 251]
    assert bench.left() == []


async def test_what_is_overdue_fires_when_the_ticker_starts(bench: Bench) -> None:
    await bench.put(-5_000, -1)
    bench.ticker.start()
    await bench.advance(0)
    assert bench.handler.fired == [-5_000, -1]


async def test_ticks_run_one_at_a_time_and_one_that_was_asked_for_meanwhile_follows(bench: Bench) -> None:
    await bench.put(0)
    bench.handler.gate = asyncio.Event()
    bench.ticker.tick()
    await bench.settle()
    assert bench.ticker.busy
    await bench.put(-1)
    for _ in range(3):
        bench.ticker.tick()
    await bench.settle()
    assert bench.handler.most_running == 1
    bench.handler.gate.set()
    await bench.settle()
    assert bench.handler.fired == [0, -1]
    assert bench.handler.most_running == 1
    assert not bench.ticker.busy


async def test_the_user_lane_is_handed_on_and_never_run_by_the_engine(bench: Bench) -> None:
    await bench.put(10, lane=USER_LANE)
    bench.ticker.start()
    await bench.advance(10)
    assert bench.handler.fired == []
    assert bench.user_ticks == [10]
    assert bench.left() == [10]


async def test_the_alarm_is_armed_for_what_the_user_lane_says(bench: Bench) -> None:
    bench.user_next_ms = START + 700
    bench.ticker.tick()
    assert bench.ticker.alarm.armed_ms == START + 700
    await bench.advance(10_000)
    assert bench.user_ticks == [0, 700]


async def test_a_user_tick_that_fails_is_logged_and_tried_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.user_error = RuntimeError("the store can't be read")
    bench.ticker.tick()
    bench.user_error = None
    assert "a tick failed" in caplog.text
    await bench.advance(TICK_ERROR_DELAY_MS)
    assert bench.user_ticks == [0, TICK_ERROR_DELAY_MS]


async def test_an_engine_tick_that_fails_is_logged_and_tried_again(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.put(0)
    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "scan", _broken)
        bench.ticker.tick()
        await bench.settle()
    assert "a tick failed" in caplog.text
    assert bench.handler.fired == []
    assert bench.ticker.status()["failed_ticks"] == 1
    await bench.advance(TICK_ERROR_DELAY_MS)
    assert bench.handler.fired == [0]


async def test_ticks_that_make_no_progress_pause_and_are_counted(bench: Bench) -> None:
    """Field complaints 52."""
    bench.handler.effects = Batch((Present("kv", (1, "missing")),))
    await bench.put(-2, -1, 0)
    bench.ticker.start()
    await bench.advance(60_000)
    assert len(bench.handler.fired) == 3 * 13, "one tick each 5 s"
    assert bench.ticker.status()["stalled_ticks"] == 13
    bench.handler.effects = NO_EFFECTS
    await bench.advance(5_000)
    assert bench.left() == []
    await bench.advance(60_000)
    assert bench.ticker.status()["stalled_ticks"] == 13, "a tick that did what there was is no stalled one"


def _broken(*given: object, **named: object) -> None:
    raise RuntimeError("the store can't be read")


async def test_a_row_that_nobody_armed_for_is_found_by_the_look_each_second() -> None:
    bench = Bench(poll_ms=1_000)
    bench.ticker.start()
    await bench.advance(500)
    await bench.put(600)
    await bench.advance(499)
    assert bench.handler.fired == []
    await bench.advance(1)
    assert bench.handler.fired == [600]
    await bench.ticker.stop()


async def test_a_clock_set_back_makes_no_timer_early(bench: Bench) -> None:
    await bench.put(1_000)
    bench.ticker.start()
    await bench.advance(900)
    bench.clock.step_wall(-500)
    await bench.advance(599)
    assert bench.handler.fired == []
    await bench.advance(1)
    assert bench.handler.fired == [1_000]


async def test_stopping_lets_the_running_tick_end_and_starts_none(bench: Bench) -> None:
    await bench.put(0, 5_000)
    bench.handler.gate = asyncio.Event()
    bench.ticker.tick()
    await bench.settle()
    stopping = asyncio.ensure_future(bench.ticker.stop())
    await bench.settle()
    assert not stopping.done()
    bench.handler.gate.set()
    await asyncio.wait_for(stopping, 5)
    assert bench.handler.fired == [0]
    bench.ticker.tick()
    await bench.advance(10_000)
    assert bench.handler.fired == [0]


async def test_stopping_does_not_wait_for_a_commit_that_will_never_end() -> None:
    class Never:
        def submit(self, job: object, done: object) -> None:
            return None

        def close(self) -> None:
            return None

    bench = Bench()
    await bench.put(0)
    bench.committer._executor = Never()
    bench.ticker.tick()
    await bench.settle()
    assert bench.ticker.busy
    bench.committer.abandon()
    await asyncio.wait_for(bench.ticker.stop(), 5)
    assert not bench.ticker.busy
