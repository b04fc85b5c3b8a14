"""The data directory of a runtime: checked, found, made, and deleted."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from actors.cluster_file import LOCAL_CLUSTER, OWN_ENTRIES, ClusterFile
from actors.coordinator_store import balanced_ranges
from actors.errors import InvalidOption, WrongPartition
from drivers.files import FileLock, check_filesystem

__all__ = [
    "DEFAULT_PARTITIONS",
    "delete_data",
    "find_cluster",
    "open_cluster",
    "prepare_directory",
    "require_cluster",
]

#: Partitions of a new cluster: about one per core of a small machine; idle ones cost 45 MiB each.
DEFAULT_PARTITIONS = 4
#: How long deleting data waits for processes that have been killed to be gone.
_GONE_WAIT_MS = 10_000


def prepare_directory(data_dir: str | Path) -> Path:
    """The directory, made if it was not there. Raises `InvalidOption`, `UnsupportedFilesystem`."""
    directory = Path(data_dir).expanduser().resolve()
    if directory.exists() and not directory.is_dir():
        raise InvalidOption(f"data_dir = {str(data_dir)!r}: is a file, not a directory")
    directory.mkdir(parents=True, exist_ok=True)
    check_filesystem(directory)
    return directory


def find_cluster(directory: Path, partitions: int | None) -> ClusterFile | None:
    """The cluster of the directory, if there is one, and the error when it can't be started with so many partitions.

    Raises `InvalidOption`, `WrongPartition`, `DataMissing`, `SchemaTooNew`.
    """
    cluster = ClusterFile.read(directory)
    if cluster is None:
        balanced_ranges(_wanted(partitions))  # refuses an impossible number
        return None
    if cluster.cluster_id == LOCAL_CLUSTER:
        raise WrongPartition(f"{directory} belongs to a LocalRuntime: open it with that, or give another directory")
    if partitions is not None and partitions != cluster.partitions:
        raise InvalidOption(
            f"{directory} has {cluster.partitions} partitions, not {partitions}. Leave `partitions` out to take what "
            "is there; `runtime.scale()` changes the number."
        )
    return cluster


def open_cluster(directory: Path, partitions: int | None) -> tuple[ClusterFile, bool]:
    """The cluster of the directory, and whether it was made just now. Raises as `find_cluster` does."""
    is_new = False
    cluster = find_cluster(directory, partitions)
    if cluster is None:
        is_new = ClusterFile(uuid.uuid4().hex, _wanted(partitions)).create(directory)
        cluster = find_cluster(directory, partitions)
        assert cluster is not None
    return cluster, is_new


def _wanted(partitions: int | None) -> int:
    return DEFAULT_PARTITIONS if partitions is None else partitions


def require_cluster(directory: Path, cluster_id: str) -> None:
    """Raises `WrongPartition` unless the directory holds this cluster."""
    found = ClusterFile.read(directory)
    if found is None or found.cluster_id != cluster_id:
        raise WrongPartition(f"{directory} does not hold cluster {cluster_id}; nothing was deleted.")


def delete_data(directory: Path) -> None:
    """Delete what is ours, and nothing else. Raises `PartitionBusy` while a process has any of the files."""
    locks = [FileLock(path) for path in sorted(directory.rglob("*.lock"))]
    held: list[FileLock] = []
    try:
        for lock in locks:
            lock.acquire(_GONE_WAIT_MS)
            held.append(lock)
        for name in OWN_ENTRIES:
            path = directory / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    finally:
        for lock in held:
            lock.release()
    if not any(directory.iterdir()):
        directory.rmdir()
