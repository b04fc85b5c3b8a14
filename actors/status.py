"""What a runtime is doing, as one model: for people, for `mainspring status`, and for whoever watches it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

__all__ = ["CoordinatorReport", "EngineReport", "MovesReport", "PartitionReport", "RuntimeStatus"]


class _Report(BaseModel):
    """Numbers of one process. What does not answer has an `error`, and nothing else that means anything."""

    model_config = ConfigDict(frozen=True, extra="allow")

    error: str | None = None

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self.model_fields_set


class PartitionReport(_Report):
    """One partition. Counts are since its process opened it; times are milliseconds, instants epoch ms.

    `oldest_due_ms`: how long the oldest due timer has been waiting. `held_calls`: calls from outside that have not been
    answered. `inbox`: outcomes kept for repeats. `careful`: it finds out what ended its process the last time.
    `failed_ticks`, `stalled_ticks`: ticks of the timer engine that failed, and that left due timers and did nothing.
    `lateness_*`: how late timers' turns began. `commit_*`: how long transactions took. Further fields belong to what
    the partition hosts (outcomes, messages, the alarm).
    """

    partition: int = -1
    pid: int | None = None
    ray_node: str = ""
    epoch: int = 0
    commit_seq: int = 0
    slots: int = 0
    connections: int = 0
    active_objects: int = 0
    held_calls: int = 0
    calls: int = 0
    repeats: int = 0
    turns: int = 0
    commits: int = 0
    write_sets: int = 0
    fires: int = 0
    retries: int = 0
    dead_letters: int = 0
    activations: int = 0
    resets: int = 0
    timer_turns: int = 0
    next_due_ms: int | None = None
    oldest_due_ms: int = 0
    failed_ticks: int = 0
    stalled_ticks: int = 0
    inbox: int = 0
    careful: bool = False
    lateness_p50_ms: float = 0
    lateness_p95_ms: float = 0
    lateness_p99_ms: float = 0
    commit_p50_ms: float = 0
    commit_p95_ms: float = 0
    commit_p99_ms: float = 0


class EngineReport(_Report):
    """The coordinator's engine, which keeps leases and totals of quotas. `lagging_leases`: how often a lease was found
    kept for more than a minute past its end, because messages of its holder had not arrived."""

    pid: int | None = None
    epoch: int = 0
    commit_seq: int = 0
    commits: int = 0
    next_due_ms: int | None = None
    lagging_leases: int = 0
    failed_ticks: int = 0
    stalled_ticks: int = 0


class CoordinatorReport(_Report):
    """What the coordinator knows: the version of the slot map, and of each partition its highest epoch and commit, its
    node, directory and disk. `silent_s`: how long its process has said nothing; `silences`: how often one was ended
    for that, `fences`: how often an owner was told to stop because of a newer one, since the coordinator started."""

    cluster_id: str = ""
    map_version: int = 0
    partitions: tuple[dict[str, Any], ...] = ()
    endpoints: dict[int, dict[str, Any]] = {}
    silent_s: dict[int, float] = {}
    silences: int = 0
    engine: EngineReport = EngineReport()
    fences: int = 0


class MovesReport(_Report):
    """Slots on their way: how many the last change wanted to move and has moved, moves that were put off, and those
    that have not ended. `errors` counts what should not have happened, and was tried again."""

    goal: tuple[int, ...] | None = None
    running: bool = False
    wanted: int = 0
    moved: int = 0
    put_off: int = 0
    bytes_sent: int = 0
    errors: int = 0
    last_error: str = ""
    moves: tuple[dict[str, Any], ...] = ()


class RuntimeStatus(BaseModel):
    """A whole runtime at one moment, or nearly: each process is asked on its own."""

    model_config = ConfigDict(frozen=True)

    name: str
    coordinator: CoordinatorReport
    moves: MovesReport
    partitions: dict[int, PartitionReport]
    release_wheels: dict[str, Any]

    @classmethod
    def of(
        cls,
        name: str,
        coordinator: Any,
        moves: Any,
        partitions: Mapping[int, Any],
        release_wheels: Mapping[str, Any],
    ) -> RuntimeStatus:
        """From what each process said, as dataclasses or dictionaries."""
        return cls(
            name=name,
            coordinator=CoordinatorReport.model_validate(_plain(coordinator)),
            moves=MovesReport.model_validate(_plain(moves)),
            partitions={number: PartitionReport.model_validate(_plain(said)) for number, said in partitions.items()},
            release_wheels={wheel: _plain(said) for wheel, said in release_wheels.items()},
        )


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
