"""Creates, waits for and ends the Ray actors of a runtime."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from actors.cluster_file import ClusterFile
from actors.coordinator import CoordinatorConfig, RuntimeDescription
from actors.coordinator_actor import CoordinatorActor
from actors.demands import Demands
from actors.disks import DISK_LABEL, disk_of, disks_of, living_nodes
from actors.errors import DataMissing, InvalidOption, MainspringError, RuntimeNotStarted
from actors.local_ray import import_paths
from actors.logs import log_event
from actors.partition_actor import CONCURRENCY_GROUPS, PartitionActor, PartitionActorConfig
from actors.ray_calls import (
    COORDINATOR,
    RELEASE_WHEEL,
    ActorUnreachable,
    RayCalls,
    partition_actor,
    release_wheel_actor,
)
from actors.ray_directory import Transport
from actors.release_wheel import ReleaseWheelActor, WheelConfig
from actors.settings import Settings

__all__ = [
    "DISK_LABEL",
    "Launch",
    "Placement",
    "assign_disks",
    "choose_placement",
    "end_actor",
    "find_partitions",
    "find_runtime",
    "find_runtimes",
    "find_wheels",
    "placement_of",
    "start_actors",
    "start_partitions",
    "stop_actors",
    "stop_partition",
]

#: How long a clean stop may take before the actor is killed all the same; its files survive both.
_STOP_TIMEOUT_S = 30.0
#: How long to wait for a coordinator that is already there to say what it runs.
_DESCRIBE_TIMEOUT_S = 15.0
#: How often to look whether a node with a disk that is needed has joined.
_DISK_POLL_S = 0.5

_ACTOR_OPTIONS: dict[str, Any] = {
    "lifetime": "detached",
    "max_restarts": -1,
    "max_task_retries": 0,  # calls are repeated by their callers, who know whether they may be
    "enable_task_events": False,
    "get_if_exists": True,
}


@dataclass(frozen=True)
class Placement:
    """Where actors go. `disk` is the label of this node's disk, `disks` those of all nodes, this one first."""

    disk: str | None
    disks: tuple[str, ...] = ()

    def options(self, disk: str | None = None) -> dict[str, Any]:
        """As Ray's actor options, for the node with this disk (None: this node).

        By label and not by node: an actor bound to a lost node is dead for good.
        """
        wanted = self.disk if disk is None else disk
        return {"label_selector": {DISK_LABEL: wanted}} if wanted is not None else {}


@dataclass(frozen=True)
class Launch:
    """What `start_actors` found or made. `created`: the runtime did not run before."""

    description: RuntimeDescription
    created: bool


def choose_placement() -> Placement:
    """Keep partitions on this node's disk. Raises `InvalidOption` when Ray could move them away from it."""
    nodes = living_nodes()
    here = ray.get_runtime_context().get_node_id()
    disk = next((disk_of(node) for node in nodes if node["NodeID"] == here), None)
    if disk is None and len(nodes) > 1:
        raise InvalidOption(
            f"this Ray has {len(nodes)} nodes, and partitions must stay where their files are. Start the node that "
            f"holds the data directory with a label for its disk, for example\n"
            f'    ray start --address=... --labels "{DISK_LABEL}=disk1"\n'
            "and start the runtime there."
        )
    others = (each for each in disks_of(nodes) if each != disk)
    return Placement(disk, () if disk is None else (disk, *others))


def placement_of(description: RuntimeDescription) -> Placement:
    """The placement for a runtime that runs, also from a node without its data. Raises `InvalidOption`."""
    if not description.disks:
        return choose_placement()
    own = description.disks[min(description.disks)]
    return Placement(own, (own, *(each for each in disks_of(living_nodes()) if each != own)))


def start_actors(
    calls: RayCalls,
    runtime: str,
    data_dir: Path,
    cluster: ClusterFile,
    settings: Settings,
    transport: Transport,
    placement: Placement,
    demands: Demands,
) -> Launch:
    """Create what does not run yet, and wait until every partition serves.

    Raises the error of what can't open (`PartitionBusy`, `DataMissing`, ...), `InvalidOption` when a runtime of this
    name serves another directory, and `RuntimeNotStarted` when Ray can't start an actor.
    """
    is_new = not _exists(calls, COORDINATOR)
    config = CoordinatorConfig(str(data_dir), cluster.cluster_id, uuid.uuid4().hex, settings, runtime, demands)
    started: list[str] = []
    try:
        started.append(COORDINATOR)
        _create(calls, CoordinatorActor, COORDINATOR, config, num_cpus=0, **placement.options())
        wait_s = settings.lock_wait_ms / 1_000 + settings.connect_timeout_ms / 1_000
        description: RuntimeDescription = _ask(calls, COORDINATOR, "describe", wait_s)
        if (description.cluster_id, description.data_dir) != (cluster.cluster_id, str(data_dir)):
            is_new = False
            raise InvalidOption(
                f"a runtime named {runtime!r} already runs in this Ray, for {description.data_dir}. "
                "Stop it, or start this one under another name."
            )
        is_new = description.run_id == config.run_id  # else another process was first
        description = assign_disks(calls, description, placement)
        started.extend(start_partitions(calls, runtime, description, transport, placement, description.partitions))
        _await_disks(calls, wait_s)
        for partition in description.partitions:
            _await_partition(calls, partition, description.demands, wait_s)
    except BaseException:
        if is_new:
            _kill(calls, reversed(started))
        raise
    return Launch(description, is_new)


def _await_partition(calls: RayCalls, partition: int, demands: Demands, wait_s: float) -> None:
    try:
        _ask(calls, partition_actor(partition), "endpoint", wait_s)
    except RuntimeNotStarted as error:
        asked = demands.with_environment(None)
        if asked == Demands():
            raise
        raise RuntimeNotStarted(f"{error}. Each partition asks Ray for {asked}: no node may have that free") from error


def _await_disks(calls: RayCalls, wait_s: float) -> None:
    """Give nodes that are just being started time to join. Raises `DataMissing` for a disk that stays away."""
    deadline = time.monotonic() + wait_s
    while absences := _ask(calls, COORDINATOR, "absences", wait_s):
        if time.monotonic() > deadline:
            raise DataMissing("; ".join(absences.values()))
        time.sleep(_DISK_POLL_S)


def assign_disks(calls: RayCalls, description: RuntimeDescription, placement: Placement) -> RuntimeDescription:
    """Say on which disk each partition's files are to be; partitions that have one keep it."""
    if placement.disk is None:
        return description
    disks = calls.call(COORDINATOR, "assign_disks", placement.disk, placement.disks, timeout_s=_DESCRIBE_TIMEOUT_S)
    return replace(description, disks=disks)


def _start_wheel(calls: RayCalls, description: RuntimeDescription, placement: Placement, disk: str | None) -> str:
    """The wheel of one node. Not waited for: partitions wake themselves until they find it."""
    name = release_wheel_actor(disk)
    config = WheelConfig(description.secret, description.settings)
    _create(calls, ReleaseWheelActor, name, config, num_cpus=0, **placement.options(disk))
    return name


def start_partitions(
    calls: RayCalls,
    runtime: str,
    description: RuntimeDescription,
    transport: Transport,
    placement: Placement,
    partitions: Sequence[int],
) -> list[str]:
    """Create what does not run yet of these partitions and of the wheels on their nodes; the names of all of them.

    Does not wait for them.
    """
    remote = {"concurrency_groups": CONCURRENCY_GROUPS}
    disks = {partition: description.disks.get(partition, placement.disk) for partition in partitions}
    wheels = sorted(set(disks.values()), key=str) if description.settings.release_wheel else []
    names = [_start_wheel(calls, description, placement, disk) for disk in wheels]
    for partition in partitions:
        config = PartitionActorConfig(
            runtime=runtime,
            data_dir=description.data_dir,
            cluster_id=description.cluster_id,
            partition=partition,
            secret=description.secret,
            settings=description.settings,
            slot_map=description.slot_map,
            import_paths=tuple(import_paths()),
            transport=transport,
            release_wheel=release_wheel_actor(disks[partition]) if description.settings.release_wheel else None,
        )
        options = {**description.demands.options(), **placement.options(disks[partition])}
        _create(calls, PartitionActor, partition_actor(partition), config, remote=remote, **options)
        names.append(partition_actor(partition))
    return names


def stop_partition(calls: RayCalls, partition: int) -> None:
    """End one partition, cleanly where that works. Idempotent."""
    name = partition_actor(partition)
    try:
        calls.call(name, "stop", timeout_s=_STOP_TIMEOUT_S)
    except ActorUnreachable as error:
        log_event(logging.WARNING, "stop_unclean", f"{name} did not stop cleanly: {error}", actor=name)
    _kill(calls, [name])


def end_actor(calls: RayCalls, name: str) -> None:
    """End an actor for good. Idempotent."""
    _kill(calls, [name])


def find_runtime(calls: RayCalls, runtime: str) -> RuntimeDescription:
    """What runs under this name in this process's Ray. Raises `RuntimeNotStarted`."""
    try:
        description: RuntimeDescription = calls.call(COORDINATOR, "describe", timeout_s=_DESCRIBE_TIMEOUT_S)
    except ActorUnreachable as error:
        others = ", ".join(find_runtimes()) or "none"
        raise RuntimeNotStarted(
            f"no runtime named {runtime!r} answers in this Ray (running: {others}): {error}"
        ) from error
    return description


def find_partitions(calls: RayCalls) -> list[int]:
    """The partitions that have actors, whatever the coordinator says."""
    prefix = partition_actor(0)[:-4]
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in actors if each["namespace"] == calls.namespace]
    return sorted(int(name[len(prefix) :]) for name in names if name.startswith(prefix))


def find_runtimes() -> list[str]:
    """Names of the runtimes in this process's Ray."""
    prefix = "mainspring-"
    actors = ray.util.list_named_actors(all_namespaces=True)
    found = {actor["namespace"] for actor in actors if actor["name"] == COORDINATOR}
    return sorted(namespace[len(prefix) :] for namespace in found if namespace.startswith(prefix))


def find_wheels(calls: RayCalls) -> list[str]:
    """Names of the runtime's release wheels, one for each node that has partitions."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = (actor["name"] for actor in actors if actor["namespace"] == calls.namespace)
    return sorted(name for name in names if name.startswith(RELEASE_WHEEL))


def stop_actors(calls: RayCalls, partitions: Iterable[int]) -> None:
    """End the runtime: partitions and wheels first, each cleanly where it can, the coordinator last. Idempotent."""
    names = [partition_actor(partition) for partition in partitions] + find_wheels(calls)
    stopping: dict[str, Any] = {}
    for name in names:
        with contextlib.suppress(ActorUnreachable):  # gone already: nothing to stop
            stopping[name] = calls.handle(name).stop.remote()
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    for name, stopped in stopping.items():
        try:
            ray.get(stopped, timeout=max(0.1, deadline - time.monotonic()))
        except (RayError, MainspringError) as error:
            log_event(logging.WARNING, "stop_unclean", f"{name} did not stop cleanly: {error}", actor=name)
    _kill(calls, names)
    with contextlib.suppress(ActorUnreachable):
        calls.call(COORDINATOR, "stop", timeout_s=_STOP_TIMEOUT_S)
    _kill(calls, [COORDINATOR])


def _create(
    calls: RayCalls, cls: type, name: str, config: object, remote: dict[str, Any] | None = None, **options: Any
) -> None:
    actor_class = ray.remote(**remote)(cls) if remote else ray.remote(cls)
    actor_class.options(name=name, namespace=calls.namespace, **_ACTOR_OPTIONS, **options).remote(config)


def _exists(calls: RayCalls, name: str) -> bool:
    try:
        calls.handle(name)
    except ActorUnreachable:
        return False
    return True


def _ask(calls: RayCalls, actor: str, method: str, timeout_s: float) -> Any:
    try:
        return calls.call(actor, method, timeout_s=timeout_s)
    except ActorUnreachable as error:
        because = str(error.__cause__ or "") or str(error)  # a limit that was passed says nothing of itself
        raise RuntimeNotStarted(f"the runtime could not be started: {because}") from error


def _kill(calls: RayCalls, names: Iterable[str]) -> None:
    for name in names:
        try:
            ray.kill(calls.handle(name), no_restart=True)
        except ActorUnreachable:
            continue  # gone already
        except RayError as error:
            log_event(logging.WARNING, "kill_failed", f"{name} could not be ended: {error}", actor=name)
        calls.forget(name)
