"""A partition's process that stops saying that it runs is ended, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from actors.errors import MainspringError
from actors.node import node_identity
from actors.partition_leases import LeaseRenewal, PartitionLeases
from actors.process_id import ProcessId

LEASE_MS = 30_000
PROCESS = ProcessId("n", 7, 1)


class Bench:
    """Leases on a clock of their own; what was ended."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.ended: list[tuple[int, ProcessId | None]] = []
        self.error: Exception | None = None
        self.leases = PartitionLeases(LEASE_MS, self._end, now_s=lambda: self.now_s)

    async def _end(self, partition: int, process: ProcessId | None) -> None:
        self.ended.append((partition, process))
        if self.error is not None:
            raise self.error

    async def after(self, seconds: float, step: float = 5.0) -> None:
        """Look every few seconds, as the coordinator does."""
        until = self.now_s + seconds
        while self.now_s < until:
            self.now_s = min(until, self.now_s + step)
            await self.leases.look()


async def test_a_partition_that_renews_is_left_alone() -> None:
    bench = Bench()
    for _ in range(20):
        bench.leases.renew(0, PROCESS)
        await bench.after(10)
    assert bench.ended == []


async def test_a_silent_partition_is_ended_once_its_lease_is_over_and_gets_another_one() -> None:
    bench = Bench()
    bench.leases.renew(0, PROCESS)
    bench.leases.renew(1, PROCESS)
    await bench.after(30)
    assert bench.ended == []
    bench.leases.renew(1, PROCESS)
    await bench.after(5)
    assert bench.ended == [(0, PROCESS)]
    await bench.after(20)
    assert bench.ended == [(0, PROCESS)], "the next process has a whole lease's time"
    await bench.after(20)
    assert bench.ended[-1] == (0, None), "and when it never comes, Ray is asked to end the actor"


async def test_a_partition_that_never_came_is_ended_too() -> None:
    bench = Bench()
    bench.leases.expect([3])
    await bench.after(35)
    assert bench.ended == [(3, None)]


async def test_time_in_which_the_coordinator_did_not_run_does_not_count() -> None:
    bench = Bench()
    bench.leases.renew(0, PROCESS)
    await bench.after(10)
    bench.now_s += 500  # stopped, or suspended
    await bench.leases.look()
    assert bench.ended == []
    await bench.after(35)
    assert bench.ended == [(0, PROCESS)]


@pytest.mark.parametrize("error", [MainspringError("Ray does not answer"), RuntimeError("nobody expects this")])
async def test_what_was_ended_on_purpose_is_not_missed_and_a_failure_to_end_is_tried_again(error: Exception) -> None:
    bench = Bench()
    bench.error = error
    bench.leases.renew(0, PROCESS)
    bench.leases.renew(1, PROCESS)
    bench.leases.forget(1)
    await bench.after(70)
    assert [partition for partition, _ in bench.ended] == [0, 0]


def test_only_the_very_process_that_was_meant_is_killed() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        stat = open(f"/proc/{child.pid}/stat").read()  # noqa: SIM115
        started = int(stat.rpartition(")")[2].split()[19])
        os.kill(child.pid, signal.SIGSTOP)
        assert not ProcessId("elsewhere", child.pid, started).kill()
        assert not ProcessId(node_identity(), child.pid, started + 1).kill()
        assert child.poll() is None
        assert ProcessId(node_identity(), child.pid, started).kill()
        assert child.wait(30) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()


def test_a_process_knows_itself() -> None:
    own = ProcessId.own()
    assert (own.node, own.pid) == (node_identity(), os.getpid())
    assert own.started > 0


@pytest.mark.parametrize("error", [None, MainspringError("nobody there"), RuntimeError("nobody expects this")])
def test_the_renewal_goes_on_whether_or_not_it_is_heard(error: Exception | None) -> None:
    renewed = threading.Semaphore(0)

    def renew() -> None:
        renewed.release()
        if error is not None:
            raise error

    renewal = LeaseRenewal("test", 10, renew)
    renewal.start()
    for _ in range(3):
        assert renewed.acquire(timeout=30)
    renewal.stop()
