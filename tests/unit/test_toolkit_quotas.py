"""Quotas as applications use them: counted exactly with the turn, summed over all objects, limited by both."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from actors import Charge, DurableObject, QuotaLimit, QuotaTotal, Settings, shared
from actors.errors import (
    CoordinatorUnavailable,
    InvalidOption,
    InvalidSchedule,
    QuotaExceeded,
    ReadOnlyTurn,
    SerialTurnsNeeded,
)
from actors.testing import COORDINATOR, LocalRuntime
from tests.support.crash_points import CommitControl, crash_when_stopped, finish, key_in, runtime_with
from tests.support.toolkit import scan, until
from timers.quotas import CLOCK_GRACE_MS, ROLLUP_MS, VIEW_MAX_AGE_MS

HOUR = QuotaLimit("1h", operations=10, bytes=1_000)
FIVE_MINUTES = QuotaLimit("5m", operations=10, bytes=1_000)


class Uploader(DurableObject):
    """Charges what it is told to."""

    def charge(self, operations: int = 1, size: int = 0, limit: QuotaLimit = HOUR, name: str = "uploads") -> Charge:
        return self.quotas.charge(name, operations, size, limit=limit)

    def charge_and_raise(self) -> None:
        self.quotas.charge("uploads", limit=HOUR)
        raise ValueError("rolled back, with the charge")

    def charge_twice(self, first: QuotaLimit, second: QuotaLimit) -> None:
        """Two limits at once: the second refusal takes the first charge back."""
        self.quotas.charge("uploads", limit=first)
        self.quotas.charge("uploads", limit=second)

    def charge_if_possible(self) -> bool:
        try:
            self.quotas.charge("uploads", limit=HOUR)
        except QuotaExceeded:
            return False
        return True

    @shared
    def check(self, operations: int = 1, size: int = 0, limit: QuotaLimit = HOUR) -> Charge:
        return self.quotas.check("uploads", operations, size, limit=limit)

    @shared
    def charge_shared(self) -> None:
        self.quotas.charge("uploads", limit=HOUR)

    async def total(self, window: Any = "1h") -> QuotaTotal:
        return await self.quotas.total("uploads", window)

    @shared
    async def total_shared(self) -> QuotaTotal:
        return await self.quotas.total("uploads")


class Interleaved(DurableObject):
    turns = "interleaved"

    def charge(self) -> None:
        self.quotas.charge("uploads", limit=HOUR)


async def to_window_start(runtime: LocalRuntime, window_ms: int = 3_600_000) -> int:
    """Let time pass until a window has just begun; when it ends."""
    now_ms = runtime.clock.wall_ms()
    end_ms = (now_ms // window_ms + 1) * window_ms
    await runtime.advance(ms=end_ms - now_ms)
    return end_ms + window_ms


# --- one object ---------------------------------------------------------------------------------------


async def test_a_charge_says_what_is_left_and_when_the_window_ends() -> None:
    async with LocalRuntime(memory=True) as runtime:
        end_ms = await to_window_start(runtime)
        uploader = runtime.namespace(Uploader).get("a")
        assert await uploader.charge(3, 400) == Charge(True, 7, 600, end_ms, True)
        assert await uploader.check(7, 600) == Charge(True, 7, 600, end_ms, True)
        assert await uploader.check(8, 0) == Charge(False, 7, 600, end_ms, True)
        assert await uploader.charge(7, 600) == Charge(True, 0, 0, end_ms, True)  # exactly at the limit
        with pytest.raises(QuotaExceeded, match="local operations") as refused:
            await uploader.charge(1, 0)
        error = refused.value
        assert (error.remaining_operations, error.remaining_bytes, error.resets_ms) == (0, 0, end_ms)
        assert await uploader.charge(0, 0) == Charge(True, 0, 0, end_ms, True)


async def test_what_is_refused_charges_nothing() -> None:
    async with LocalRuntime(memory=True) as runtime:
        await to_window_start(runtime)
        uploader = runtime.namespace(Uploader).get("a")
        await uploader.charge(9)
        with pytest.raises(QuotaExceeded):
            await uploader.charge(1, 1_001)  # the operation would have been within the limit
        assert (await uploader.check()).remaining_operations == 1
        assert await uploader.charge_if_possible()
        assert not await uploader.charge_if_possible()


async def test_the_next_window_begins_from_zero() -> None:
    async with LocalRuntime(memory=True) as runtime:
        end_ms = await to_window_start(runtime)
        uploader = runtime.namespace(Uploader).get("a")
        await uploader.charge(10)
        await runtime.advance(ms=end_ms - runtime.clock.wall_ms() - 1)
        with pytest.raises(QuotaExceeded):
            await uploader.charge()
        await runtime.advance(ms=1)
        assert (await uploader.charge()).resets_ms == end_ms + 3_600_000


async def test_a_turn_that_raises_has_charged_nothing() -> None:
    async with LocalRuntime(memory=True) as runtime:
        await to_window_start(runtime)
        uploader = runtime.namespace(Uploader).get("a")
        with pytest.raises(ValueError):
            await uploader.charge_and_raise()
        assert (await uploader.check()).remaining_operations == 10
        await runtime.advance(ms=ROLLUP_MS)
        assert scan(runtime, "quota_counters") == []


async def test_several_limits_of_different_windows_hold_together() -> None:
    async with LocalRuntime(memory=True) as runtime:
        await to_window_start(runtime, 86_400_000)
        minute, day = QuotaLimit("1m", operations=2), QuotaLimit("1d", operations=3)
        uploader = runtime.namespace(Uploader).get("a")
        for _ in range(2):
            await uploader.charge_twice(minute, day)
        with pytest.raises(QuotaExceeded):
            await uploader.charge_twice(minute, day)
        await runtime.advance(minutes=1)
        await uploader.charge_twice(minute, day)
        with pytest.raises(QuotaExceeded):
            await uploader.charge_twice(minute, day)
        assert (await uploader.check(1, 0, minute)).remaining_operations == 1  # the first charge was taken back


async def test_counts_survive_a_crash_and_eviction() -> None:
    async with LocalRuntime(memory=True) as runtime:
        await to_window_start(runtime)
        uploader = runtime.namespace(Uploader).get("a")
        await uploader.charge(4)
        await runtime.crash()
        await uploader.charge(4)
        assert await runtime.evict(uploader)
        assert (await uploader.check()).remaining_operations == 2


async def test_a_local_limit_is_for_each_object() -> None:
    async with LocalRuntime(memory=True) as runtime:
        await to_window_start(runtime)
        limit = QuotaLimit("1h", operations=100, local_operations=2, local_bytes=10)
        uploaders = runtime.namespace(Uploader)
        for key in ("a", "b"):
            await uploaders.get(key).charge(2, 0, limit)
            with pytest.raises(QuotaExceeded):
                await uploaders.get(key).charge(1, 0, limit)
        with pytest.raises(QuotaExceeded, match="local bytes"):
            await uploaders.get("c").charge(1, 11, limit)


# --- all objects --------------------------------------------------------------------------------------


async def test_objects_know_of_each_other_after_a_minute() -> None:
    async with LocalRuntime(memory=True, partitions=2) as runtime:
        end_ms = await to_window_start(runtime)
        uploaders = runtime.namespace(Uploader)
        for key in ("a", "b", "c"):
            assert (await uploaders.get(key).charge(3, 10)).metered
        await runtime.advance(ms=ROLLUP_MS)
        await runtime.advance(ms=ROLLUP_MS)  # all have pushed when each looks again
        assert await uploaders.get("a").check() == Charge(True, 1, 970, end_ms, False)
        await uploaders.get("a").charge(1)
        with pytest.raises(QuotaExceeded, match="cluster operations"):
            await uploaders.get("a").charge(1)
        assert await uploaders.get("new").charge_if_possible()  # it has not heard of the others yet


async def test_totals_are_readable_from_objects_and_from_outside() -> None:
    async with LocalRuntime(memory=True, partitions=2) as runtime:
        end_ms = await to_window_start(runtime)
        uploaders = runtime.namespace(Uploader)
        for number in range(4):
            await uploaders.get(f"u{number}").charge(number + 1, number)
        assert await runtime.quota_total("uploads") == QuotaTotal(0, 0, end_ms)
        await runtime.advance(ms=ROLLUP_MS)
        expected = QuotaTotal(10, 6, end_ms)
        assert await runtime.quota_total("uploads", timedelta(hours=1)) == expected
        assert await uploaders.get("u0").total() == expected
        assert await uploaders.get("u0").total_shared() == expected
        assert (await uploaders.get("u0").total("1d")).operations == 0


async def test_a_coordinator_that_is_away_leaves_the_limits_of_each_object() -> None:
    settings = Settings(durability="off", coordinator_wait_ms=0)
    async with LocalRuntime(memory=True, settings=settings) as runtime:
        await to_window_start(runtime)
        uploaders = runtime.namespace(Uploader)
        for key in ("a", "b"):
            await uploaders.get(key).charge(5)
        await runtime.advance(ms=2 * ROLLUP_MS)
        assert not (await uploaders.get("a").check()).allowed
        engine = runtime.coordinator.engine
        assert engine is not None
        await engine.abandon()
        with pytest.raises(CoordinatorUnavailable):
            await uploaders.get("a").total()
        await runtime.advance(ms=VIEW_MAX_AGE_MS + ROLLUP_MS)
        assert (await uploaders.get("a").charge(5)).metered
        await runtime.crash(COORDINATOR)
        await runtime.advance(minutes=12)  # the retry ladder's longest step
        assert (await runtime.quota_total("uploads")).operations == 15


async def test_a_deleted_object_has_charged_what_it_has_charged_and_begins_from_zero() -> None:
    async with LocalRuntime(memory=True) as runtime:
        await to_window_start(runtime)
        uploaders = runtime.namespace(Uploader)
        await uploaders.get("a").charge(4)
        await runtime.run_until_idle()
        assert await uploaders.delete("a")
        await uploaders.get("a").charge(3)
        await runtime.advance(ms=ROLLUP_MS)
        assert (await runtime.quota_total("uploads")).operations == 7


async def test_a_window_that_is_over_leaves_no_rows_anywhere() -> None:
    async with LocalRuntime(memory=True, partitions=2) as runtime:
        end_ms = await to_window_start(runtime)
        uploaders = runtime.namespace(Uploader)
        for number in range(6):
            await uploaders.get(f"u{number}").charge()
        await runtime.run_until_idle()
        await uploaders.delete("u5")
        await runtime.advance(ms=end_ms - runtime.clock.wall_ms() + CLOCK_GRACE_MS + 2 * ROLLUP_MS)
        engine = runtime.coordinator.engine
        assert engine is not None
        for table in ("quota_counters", "quota_views", "timers"):
            assert scan(runtime, table) == []
        for table in ("quota_totals", "quota_sources", "timers"):
            assert engine.store.scan(table) == []


async def test_a_busy_object_is_pushed_all_the_same() -> None:
    """Its turns follow each other without a pause: the view is written beside them."""
    async with LocalRuntime(memory=True) as runtime:
        await to_window_start(runtime)
        uploader = runtime.namespace(Uploader).get("a")
        limit = QuotaLimit("1h", operations=1_000_000)
        await uploader.charge(1, 0, limit)
        await runtime.advance(ms=ROLLUP_MS - 1)
        calls = [asyncio.ensure_future(uploader.charge(1, 0, limit)) for _ in range(200)]
        await runtime.advance(ms=1)
        assert not (await uploader.check(1, 0, limit)).metered
        await asyncio.gather(*calls)


async def test_counters_move_with_their_slot_and_keep_their_source() -> None:
    async with LocalRuntime(memory=True) as runtime:
        await to_window_start(runtime)
        uploaders = runtime.namespace(Uploader)
        for number in range(12):
            await uploaders.get(f"u{number}").charge(1, number)
        await runtime.advance(ms=ROLLUP_MS)
        await runtime.scale(3)
        for number in range(12):
            await finish(runtime, uploaders.get(f"u{number}").charge(1, number, QuotaLimit("1h", operations=100)))
        await runtime.advance(ms=2 * ROLLUP_MS)
        total = await runtime.quota_total("uploads")
        assert (total.operations, total.bytes) == (24, 2 * sum(range(12)))
        engine = runtime.coordinator.engine
        assert engine is not None
        assert len(engine.store.scan("quota_sources")) == 12


# --- crashes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("alone", [True, pytest.param(False, marks=pytest.mark.soak)])
async def test_a_crash_at_any_commit_leaves_exact_totals(applied: bool, alone: bool) -> None:
    """A.8.8, A.8.11, A.8.15: partitions and coordinator die at each commit of charges, pushes and the window's end."""
    crash_at, done = 0, False
    while not done:
        crash_at += 1
        control = CommitControl(crash_at, applied=applied)
        async with runtime_with(control, partitions=2) as runtime:
            end_ms = await to_window_start(runtime, 300_000)
            uploaders = runtime.namespace(Uploader)
            keys = [key_in("Uploader", number % 2, 2, f"u{number}-") for number in range(4)]
            async with crash_when_stopped(runtime, control, all_partitions=not alone):
                for number, key in enumerate(keys):
                    await finish(runtime, uploaders.get(key).charge(number + 1, number, FIVE_MINUTES))
                await until(runtime, lambda: all_have_told(runtime))
                await runtime.advance(ms=end_ms - runtime.clock.wall_ms())
                await until(runtime, lambda: nothing_is_left(runtime))
                done = not control.stopped
    assert crash_at > 20


async def all_have_told(runtime: LocalRuntime) -> bool:
    """Whether 10 operations and 6 bytes are in the total; more of either there never is."""
    if None in runtime.partitions or len(scan(runtime, "quota_views")) < 4:
        return False
    total = await runtime.quota_total("uploads", "5m")
    assert total.operations <= 10
    assert total.bytes <= 6
    return (total.operations, total.bytes) == (10, 6)


async def nothing_is_left(runtime: LocalRuntime) -> bool:
    engine = runtime.coordinator.engine
    if None in runtime.partitions or engine is None:
        return False
    left = [scan(runtime, table) for table in ("quota_counters", "quota_views")]
    left += [engine.store.scan(table) for table in ("quota_totals", "quota_sources")]
    return not any(left)


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"operations": -1}, {"bytes": 1.5}, {"local_operations": True}, {"local_bytes": 2**53 + 1}, {"window": "0.5s"}],
)
def test_limits_are_whole_numbers_and_windows_last(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        QuotaLimit(**{"window": "1h", **wrong})


@pytest.mark.parametrize("window", ["soon", 3_600, None])
def test_a_window_is_a_duration(window: Any) -> None:
    with pytest.raises(InvalidSchedule):
        QuotaLimit(window)


async def test_amounts_are_whole_numbers_and_names_short_text() -> None:
    async with LocalRuntime(memory=True) as runtime:
        uploader = runtime.namespace(Uploader).get("a")
        for amount in (-1, 1.5, True):
            with pytest.raises(InvalidOption):
                await uploader.charge(amount)
        for name in ("", "x" * 513):
            with pytest.raises(InvalidOption):
                await uploader.charge(1, 0, HOUR, name)


async def test_shared_methods_only_look_and_interleaved_classes_have_no_quotas() -> None:
    async with LocalRuntime(memory=True) as runtime:
        with pytest.raises(ReadOnlyTurn):
            await runtime.namespace(Uploader).get("a").charge_shared()
        with pytest.raises(SerialTurnsNeeded):
            await runtime.namespace(Interleaved).get("a").charge()
