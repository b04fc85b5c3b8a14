"""What partitions and the coordinator measure, and how it reaches Ray's metrics (and from there Prometheus)."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from actors.errors import MainspringError
from actors.logs import log_event
from timers.lateness import LatenessRecorder

__all__ = [
    "COORDINATOR",
    "COUNTERS",
    "GAUGES",
    "HISTOGRAMS",
    "PARTITION",
    "MetricNames",
    "MetricsExporter",
    "PartitionMetrics",
    "RayMetrics",
    "Snapshot",
]

#: Observations kept between two exports; more than that in a few seconds are a sample of themselves.
_KEPT: Final = 10_000
_NS_PER_MS: Final = 1e6

#: Numbers of a partition's status that only grow -> what they count.
COUNTERS: Final[dict[str, str]] = {
    "calls": "Calls that were taken, repeats not counted.",
    "repeats": "Calls that came again after a lost connection.",
    "turns": "Turns that were started.",
    "commits": "Transactions.",
    "write_sets": "Write sets that are durable.",
    "fires": "Timers whose turn is durable.",
    "retries": "Timers and messages that will be tried again after their handler failed.",
    "dead_letters": "Timers and messages whose tries were used up.",
    "activations": "Objects brought into memory.",
    "resets": "Objects that went back to their last durable state.",
    "failed_ticks": "Ticks of the timer engine that failed; each is tried again after 5 s.",
    "stalled_ticks": "Ticks that left due timers behind and made no progress; the next one comes after 5 s.",
    "outcomes_delivered": "Outcomes that their sinks have taken.",
    "outcomes_failed": "Times that a sink did not take an outcome.",
}
#: Numbers of a partition's status that go up and down.
GAUGES: Final[dict[str, str]] = {
    "active_objects": "Objects in memory.",
    "held_calls": "Calls from outside that have not been answered.",
    "timer_turns": "Timer turns queued or running.",
    "inbox": "Outcomes kept for repeats.",
    "outbox": "Messages between objects that are not delivered.",
    "outbox_oldest_age_ms": "How long the oldest of them has been waiting, in milliseconds.",
    "slots": "Slots that the partition owns.",
    "oldest_due_ms": "How long the oldest due timer has been waiting, in milliseconds.",
    "epoch": "Epoch of the partition's owner.",
    "outcomes_waiting": "Outcomes that have not been delivered.",
}
#: Observations -> upper bounds of their buckets.
HISTOGRAMS: Final[dict[str, tuple[float, ...]]] = {
    "lateness_ms": (0.5, 1, 2, 5, 10, 25, 50, 100, 250, 1_000, 10_000, 60_000),
    "commit_ms": (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 250, 1_000),
    "commit_units": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 4_096),
}
_WHAT: Final = {
    "lateness_ms": "How late timers were started, in milliseconds.",
    "commit_ms": "How long a transaction took from its first row to being durable, in milliseconds.",
    "commit_units": "Write sets of one transaction.",
}


@dataclass(frozen=True)
class Snapshot:
    """A partition's status, and what was observed since the last one."""

    status: Mapping[str, Any]
    observed: Mapping[str, Sequence[float]]


@dataclass
class PartitionMetrics:
    """Observations of one partition. Belongs to its loop."""

    lateness: LatenessRecorder = field(default_factory=LatenessRecorder)
    commits: LatenessRecorder = field(default_factory=LatenessRecorder)
    _recent: dict[str, deque[float]] = field(default_factory=lambda: {name: deque(maxlen=_KEPT) for name in HISTOGRAMS})

    def timer_started(self, due_ms: int, now_ms: int) -> None:
        """A timer's turn begins."""
        late_ms = max(0, now_ms - due_ms)
        self.lateness.record(late_ms * 1_000_000)
        self._recent["lateness_ms"].append(late_ms)

    def committed(self, units: int, took_ns: int) -> None:
        """A transaction is durable."""
        self.commits.record(took_ns)
        self._recent["commit_ms"].append(took_ns / _NS_PER_MS)
        self._recent["commit_units"].append(units)

    def take_recent(self) -> dict[str, list[float]]:
        """What was observed since this was asked the last time."""
        taken = {name: list(values) for name, values in self._recent.items()}
        for values in self._recent.values():
            values.clear()
        return taken

    def summary(self) -> dict[str, float]:
        """Percentiles since the partition opened, in milliseconds."""
        found: dict[str, float] = {}
        for name, recorder in (("lateness", self.lateness), ("commit", self.commits)):
            summary = recorder.summary()
            for share in ("p50", "p95", "p99"):
                found[f"{name}_{share}_ms"] = round(getattr(summary, f"{share}_ns") / _NS_PER_MS, 3)
        return found


class MetricsModule(Protocol):
    """What is used of `ray.util.metrics`."""

    Counter: Any
    Gauge: Any
    Histogram: Any


@dataclass(frozen=True)
class MetricNames:
    """Names of counters, gauges and histograms, each with what it means."""

    counters: Mapping[str, str]
    gauges: Mapping[str, str]
    histograms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


#: What a partition has.
PARTITION: Final = MetricNames(COUNTERS, GAUGES, HISTOGRAMS)
#: What the coordinator has.
COORDINATOR: Final = MetricNames(
    {
        "fences": "Owners of partitions that were told to stop, because there is a newer one.",
        "silences": "Processes of partitions that were ended because they went silent.",
        "slots_moved": "Slots that were moved.",
        "moves_put_off": "Moves that were put off, and planned again.",
        "move_bytes": "Bytes that moves have sent.",
        "move_errors": "What went wrong in moves and was tried again.",
    },
    {
        "moves": "Moves that have begun and not ended.",
        "map_version": "Version of the slot map.",
        "silent_ms": "How long the most silent partition has said nothing, in milliseconds.",
    },
)


class RayMetrics:
    """The numbers of one process as metrics of Ray. `tags` are on each of them."""

    def __init__(
        self,
        module: MetricsModule,
        tags: Mapping[str, str],
        names: MetricNames = PARTITION,
        prefix: str = "mainspring_",
    ) -> None:
        self._tags = dict(tags)
        keys = tuple(self._tags)
        self._counters = {
            name: module.Counter(prefix + name, description=what, tag_keys=keys)
            for name, what in names.counters.items()
        }
        self._gauges = {
            name: module.Gauge(prefix + name, description=what, tag_keys=keys) for name, what in names.gauges.items()
        }
        self._histograms = {
            name: module.Histogram(prefix + name, description=_WHAT[name], boundaries=list(bounds), tag_keys=keys)
            for name, bounds in names.histograms.items()
        }
        self._counted: dict[str, float] = {}

    def publish(self, snapshot: Snapshot) -> None:
        """Hand the numbers to Ray."""
        for name, counter in self._counters.items():
            value = float(snapshot.status.get(name, 0))
            grown = value - self._counted.get(name, 0.0)
            if grown > 0:
                counter.inc(grown, tags=self._tags)
            self._counted[name] = value
        for name, gauge in self._gauges.items():
            gauge.set(float(snapshot.status.get(name) or 0), tags=self._tags)
        for name, histogram in self._histograms.items():
            for observed in snapshot.observed.get(name, ()):
                histogram.observe(observed, tags=self._tags)


class MetricsExporter:
    """Publishes from a thread of its own: Ray's metrics may block, the partition's loop may not."""

    def __init__(
        self, name: str, interval_ms: int, look: Callable[[], Snapshot], publish: Callable[[Snapshot], None]
    ) -> None:
        """`look` raises a `MainspringError` while there is nothing to be seen."""
        self._interval_s = interval_ms / 1_000
        self._look = look
        self._publish = publish
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mainspring-metrics-{name}", daemon=True)

    def start(self) -> None:
        """Begin to publish."""
        self._thread.start()

    def stop(self) -> None:
        """Publish no more; does not wait."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._publish(self._look())
            except (MainspringError, concurrent.futures.TimeoutError):
                continue  # the partition is opening, has stopped, or is busy: there is nothing new to say
            except Exception as error:  # numbers that can't be published must not end their publishing
                log_event(logging.WARNING, "metrics_failed", f"metrics were not published: {error!r}", error=error)
