"""Named timers: when they run, what replaces what, retries, misfires, dead letters, fairness, crashes and downtime."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import datetime, timedelta, timezone
from typing import Any, Literal

import pytest

from actors.durable_object import DurableObject
from actors.errors import (
    InvalidOption,
    InvalidSchedule,
    NoSuchMethod,
    TooManyTimers,
    UnstorableValue,
)
from actors.object_timers import TimerState
from actors.settings import Settings
from actors.testing import LocalRuntime, VirtualClock
from tests.support.crash_points import CommitControl, crash_when_stopped, finish, runtime_with, until_forgotten
from timers.backoff import RetryPolicy

SECOND = 1_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
QUICK = RetryPolicy(max_attempts=3, base_ms=1_000, factor=2.0, jitter=0.0)


class Bell(DurableObject):
    """Sets timers as it is told, and notes what they told it."""

    failures: dict[str, int] = {}
    gate: asyncio.Event | None = None
    waiting = 0

    def set(self, name: str, options: dict[str, Any]) -> TimerState:
        return self.timers.set(name, **{"method": "ring", **options})

    def set_many(self, names: list[str], options: dict[str, Any]) -> None:
        for name in names:
            self.timers.set(name, **{"method": "ring", **options})

    def set_each(self, due: dict[str, int]) -> None:
        for name, at in due.items():
            self.timers.set(name, at=at, method="ring")

    def set_and_raise(self, name: str) -> None:
        self.timers.set(name, after="1s", method="ring")
        raise ValueError("no")

    def cancel(self, name: str) -> bool:
        return self.timers.cancel(name)

    def cancel_many(self, names: list[str]) -> int:
        return sum(self.timers.cancel(name) for name in names)

    def get(self, name: str) -> TimerState | None:
        return self.timers.get(name)

    def names(self) -> list[str]:
        return [timer.name for timer in self.timers.list()]

    def ring(self, info: Any) -> None:
        rung = self.storage.get("rung", [])
        rung.append([info.name, info.due_ms, info.fired_ms, info.attempt, info.missed, info.payload, info.generation])
        self.storage.put("rung", rung)

    def ring_and_fail(self, info: Any) -> None:
        tries = self.failures.get(info.name, 0)
        Bell.failures[info.name] = tries + 1
        self.storage.put("lost", True)
        if info.payload is None or tries < info.payload:
            raise RuntimeError(f"try {info.attempt} at {info.fired_ms}")
        self.ring(info)

    async def ring_slowly(self, info: Any) -> None:
        assert Bell.gate is not None
        Bell.waiting += 1
        await Bell.gate.wait()
        self.ring(info)

    def ring_and_set(self, info: Any) -> None:
        """Replaces itself by what its payload says."""
        self.ring(info)
        self.timers.set(info.name, **info.payload)

    def chain(self, info: Any) -> None:
        self.ring(info)
        if info.payload > 1:
            self.timers.set("chain", at=1, method="chain", payload=info.payload - 1)

    def ring_and_cancel(self, info: Any) -> None:
        self.ring(info)
        self.timers.cancel(info.payload)

    async def hold(self) -> None:
        assert Bell.gate is not None
        await Bell.gate.wait()

    async def hold_and_set(self, name: str, options: dict[str, Any]) -> None:
        await self.hold()
        self.timers.set(name, **{"method": "ring", **options})

    def rung(self) -> list[list[Any]]:
        found: list[list[Any]] = self.storage.get("rung", [])
        return found

    def lost(self) -> bool:
        return "lost" in self.storage

    def set_alarm(self, at: int) -> None:
        self.storage.set_alarm(at)

    def alarm(self, info: Any) -> None:
        self.ring(info)


@pytest.fixture
async def rt() -> AsyncIterator[LocalRuntime]:
    Bell.failures = {}
    Bell.gate, Bell.waiting = asyncio.Event(), 0
    async with LocalRuntime(memory=True, settings=Settings(durability="off", ack_delay_ms=1)) as runtime:
        yield runtime


@pytest.fixture
async def bell(rt: LocalRuntime) -> Any:
    return rt.namespace(Bell).get("b")


def virtual(rt: LocalRuntime) -> VirtualClock:
    assert isinstance(rt.clock, VirtualClock)
    return rt.clock


async def dues(bell: Any) -> list[int]:
    return [row[1] for row in await bell.rung()]


async def fires(bell: Any) -> list[int]:
    return [row[2] for row in await bell.rung()]


# --- when they run ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"after": "90s"},
        {"after": timedelta(seconds=90)},
        {"at": "90s"},
    ],
)
async def test_a_one_shot_runs_once_at_its_instant(rt: LocalRuntime, bell: Any, options: dict[str, Any]) -> None:
    start = rt.clock.wall_ms()
    state = await bell.set("t", options)
    assert (state.due_ms, state.attempt) == (start + 90 * SECOND, 0)
    await rt.advance(seconds=89.999)
    assert await bell.rung() == []
    await rt.advance(ms=1)
    assert await fires(bell) == [start + 90 * SECOND]
    await rt.advance(days=1)
    assert len(await bell.rung()) == 1
    assert await bell.names() == []


async def test_at_takes_epoch_milliseconds_and_aware_datetimes(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    await bell.set("int", {"at": start + 5})
    await bell.set("datetime", {"at": datetime.fromtimestamp(start / 1_000 + 7, tz=timezone.utc)})
    await rt.advance(seconds=10)
    assert await dues(bell) == [start + 5, start + 7 * SECOND]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"at": 5, "after": "1s"},
        {"at": 1.5},
        {"at": datetime(2030, 1, 1)},
        {"after": 5},
        {"after": "soon"},
        {"every": "0s"},
        {"cron": "not cron"},
        {"after": "1s", "misfire": "forget"},
        {"after": "1s", "tz": "UTC"},
        {"cron": "* * * * *", "tz": "Mars/Olympus"},
        {"after": "1s", "jitter_ms": -1},
    ],
)
async def test_a_schedule_that_makes_no_sense_is_refused_and_sets_nothing(bell: Any, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSchedule):
        await bell.set("t", options)
    assert await bell.names() == []


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 513, None])
async def test_a_name_that_is_none_is_refused(bell: Any, name: Any) -> None:
    with pytest.raises(InvalidOption):
        await bell.set(name, {"after": "1s"})


async def test_a_handler_must_be_a_method_of_the_class(bell: Any) -> None:
    with pytest.raises(NoSuchMethod):
        await bell.set("t", {"after": "1s", "method": "nothing"})


async def test_a_payload_must_be_storable(rt: LocalRuntime, bell: Any) -> None:
    class Local:
        pass

    namespace = rt.namespace(BadPayload)
    with pytest.raises(UnstorableValue):
        await namespace.get("x").go()


class BadPayload(DurableObject):
    """Sets a timer with a payload that can't be stored."""

    def go(self) -> None:
        self.timers.set("t", after="1s", method="go", payload={"a": [object()]})


async def test_the_payload_and_the_method_arrive_unchanged(rt: LocalRuntime, bell: Any) -> None:
    payload = {"bytes": b"\0\xff", "none": None, "list": [1, (2, 3)], "text": "ä\u2028"}
    await bell.set("t", {"after": "1s", "payload": payload})
    await rt.crash()
    await rt.advance(seconds=1)
    assert (await bell.rung())[0][5] == payload


async def test_every_is_anchored_at_its_start(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    await bell.set("t", {"every": "7s"})
    await rt.advance(minutes=1)
    assert await fires(bell) == [start + k * 7 * SECOND for k in range(1, 9)]


async def test_the_kth_due_time_does_not_depend_on_how_long_the_handler_takes(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    assert Bell.gate is not None
    await bell.set("t", {"every": "10s", "method": "ring_slowly"})
    await rt.advance(seconds=13)
    Bell.gate.set()
    await rt.advance(seconds=40)
    assert await dues(bell) == [start + k * 10 * SECOND for k in range(1, 6)]


async def test_cron_counts_in_its_time_zone(rt: LocalRuntime, bell: Any) -> None:
    start = datetime.fromtimestamp(rt.clock.wall_ms() / 1_000, tz=timezone.utc)
    await bell.set("t", {"cron": "30 4 * * *", "tz": "Asia/Kolkata"})
    await rt.advance(days=3)
    found = [datetime.fromtimestamp(due / 1_000, tz=timezone.utc) for due in await dues(bell)]
    assert len(found) == 3
    assert all((each.hour, each.minute) == (23, 0) for each in found)
    assert found[0] - start <= timedelta(days=1)


async def test_after_a_restart_an_interval_goes_on_for_many_periods(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 4: after a restart each reminder fired only once."""
    start = rt.clock.wall_ms()
    await bell.set("t", {"every": "1m"})
    await rt.advance(minutes=2)
    await rt.crash()
    await rt.advance(minutes=4)
    assert await fires(bell) == [start + k * MINUTE for k in range(1, 7)]


@pytest.mark.parametrize("wait_ms", [1, 999, HOUR, 30 * DAY, 3_650 * DAY])
async def test_no_timer_runs_early_whatever_the_clock_does(rt: LocalRuntime, bell: Any, wait_ms: int) -> None:
    """Field complaints 26."""
    due_ms = rt.clock.wall_ms() + wait_ms
    await bell.set("t", {"at": due_ms})
    await until_forgotten(rt)  # a partition that keeps replies looks at them every 30 s, for ten years if need be
    await rt.advance(ms=wait_ms // 2)
    virtual(rt).step_wall(-3 * HOUR)
    await rt.advance(ms=wait_ms - wait_ms // 2)
    assert await bell.rung() == []
    await rt.advance(ms=due_ms - rt.clock.wall_ms())
    (fired_ms,) = await fires(bell)
    assert fired_ms >= due_ms


async def test_a_clock_that_is_set_back_between_the_tick_and_the_turn_fires_nothing_early(
    rt: LocalRuntime, bell: Any
) -> None:
    assert Bell.gate is not None
    due_ms = rt.clock.wall_ms() + 10 * SECOND
    await bell.set("t", {"at": due_ms})
    held = asyncio.ensure_future(bell.hold())
    await rt.advance(seconds=10)  # the timer is queued behind the held turn
    virtual(rt).step_wall(-5 * SECOND)
    Bell.gate.set()
    await held
    await rt.run_until_idle()
    assert await bell.rung() == []
    await rt.advance(seconds=5)
    assert await fires(bell) == [due_ms]


async def test_a_clock_that_is_set_forward_fires_what_has_come_due(rt: LocalRuntime, bell: Any) -> None:
    await bell.set("t", {"after": "1h"})
    virtual(rt).step_wall(2 * HOUR)
    await rt.run_until_idle()
    assert len(await bell.rung()) == 1


async def test_a_time_in_the_past_runs_now_and_once(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 28."""
    start = rt.clock.wall_ms()
    await bell.set("t", {"at": start - 5 * SECOND})
    await rt.run_until_idle()
    assert [(row[1], row[2]) for row in await bell.rung()] == [(start - 5 * SECOND, start)]
    await rt.advance(days=1)
    assert len(await bell.rung()) == 1


async def test_due_equals_now_runs_in_this_tick(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 29."""
    start = rt.clock.wall_ms()
    await bell.set("t", {"at": start})
    await rt.run_until_idle()
    assert await fires(bell) == [start]


async def test_a_chain_of_a_thousand_that_rearm_for_now_runs_without_time_passing(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 31 and 34."""
    start = rt.clock.wall_ms()
    links = 1_000
    await rt.namespace(Chain).get("c").start(links)
    await rt.run_until_idle()
    assert await rt.namespace(Chain).get("c").count() == links
    assert rt.clock.wall_ms() == start


class Chain(DurableObject):
    """Rearms itself for a time that has passed."""

    def start(self, links: int) -> None:
        self.timers.set("chain", at=1, method="link", payload=links)

    def link(self, info: Any) -> None:
        self.storage.put("n", self.storage.get("n", 0) + 1)
        if info.payload > 1:
            self.timers.set("chain", at=info.payload, method="link", payload=info.payload - 1)

    def count(self) -> int:
        count: int = self.storage.get("n", 0)
        return count


async def test_timers_made_for_now_in_a_tight_loop_fire_while_they_are_made(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 34: both creation and firing make progress."""
    for number in range(100):
        await bell.set(f"t{number}", {"at": rt.clock.wall_ms()})
    await rt.run_until_idle()
    assert sorted(row[0] for row in await bell.rung()) == sorted(f"t{number}" for number in range(100))


async def test_a_day_of_timers_passes_at_once_whatever_the_caller_waits_on(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 61."""
    await bell.set("t", {"every": "1m"})
    waiting = asyncio.ensure_future(bell.hold())
    other = rt.namespace(Bell).get("other")
    await other.set("t", {"every": "1m"})
    await rt.advance(hours=4)
    assert len(await other.rung()) == 240
    assert Bell.gate is not None
    Bell.gate.set()
    with pytest.raises(Exception, match="ran longer"):
        await waiting


async def test_each_runtime_has_a_clock_of_its_own() -> None:
    """Field complaints 62."""
    async with LocalRuntime(memory=True) as one, LocalRuntime(memory=True) as two:
        for runtime in (one, two):
            await runtime.namespace(Bell).get("b").set("t", {"after": "1h"})
        await one.advance(hours=2)
        assert len(await one.namespace(Bell).get("b").rung()) == 1
        assert await two.namespace(Bell).get("b").rung() == []


@pytest.mark.parametrize("jitter_ms", [1, 500, 30_000])
async def test_jitter_only_delays_and_keeps_the_due_time(rt: LocalRuntime, bell: Any, jitter_ms: int) -> None:
    start = rt.clock.wall_ms()
    await bell.set("t", {"every": "1m", "jitter_ms": jitter_ms})
    await rt.advance(minutes=10, ms=jitter_ms)
    rows = (await bell.rung())[:10]
    assert [row[1] for row in rows] == [start + k * MINUTE for k in range(1, 11)]
    assert all(0 <= row[2] - row[1] <= jitter_ms for row in rows)


# --- replacing, generations, cancelling -----------------------------------------------------------


async def test_the_same_name_replaces_and_gets_a_new_generation(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    first = await bell.set("t", {"after": "1h", "payload": 1})
    second = await bell.set("t", {"after": "2h", "payload": 2})
    assert second.generation > first.generation
    await rt.advance(hours=3)
    assert [(row[1], row[5], row[6]) for row in await bell.rung()] == [(start + 2 * HOUR, 2, second.generation)]


@pytest.mark.parametrize(
    "options",
    [
        {"at": 1_900_000_000_000, "payload": [1]},
        {"every": "5m", "payload": {"a": 1}},
        {"cron": "0 3 * * *", "tz": "Europe/Berlin"},
    ],
)
async def test_setting_the_same_thing_again_changes_nothing(
    rt: LocalRuntime, bell: Any, options: dict[str, Any]
) -> None:
    first = await bell.set("t", options)
    await rt.advance(seconds=100)
    assert await bell.set("t", options) == first


@pytest.mark.parametrize(
    "other", [{"every": "6m"}, {"every": "5m", "payload": 2}, {"every": "5m", "method": "ring_slowly"}]
)
async def test_setting_something_else_replaces(bell: Any, other: dict[str, Any]) -> None:
    first = await bell.set("t", {"every": "5m"})
    assert (await bell.set("t", other)).generation > first.generation


async def test_after_again_moves_the_timer(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    await bell.set("t", {"after": "1m"})
    await rt.advance(seconds=30)
    await bell.set("t", {"after": "1m"})
    await rt.advance(hours=1)
    assert await fires(bell) == [start + 90 * SECOND]


async def test_if_absent_never_touches_an_existing_timer(rt: LocalRuntime, bell: Any) -> None:
    first = await bell.set("t", {"after": "1m"})
    assert await bell.set("t", {"after": "9h", "if_absent": True}) == first
    await rt.advance(minutes=1)
    assert (await bell.set("t", {"after": "9h", "if_absent": True})).generation > first.generation


async def test_setting_one_timer_leaves_the_others_alone(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 40."""
    before = [await bell.set(name, {"every": "1h"}) for name in ("a", "b")]
    for _ in range(20):
        await bell.set("c", {"at": rt.clock.wall_ms()})
        await rt.advance(seconds=1)
    assert [await bell.get(name) for name in ("a", "b")] == before


async def test_set_five_hundred_times_by_five_hundred_starts_is_one_timer_and_one_fire(rt: LocalRuntime) -> None:
    """Field complaints 41."""
    stub = rt.namespace(SetsOnStart).get("s")
    for _ in range(500):
        await stub.count()
        await rt.evict(stub)
    assert await stub.timers_set() == 1
    assert [len(partition.store.scan("timers")) for partition in rt.partitions if partition] == [1]
    await rt.advance(hours=1)
    assert await stub.count() == 1


class SetsOnStart(DurableObject):
    """Sets its timer whenever it comes into memory."""

    def on_start(self) -> None:
        if "fired" not in self.storage:
            self.timers.set("once", at=1_900_000_000_000 - 100_000_000_000 + HOUR, method="fire")

    def fire(self, info: Any) -> None:
        self.storage.put("fired", self.storage.get("fired", 0) + 1)

    def count(self) -> int:
        count: int = self.storage.get("fired", 0)
        return count

    def timers_set(self) -> int:
        return len(self.timers.list())


async def test_a_cancelled_timer_never_runs_also_after_a_restart(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 5, with a thousand timers."""
    names = [f"t{number}" for number in range(1_000)]
    await bell.set_many(names, {"after": "1h"})
    assert await bell.cancel_many(names) == 1_000
    await rt.crash()
    await rt.advance(days=1)
    assert await bell.rung() == []
    assert [partition.store.scan("timers") for partition in rt.partitions if partition] == [[]]


async def test_cancel_says_whether_it_was_set(bell: Any) -> None:
    await bell.set("t", {"after": "1h"})
    assert await bell.cancel("t") is True
    assert await bell.cancel("t") is False
    assert await bell.get("t") is None


async def test_a_turn_that_raises_sets_and_cancels_nothing(rt: LocalRuntime, bell: Any) -> None:
    with pytest.raises(ValueError):
        await bell.set_and_raise("t")
    await rt.advance(hours=1)
    assert await bell.rung() == []
    assert await bell.names() == []


async def test_a_handler_sees_a_one_shot_as_ended_and_a_recurring_one_as_moved_on(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    stub = rt.namespace(LooksAtItself).get("x")
    await stub.arm()
    await rt.advance(minutes=1)
    assert await stub.seen() == {"once": None, "often": start + 2 * MINUTE}


class LooksAtItself(DurableObject):
    """Its handler notes what it sees of its own timer."""

    def arm(self) -> None:
        self.timers.set("once", after="1m", method="look")
        self.timers.set("often", every="1m", method="look")

    def look(self, info: Any) -> None:
        state = self.timers.get(info.name)
        self.storage.put(info.name, None if state is None else state.due_ms)

    def seen(self) -> dict[str, Any]:
        return self.storage.list()


async def test_a_handler_that_sets_its_own_name_again_replaces_what_follows(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    again = {"after": "10s", "method": "ring"}
    await bell.set("t", {"every": "1m", "method": "ring_and_set", "payload": again})
    await rt.advance(hours=1)
    assert await fires(bell) == [start + MINUTE, start + MINUTE + 10 * SECOND]


async def test_a_handler_that_cancels_its_own_recurring_timer_ends_it(rt: LocalRuntime, bell: Any) -> None:
    await bell.set("t", {"every": "1m", "method": "ring_and_cancel", "payload": "t"})
    await rt.advance(hours=1)
    assert len(await bell.rung()) == 1


async def test_a_timer_that_is_replaced_while_it_waits_behind_turns_runs_as_its_replacement(
    rt: LocalRuntime, bell: Any
) -> None:
    """The tick meets the new row while the old one's turn is still queued; it must not be passed for good."""
    assert Bell.gate is not None
    now_ms = rt.clock.wall_ms()
    await bell.set("t", {"at": now_ms + SECOND, "payload": "old"})
    setting = asyncio.ensure_future(bell.hold_and_set("t", {"at": now_ms, "payload": "new"}))
    holding = asyncio.ensure_future(bell.hold())
    await rt.advance(seconds=1)
    Bell.gate.set()
    await asyncio.gather(setting, holding)
    await rt.run_until_idle()
    assert [row[5] for row in await bell.rung()] == ["new"]


async def test_the_number_of_timers_of_an_object_is_bounded() -> None:
    settings = Settings(durability="off", max_timers_per_object=3)
    async with LocalRuntime(memory=True, settings=settings) as rt:
        bell = rt.namespace(Bell).get("b")
        await bell.set_many(["a", "b", "c"], {"after": "1h"})
        with pytest.raises(TooManyTimers):
            await bell.set("d", {"after": "1h"})
        await bell.set("a", {"after": "2h"})  # replacing needs no room
        await bell.cancel("b")
        await bell.set("d", {"after": "1h"})


# --- retries and dead letters -----------------------------------------------------------------------


async def test_a_failing_handler_is_retried_by_its_policy_and_rolled_back_each_time(
    rt: LocalRuntime, bell: Any
) -> None:
    start = rt.clock.wall_ms()
    await bell.set("t", {"after": "1m", "method": "ring_and_fail", "payload": 2, "retry": QUICK})
    await rt.advance(minutes=2)
    ((name, due_ms, fired_ms, attempt, *_),) = await bell.rung()
    assert (name, due_ms, attempt) == ("t", start + MINUTE, 2)
    assert fired_ms == start + MINUTE + SECOND + 2 * SECOND
    assert await rt.dead_letters() == []


async def test_attempts_are_kept_across_crashes(rt: LocalRuntime, bell: Any) -> None:
    await bell.set("t", {"after": "1m", "method": "ring_and_fail", "retry": QUICK})
    await rt.advance(minutes=1)
    for _ in range(3):
        await rt.crash()
    assert (await bell.get("t")).attempt == 1
    await rt.advance(minutes=1)
    assert Bell.failures == {"t": 3}
    (letter,) = await rt.dead_letters()
    assert (letter.name, letter.attempts) == ("t", 3)


async def test_a_used_up_timer_goes_to_the_dead_letters_and_delays_nobody(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 50."""
    start = rt.clock.wall_ms()
    await bell.set("poison", {"after": "1m", "method": "ring_and_fail", "retry": QUICK})
    await bell.set("fine", {"every": "1m"})
    await rt.advance(minutes=3)
    assert await fires(bell) == [start + k * MINUTE for k in range(1, 4)]
    (letter,) = await rt.dead_letters()
    assert (letter.type_name, letter.key, letter.name) == ("Bell", "b", "poison")
    assert (letter.due_ms, letter.attempts, letter.crashes) == (start + MINUTE, 3, 0)
    assert "RuntimeError: try 2" in letter.error
    assert await bell.names() == ["fine"]
    assert not await bell.lost()


async def test_a_recurring_timer_that_is_used_up_goes_on_with_its_next_occurrence(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    await bell.set("t", {"every": "1m", "method": "ring_and_fail", "payload": 3, "retry": QUICK})
    await rt.advance(minutes=2)
    assert len(await rt.dead_letters()) == 1
    assert [(row[1], row[3]) for row in await bell.rung()] == [(start + 2 * MINUTE, 0)]


async def test_a_dead_letter_can_be_redriven_with_all_its_tries(rt: LocalRuntime, bell: Any) -> None:
    await bell.set("t", {"after": "1m", "method": "ring_and_fail", "payload": 4, "retry": QUICK})
    await rt.advance(minutes=2)
    (letter,) = await rt.dead_letters()
    await rt.redrive(letter)
    assert await rt.dead_letters() == []
    await rt.advance(minutes=1)
    assert Bell.failures == {"t": 5}
    assert [row[3] for row in await bell.rung()] == [1]


async def test_a_dead_letter_can_be_discarded_and_survives_crashes_until_then(rt: LocalRuntime, bell: Any) -> None:
    await bell.set("t", {"after": "1m", "method": "ring_and_fail", "retry": QUICK})
    await rt.advance(minutes=2)
    await rt.crash()
    (letter,) = await rt.dead_letters()
    await rt.discard(letter)
    assert await rt.dead_letters() == []
    assert await rt.redrive(letter) is False
    await rt.advance(days=1)
    assert Bell.failures == {"t": 3}


async def test_a_redriven_timer_does_not_replace_one_that_was_set_again(rt: LocalRuntime, bell: Any) -> None:
    await bell.set("t", {"after": "1m", "method": "ring_and_fail", "retry": QUICK})
    await rt.advance(minutes=2)
    (letter,) = await rt.dead_letters()
    state = await bell.set("t", {"after": "1h"})
    assert await rt.redrive(letter)
    assert await rt.dead_letters() == []
    await rt.advance(minutes=1)
    assert Bell.failures == {"t": 6}  # told under its own name, with all its tries
    assert await bell.get("t") == state


async def test_setting_a_timer_anew_forgets_the_failures_of_the_old_one(rt: LocalRuntime, bell: Any) -> None:
    await bell.set("t", {"after": "1m", "method": "ring_and_fail", "retry": QUICK})
    await rt.advance(minutes=1)
    assert (await bell.get("t")).attempt == 1
    assert (await bell.set("t", {"after": "1h"})).attempt == 0


async def test_a_handler_that_rearms_and_then_raises_is_rolled_back_and_the_retry_stands(
    rt: LocalRuntime, bell: Any
) -> None:
    """Field complaints 44."""
    start = rt.clock.wall_ms()
    stub = rt.namespace(RearmsThenRaises).get("x")
    await stub.arm()
    await rt.advance(minutes=1)
    assert await stub.state() == (start + MINUTE, 1)
    await rt.advance(minutes=1)
    assert RearmsThenRaises.runs == 3
    assert len(await rt.dead_letters()) == 1


class RearmsThenRaises(DurableObject):
    """The re-arm belongs to the turn that failed."""

    runs = 0

    def arm(self) -> None:
        type(self).runs = 0
        self.timers.set("t", after="1m", method="fire", retry=QUICK)

    def fire(self, info: Any) -> None:
        type(self).runs += 1
        self.timers.set("t", after="9h", method="fire")
        raise RuntimeError("after the re-arm")

    def state(self) -> tuple[int, int] | None:
        state = self.timers.get("t")
        return None if state is None else (state.due_ms, state.attempt)


async def test_a_handler_past_its_deadline_is_cancelled_its_attempt_counted_and_the_key_released(
    rt: LocalRuntime, bell: Any
) -> None:
    """Field complaints 59."""
    await bell.set("t", {"after": "1m", "method": "ring_slowly", "retry": QUICK})
    await rt.advance(minutes=15, seconds=59)
    call = asyncio.ensure_future(bell.get("t"))
    await rt.run_until_idle()
    assert not call.done()
    await rt.advance(seconds=1)
    assert (await call).attempt == 1
    assert Bell.gate is not None
    Bell.gate.set()


async def test_a_timer_whose_method_is_gone_fails_like_any_other(rt: LocalRuntime) -> None:
    stub = rt.namespace(Changes).get("x")
    await stub.arm()
    info = rt.partitions[0].classes.get("Changes")  # type: ignore[union-attr]
    handler = info.methods.pop("fire")  # type: ignore[union-attr]
    try:
        await rt.advance(minutes=5)
        (letter,) = await rt.dead_letters()
        assert "has no method 'fire'" in letter.error
    finally:
        info.methods["fire"] = handler  # type: ignore[union-attr]


class Changes(DurableObject):
    """Loses its handler."""

    def arm(self) -> None:
        self.timers.set("t", after="1m", method="fire", retry=QUICK)

    def fire(self, info: Any) -> None:
        return None


# --- downtime ---------------------------------------------------------------------------------------


async def down_for(rt: LocalRuntime, **span: float) -> None:
    """Crash, and come back later: nothing runs meanwhile."""
    for number, partition in enumerate(rt.partitions):
        assert partition is not None
        rt.partitions[number] = None
        await partition.abandon()
    clock = virtual(rt)
    clock.move_to(clock.wall_ms() + timedelta(**span) // timedelta(milliseconds=1))
    await rt.crash()
    await rt.run_until_idle()


async def test_a_late_one_shot_is_never_dropped(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 38."""
    due_ms = rt.clock.wall_ms() + MINUTE
    await bell.set("t", {"at": due_ms, "misfire": "skip"})
    await down_for(rt, days=400)
    assert [(row[1], row[2]) for row in await bell.rung()] == [(due_ms, rt.clock.wall_ms())]


async def test_coalesce_runs_once_and_says_how_many_it_stands_for(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    await bell.set("t", {"every": "1m"})
    await down_for(rt, minutes=10.5)
    assert [(row[1], row[4]) for row in await bell.rung()] == [(start + MINUTE, 9)]
    await rt.advance(minutes=1)
    assert [(row[1], row[4]) for row in await bell.rung()][1:] == [(start + 11 * MINUTE, 0)]


async def test_skip_runs_nothing_that_was_missed_and_accounts_for_it(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    await bell.set("t", {"every": "1m", "misfire": "skip"})
    await down_for(rt, minutes=10.5)
    assert await bell.rung() == []
    await rt.advance(minutes=1)
    assert [(row[1], row[4]) for row in await bell.rung()] == [(start + 11 * MINUTE, 10)]


async def test_skip_still_runs_what_is_late_by_less_than_a_period(rt: LocalRuntime, bell: Any) -> None:
    await bell.set("t", {"every": "1h", "misfire": "skip"})
    await down_for(rt, minutes=90)
    assert len(await bell.rung()) == 1


async def test_all_runs_each_missed_occurrence_in_order(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    await bell.set("t", {"every": "1m", "misfire": "all"})
    await down_for(rt, minutes=10.5)
    assert await dues(bell) == [start + k * MINUTE for k in range(1, 11)]
    assert set(await fires(bell)) == {rt.clock.wall_ms()}


async def test_all_is_bounded_and_leaves_out_the_oldest() -> None:
    settings = Settings(durability="off", misfire_all_limit=5)
    async with LocalRuntime(memory=True, settings=settings) as rt:
        bell = rt.namespace(Bell).get("b")
        start = rt.clock.wall_ms()
        await bell.set("t", {"every": "1m", "misfire": "all"})
        await down_for(rt, minutes=20.5)
        rows = await bell.rung()
        assert [row[1] for row in rows][-5:] == [start + k * MINUTE for k in range(16, 21)]
        assert len(rows) + sum(row[4] for row in rows) == 20


async def test_a_thousand_overdue_timers_run_at_once_in_order_and_none_twice(rt: LocalRuntime) -> None:
    start = rt.clock.wall_ms()
    keys = [f"k{number}" for number in range(20)]
    for index, key in enumerate(keys):
        await rt.namespace(Bell).get(key).set_each({f"t{n:02}": start + MINUTE + n * 20 + index for n in range(50)})
    await down_for(rt, hours=5)
    for key in keys:
        rows = await rt.namespace(Bell).get(key).rung()
        assert [row[0] for row in rows] == [f"t{n:02}" for n in range(50)]
        assert {row[2] for row in rows} == {rt.clock.wall_ms()}
    assert sum(status["fires"] for status in rt.status()) == 1_000


async def test_the_wake_up_is_rebuilt_from_disk_without_any_call(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 43."""
    start = rt.clock.wall_ms()
    await bell.set("t", {"after": "1h"})
    await rt.crash()
    await rt.advance(hours=2)
    assert await fires(bell) == [start + HOUR]


async def test_the_key_is_known_in_every_entry_path(rt: LocalRuntime) -> None:
    """Field complaints 58."""
    stub = rt.namespace(KnowsItsKey).get("the key")
    await stub.arm()
    await rt.evict(stub)
    await rt.advance(minutes=1)
    await rt.crash()
    await rt.advance(minutes=1)
    assert set(await stub.keys()) == {"start", "call", "timer", "alarm"}


class KnowsItsKey(DurableObject):
    """Notes its key wherever it is entered."""

    def _note(self, where: str) -> None:
        assert self.key == "the key"
        self.storage.put(where, self.key)

    def on_start(self) -> None:
        self._note("start")

    def arm(self) -> None:
        self._note("call")
        self.timers.set("t", after="1m", method="fire")
        self.storage.set_alarm("2m")

    def fire(self, info: Any) -> None:
        self._note("timer")

    def alarm(self, info: Any) -> None:
        self._note("alarm")

    def keys(self) -> list[str]:
        return list(self.storage)


# --- order and fairness -----------------------------------------------------------------------------


async def test_alarm_and_timers_of_one_object_run_in_the_order_of_their_due_times(rt: LocalRuntime, bell: Any) -> None:
    start = rt.clock.wall_ms()
    await bell.set_each({"first": start + 10, "third": start + 30, "fourth": start + 40})
    await bell.set_alarm(start + 20)
    await down_for(rt, minutes=1)
    assert [row[0] for row in await bell.rung()] == ["first", "", "third", "fourth"]


async def test_one_busy_object_with_five_hundred_due_timers_delays_no_other(rt: LocalRuntime, bell: Any) -> None:
    """Field complaints 35."""
    start = rt.clock.wall_ms()
    await bell.set_many([f"t{n:03}" for n in range(500)], {"at": start + MINUTE, "method": "ring_slowly"})
    others = [rt.namespace(Bell).get(f"o{number}") for number in range(20)]
    for other in others:
        await other.set("t", {"at": start + MINUTE + 1})
    await rt.advance(minutes=1, seconds=1)
    assert Bell.waiting == 1
    for other in others:
        assert await fires(other) == [start + MINUTE + 1]
    assert Bell.gate is not None
    Bell.gate.set()
    await rt.run_until_idle()
    assert [row[0] for row in await bell.rung()] == [f"t{n:03}" for n in range(500)]


async def test_one_class_with_slow_handlers_delays_no_other_class() -> None:
    Bell.gate, Bell.waiting = asyncio.Event(), 0
    settings = Settings(durability="off", max_timer_turns_per_class=8)
    async with LocalRuntime(memory=True, settings=settings) as rt:
        start = rt.clock.wall_ms()
        slow = [rt.namespace(Bell).get(f"s{number}") for number in range(30)]
        for stub in slow:
            await stub.set("t", {"at": start + MINUTE, "method": "ring_slowly"})
        chain = rt.namespace(LooksAtItself).get("x")
        await chain.arm()
        await rt.advance(minutes=1)
        assert Bell.waiting == 8
        assert len(await chain.seen()) == 2
        Bell.gate.set()
        await rt.run_until_idle()
        for stub in slow:
            assert len(await stub.rung()) == 1


async def test_a_parked_object_whose_timer_was_cancelled_does_not_keep_the_others_parked() -> None:
    Bell.gate, Bell.waiting = asyncio.Event(), 0
    settings = Settings(durability="off", max_timer_turns_per_class=1)
    async with LocalRuntime(memory=True, settings=settings) as rt:
        start = rt.clock.wall_ms()
        stubs = [rt.namespace(Bell).get(f"s{number}") for number in range(4)]
        for index, stub in enumerate(stubs):
            await stub.set("t", {"at": start + MINUTE + index, "method": "ring_slowly"})
        await rt.advance(minutes=2)  # the first runs, the others are parked in their order
        await stubs[1].cancel("t")
        await stubs[2].cancel("t")
        Bell.gate.set()
        await rt.run_until_idle()
        assert len(await stubs[0].rung()) == 1
        assert len(await stubs[3].rung()) == 1


async def test_the_partitions_bound_of_timer_turns_is_filled_again_as_turns_end() -> None:
    Bell.gate, Bell.waiting = asyncio.Event(), 0
    settings = Settings(durability="off", max_timer_turns=10)
    async with LocalRuntime(memory=True, settings=settings) as rt:
        start = rt.clock.wall_ms()
        stubs = [rt.namespace(Bell).get(f"s{number}") for number in range(50)]
        for stub in stubs:
            await stub.set("t", {"at": start + MINUTE, "method": "ring_slowly"})
        await rt.advance(minutes=2)
        assert Bell.waiting == 10
        Bell.gate.set()
        await rt.run_until_idle()
        for stub in stubs:
            assert len(await stub.rung()) == 1


# --- exactness --------------------------------------------------------------------------------------


class Tally(DurableObject):
    """A read-modify-write counter that calls and timers raise."""

    async def add(self) -> int:
        count = self.storage.get("n", 0)
        await asyncio.sleep(0)
        self.storage.put("n", count + 1)
        return int(count + 1)

    async def tick(self, info: Any) -> None:
        await self.add()

    def arm(self, timers: int, misfire: Literal["coalesce", "all"] = "coalesce") -> int:
        for number in range(timers):
            self.timers.set(f"t{number}", every=f"{number + 1}s", method="tick", misfire=misfire)
        return self.turn.now_ms

    def total(self) -> int:
        total: int = self.storage.get("n", 0)
        return total


async def test_calls_and_timers_interleaved_count_exactly(rt: LocalRuntime) -> None:
    """Field complaints 53."""
    tally = rt.namespace(Tally).get("t")
    await tally.arm(10)
    calls: list[asyncio.Future[int]] = []
    for _ in range(60):
        calls += [tally.add() for _ in range(5)]
        await rt.advance(seconds=1)
    await asyncio.gather(*calls)
    ticks = sum(60 // (number + 1) for number in range(10))
    assert await tally.total() == 300 + ticks


@pytest.mark.parametrize("applied", [True, False], ids=["after_the_commit", "before_the_commit"])
async def test_a_schedule_recovers_from_a_crash_at_every_commit(applied: bool) -> None:
    """Field complaints 46: no occurrence is lost or runs twice."""
    number = 1
    while True:
        control = CommitControl(number, applied=applied)
        async with runtime_with(control) as rt:
            tally = rt.namespace(Tally).get("t")
            async with crash_when_stopped(rt, control, all_partitions=True):
                start = await finish(rt, tally.arm(3, "all"))
                for _ in range(12):
                    await rt.advance(ms=500)
                # each occurrence of each timer, some of them late, none of them lost or doubled
                await finish(rt, tally.total())  # it serves again
                await rt.run_until_idle()
                elapsed_s = (rt.clock.wall_ms() - start) // SECOND
                assert await tally.total() == sum(elapsed_s // period for period in (1, 2, 3)), f"commit {number}"
        if not control.stopped:
            break
        number += 1
    assert number > 6


class Rearming(DurableObject):
    """Each of its timers arms itself again in its handler, an hour later."""

    def arm(self, count: int) -> None:
        for number in range(count):
            self.timers.set(f"t{number}", at=self.turn.now_ms + HOUR + number, method="rearm")

    def rearm(self, info: Any) -> None:
        self.storage.put(info.name, self.storage.get(info.name, 0) + 1)
        self.timers.set(info.name, at=info.due_ms + HOUR, method="rearm")

    def fires(self) -> list[int]:
        return list(self.storage.list().values())


SOAK = [pytest.mark.soak, pytest.mark.timeout(7_200)]


@pytest.mark.parametrize("count", [400, pytest.param(50_000, marks=SOAK)])
async def test_timers_that_rearm_themselves_in_their_handler_for_a_day_are_none_lost(
    rt: LocalRuntime, count: int
) -> None:
    """Field complaints 49: all due within seconds of each other, and the process is killed twice on the way."""
    stubs = [rt.namespace(Rearming).get(f"k{number}") for number in range(20)]
    for stub in stubs:
        await stub.arm(count // len(stubs))
    for hours in (7, 6, 11):
        await rt.advance(hours=hours)
        await rt.crash()
    await rt.advance(minutes=1)
    for stub in stubs:
        assert await stub.fires() == [24] * (count // len(stubs))
