"""Copies of a whole data directory at rest: every file at the same moment, so that calls between objects agree."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from drivers.errors import DataMissing, SnapshotRefused
from drivers.files import COORDINATOR, FileLock, fsync_directory, store_files

__all__ = ["restore", "snapshot"]

#: What says that a directory is a cluster's, written last so that a copy that was cut short is none.
_CLUSTER_FILE = "cluster.json"
#: The same in a copy of what another node of the cluster has: partitions without the coordinator and its file.
_PART_FILE = "cluster.part"
_DATABASES = "*.sqlite"
_LOCKS = "*.lock"


def snapshot(data_dir: Path, target: Path) -> int:
    """Copy the data directory of a runtime that is stopped to `target`; how many files were copied.

    In a cluster each node has the directory with its own partitions: a snapshot is one of each node.

    Raises `PartitionBusy` while a process has the data, `DataMissing` where there is none, and `SnapshotRefused` when
    something is at `target` already.
    """
    if not (data_dir / _CLUSTER_FILE).exists() and not any((data_dir / "partitions").glob(f"*/{_DATABASES}")):
        raise DataMissing(f"{data_dir} holds no cluster: give the directory that the runtime was started with")
    if not (data_dir / _CLUSTER_FILE).exists() and any(store_files(data_dir, COORDINATOR).directory.glob(_DATABASES)):
        raise DataMissing(
            f"{data_dir} has the coordinator's files but no {_CLUSTER_FILE}: bring that back from a backup first; "
            "without it the copy would pass as a part of a cluster"
        )
    with _at_rest(data_dir):
        return _copy(data_dir, target, mark_part=True)


def restore(source: Path, data_dir: Path) -> int:
    """Copy a snapshot to a data directory that holds nothing yet; how many files were copied.

    Raises `DataMissing` when `source` is no whole snapshot, and `SnapshotRefused` when `data_dir` has something.
    """
    if not (source / _CLUSTER_FILE).exists() and not (source / _PART_FILE).exists():
        raise DataMissing(
            f"{source} is no snapshot, or one that was cut short: it has neither {_CLUSTER_FILE} nor {_PART_FILE}"
        )
    return _copy(source, data_dir, mark_part=False)


@contextmanager
def _at_rest(data_dir: Path) -> Iterator[None]:
    """Hold every lock of the directory, so that nobody opens it meanwhile."""
    with ExitStack() as held:
        for path in sorted(data_dir.rglob(_LOCKS)):
            lock = FileLock(path)
            lock.acquire(0)
            held.callback(lock.release)
        yield


def _copy(source: Path, target: Path, *, mark_part: bool) -> int:
    if target.exists() and any(target.iterdir()):
        raise SnapshotRefused(f"{target} is not empty; nothing was copied. Give a new directory.")
    copied = 0
    for path in sorted(source.rglob(_DATABASES)):
        _copy_database(path, target / path.relative_to(source))
        copied += 1
    if (source / _CLUSTER_FILE).exists():
        shutil.copyfile(source / _CLUSTER_FILE, target / (_CLUSTER_FILE + ".new"))
        with (target / (_CLUSTER_FILE + ".new")).open("rb") as written:
            os.fsync(written.fileno())
        os.replace(target / (_CLUSTER_FILE + ".new"), target / _CLUSTER_FILE)
        copied += 1
    elif mark_part:
        (target / _PART_FILE).touch()
    fsync_directory(target)
    return copied


def _copy_database(path: Path, target: Path) -> None:
    """By SQLite's own backup, which takes what is still in the log along."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, path.stat().st_mode & 0o777))
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as source:
        with closing(sqlite3.connect(target)) as copy:
            source.backup(copy)
    with target.open("rb") as written:
        os.fsync(written.fileno())
    fsync_directory(target.parent)
