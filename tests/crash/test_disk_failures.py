"""Disks that are full, and disks whose sync fails: what a partition may say about a commit then."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivers.errors import CommitFailed
from drivers.executor import InlineExecutor
from drivers.group_commit import GroupCommitter
from drivers.sqlite_store import SqliteStore
from drivers.tables import KV
from drivers.write_set import WriteSet

CLUSTER = "test-cluster"
MIB = 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few MiB of its own."""
    point = tmp_path / "disk"
    point.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(point)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no small file system can be mounted here: {made.stderr.strip()}")
    yield point
    subprocess.run(["umount", "-l", str(point)], check=True)


def create(path: Path) -> SqliteStore:
    SqliteStore.create(path, CLUSTER, 0)
    return reopen(path)


def reopen(path: Path) -> SqliteStore:
    return SqliteStore.open(path, cluster_id=CLUSTER, partition_id=0, busy_timeout_ms=0)


class Writer:
    """Commits one value at a time and keeps what was said about each."""

    def __init__(self, store: SqliteStore) -> None:
        self.store = store
        self.fatal: list[BaseException] = []
        self.acknowledged: list[int] = []
        self.failed: list[int] = []
        self.committer = GroupCommitter(store, InlineExecutor(), wall_ms=lambda: 0, on_fatal=self.fatal.append)
        self.committer.start()

    async def put(self, oid: int, value: bytes) -> None:
        write_set = WriteSet([(KV, (oid, "k"), (value,))])
        write_set.waiters.append(lambda error: (self.failed if error else self.acknowledged).append(oid))
        self.committer.submit(write_set)
        await asyncio.wait_for(self.committer.drain(), 10)
        assert write_set.error is None or type(write_set.error) is CommitFailed

    async def fill(self, limit: int) -> None:
        """Put values until one fails."""
        for oid in range(1, limit):
            await self.put(oid, bytes([oid]) * 100_000)
            if self.failed:
                return
        raise AssertionError("the disk did not get full")


def stored(store: SqliteStore) -> list[int]:
    return [oid for oid, *_ in store.scan(KV)]


async def test_on_a_full_disk_a_failed_commit_is_not_applied_and_room_makes_the_next_one_work(small_disk: Path) -> None:
    ballast, more = small_disk / "ballast", small_disk / "more"
    ballast.write_bytes(bytes(MIB))
    more.write_bytes(bytes(MIB))
    path = small_disk / "partition.sqlite"
    writer = Writer(create(path))
    await writer.fill(60)
    assert writer.fatal == []
    assert stored(writer.store) == writer.acknowledged
    await writer.put(100, b"x" * 400_000)
    assert 100 in writer.failed, "it stays full"
    ballast.unlink()
    await writer.put(101, b"x" * 100_000)
    assert writer.acknowledged[-1] == 101
    assert writer.fatal == []
    writer.committer.abandon()
    writer.store.close()
    more.unlink()  # a new owner writes its epoch before anything else
    after = reopen(path)
    assert stored(after) == writer.acknowledged
    after.close()


async def test_at_the_size_limit_of_the_file_a_failed_commit_is_not_applied_and_smaller_ones_work(
    tmp_path: Path,
) -> None:
    path = tmp_path / "partition.sqlite"

    class Limited(sqlite3.Connection):
        def execute(self, statement: str, *parameters: Any) -> sqlite3.Cursor:
            if statement.startswith("PRAGMA cache_size"):
                super().execute("PRAGMA max_page_count = 400")
            return super().execute(statement, *parameters)

    SqliteStore.create(path, CLUSTER, 0)
    writer = Writer(SqliteStore.open(path, cluster_id=CLUSTER, partition_id=0, writer_factory=Limited))
    await writer.fill(60)
    await writer.put(101, b"small")
    assert writer.acknowledged[-1] == 101
    assert writer.fatal == []
    assert stored(writer.store) == writer.acknowledged
    writer.committer.abandon()
    writer.store.close()


# --- a sync that fails ------------------------------------------------------------------------------

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int must_fail(int descriptor) {
    const char *control = getenv("FAIL_WAL_SYNC");
    char link[64], path[4096];
    if (control == NULL || access(control, F_OK) != 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 4) return 0;
    path[length] = 0;
    return strcmp(path + length - 4, "-wal") == 0;
}

int fsync(int descriptor) {
    if (must_fail(descriptor)) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(descriptor);
}

int fdatasync(int descriptor) {
    if (must_fail(descriptor)) { errno = EIO; return -1; }
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(descriptor);
}
"""

# Commits "good", then "doubtful" with a sync that fails; says what it was told, and waits to be killed.
CHILD = """
import asyncio, sys
from pathlib import Path
from drivers.executor import ThreadExecutor
from drivers.group_commit import GroupCommitter
from drivers.sqlite_store import SqliteStore
from drivers.write_set import WriteSet

async def main(path, control):
    loop = asyncio.get_running_loop()
    store = SqliteStore.open(path, cluster_id="test-cluster", partition_id=0)
    fatal = loop.create_future()
    committer = GroupCommitter(
        store, ThreadExecutor("commit", loop), wall_ms=lambda: 0, on_fatal=fatal.set_result
    )
    committer.start()
    def submit(name):
        write_set = WriteSet([("kv", (1, name), (b"v",))])
        write_set.waiters.append(lambda error: print("told", name, error, flush=True))
        committer.submit(write_set)
    submit("good")
    await committer.drain()
    control.touch()
    submit("doubtful")
    print("fatal", type(await fatal).__name__, flush=True)
    submit("late")
    for _ in range(10):
        await asyncio.sleep(0)
    print("ready", flush=True)
    await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.fixture
def failing_sync(tmp_path: Path) -> Path:
    """A library that makes the sync of a write-ahead log fail while the file in FAIL_WAL_SYNC exists."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("a C compiler and Linux are needed to make a sync fail")
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def test_a_commit_whose_sync_failed_is_answered_to_nobody_and_is_whole_or_absent_after_the_crash(
    failing_sync: Path, tmp_path: Path
) -> None:
    path, control = tmp_path / "partition.sqlite", tmp_path / "control"
    SqliteStore.create(path, CLUSTER, 0)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "LD_PRELOAD": str(failing_sync), "FAIL_WAL_SYNC": str(control), "PYTHONPATH": root}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(control)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    said = []
    for line in child.stdout:
        said.append(line.strip())
        if said[-1] == "ready":
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert said == ["told good None", "fatal CommitOutcomeUnknown", "ready"]
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    store = reopen(path)
    found = [name for _, name, _ in store.scan(KV)]
    assert found in (["good"], ["doubtful", "good"]), "nobody was told, so both are honest"
    assert store.commit_seq in (1, 2)
    assert (store.commit_seq == 2) == ("doubtful" in found), "the commit is there whole or not at all"
    store.close()
