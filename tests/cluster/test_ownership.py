"""One owner of a partition at a time: hung processes are replaced, second actors are refused."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest
import ray

from actors.errors import PartitionBusy
from actors.launch import choose_placement, find_runtime, start_partitions
from actors.ray_calls import RayCalls, partition_actor, ray_namespace
from actors.runtime import Runtime
from actors.settings import Settings
from drivers.files import partition_directory
from tests.cluster.apps import Ledger
from tests.support.killing import is_alive, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]

SHORT = Settings(partition_lease_ms=3_000, partition_renew_ms=500, lock_wait_ms=500)


def test_a_stopped_process_is_found_and_replaced_and_its_calls_go_on(tmp_path: Path) -> None:
    with Runtime.start(tmp_path / "data", 1, name="stopped", settings=SHORT) as runtime:
        ledger = runtime.namespace(Ledger).get("a")
        ledger.apply.sync("before")
        pid = runtime.partition_pids()[0]
        os.kill(pid, signal.SIGSTOP)
        began = time.monotonic()
        assert ledger.apply.sync("during")[0] == 1
        assert time.monotonic() - began > 1, "it was stopped, so somebody else has answered"
        assert not is_alive(pid)
        assert ledger.applied.sync() == {"before": 1, "during": 1}
        assert runtime.partition_pids()[0] != pid


def test_a_second_actor_of_a_partition_is_refused_and_the_first_one_goes_on(tmp_path: Path) -> None:
    with Runtime.start(tmp_path / "data", 1, name="twice", settings=SHORT) as runtime:
        ledger = runtime.namespace(Ledger).get("a")
        ledger.apply.sync("x")
        description = find_runtime(RayCalls(ray_namespace("twice")), "twice")
        by_hand = RayCalls("by-hand")
        start_partitions(by_hand, "twice", description, "auto", choose_placement(), [0])
        with pytest.raises(PartitionBusy):
            by_hand.call(partition_actor(0), "endpoint", timeout_s=30)
        assert ledger.apply.sync("y")[0] == 1
        assert ledger.total.sync() == 2
        ray.kill(by_hand.handle(partition_actor(0)), no_restart=True)
        path = partition_directory(str(tmp_path / "data"), 0) / "partition.sqlite"
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        wait_for(lambda: runtime.partition_pids().get(0), "the partition")
