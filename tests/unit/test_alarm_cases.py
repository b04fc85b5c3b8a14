"""The one alarm of an object: the alarm cases of `durable_objects.md`, read through our design.

Cases 5, 6, 7, 27, 33 to 38, 41, 42 and 43 describe messages between an object and an alarm scheduler elsewhere. Here
the alarm and its timer row are in one file and one commit, so these messages do not exist; what an application could
see of them (a moved or deleted alarm never fires at the old time, one handler at a time) is tested. Left out
altogether: 29 (objects have no abort), 53 (no facets), 54 (no legacy alarm files). Where the cases and our design
differ, ours is asserted: a handler that raises rolls its `set_alarm` back and the retry stands (19), `delete_all`
removes the alarm (47, "new mode"), used up alarms become dead letters (21), failures of the platform are tried again
each second without a bound that grows (22).
"""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from actors.durable_object import DurableObject
from actors.errors import InvalidOption, InvalidSchedule
from actors.object_timers import TimerInfo
from actors.settings import Settings
from actors.testing import LocalRuntime, VirtualClock
from tests.support.held_commits import CommitFailure, held_runtime, turn_loop
from timers.backoff import RetryPolicy

HOUR_MS = 3_600_000


class Alarmed(DurableObject):
    """Does in its handler what `plan()` says; `runs` in its own state tells how each committed run went."""

    attempts: dict[str, list[tuple[int, int, bool]]] = {}  # what every run saw, committed or not, by key

    def set(self, when: Any) -> int | None:
        self.storage.set_alarm(when)
        return self.storage.get_alarm()

    def set_twice(self, first: Any, second: Any) -> int | None:
        self.storage.set_alarm(first)
        self.storage.set_alarm(second)
        return self.storage.get_alarm()

    def set_and_put(self, when: Any, value: str, fail: bool) -> None:
        self.storage.set_alarm(when)
        self.storage.put("value", value)
        if fail:
            raise ValueError("rolled back")

    def get(self) -> int | None:
        return self.storage.get_alarm()

    def value(self) -> Any:
        return self.storage.get("value")

    def cancel(self) -> bool:
        return self.storage.delete_alarm()

    def plan(self, *steps: str) -> None:
        self.storage.put("plan", list(steps))

    def runs(self) -> list[Any]:
        return self.storage.get("runs", [])

    def count(self) -> int:
        total: int = self.storage.get("count", 0) + 1
        self.storage.put("count", total)
        return total

    def wipe(self) -> list[Any]:
        self.storage.delete_all()
        self.storage.delete_all()
        return [self.storage.get_alarm(), self.storage.list()]

    def transact(self, before: Any, inner: Any, nested: Any, undo_nested: bool, undo_outer: bool) -> list[Any]:
        seen = []
        self.storage.set_alarm(before)
        with self.storage.transaction() as outer:
            self.storage.set_alarm(inner)
            with self.storage.transaction() as deep:
                self.storage.set_alarm(nested)
                seen.append(self.storage.get_alarm())
                if undo_nested:
                    deep.rollback()
            seen.append(self.storage.get_alarm())
            if undo_outer:
                outer.rollback()
        seen.append(self.storage.get_alarm())
        return seen

    def alarm(self, info: TimerInfo) -> None:
        now_ms = self.runtime.settings and self._ms_host.partition.clock.wall_ms()
        seen: list[Any] = [info.scheduled_ms, info.retry_count, info.is_retry, self.storage.get_alarm(), now_ms]
        self.attempts.setdefault(self.key, []).append((now_ms, info.retry_count, info.is_retry))
        for step in self.storage.get("plan", []):
            seen.append(self._step(step))
        self.storage.put("runs", [*self.storage.get("runs", []), seen])

    def _step(self, step: str) -> Any:
        if step == "raise":
            raise RuntimeError("the handler fails")
        if step == "raise once" and len(self.attempts[self.key]) == 1:
            raise RuntimeError("the handler fails once")
        if step == "delete":
            return self.storage.delete_alarm()
        if step == "wipe":
            self.storage.delete_all()
        if step == "name":
            return self.key
        if step == "transact":
            with self.storage.transaction() as transaction:
                self.storage.set_alarm("1h")
                inside = self.storage.get_alarm()
                transaction.rollback()
            return [inside is not None, self.storage.get_alarm()]
        if step.startswith("set "):
            self.storage.set_alarm(step[4:])
            self.storage.put("plan", [])
            return self.storage.get_alarm()
        return None


class Slow(DurableObject):
    """Its handler waits for `open` before it ends; `log` is what happened in what order."""

    gates: dict[str, asyncio.Event] = {}
    log: list[str] = []

    async def alarm(self, info: TimerInfo) -> None:
        self.log.append(f"begin {info.retry_count}")
        await self.gates.setdefault(self.key, asyncio.Event()).wait()
        self.storage.put("runs", self.storage.get("runs", 0) + 1)
        self.log.append("end")

    def set(self, when: Any) -> None:
        self.storage.set_alarm(when)

    def set_both(self, when: Any) -> None:
        self.storage.set_alarm(when)
        self.timers.set("named", after=when, method="on_named")

    def on_named(self, info: TimerInfo) -> None:
        self.log.append("named")

    def get(self) -> int | None:
        self.log.append("call")
        return self.storage.get_alarm()

    def runs(self) -> int:
        return self.storage.get("runs", 0)


class SlowInterleaved(Slow):
    """The same with turns that interleave."""

    turns = "interleaved"


class Resetting(DurableObject):
    """Interleaved: sets its next alarm early in a handler that goes on, and may fail."""

    turns = "interleaved"
    gates: dict[str, asyncio.Event] = {}
    seen: list[tuple[str, int]] = []

    def set(self, when: Any, then: str) -> None:
        self.storage.put("then", then)
        self.storage.set_alarm(when)

    def move(self, when: Any) -> None:
        self.storage.set_alarm(when)

    def cancel(self) -> bool:
        return self.storage.delete_alarm()

    def get(self) -> int | None:
        return self.storage.get_alarm()

    async def alarm(self, info: TimerInfo) -> None:
        then = self.storage.get("then")
        self.seen.append((then, info.retry_count))
        if then == "again now":
            self.storage.put("then", "last")
            self.storage.set_alarm(info.fired_ms)
        if then == "set and raise":
            self.storage.put("then", "last")
            self.storage.set_alarm("1h")
        if then != "last":
            await self.gates.setdefault(self.key, asyncio.Event()).wait()
        if then.endswith("raise"):
            raise RuntimeError("the handler fails")


class Quiet(DurableObject):
    """Has no alarm()."""

    def set(self) -> None:
        self.storage.set_alarm("1h")


class Starting(DurableObject):
    """Constructed again when its alarm wakes it."""

    started: list[str] = []

    def on_start(self) -> None:
        self.started.append(self.key)

    def set(self) -> None:
        self.storage.set_alarm("1h")

    def alarm(self, info: TimerInfo) -> None:
        self.storage.put("key in alarm", self.key)

    def key_in_alarm(self) -> Any:
        return self.storage.get("key in alarm")


class Exhausting(DurableObject):
    """Fails at every alarm and is told when that was the last time."""

    alarm_retry = RetryPolicy(max_attempts=2, base_ms=1_000, jitter=0.0)

    def set(self) -> None:
        self.storage.set_alarm("1h")

    def alarm(self, info: TimerInfo) -> None:
        raise RuntimeError("never works")

    def on_alarm_exhausted(self, info: TimerInfo) -> None:
        self.storage.put("exhausted", [info.scheduled_ms, info.retry_count])

    def exhausted(self) -> Any:
        return self.storage.get("exhausted")


@pytest.fixture(autouse=True)
def _fresh_logs() -> None:
    Alarmed.attempts.clear()
    Slow.gates.clear()
    Slow.log.clear()
    Resetting.gates.clear()
    Resetting.seen.clear()
    Starting.started.clear()


@pytest_asyncio.fixture
async def rt() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime() as runtime:
        yield runtime


def now_ms(rt: LocalRuntime) -> int:
    return rt.clock.wall_ms()


# --- setting, looking, deleting -------------------------------------------------------------------


async def test_case_1_a_fresh_object_has_no_alarm(rt: LocalRuntime) -> None:
    assert await rt.namespace(Alarmed).get("a").get() is None


async def test_case_2_what_was_set_is_seen_at_once(rt: LocalRuntime) -> None:
    due_ms = now_ms(rt) + HOUR_MS
    assert await rt.namespace(Alarmed).get("a").set(due_ms) == due_ms


async def test_case_3_the_second_of_two_in_one_turn_counts(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    second = now_ms(rt) + 2 * HOUR_MS
    assert await stub.set_twice(now_ms(rt) + HOUR_MS, second) == second
    await rt.advance(hours=1.5)
    assert await stub.runs() == []
    await rt.advance(hours=1)
    assert [run[0] for run in await stub.runs()] == [second]


@pytest.mark.parametrize("commit", [False, True])
async def test_case_9_alarm_and_state_are_one_commit(commit: bool) -> None:
    async with held_runtime() as (rt, commits):
        stub = rt.namespace(Alarmed).get("a")
        await stub.get()
        commits.hold()
        call = asyncio.ensure_future(stub.set_and_put("1h", "x", False))
        await commits.arrived()
        if commit:
            await commits.release()
            await call
        await rt.crash()
        commits.let_go()
        # without the commit the stub repeats its call, which the new process then runs
        await call
        assert [await stub.value(), await stub.get()] == ["x", now_ms(rt) + HOUR_MS]


async def test_case_9_a_turn_that_raises_sets_neither(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    with pytest.raises(ValueError, match="rolled back"):
        await stub.set_and_put("1h", "x", True)
    assert [await stub.value(), await stub.get()] == [None, None]


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "soon", "-1h", dt.datetime(2030, 1, 1), None])
async def test_case_10_a_time_that_makes_no_sense_changes_nothing(rt: LocalRuntime, wrong: Any) -> None:
    stub = rt.namespace(Alarmed).get("a")
    due_ms = await stub.set("1h")
    with pytest.raises(InvalidSchedule):
        await stub.set(wrong)
    assert await stub.get() == due_ms


async def test_a_class_without_alarm_can_set_none(rt: LocalRuntime) -> None:
    with pytest.raises(InvalidOption, match="no alarm"):
        await rt.namespace(Quiet).get("a").set()


async def test_case_11_a_past_time_means_now(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    set_ms = now_ms(rt)
    assert await stub.set(set_ms - HOUR_MS) == set_ms
    await rt.run_until_idle()
    assert [run[0] for run in await stub.runs()] == [set_ms]


@pytest.mark.parametrize(
    "when", [dt.timedelta(hours=1), "1h", "60m", dt.datetime(2027, 1, 15, 9, 0, tzinfo=dt.timezone.utc)]
)
async def test_times_may_be_spans_and_aware_datetimes(rt: LocalRuntime, when: Any) -> None:
    # virtual time starts at 2027-01-15 08:00 UTC
    assert await rt.namespace(Alarmed).get("a").set(when) == now_ms(rt) + HOUR_MS


# --- the handler ----------------------------------------------------------------------------------


async def test_case_13_no_alarm_is_set_while_it_runs_and_after_it(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.set("1h")
    await rt.advance(hours=1)
    assert [run[3] for run in await stub.runs()] == [None]
    assert await stub.get() is None


async def test_case_14_the_handler_learns_the_time_it_was_set_for(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    due_ms = await stub.set("1h")
    await rt.advance(hours=1)
    assert [run[:3] for run in await stub.runs()] == [[due_ms, 0, False]]


async def test_case_15_the_handler_never_sees_a_time_before_its_own(rt: LocalRuntime) -> None:
    clock = rt.clock
    assert isinstance(clock, VirtualClock)
    stub = rt.namespace(Alarmed).get("a")
    due_ms = await stub.set("1h")
    clock.step_wall(-HOUR_MS)  # the clock is set back: an hour of monotonic time is not enough now
    await rt.advance(hours=1.5)
    assert await stub.runs() == []
    await rt.advance(hours=1)
    ((scheduled_ms, _, _, _, ran_ms),) = await stub.runs()
    assert (scheduled_ms, ran_ms) == (due_ms, due_ms)


async def test_case_15_an_alarm_due_now_runs_in_this_millisecond_and_not_before(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    due_ms = await stub.set("1h")
    await rt.advance(ms=HOUR_MS - 1)
    assert await stub.runs() == []
    await rt.advance(ms=1)
    assert [run[4] for run in await stub.runs()] == [due_ms]


async def test_case_17_deleting_the_alarm_in_its_handler_does_nothing(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("delete")
    await stub.set("1h")
    await rt.advance(days=1)
    ((*_, deleted),) = await stub.runs()
    assert deleted is False


async def test_case_17_set_and_delete_in_the_handler_leaves_none(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("set 1h", "delete")
    await stub.set("1h")
    await rt.advance(days=1)
    ((*_, deleted),) = await stub.runs()
    assert deleted is True
    assert await stub.get() is None


async def test_case_18_an_alarm_set_in_the_handler_stands_after_it(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("set 2h")
    first = await stub.set("1h")
    await rt.advance(hours=1)
    assert await stub.get() == first + 2 * HOUR_MS
    await rt.advance(hours=2)
    assert [run[0] for run in await stub.runs()] == [first, first + 2 * HOUR_MS]


async def test_case_19_an_alarm_set_in_a_handler_that_raises_is_rolled_back_and_the_retry_stands(
    rt: LocalRuntime,
) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("set 2h", "raise once")
    due_ms = await stub.set("1h")
    await rt.advance(hours=1)
    assert await stub.get() == due_ms
    await rt.advance(seconds=3)
    ((scheduled_ms, retry_count, is_retry, *_),) = await stub.runs()
    assert (scheduled_ms, retry_count, is_retry) == (due_ms, 1, True)


async def test_case_21_an_alarm_that_always_fails_runs_seven_times_and_becomes_a_dead_letter(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("raise")
    await stub.set("1h")
    await rt.advance(days=1)
    attempts = Alarmed.attempts["a"]
    assert [retry_count for _, retry_count, _ in attempts] == list(range(7))
    assert [is_retry for _, _, is_retry in attempts] == [False] + [True] * 6
    delays = [later[0] - earlier[0] for earlier, later in itertools.pairwise(attempts)]
    for k, delay in enumerate(delays, start=1):
        assert 1_000 * 2**k <= delay <= 1_250 * 2**k, f"retry {k} came after {delay} ms"
    assert await stub.get() is None
    (letter,) = await rt.dead_letters()
    assert (letter.type_name, letter.key, letter.name, letter.attempts) == ("Alarmed", "a", "", 7)
    assert "the handler fails" in letter.error


async def test_case_21_attempts_survive_restarts(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("raise")
    await stub.set("1h")
    await rt.advance(hours=1)
    await rt.crash()
    await rt.advance(days=1)
    assert [retry_count for _, retry_count, _ in Alarmed.attempts["a"]] == list(range(7))


async def test_a_dead_letter_that_is_driven_again_has_all_its_tries(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("raise")
    await stub.set("1h")
    await rt.advance(days=1)
    (letter,) = await rt.dead_letters()
    await stub.plan()
    await rt.redrive(letter)
    await rt.run_until_idle()
    assert [run[1] for run in await stub.runs()] == [0]
    assert await rt.dead_letters() == []


async def test_the_class_is_told_when_an_alarm_is_used_up(rt: LocalRuntime) -> None:
    stub = rt.namespace(Exhausting).get("a")
    due_ms = now_ms(rt) + HOUR_MS
    await stub.set()
    await rt.advance(hours=2)
    assert await stub.exhausted() == [due_ms, 1]
    assert len(await rt.dead_letters()) == 1


# --- failures of the platform -----------------------------------------------------------------------


async def test_case_22_a_hundred_failures_of_the_platform_use_up_no_attempt() -> None:
    async with held_runtime() as (rt, commits):
        stub = rt.namespace(Alarmed).get("a")
        due_ms = await stub.set("1h")
        commits.fail_next(CommitFailure.DISK_FULL, times=100)
        await rt.advance(hours=1)
        assert (await rt.dead_letters(), await stub.get()) == ([], due_ms)
        await rt.advance(minutes=10)
        assert [run[:3] for run in await stub.runs()] == [[due_ms, 0, False]]
        assert len(Alarmed.attempts["a"]) == 101


async def test_case_23_a_failure_of_the_handler_after_some_of_the_platform_is_the_first() -> None:
    async with held_runtime() as (rt, commits):
        stub = rt.namespace(Alarmed).get("a")
        await stub.set("1h")
        commits.fail_next(CommitFailure.DISK_FULL, times=2)
        await rt.advance(hours=1, seconds=1.5)
        await stub.plan("raise")
        await rt.advance(minutes=1)
        failed = [(ms, count) for ms, count, _ in Alarmed.attempts["a"] if count <= 1]
        first_counted_ms, second_ms = failed[-2][0], failed[-1][0]
        assert 2_000 <= second_ms - first_counted_ms <= 2_500


async def test_case_31_a_handler_whose_commit_fails_runs_again() -> None:
    async with held_runtime() as (rt, commits):
        stub = rt.namespace(Alarmed).get("a")
        due_ms = await stub.set("1h")
        commits.fail_next(CommitFailure.DISK_FULL)
        await rt.advance(hours=1)
        assert [await stub.runs(), await stub.get()] == [[], due_ms]
        await rt.advance(minutes=1)
        assert [run[:2] for run in await stub.runs()] == [[due_ms, 0]]
        assert await stub.get() is None


async def test_a_deletion_that_was_not_committed_leaves_the_alarm_running() -> None:
    """The alarm comes due while its deletion waits for the disk, and the disk is full: nothing may be lost."""
    async with held_runtime() as (rt, commits):
        clock = rt.clock
        assert isinstance(clock, VirtualClock)
        stub = rt.namespace(Alarmed).get("a")
        due_ms = await stub.set("1h")
        await rt.advance(ms=HOUR_MS - 1)
        commits.hold()
        deletion = asyncio.ensure_future(stub.cancel())
        await commits.arrived()
        clock.move_to(due_ms)
        clock.run_due()
        await turn_loop()
        await commits.fail(CommitFailure.DISK_FULL)
        with pytest.raises(Exception, match="not applied"):
            await deletion
        commits.let_go()
        await rt.advance(minutes=1)
        assert [run[0] for run in await stub.runs()] == [due_ms]


# --- between retries --------------------------------------------------------------------------------


async def test_case_25_an_alarm_set_between_retries_takes_the_place_of_the_old_one_and_is_on_time(
    rt: LocalRuntime,
) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("raise")
    await stub.set("1h")
    await rt.advance(hours=1)
    await stub.plan()
    second = await stub.set("1s")  # earlier than the retry, which is 2 s away at least
    await rt.advance(hours=1)
    assert [run[:3] + run[4:] for run in await stub.runs()] == [[second, 0, False, second]]


async def test_case_25_one_that_is_due_already_runs_at_once(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("raise")
    await stub.set("1h")
    await rt.advance(hours=1)
    await stub.plan()
    second = await stub.set(now_ms(rt))
    await rt.run_until_idle()
    assert [run[:2] for run in await stub.runs()] == [[second, 0]]


async def test_case_26_deleting_between_retries_cancels_the_retry(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("raise")
    await stub.set("1h")
    await rt.advance(hours=1)
    assert await stub.cancel() is True
    await rt.advance(days=1)
    assert len(Alarmed.attempts["a"]) == 1
    assert [await stub.get(), await rt.dead_letters()] == [None, []]


async def test_case_30_a_handler_that_takes_too_long_is_cancelled_and_the_retry_counts() -> None:
    async with LocalRuntime(settings=Settings(durability="off", timer_turn_timeout_ms=60_000)) as rt:
        stub = rt.namespace(Slow).get("a")
        await stub.set("1h")
        await rt.advance(hours=1, seconds=59)
        assert Slow.log == ["begin 0"]
        await rt.advance(seconds=5)
        assert Slow.log == ["begin 0", "begin 1"]
        Slow.gates["a"].set()
        await rt.run_until_idle()
        assert await stub.runs() == 1


# --- moved, deleted, deleted and set again ------------------------------------------------------------


async def test_case_33_a_deleted_alarm_never_runs(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.set("1h")
    assert await stub.cancel() is True
    assert await stub.cancel() is False
    await rt.advance(days=1)
    assert "a" not in Alarmed.attempts


@pytest.mark.parametrize(("first", "second"), [("1h", "3h"), ("3h", "1h")])
async def test_cases_34_and_35_a_moved_alarm_runs_once_at_the_new_time(
    rt: LocalRuntime, first: str, second: str
) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.set(first)
    moved_ms = await stub.set(second)
    await rt.advance(days=1)
    assert [run[0::4] for run in await stub.runs()] == [[moved_ms, moved_ms]]


async def test_case_37_an_alarm_that_was_moved_many_times_runs_once(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await asyncio.gather(*(stub.set(f"{hours}h") for hours in (2, 3, 4, 5, 1, 6)))
    await rt.advance(days=1)
    assert len(await stub.runs()) == 1


async def test_case_39_a_serial_object_finishes_its_handler_before_anything_else(rt: LocalRuntime) -> None:
    stub = rt.namespace(Slow).get("a")
    await stub.set_both("1h")
    await rt.advance(hours=1)
    call = asyncio.ensure_future(stub.get())
    await turn_loop()
    assert Slow.log == ["begin 0"]
    Slow.gates["a"].set()
    await call
    assert Slow.log == ["begin 0", "end", "named", "call"]


async def test_case_39_an_interleaved_handler_interleaves_with_calls_but_not_with_a_second_alarm(
    rt: LocalRuntime,
) -> None:
    stub = rt.namespace(SlowInterleaved).get("a")
    await stub.set("1h")
    await rt.advance(hours=1)
    await stub.get()
    await stub.set(now_ms(rt))  # due at once, while the first one runs
    await rt.run_until_idle()
    assert Slow.log == ["begin 0", "call"]
    Slow.gates["a"].set()
    await rt.run_until_idle()
    assert Slow.log == ["begin 0", "call", "end", "begin 0", "end"]
    assert await stub.runs() == 2


async def test_case_38_an_interleaved_handler_that_sets_an_alarm_due_now_runs_again_after_it_ended(
    rt: LocalRuntime,
) -> None:
    stub = rt.namespace(Resetting).get("a")
    await stub.set("1h", "again now")
    await rt.advance(hours=1)
    assert Resetting.seen == [("again now", 0)]
    Resetting.gates["a"].set()
    await rt.run_until_idle()
    assert Resetting.seen == [("again now", 0), ("last", 0)]
    assert await stub.get() is None


async def test_case_19_interleaved_turns_do_not_roll_back_so_a_new_alarm_stands_and_the_old_is_not_retried(
    rt: LocalRuntime,
) -> None:
    stub = rt.namespace(Resetting).get("a")
    await stub.set("1h", "set and raise")
    await rt.advance(hours=1)
    resets = rt.status()[0]["resets"]
    Resetting.gates["a"].set()
    await rt.advance(minutes=30)
    assert await stub.get() == now_ms(rt) + HOUR_MS // 2
    await rt.advance(days=1)
    assert Resetting.seen == [("set and raise", 0), ("last", 0)]
    assert rt.status()[0]["resets"] == resets


async def test_an_interleaved_alarm_that_is_moved_while_its_handler_fails_is_not_retried(rt: LocalRuntime) -> None:
    stub = rt.namespace(Resetting).get("a")
    await stub.set("1h", "raise")
    await rt.advance(hours=1)
    await stub.move("2h")
    Resetting.gates["a"].set()
    await rt.advance(hours=1)
    assert Resetting.seen == [("raise", 0)]
    assert await stub.get() == now_ms(rt) + HOUR_MS


async def test_an_interleaved_alarm_fails_and_is_retried(rt: LocalRuntime) -> None:
    stub = rt.namespace(Resetting).get("a")
    await stub.set("1h", "raise")
    Resetting.gates["a"] = asyncio.Event()
    Resetting.gates["a"].set()
    await rt.advance(days=1)
    assert Resetting.seen == [("raise", attempt) for attempt in range(7)]
    assert [await stub.get(), len(await rt.dead_letters())] == [None, 1]


# --- transactions and delete_all ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("undo_nested", "undo_outer", "expected"),
    [
        (False, False, ["3h", "3h", "3h"]),
        (True, False, ["3h", "2h", "2h"]),
        (False, True, ["3h", "3h", "1h"]),
        (True, True, ["3h", "2h", "1h"]),
    ],
)
async def test_case_45_alarms_in_transactions(
    rt: LocalRuntime, undo_nested: bool, undo_outer: bool, expected: list[str]
) -> None:
    stub = rt.namespace(Alarmed).get("a")
    start_ms = now_ms(rt)
    seen = await stub.transact("1h", "2h", "3h", undo_nested, undo_outer)
    due = {name: start_ms + int(name[0]) * HOUR_MS for name in ("1h", "2h", "3h")}
    assert seen == [due[name] for name in expected]
    await rt.advance(days=1)
    assert [run[0] for run in await stub.runs()] == [due[expected[-1]]]


async def test_case_46_a_transaction_in_the_handler_that_is_rolled_back(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("transact")
    await stub.set("1h")
    await rt.advance(days=1)
    assert [run[5] for run in await stub.runs()] == [[True, None]]
    assert await stub.get() is None


async def test_case_47_delete_all_removes_the_alarm_too_and_may_be_repeated(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.set("1h")
    assert await stub.wipe() == [None, {}]
    assert await stub.wipe() == [None, {}]
    await rt.advance(days=1)
    assert "a" not in Alarmed.attempts


async def test_case_49_delete_all_in_the_handler_leaves_no_alarm(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    await stub.plan("set 1h", "wipe")
    await stub.set("1h")
    await rt.advance(days=1)
    assert await stub.get() is None
    assert len(Alarmed.attempts["a"]) == 1


# --- restarts and eviction --------------------------------------------------------------------------------


async def test_case_50_alarms_survive_a_restart_and_overdue_ones_run_at_once(rt: LocalRuntime) -> None:
    clock = rt.clock
    assert isinstance(clock, VirtualClock)
    namespace = rt.namespace(Alarmed)
    overdue_ms = await namespace.get("overdue").set("1h")
    later_ms = await namespace.get("later").set("3h")
    await rt.crash()
    assert [await namespace.get("overdue").get(), await namespace.get("later").get()] == [overdue_ms, later_ms]
    clock.step_wall(2 * HOUR_MS)  # as if it had been down for two hours
    await rt.crash()
    await rt.run_until_idle()
    assert [run[0] for run in await namespace.get("overdue").runs()] == [overdue_ms]
    assert await namespace.get("later").runs() == []
    await rt.advance(hours=1)
    assert [run[0] for run in await namespace.get("later").runs()] == [later_ms]


async def test_a_handler_that_a_crash_cut_short_runs_again_with_no_attempt_counted(rt: LocalRuntime) -> None:
    stub = rt.namespace(Slow).get("a")
    await stub.set("1h")
    await rt.advance(hours=1)
    await rt.crash()
    Slow.gates["a"].set()
    await rt.run_until_idle()
    assert Slow.log == ["begin 0", "begin 0", "end"]
    assert await stub.runs() == 1


async def test_case_51_an_alarm_wakes_an_evicted_object_which_knows_its_key(rt: LocalRuntime) -> None:
    stub = rt.namespace(Starting).get("by name")
    await stub.set()
    assert await rt.evict(stub)
    await rt.advance(hours=1)
    assert Starting.started == ["by name", "by name"]
    assert await stub.key_in_alarm() == "by name"


async def test_fire_alarm_runs_it_now_and_says_whether_there_was_one(rt: LocalRuntime) -> None:
    stub = rt.namespace(Alarmed).get("a")
    assert await rt.fire_alarm(stub) is False
    due_ms = await stub.set("24h")
    assert await rt.fire_alarm(stub) is True
    assert [run[0] for run in await stub.runs()] == [due_ms]
