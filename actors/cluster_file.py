"""`cluster.json`: says that a data directory holds a cluster, which one, and whether its creation was completed."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from actors.errors import DataMissing, SchemaTooNew, WrongPartition
from drivers.files import fsync_directory

__all__ = ["FILE_NAME", "LOCAL_CLUSTER", "OWN_ENTRIES", "ClusterFile"]

FILE_NAME = "cluster.json"
#: Everything that Mainspring makes in a data directory, the file itself last: while it is there, so is the cluster.
OWN_ENTRIES = ("partitions", "coordinator", FILE_NAME)
#: The cluster id of every directory that a `LocalRuntime` has made.
LOCAL_CLUSTER = "local"
_FORMAT = 1


@dataclass(frozen=True)
class ClusterFile:
    """The contents. While `ready` is False the coordinator may still create its own file; afterwards never again. The
    same for its engine's file and `engine`."""

    cluster_id: str
    partitions: int
    ready: bool = False
    engine: bool = False
    format: int = _FORMAT

    @classmethod
    def read(cls, data_dir: Path) -> ClusterFile | None:
        """What the directory says, or None when it has no such file.

        Raises `DataMissing` when the file is gone but data is there, `SchemaTooNew`, and `WrongPartition` for a file
        that is not ours.
        """
        path = data_dir / FILE_NAME
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            _refuse_orphans(data_dir)
            return None
        try:
            fields = json.loads(text)
            number = int(fields["format"])
            if number <= _FORMAT:
                return cls(
                    str(fields["cluster_id"]),
                    int(fields["partitions"]),
                    bool(fields["ready"]),
                    bool(fields.get("engine", False)),  # directories of before there were engines lack it
                    number,
                )
        except (ValueError, KeyError, TypeError) as error:
            raise WrongPartition(f"{path} is not a Mainspring cluster file: {error!r}") from error
        raise SchemaTooNew(f"{path} has format {number}, this Mainspring knows up to {_FORMAT}. Upgrade Mainspring.")

    def create(self, data_dir: Path) -> bool:
        """Write the file durably, unless there is one: False when another process was first."""
        draft = self._write_draft(data_dir)
        try:
            # A link appears whole and only where nothing is: as exclusive as O_EXCL, and never half written.
            os.link(draft, data_dir / FILE_NAME)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        fsync_directory(data_dir)
        fsync_directory(data_dir.parent)
        return True

    def mark_ready(self, data_dir: Path) -> None:
        """Record durably that the coordinator's file exists."""
        if self.ready:
            return
        os.replace(replace(self, ready=True)._write_draft(data_dir), data_dir / FILE_NAME)
        fsync_directory(data_dir)

    def resize(self, data_dir: Path, partitions: int) -> None:
        """Record durably how many partitions there are now."""
        if self.partitions != partitions:
            os.replace(replace(self, partitions=partitions)._write_draft(data_dir), data_dir / FILE_NAME)
            fsync_directory(data_dir)

    def mark_engine(self, data_dir: Path) -> None:
        """Record durably that the file of the coordinator's engine exists."""
        if self.engine:
            return
        os.replace(replace(self, engine=True)._write_draft(data_dir), data_dir / FILE_NAME)
        fsync_directory(data_dir)

    def _write_draft(self, data_dir: Path) -> Path:
        descriptor, name = tempfile.mkstemp(prefix=f".{FILE_NAME}.", dir=data_dir)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        return Path(name)


def _refuse_orphans(data_dir: Path) -> None:
    left = [name for name in OWN_ENTRIES if (data_dir / name).exists()]
    if left:
        raise DataMissing(
            f"{data_dir} has {' and '.join(left)} but no {FILE_NAME}. Bring it back from a backup; "
            "a new cluster is never made over existing data."
        )
