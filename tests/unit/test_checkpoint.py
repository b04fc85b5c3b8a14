"""Checkpoints: the log is copied back beside the commits, and cut at its limit."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drivers.checkpoint import Checkpointer
from drivers.executor import InlineExecutor
from drivers.group_commit import GroupCommitter
from drivers.sqlite_store import SqliteStore
from drivers.tables import KV
from drivers.write_set import WriteSet
from tests.support.stores import FilePlace

MIB = 1024 * 1024


@pytest.fixture
def place() -> Iterator[FilePlace]:
    place = FilePlace()
    yield place
    place.remove()


def commit(store: SqliteStore, oid: int, size: int) -> None:
    store.begin()
    store.write([(KV, (oid, "k"), (bytes(size),))])
    store.flush()
    store.commit()


def wait_until(condition: Callable[[], bool]) -> None:
    tick = threading.Event()
    for _ in range(2_000):
        if condition():
            return
        tick.wait(0.005)
    raise AssertionError("it did not happen")


def test_a_long_log_is_copied_back_while_a_transaction_is_open(place: FilePlace) -> None:
    store = place.open()
    before = place.path.stat().st_size
    commit(store, 1, 5 * MIB)
    store.begin()
    assert place.path.stat().st_size == before
    checkpointer = Checkpointer(place.path, interval_ms=1)
    wait_until(lambda: place.path.stat().st_size > 5 * MIB)
    checkpointer.stop()
    assert store.get(KV, (1, "k")) == (bytes(5 * MIB),)
    store.write([(KV, (2, "k"), (b"after",))])
    store.flush()
    store.commit()
    assert store.get(KV, (2, "k")) == (b"after",)
    store.close()


def test_a_checkpoint_that_fails_is_logged_and_the_next_one_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "partition.sqlite"
    path.write_bytes(b"x" * 8_192)
    (tmp_path / "partition.sqlite-wal").write_bytes(bytes(5 * MIB))
    with caplog.at_level(logging.WARNING):
        checkpointer = Checkpointer(path, interval_ms=1)
        wait_until(lambda: caplog.text.count("checkpoint of") >= 2)
        checkpointer.stop()


def test_stopping_ends_the_thread(place: FilePlace) -> None:
    checkpointer = Checkpointer(place.path, interval_ms=60_000)
    checkpointer.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "mainspring-checkpoint"]


async def test_the_committer_cuts_a_log_that_has_reached_its_limit(place: FilePlace) -> None:
    store = place.open()
    committer = GroupCommitter(
        store, InlineExecutor(), wall_ms=lambda: 0, on_fatal=lambda error: None, wal_truncate_bytes=MIB
    )
    committer.start()
    sizes = []
    for oid in range(1, 5):
        committer.submit(WriteSet([(KV, (oid, "k"), (bytes(400_000),))]))
        await asyncio.wait_for(committer.drain(), 5)
        sizes.append(store.wal_bytes())
    assert sizes[0] < sizes[1] < MIB
    assert sizes[2] == 0, "cut once it had passed the limit"
    assert len(store.scan(KV)) == 4
    committer.abandon()
    store.close()
