"""Copies the write-ahead log back into the database, on a thread of its own, so that no commit waits for it."""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path

from drivers import sql

__all__ = ["Checkpointer"]

logger = logging.getLogger("mainspring.checkpoint")

#: Logs shorter than this are left alone: one checkpoint of many pages is cheaper than many of a few.
_WORTH_BYTES = 4 * 1024 * 1024


class Checkpointer:
    """Runs PASSIVE checkpoints (which wait for nobody and make nobody wait) while the log is worth it."""

    def __init__(self, path: Path, interval_ms: int) -> None:
        self._path = path
        self._interval_s = interval_ms / 1_000
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mainspring-checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        wal = Path(f"{self._path}-wal")
        connection: sqlite3.Connection | None = None
        try:
            while not self._stop.wait(self._interval_s):
                try:
                    if not wal.exists() or wal.stat().st_size < _WORTH_BYTES:
                        continue
                    if connection is None:
                        connection = sqlite3.connect(self._path, isolation_level=None, timeout=1.0)
                        # it never writes rows, and checkpoints only when told to
                        connection.execute("PRAGMA wal_autocheckpoint = 0")
                    connection.execute(sql.CHECKPOINT_PASSIVE).fetchall()
                except (sqlite3.Error, OSError) as error:
                    # the log only grows meanwhile; the committer cuts it at its own limit
                    logger.warning(
                        "checkpoint of %s failed: %s", self._path, error, extra={"event": "checkpoint_failed"}
                    )
        finally:
            if connection is not None:
                connection.close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
