"""Copies of data at rest: whole ones, and those of one node of several."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from drivers.errors import DataMissing, PartitionBusy, SnapshotRefused
from drivers.files import FileLock
from drivers.snapshot import restore, snapshot


def make_partition(data_dir: Path, number: int) -> Path:
    path = data_dir / "partitions" / f"{number:04d}" / "partition.sqlite"
    path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE t (number INTEGER)")
        db.execute("INSERT INTO t VALUES (?)", (number,))
        db.commit()
    return path


def number_in(data_dir: Path, partition: int) -> int:
    with closing(sqlite3.connect(data_dir / "partitions" / f"{partition:04d}" / "partition.sqlite")) as db:
        (number,) = db.execute("SELECT number FROM t").fetchone()
    return int(number)


def test_each_node_of_a_cluster_is_copied_and_brought_back_for_itself(tmp_path: Path) -> None:
    """The node with the coordinator has `cluster.json`, the others have only partitions."""
    for node, number in (("first", 0), ("second", 1)):
        make_partition(tmp_path / node, number)
    (tmp_path / "first" / "cluster.json").write_text("{}")
    for node, number in (("first", 0), ("second", 1)):
        snapshot(tmp_path / node, tmp_path / f"copy-{node}")
        restore(tmp_path / f"copy-{node}", tmp_path / f"back-{node}")
        assert number_in(tmp_path / f"back-{node}", number) == number
    assert (tmp_path / "back-first" / "cluster.json").read_text() == "{}"
    assert [path.name for path in (tmp_path / "back-second").iterdir()] == ["partitions"]


def test_a_copy_that_was_cut_short_is_no_snapshot(tmp_path: Path) -> None:
    make_partition(tmp_path / "data", 1)
    snapshot(tmp_path / "data", tmp_path / "copy")
    (tmp_path / "copy" / "cluster.part").unlink()  # it is written last
    with pytest.raises(DataMissing, match="cut short"):
        restore(tmp_path / "copy", tmp_path / "back")


def test_what_is_in_use_empty_or_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataMissing):
        snapshot(tmp_path / "empty", tmp_path / "copy")
    path = make_partition(tmp_path / "data", 1)
    lock = FileLock(path.with_name("partition.lock"))
    lock.acquire(0)
    with pytest.raises(PartitionBusy):
        snapshot(tmp_path / "data", tmp_path / "copy")
    lock.release()
    with pytest.raises(SnapshotRefused):
        snapshot(tmp_path / "data", tmp_path / "data")
