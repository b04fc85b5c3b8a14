"""kill -9 of partitions at the worst moments: what was acknowledged is there, nothing happens twice, poison stops."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.address import slot_of
from actors.dead_letters import DeadLetter
from actors.errors import PoisonCall
from actors.namespace import Stub
from actors.runtime import Runtime
from tests.cluster.apps import Bell, Crew, Gate, Ledger
from tests.support.killing import claims, kill_9, timer_crashes, wait_for
from timers.backoff import RetryPolicy

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]

CONCURRENT_CALLS = 2_000
#: How long a process lives on after each call that dooms it. 0: it dies inside that very turn.
FUSES_S = (0.0, 0.0, 0.004)
#: Long enough to be armed and the runtime to be stopped before anything is due, also on a slow machine.
DOWNTIME_LEAD_MS = 4_000


@pytest.fixture(scope="module")
def runtime(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with Runtime.start(tmp_path_factory.mktemp("killed"), 2, name="killed") as started:
        yield started


def key_at(runtime: Runtime, cls: type[Any], partition: int, prefix: str) -> str:
    """A key of the class that lives in this partition."""
    numbered = (f"{prefix}-{number}" for number in range(10_000))
    return next(key for key in numbered if partition_of(runtime, cls, key) == partition)


def partition_of(runtime: Runtime, cls: type[Any], key: str) -> int:
    return runtime._directory.partition_of(slot_of(cls.type_name, key))


def pid_of(runtime: Runtime, partition: int) -> int:
    """The process that serves the partition now; waits while it restarts."""
    return wait_for(lambda: runtime.partition_pids().get(partition, 0), f"partition {partition}")


def kill_partition(runtime: Runtime, partition: int) -> int:
    """SIGKILL to the process of a partition; its pid."""
    pid = pid_of(runtime, partition)
    kill_9(pid)
    return pid


def dead_letters(runtime: Runtime, key: str) -> list[DeadLetter]:
    async def ask() -> list[DeadLetter]:
        client = runtime.client()
        pages = await asyncio.gather(*(client.admin(number, "dead_letters", [1_000, None]) for number in (0, 1)))
        return [letter for page in pages for letter in page if letter.key == key]

    return runtime.run_sync(ask)


def start(runtime: Runtime, stub: Stub, method: str, *args: Any) -> asyncio.Future[Any]:
    """Make a call without waiting for it; `result` waits."""

    async def begin() -> list[asyncio.Future[Any]]:
        return [asyncio.ensure_future(getattr(stub, method)(*args))]  # in a list: the future itself is not awaited

    (future,) = runtime.run_sync(begin)
    return future


def result(runtime: Runtime, future: asyncio.Future[Any]) -> Any:
    async def wait() -> Any:
        return await future

    return runtime.run_sync(wait)


def wait_for_fires(bell: Stub, count: int | None = None) -> None:
    """Until so many timers have fired, or none is armed any more."""
    wait_for(
        lambda: not bell.armed.sync() or (count is not None and len(bell.fires.sync()) >= count), f"timers of {bell}"
    )


# --- calls --------------------------------------------------------------------------------------------


def test_each_of_2000_concurrent_calls_is_applied_once_whatever_is_killed_meanwhile(
    runtime: Runtime, tmp_path: Path
) -> None:
    """Some of the calls light a fuse: their process is killed a moment later, in the middle of all the others."""
    ledgers = runtime.namespace(Ledger)
    keys = [f"many-{number}" for number in range(100)]
    fuses = {}
    for partition in (0, 1):
        key = key_at(runtime, Ledger, partition, "fuse")
        for number, delay_s in enumerate(FUSES_S, start=1):
            place = CONCURRENT_CALLS * number // (len(FUSES_S) + 1) + partition
            fuses[place] = (key, tmp_path / f"fuse-{partition}-{number}", delay_s)

    async def call(number: int) -> Any:
        return await ledgers.get(keys[number % len(keys)]).apply(f"token-{number}")

    async def light(key: str, path: Path, delay_s: float) -> None:
        await ledgers.get(key).light_fuse(str(path), delay_s)

    async def run() -> list[Any]:
        calls: list[Any] = []
        for number in range(CONCURRENT_CALLS):
            calls.append(call(number))
            if number in fuses:
                calls.append(light(*fuses[number]))
        answers = await asyncio.gather(*calls)
        return [answer for answer in answers if answer is not None]

    answers = runtime.run_sync(run)
    killed = {path.read_text() for path in tmp_path.iterdir()}
    assert len(killed) == len(fuses)
    assert {count for count, _ in answers} == {1}
    assert len({pid for _, pid in answers}) > len(FUSES_S)  # the work was spread over the processes that died
    applied: Counter[str] = Counter()
    for key in keys:
        found = ledgers.get(key).applied.sync()
        assert sum(found.values()) == ledgers.get(key).total.sync()
        applied.update(found)
    assert applied == Counter(f"token-{number}" for number in range(CONCURRENT_CALLS))


@pytest.mark.parametrize("killed", [[0], [1], [0, 1]], ids=["the caller's", "the callee's", "both"])
def test_a_tree_of_calls_happens_once_when_a_partition_is_killed_in_it(runtime: Runtime, killed: list[int]) -> None:
    """Root and two leaves live in partition 0; what the root calls, and the gate that it waits at, in partition 1."""
    token = f"tree-{killed}"
    root, branch, inner, outer, last = (
        key_at(runtime, Crew, partition, f"{token} {name}")
        for name, partition in (("root", 0), ("branch", 1), ("inner", 0), ("outer", 1), ("last", 0))
    )
    gate = runtime.namespace(Gate).get(key_at(runtime, Gate, 1, token))
    below = [[branch, [[inner, [], ""], [outer, [], ""]], gate.key], [last, [], ""]]
    answer = start(runtime, runtime.namespace(Crew).get(root), "work", token, below)
    wait_for(gate.waiting.sync, "the branch at the gate")
    for partition in killed:
        kill_partition(runtime, partition)
    wait_for(gate.waiting.sync, "the branch at the gate, again")
    gate.open.sync()
    assert result(runtime, answer) == 5
    for key in (root, branch, inner, outer, last):
        assert runtime.namespace(Crew).get(key).counts.sync() == {f"begun {token}": 1, f"ended {token}": 1}
    assert gate.tokens.sync() == {token: 1}


def test_a_call_that_kills_its_process_is_refused_after_three_crashes_alone_and_those_beside_it_succeed(
    runtime: Runtime,
) -> None:
    ledgers = runtime.namespace(Ledger)
    poisoned = ledgers.get(key_at(runtime, Ledger, 0, "poisoned"))
    beside = [ledgers.get(key_at(runtime, Ledger, 0, f"beside-{number}")) for number in range(20)]

    async def run() -> list[Any]:
        calls = [stub.apply("before") for stub in beside]
        calls.append(poisoned.poison("bad"))
        calls += [stub.apply("after") for stub in [poisoned, *beside]]
        return list(await asyncio.gather(*calls, return_exceptions=True))

    answers = runtime.run_sync(run)
    refused = answers.pop(len(beside))
    assert isinstance(refused, PoisonCall), refused
    assert "3 times" in str(refused)
    assert {count for count, _ in answers} == {1}
    assert poisoned.applied.sync() == {"after": 1}
    for stub in beside:
        assert stub.applied.sync() == {"before": 1, "after": 1}


def test_a_call_of_a_turn_that_kills_its_process_is_refused_to_that_turn(runtime: Runtime) -> None:
    crew = runtime.namespace(Crew).get(key_at(runtime, Crew, 0, "asking"))
    ledger = runtime.namespace(Ledger).get(key_at(runtime, Ledger, 1, "asked"))
    assert crew.ask.sync(ledger.key, "bad") == "PoisonCall"
    assert crew.counts.sync() == {"refused bad": 1}
    assert ledger.applied.sync() == {}


# --- timers -------------------------------------------------------------------------------------------


def test_timers_that_are_due_while_partitions_are_killed_take_effect_once_each(runtime: Runtime) -> None:
    bells = {
        partition: [
            runtime.namespace(Bell).get(key_at(runtime, Bell, partition, f"due-{number}")) for number in range(5)
        ]
        for partition in (0, 1)
    }
    everything = [bell for each in bells.values() for bell in each]
    begin_ms = time.time_ns() // 1_000_000 + 200
    due = {f"timer-{number}": begin_ms + 25 * number for number in range(60)}
    for bell in everything:
        assert bell.arm.sync(due) == len(due)
    failing = bells[0][0]
    failing.arm.sync({"failing": begin_ms}, "fail", RetryPolicy(max_attempts=3, base_ms=400))
    for partition in (0, 1, 0):
        first = bells[partition][0]
        seen = len(first.fires.sync())
        wait_for_fires(first, seen + 1)
        kill_partition(runtime, partition)
    for bell in everything:
        wait_for_fires(bell)
        fires = bell.fires.sync()
        assert Counter(name for name, *_ in fires) == Counter(due.keys())
        assert all(fired_ms >= due_ms == due[name] and attempt == 0 for name, due_ms, fired_ms, attempt, *_ in fires)
    (letter,) = dead_letters(runtime, failing.key)
    assert (letter.name, letter.attempts, letter.crashes) == ("failing", 3, 0)


def test_kills_between_start_and_acknowledgement_use_up_no_attempt_and_count_as_crash_only_when_it_ran_alone(
    runtime: Runtime,
) -> None:
    bell = runtime.namespace(Bell).get(key_at(runtime, Bell, 0, "claimed"))
    other = runtime.namespace(Ledger).get(key_at(runtime, Ledger, 0, "other"))

    def claim(alone: bool) -> bool:
        found = [claim for claim in claims(runtime.data_dir, 0) if claim.key == bell.key]
        return [each.alone for each in found] == [alone]

    def counted() -> tuple[int, int] | None:
        return timer_crashes(runtime.data_dir, 0, "slow")

    bell.arm.sync({"slow": time.time_ns() // 1_000_000}, "ring_slowly")
    wait_for(bell.running.sync, "the handler")
    other.apply.sync("any commit takes the claim along")
    wait_for(lambda: claim(alone=False), "the claim")
    kill_partition(runtime, 0)
    wait_for(lambda: claim(alone=True), "the handler, run alone")
    assert counted() == (0, 0)  # beside it ran others, so nobody knows what it was
    kill_partition(runtime, 0)
    wait_for(lambda: counted() == (0, 1), "the crash to be counted")
    wait_for(lambda: claim(alone=False), "the handler to be let go, since it takes long")
    kill_partition(runtime, 0)
    wait_for(bell.running.sync, "the handler")
    assert counted() == (0, 1)
    assert bell.begun.sync() == 0
    bell.let_go.sync()
    wait_for(bell.fires.sync, "the fire")
    (fire,) = bell.fires.sync()
    assert (fire[0], fire[3]) == ("slow", 0)
    assert bell.begun.sync() == 1
    assert counted() is None
    wait_for(lambda: not claims(runtime.data_dir, 0), "the end of the claims")


def test_a_timer_that_kills_its_process_becomes_a_dead_letter_and_the_others_run(runtime: Runtime) -> None:
    bell = runtime.namespace(Bell).get(key_at(runtime, Bell, 1, "poisoned"))
    beside = [runtime.namespace(Bell).get(key_at(runtime, Bell, 1, f"beside-{number}")) for number in range(5)]
    now_ms = time.time_ns() // 1_000_000
    due = {f"timer-{number}": now_ms + number for number in range(20)}
    for good in beside:
        good.arm.sync(due)
    bell.arm.sync({"bad": now_ms}, "ring_poison")
    (letter,) = wait_for(lambda: dead_letters(runtime, bell.key), "the dead letter")
    assert (letter.name, letter.attempts, letter.crashes) == ("bad", 0, 3)
    assert bell.fires.sync() == []
    for good in beside:
        wait_for_fires(good)
        assert Counter(name for name, *_ in good.fires.sync()) == Counter(due.keys())


def test_a_thousand_timers_that_came_due_in_downtime_all_fire_at_once_in_order_none_twice(tmp_path: Path) -> None:
    with Runtime.start(tmp_path, 2, name="downtime") as before:
        bells = [before.namespace(Bell).get(f"bell-{number}") for number in range(10)]
        begin_ms = time.time_ns() // 1_000_000 + DOWNTIME_LEAD_MS
        due = [{f"timer-{n:03d}": begin_ms + n * 10 + offset for n in range(100)} for offset in range(10)]
        for bell, times in zip(bells, due, strict=True):
            bell.arm.sync(dict(reversed(times.items())))
    last_ms = max(max(times.values()) for times in due)
    assert time.time_ns() // 1_000_000 < begin_ms
    wait_for(lambda: time.time_ns() // 1_000_000 > last_ms, "the last due time")
    with Runtime.start(tmp_path, name="downtime") as after:
        for bell, times in zip(bells, due, strict=True):
            again = after.namespace(Bell).get(bell.key)
            wait_for_fires(again)
            assert [(name, due_ms) for name, due_ms, *_ in again.fires.sync()] == list(times.items())
            assert again.armed.sync() == []
