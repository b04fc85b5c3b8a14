"""Leases of partitions: each process says that it runs, and one that has stopped saying so is ended.

Leases find failures; they do not protect data, which the files do. The process that hangs in the kernel or was stopped
keeps its actor alive for Ray, so Ray never starts it again by itself. (A loop that hangs while the process runs is the
watchdog's business.)
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from actors.logs import log_event
from actors.process_id import ProcessId

__all__ = ["LeaseRenewal", "PartitionLeases", "boot_s"]

#: How often leases are looked at, in parts of their length.
_LOOKS_PER_LEASE = 6


def boot_s() -> float:
    """Seconds since the machine started, those in which it was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


@dataclass
class _Lease:
    seen_s: float
    process: ProcessId | None = None


class PartitionLeases:
    """The coordinator's side. Belongs to its event loop; `end` has a partition's process killed and started again."""

    def __init__(
        self,
        lease_ms: int,
        end: Callable[[int, ProcessId | None], Awaitable[None]],
        *,
        now_s: Callable[[], float] = boot_s,
    ) -> None:
        self._lease_s = lease_ms / 1_000
        self._end = end
        self._now_s = now_s
        self._leases: dict[int, _Lease] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self._looked_s = now_s()
        self.ended = 0

    def expect(self, partitions: Iterable[int]) -> None:
        """These partitions have a lease's time to say that they run."""
        for partition in partitions:
            self._leases.setdefault(partition, _Lease(self._now_s()))

    def renew(self, partition: int, process: ProcessId) -> None:
        """The partition's process runs."""
        self._leases[partition] = _Lease(self._now_s(), process)

    def forget(self, partition: int) -> None:
        """The partition has been ended on purpose."""
        self._leases.pop(partition, None)

    def silent_s(self) -> dict[int, float]:
        """How long each partition has said nothing, in seconds."""
        now_s = self._now_s()
        return {partition: now_s - lease.seen_s for partition, lease in self._leases.items()}

    def start(self) -> None:
        """Begin to look at the leases."""
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep())

    def stop(self) -> None:
        """Look no more."""
        if self._sweeping is not None:
            self._sweeping.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _LOOKS_PER_LEASE)
            await self.look()

    async def look(self) -> None:
        """End what has been silent for longer than its lease. Time in which the coordinator itself did not run does
        not count: nobody could be heard then."""
        now_s = self._now_s()
        gap_s = now_s - self._looked_s - 2 * self._lease_s / _LOOKS_PER_LEASE
        self._looked_s = now_s
        if gap_s > 0:
            for lease in self._leases.values():
                lease.seen_s += gap_s
        for partition, silent_s in self.silent_s().items():
            if silent_s > self._lease_s:
                await self._end_silent(partition, silent_s)

    async def _end_silent(self, partition: int, silent_s: float) -> None:
        lease = self._leases[partition]
        log_event(
            logging.ERROR,
            "partition_silent",
            f"Partition {partition} has been silent for {silent_s:.1f} s: its process is ended and started again.",
            partition=partition,
            pid=None if lease.process is None else lease.process.pid,
        )
        self.ended += 1
        try:
            await self._end(partition, lease.process)
        except Exception as error:  # whatever it is: the sweep goes on, or no other failure would be found any more
            log_event(logging.ERROR, "end_failed", f"Partition {partition} could not be ended: {error!r}")
        self._leases[partition] = _Lease(self._now_s())


class LeaseRenewal:
    """The partition's side: a thread of its own, so that a busy loop is no sign of a dead process."""

    def __init__(self, name: str, renew_ms: int, renew: Callable[[], None]) -> None:
        """What `renew` raises, when the coordinator does not answer, changes nothing here."""
        self._renew_s = renew_ms / 1_000
        self._renew = renew
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mainspring-lease-{name}", daemon=True)

    def start(self) -> None:
        """Renew now and from then on."""
        self._thread.start()

    def stop(self) -> None:
        """Renew no more; does not wait for a renewal that is under way."""
        self._stopped.set()

    def _run(self) -> None:
        silent = False
        while True:
            try:
                self._renew()
                silent = False
            except Exception as error:  # whatever it is: without renewals a sound process would be killed
                if not silent:
                    silent = True
                    log_event(logging.INFO, "lease_not_renewed", f"The lease could not be renewed: {error!r}")
            if self._stopped.wait(self._renew_s):
                return
