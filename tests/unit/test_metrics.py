"""A partition's numbers: what is measured, and how it reaches Ray."""

from __future__ import annotations

import threading
from typing import Any

from actors import DurableObject, TimerInfo
from actors.errors import PartitionStopped
from actors.metrics import (
    COORDINATOR,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    MetricsExporter,
    PartitionMetrics,
    RayMetrics,
    Snapshot,
)
from actors.testing import LocalRuntime

TAGS = {"runtime": "r", "partition": "3"}


class FakeMetric:
    """Keeps what it is told."""

    made: dict[str, FakeMetric] = {}

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...], boundaries: Any = None) -> None:
        assert description
        assert tag_keys == tuple(TAGS)
        self.told: list[float] = []
        FakeMetric.made[name] = self

    def _tell(self, value: float, tags: dict[str, str]) -> None:
        assert tags == TAGS
        self.told.append(value)

    inc = set = observe = _tell


class FakeModule:
    Counter = Gauge = Histogram = FakeMetric


def test_counters_grow_by_what_is_new_gauges_are_set_and_observations_are_passed_on() -> None:
    metrics = RayMetrics(FakeModule(), TAGS)
    metrics.publish(Snapshot({"calls": 10, "slots": 7}, {"lateness_ms": [1.0, 2.0]}))
    metrics.publish(Snapshot({"calls": 15, "slots": 6}, {}))
    metrics.publish(Snapshot({"calls": 15, "slots": 6}, {}))
    made = FakeMetric.made
    assert set(made) == {f"mainspring_{name}" for name in (*COUNTERS, *GAUGES, *HISTOGRAMS)}
    assert made["mainspring_calls"].told == [10, 5]
    assert made["mainspring_slots"].told == [7, 6, 6]
    assert made["mainspring_lateness_ms"].told == [1.0, 2.0]


def test_the_coordinator_counts_fences_silences_and_moves() -> None:
    store = FakeModule()
    FakeMetric.made.clear()
    metrics = RayMetrics(store, TAGS, COORDINATOR, "mainspring_coordinator_")
    metrics.publish(Snapshot({"fences": 2, "slots_moved": 64, "moves": 1}, {}))
    metrics.publish(Snapshot({"fences": 3, "slots_moved": 64, "moves": 0}, {}))
    made = {name.removeprefix("mainspring_coordinator_"): metric.told for name, metric in FakeMetric.made.items()}
    assert (made["fences"], made["slots_moved"], made["moves"]) == ([2, 1], [64], [1, 0])


def test_observations_are_handed_out_once_and_summed_up_for_good() -> None:
    metrics = PartitionMetrics()
    metrics.timer_started(due_ms=1_000, now_ms=1_004)
    metrics.committed(units=5, took_ns=2_000_000)
    assert metrics.take_recent() == {"lateness_ms": [4], "commit_ms": [2.0], "commit_units": [5]}
    assert metrics.take_recent() == {"lateness_ms": [], "commit_ms": [], "commit_units": []}
    summary = metrics.summary()
    assert 4 <= summary["lateness_p50_ms"] <= 5
    assert 2 <= summary["commit_p99_ms"] <= 2.5


class Clockwork(DurableObject):
    def arm(self) -> None:
        self.timers.set("t", after="5s", method="on_time")

    def on_time(self, timer: TimerInfo) -> None:
        self.storage["fired"] = True


async def test_a_partition_measures_commits_lateness_and_the_oldest_due_timer() -> None:
    async with LocalRuntime(partitions=1, memory=True) as runtime:
        await runtime.namespace(Clockwork).get("a").arm()
        partition = runtime.partitions[0]
        assert partition is not None
        assert partition.status()["oldest_due_ms"] == 0
        await runtime.advance(seconds=6)
        snapshot = partition.snapshot()
        assert snapshot.observed["lateness_ms"] == [0]
        assert len(snapshot.observed["commit_units"]) == snapshot.status["commits"]
        assert set(COUNTERS) | set(GAUGES) <= set(snapshot.status)
        assert snapshot.status["lateness_p99_ms"] == 0


def test_what_can_not_be_looked_at_or_published_now_is_tried_again() -> None:
    published = threading.Semaphore(0)
    looks = iter([PartitionStopped("opening"), Snapshot({}, {}), Snapshot({}, {})])
    publishes = iter([RuntimeError("Ray is not well"), None])

    def look() -> Snapshot:
        found = next(looks)
        if isinstance(found, Exception):
            raise found
        return found

    def publish(snapshot: Snapshot) -> None:
        error = next(publishes)
        if error is not None:
            raise error
        exporter.stop()
        published.release()

    exporter = MetricsExporter("test", 10, look, publish)
    exporter.start()
    assert published.acquire(timeout=30)
