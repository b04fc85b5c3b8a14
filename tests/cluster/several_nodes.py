"""Run by test_nodes.py in a process of its own: a Ray of several nodes on this machine, each with a disk of its label.

Prints one word for each thing that was seen; any exception ends it with a status other than 0.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112

import ray
from ray.cluster_utils import Cluster

from actors.launch import DISK_LABEL
from actors.runtime import Runtime
from tests.cluster.apps import Ledger

KEYS = [f"node-{number}" for number in range(40)]


def add_node(cluster: Cluster, disk: str) -> object:
    return cluster.add_node(num_cpus=1, labels={DISK_LABEL: disk}, object_store_memory=80 * 1024 * 1024)


async def totals(runtime: Runtime) -> list[int]:
    ledgers = runtime.namespace(Ledger)
    return list(await asyncio.gather(*(ledgers.get(key).total() for key in KEYS)))


async def apply(runtime: Runtime, token: str) -> None:
    ledgers = runtime.namespace(Ledger)
    await asyncio.gather(*(ledgers.get(key).apply(token) for key in KEYS))


def main(data_dir: Path) -> None:
    cluster = Cluster()
    add_node(cluster, "d1")
    second = add_node(cluster, "d2")
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="ERROR")
    runtime = Runtime.start(data_dir, 2, name="nodes", address=cluster.address)
    status = runtime.status()
    assert len({report.ray_node for report in status.partitions.values()}) == 2, status
    assert len(status.release_wheels) == 2, status.release_wheels
    print("spread")
    asyncio.run(apply(runtime, "a"))
    cluster.remove_node(second, allow_graceful=False)
    survivor = next(number for number, report in runtime.status().partitions.items() if report.pid is not None)
    time.sleep(1)
    add_node(cluster, "d2")
    asyncio.run(apply(runtime, "b"))  # calls of the lost node's partition waited for it
    assert asyncio.run(totals(runtime)) == [2] * len(KEYS)
    print("returned")
    runtime.scale(3)
    assert asyncio.run(totals(runtime)) == [2] * len(KEYS)
    node = runtime.status().coordinator.partitions[survivor]["node"]
    print("scaled", bool(node))
    runtime.stop()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
