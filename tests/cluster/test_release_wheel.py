"""The release wheel on a real Ray: found by name, used, killed, missed by nobody, found again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.address import slot_of
from actors.namespace import Stub
from actors.ray_calls import RELEASE_WHEEL
from actors.runtime import Runtime
from actors.settings import Settings
from tests.cluster.apps import Bell
from tests.support.killing import kill_9, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]

#: Bells of each partition.
BELLS = 4


@pytest.fixture(scope="module")
def runtime(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with Runtime.start(tmp_path_factory.mktemp("wheel"), 2, name="wheel") as started:
        yield started


def alarms(runtime: Runtime) -> list[dict[str, Any]]:
    """How each partition that answers is woken."""
    return [status["alarm"] for status in runtime.status().model_dump()["partitions"].values() if "alarm" in status]


def wheel_status(runtime: Runtime) -> dict[str, Any]:
    """The wheel's own words; empty while it restarts."""
    status: dict[str, Any] = runtime.status().release_wheels[RELEASE_WHEEL]
    return status if "pid" in status else {}


def wait_until_used(runtime: Runtime) -> None:
    wait_for(
        lambda: [alarm["backend"] for alarm in alarms(runtime)] == ["release-wheel"] * 2, "partitions to use the wheel"
    )


def bells(runtime: Runtime, prefix: str = "bell") -> list[Stub]:
    """Some objects of each partition."""
    found: dict[int, list[Stub]] = {0: [], 1: []}
    for number in range(10_000):
        key = f"{prefix}-{number}"
        mine = found[runtime._directory.partition_of(slot_of(Bell.type_name, key))]
        if len(mine) < BELLS:
            mine.append(runtime.namespace(Bell).get(key))
    return found[0] + found[1]


def ring(runtime: Runtime, round_name: str, first_ms: int, every_ms: int, count: int) -> dict[str, int]:
    """Arm the same timers at bells of both partitions."""
    begin_ms = time.time_ns() // 1_000_000 + first_ms
    due = {f"{round_name}-{number}": begin_ms + number * every_ms for number in range(count)}
    for bell in bells(runtime):
        bell.arm.sync(due)
    return due


def check_rung(runtime: Runtime, due: dict[str, int]) -> None:
    """Every timer has fired, once, at every bell, and none before its time."""
    for bell in bells(runtime):
        wait_for(lambda bell=bell: not bell.armed.sync(), f"the timers of {bell}")  # type: ignore[misc]
        fires = [fire for fire in bell.fires.sync() if fire[0] in due]
        assert Counter(name for name, *_ in fires) == Counter(due.keys())
        assert all(fired_ms >= due_ms == due[name] for name, due_ms, fired_ms, *_ in fires)


def test_partitions_find_the_wheel_of_their_node_and_are_woken_by_it(runtime: Runtime) -> None:
    wait_until_used(runtime)
    rounds = 0

    def both_woken() -> bool:  # on a machine that is too busy, the alarms' own call-backs may come before the wheel's
        nonlocal rounds
        rounds += 1
        check_rung(runtime, ring(runtime, f"woken-{rounds}", first_ms=300, every_ms=50, count=10))
        return all(alarm["wakes"] > 0 and alarm["lateness"]["count"] > 0 for alarm in alarms(runtime))

    wait_for(both_woken, "wakes from the wheel")
    status = wheel_status(runtime)
    assert (status["partitions"], status["release_timer"]) == (2, "sleep-slice")
    assert status["armed"] > 0
    for alarm in alarms(runtime):
        assert (alarm["backend"], alarm["release_timer"]) == ("release-wheel", "sleep-slice")


def test_when_the_wheel_is_killed_timers_fire_all_the_same_and_are_armed_again_once_it_is_back(
    runtime: Runtime,
) -> None:
    wait_until_used(runtime)
    killed = wheel_status(runtime)["pid"]
    for bell in bells(runtime, "far"):
        bell.arm.sync({"far": time.time_ns() // 1_000_000 + 3_600_000})
    due = ring(runtime, "killed", first_ms=300, every_ms=40, count=40)
    kill_9(killed)
    check_rung(runtime, due)
    wait_for(lambda: wheel_status(runtime).get("pid", killed) != killed, "the wheel")
    wait_until_used(runtime)
    wait_for(lambda: wheel_status(runtime).get("waiting") == 2, "what both partitions had armed, at the new wheel")
    check_rung(runtime, ring(runtime, "again", first_ms=500, every_ms=40, count=10))


def test_a_runtime_without_a_wheel_wakes_its_partitions_by_itself(tmp_path: Path) -> None:
    settings = Settings(release_wheel=False)
    with Runtime.start(tmp_path, 2, name="wheelless", settings=settings) as runtime:
        due = ring(runtime, "alone", first_ms=200, every_ms=40, count=5)
        check_rung(runtime, due)
        assert runtime.status().release_wheels == {}
        assert [alarm["backend"] for alarm in alarms(runtime)] == ["process"] * 2
