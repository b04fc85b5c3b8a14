"""Files and the rules that make two owners of one partition impossible."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from drivers.errors import PartitionBusy, UnsupportedFilesystem

__all__ = [
    "COORDINATOR",
    "PARTITION_FILE",
    "FileLock",
    "StoreFiles",
    "check_filesystem",
    "fsync_directory",
    "make_directory",
    "partition_directory",
    "store_files",
]

#: The number of the partition that is the coordinator's own: beside those that hold objects, which count from 0.
COORDINATOR = -1
PARTITION_FILE = "partition.sqlite"

#: How often a waiting opener looks whether the holder is gone.
_LOCK_POLL_S = 0.05
#: File systems shared between machines: SQLite's WAL needs shared memory of one machine, and their locks lie.
_NETWORK_FILESYSTEMS = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "ceph",
        "glusterfs",
        "lustre",
        "fuse.sshfs",
        "fuse.s3fs",
    }
    | {"fuse.gcsfuse", "beegfs", "gpfs", "fuse.glusterfs", "fuse.juicefs"}
)


def partition_directory(data_dir: Path | str, partition: int) -> Path:
    """Where a partition's files are."""
    return Path(data_dir) / "partitions" / f"{partition:04d}"


@dataclass(frozen=True)
class StoreFiles:
    """A partition's database, and the lock of its one owner."""

    database: Path
    lock: Path

    @property
    def directory(self) -> Path:
        return self.database.parent


def store_files(data_dir: Path | str, partition: int) -> StoreFiles:
    """The files of a partition, or of the coordinator's engine."""
    if partition == COORDINATOR:
        directory = Path(data_dir) / "coordinator"
        return StoreFiles(directory / "engine.sqlite", directory / "engine.lock")
    directory = partition_directory(data_dir, partition)
    return StoreFiles(directory / PARTITION_FILE, directory / "partition.lock")


def fsync_directory(path: Path) -> None:
    """Make the directory's entries durable: a new file exists after a power failure only then."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_directory(path: Path) -> None:
    """Make the directory and those above it that are missing, durably; no error when it is there."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        fsync_directory(made.parent)


def filesystem_type(path: Path, mounts: str = "/proc/self/mounts") -> str | None:
    """The type of the file system that holds `path`, or None where the system does not tell."""
    try:
        lines = Path(mounts).read_text().splitlines()
    except OSError:
        return None
    target = str(path.resolve())
    best, kind = "", None
    for line in lines:
        fields = line.split()
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def check_filesystem(path: Path | str, mounts: str = "/proc/self/mounts") -> None:
    """Raise `UnsupportedFilesystem` when the directory is shared between machines."""
    kind = filesystem_type(Path(path), mounts)
    if kind in _NETWORK_FILESYSTEMS:
        raise UnsupportedFilesystem(
            f"{path} is on a {kind} file system, where SQLite's WAL loses data. Use the node's own disk."
        )


class FileLock:
    """An exclusive POSIX record lock on one file, held by this process until `release` or its death.

    lockf and not flock: a flock is kept alive by forked children. The file is opened once per process, since
    closing any descriptor of it would drop the lock.
    """

    _held: dict[str, FileLock] = {}

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._descriptor: int | None = None

    def acquire(self, wait_ms: int = 0) -> None:
        """Take the lock, waiting up to `wait_ms`. Raises `PartitionBusy`, naming the holder."""
        name = str(self.path.resolve())
        # Record locks do not exclude openers in one process; this does, also for two threads at the same moment.
        if name in self._held or self._held.setdefault(name, self) is not self:
            raise PartitionBusy(f"{self.path} is already open in this process (pid {os.getpid()}). Stop it first.")
        try:
            self._descriptor = self._lock(wait_ms)
        except BaseException:
            del self._held[name]
            raise

    def _lock(self, wait_ms: int) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + wait_ms / 1_000
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    os.close(descriptor)
                    raise
                if time.monotonic() >= deadline:
                    holder = os.read(descriptor, 32).decode("ascii", "replace").strip() or "unknown"
                    os.close(descriptor)
                    raise PartitionBusy(
                        f"{self.path} is held by another process (pid {holder}). Stop that process, or wait until "
                        "it ends; two owners of one partition are never allowed."
                    ) from error
            time.sleep(_LOCK_POLL_S)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return descriptor

    def release(self) -> None:
        """Give the lock up; no error when it is not held."""
        if self._descriptor is None:
            return
        self._held.pop(str(self.path.resolve()), None)
        os.close(self._descriptor)
        self._descriptor = None
