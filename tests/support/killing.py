"""Kills processes for real, and waits for what can be seen afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from drivers.files import partition_directory

__all__ = ["ClaimRow", "claims", "is_alive", "kill_9", "timer_crashes", "wait_for"]

T = TypeVar("T")

#: How long anything may take that a test waits for: only a bound, never waited out.
PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.01


def wait_for(look: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """The first true answer of `look`."""
    deadline = time.monotonic() + patience_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {patience_s:g} s in vain for {what}"
        time.sleep(_LOOK_EVERY_S)
    return found


def kill_9(pid: int) -> None:
    """SIGKILL, and wait until the process is gone."""
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid), f"the end of process {pid}")


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not reaped yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


@dataclass(frozen=True)
class ClaimRow:
    """A claim on disk: `alone` when its work has the process to itself."""

    kind: str
    key: str
    name: str
    alone: bool
    crashes: int


def claims(data_dir: Path, partition: int) -> list[ClaimRow]:
    """The claims in a partition's file, which may be open elsewhere."""
    rows = _query(data_dir, partition, "SELECT kind, key, name, alone, crashes FROM claims")
    return [
        ClaimRow(str(kind), str(key), str(name), bool(alone), int(crashes)) for kind, key, name, alone, crashes in rows
    ]


def timer_crashes(data_dir: Path, partition: int, name: str) -> tuple[int, int] | None:
    """(attempt, crashes) of a timer as they are on disk; None when it is not set."""
    rows = _query(data_dir, partition, "SELECT attempt, crashes FROM directory WHERE name = ?", name)
    return (int(rows[0][0]), int(rows[0][1])) if rows else None


def _query(data_dir: Path, partition: int, sql: str, *values: str) -> list[tuple[int | str, ...]]:
    path = partition_directory(data_dir, partition) / "partition.sqlite"
    with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
        return list(db.execute(sql, values))
