"""What a partition is opened with, and the driver that it has unless it is given another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from actors.class_table import FetchClass
from actors.coordinator_services import CoordinatorServices, NoCoordinator
from actors.settings import Settings
from drivers.durable_object import DurableObjectDriver
from drivers.native import Driver

__all__ = ["PartitionConfig", "default_driver"]


@dataclass(frozen=True)
class PartitionConfig:
    """What a partition is opened with. `slots` (inclusive ranges) count at creation only; later its file knows."""

    data_dir: str
    cluster_id: str
    partition: int
    create: bool
    slots: Sequence[tuple[int, int]]
    settings: Settings
    min_commit_seq: int = 0
    runtime_name: str = "default"
    fetch_class: FetchClass | None = field(default=None, compare=False)
    coordinator: CoordinatorServices = field(default_factory=NoCoordinator, compare=False)


def default_driver(settings: Settings) -> Driver:
    """The driver of a partition that has its process to itself."""
    return DurableObjectDriver(
        durability=settings.durability,
        poll_ms=settings.poll_ms,
        lock_wait_ms=settings.lock_wait_ms,
        busy_timeout_ms=settings.busy_timeout_ms,
        checkpoint_interval_ms=settings.checkpoint_interval_ms,
    )
