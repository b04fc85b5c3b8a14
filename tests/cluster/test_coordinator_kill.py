"""kill -9 of the coordinator: what it keeps for all objects is there again, and who waits for it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import pytest

from actors import QuotaLimit
from actors.errors import CoordinatorUnavailable, LeaseHeld, StaleLease
from actors.runtime import Runtime
from actors.settings import Settings
from drivers.files import COORDINATOR, store_files
from tests.cluster.lease_apps import Uploader, Vault, Worker
from tests.support.killing import kill_9, wait_for
from timers.quotas import QuotaPush, QuotaWindow, Usage

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]

#: A window that does not end while these tests run, nor at any other time soon.
LIMIT = QuotaLimit("360d", operations=1_000, bytes=1_000)


@pytest.fixture(scope="module")
def runtime(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    settings = Settings(quota_rollup_ms=2_000)
    with Runtime.start(tmp_path_factory.mktemp("coordinator"), 2, name="coordinated", settings=settings) as started:
        # first of all: it takes a while until the coordinator is told, and the other tests kill it meanwhile
        for number in range(4):
            started.namespace(Uploader).get(f"u{number}").charge.sync(number + 1, number, LIMIT)
        yield started


def kill_coordinator(runtime: Runtime) -> int:
    """SIGKILL to the coordinator's process; its pid."""
    pid: int = wait_for(lambda: runtime.status().coordinator.engine.pid or 0, "the coordinator's engine")
    kill_9(pid)
    return pid


def leases_on_disk(runtime: Runtime) -> list[str]:
    """The leases in the file of the coordinator's engine, which may be open elsewhere."""
    path = store_files(runtime.data_dir, COORDINATOR).database
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        return [name for (name,) in db.execute("SELECT name FROM leases")]


def test_leases_survive_the_coordinator(runtime: Runtime) -> None:
    workers, vault = runtime.namespace(Worker), runtime.namespace(Vault).get("kept")
    first = workers.get("a").take.sync("kept", "10m")
    pid = kill_coordinator(runtime)
    with pytest.raises(LeaseHeld) as refused:
        workers.get("b").take.sync("kept")  # waits until it is back
    assert (refused.value.holder, refused.value.until_ms) == (("Worker", "a"), first.expires_ms)
    renewed = workers.get("a").renew.sync("kept")
    assert (renewed.epoch, renewed.expires_ms >= first.expires_ms) == (first.epoch, True)
    vault.write.sync("kept", first.epoch, "a")
    workers.get("a").give_back.sync("kept")
    second = workers.get("b").take.sync("kept")
    assert second.epoch > first.epoch
    vault.write.sync("kept", second.epoch, "b")
    with pytest.raises(StaleLease):
        vault.write.sync("kept", first.epoch, "a again")
    assert [lease.holder for lease in runtime.run_sync(runtime.leases)] == [("Worker", "b")]
    assert runtime.status().coordinator.engine.pid != pid


def test_a_lease_that_nobody_renews_is_swept_by_the_coordinator_that_comes_after(runtime: Runtime) -> None:
    workers = runtime.namespace(Worker)
    lease = workers.get("a").take.sync("swept", "7s")
    kill_coordinator(runtime)
    assert "swept" in leases_on_disk(runtime)
    wait_for(lambda: "swept" not in leases_on_disk(runtime), "its end")
    assert workers.get("b").take.sync("swept").epoch > lease.epoch


def test_turns_under_leases_happen_once_while_the_coordinator_is_killed(runtime: Runtime) -> None:
    workers, vault = runtime.namespace(Worker), runtime.namespace(Vault)
    count = 60

    async def run() -> list[Any]:
        calls = [
            asyncio.ensure_future(workers.get(f"w{number}").work(f"n{number}", f"v{number}")) for number in range(count)
        ]
        return list(await asyncio.gather(*calls))

    started = runtime.run_sync(_begin(run))
    for _ in range(2):
        kill_coordinator(runtime)
    epochs = runtime.run_sync(_end(started))
    for number, epoch in enumerate(epochs):
        assert vault.get(f"v{number}").writes.sync() == [(epoch, f"w{number}")]
    assert len(set(epochs)) == count


def test_totals_of_quotas_survive_the_coordinator_and_repeated_pushes_add_nothing(runtime: Runtime) -> None:
    def total() -> tuple[int, int] | None:
        try:
            found = runtime.run_sync(lambda: runtime.quota_total("uploads", LIMIT.window))
        except CoordinatorUnavailable:
            return None
        return found.operations, found.bytes

    wait_for(lambda: total() == (10, 6), "the roll-up", patience_s=90)
    kill_coordinator(runtime)
    assert wait_for(total, "the coordinator") == (10, 6)
    window = QuotaWindow.at("uploads", LIMIT.window_ms, time.time_ns() // 1_000_000)
    push = QuotaPush(window, "one more", Usage(5, 5))
    for _ in range(3):
        kill_coordinator(runtime)
        wait_for(total, "the coordinator")
        told: Usage = runtime.run_sync(lambda: runtime._services().apply_quota(push))
        assert told == Usage(15, 11)
    charge = runtime.namespace(Uploader).get("u0").check.sync(LIMIT)
    assert not charge.metered


def _begin(run: Any) -> Any:
    async def begin() -> list[asyncio.Future[Any]]:
        return [asyncio.ensure_future(run())]  # in a list: the future itself is not awaited

    return begin


def _end(started: list[asyncio.Future[Any]]) -> Any:
    async def end() -> Any:
        return await started[0]

    return end
