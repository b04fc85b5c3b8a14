"""One local Ray for all tests of this tier."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """A Ray of our own on loopback; never one that happens to run on the machine."""
    # Workers at Ray's default nice level can wait for seconds beside ordinary processes.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    import ray

    ray.init(
        address="local",
        include_dashboard=False,
        num_cpus=2,
        _node_ip_address="127.0.0.1",
        object_store_memory=100 * 1024 * 1024,
    )
    yield
    ray.shutdown()
