"""Where the registry runs: on Ray, or in this process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from actors import Runtime, Settings
from actors.testing import LocalRuntime, SystemClock
from examples.package_registry.namespaces import Namespaces

__all__ = ["Hosting", "host_locally", "host_on_ray"]

#: How long a killed partition may take to have a process again.
_RESTART_TIMEOUT_S = 60.0
_LOOK_EVERY_S = 0.1


class Hosting(Protocol):
    """A running registry."""

    @property
    def partitions(self) -> int:
        """How many there are."""
        ...

    @property
    def names(self) -> Namespaces:
        """The objects."""
        ...

    async def kill(self, partition: int) -> str:
        """End the partition's process without any warning and wait for its successor; says what was done."""
        ...


class _RayHosting:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.partitions = len(runtime.partition_pids())
        self.names = Namespaces.of(runtime.namespace)

    async def kill(self, partition: int) -> str:
        pid = await self._pid(partition, other_than=None)
        os.kill(pid, signal.SIGKILL)
        successor = await self._pid(partition, other_than=pid)
        return f"SIGKILL to partition {partition} (pid {pid}); it is back as pid {successor}"

    async def _pid(self, partition: int, *, other_than: int | None) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _RESTART_TIMEOUT_S
        while loop.time() < deadline:
            pid = (await asyncio.to_thread(self._runtime.partition_pids)).get(partition)
            if pid is not None and pid != other_than:
                return pid
            await asyncio.sleep(_LOOK_EVERY_S)
        raise TimeoutError(f"partition {partition} had no process again after {_RESTART_TIMEOUT_S:.0f} s")


class _LocalHosting:
    def __init__(self, runtime: LocalRuntime) -> None:
        self._runtime = runtime
        self.partitions = runtime.partition_count
        self.names = Namespaces.of(runtime.namespace)

    async def kill(self, partition: int) -> str:
        await self._runtime.crash(partition)
        return f"dropped the memory of partition {partition} and opened it again"


@asynccontextmanager
async def host_on_ray(runtime: Runtime) -> AsyncIterator[Hosting]:
    """The registry in a runtime that has been started, which is stopped at the end."""
    async with runtime:
        yield await asyncio.to_thread(_RayHosting, runtime)


@asynccontextmanager
async def host_locally(data_dir: Path, partitions: int, settings: Settings) -> AsyncIterator[Hosting]:
    """The same partitions and files in this process, without Ray, in real time."""
    async with LocalRuntime(
        clock=SystemClock(), data_dir=data_dir, partitions=partitions, settings=settings
    ) as runtime:
        yield _LocalHosting(runtime)
