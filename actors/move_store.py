"""Moves in the coordinator's file, a row each: its step from `copying` to `committed` or `aborted` is the decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlite_utils import Database

from actors.errors import MoveRefused

__all__ = ["ABORTED", "COMMITTED", "COPYING", "MOVE_TABLES", "MoveRecord", "MoveStore"]

COPYING = "copying"
COMMITTED = "committed"
ABORTED = "aborted"

MOVE_TABLES = (
    """
    CREATE TABLE moves (
        move_id TEXT PRIMARY KEY,
        source INTEGER NOT NULL,
        target INTEGER NOT NULL,
        state TEXT NOT NULL,
        version INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    # a slot is in one move at a time
    """
    CREATE TABLE moving_slots (
        slot INTEGER PRIMARY KEY,
        move_id TEXT NOT NULL REFERENCES moves (move_id)
    )
    """,
)

_INSERT_MOVE = "INSERT INTO moves (move_id, source, target, state, version) VALUES (?, ?, ?, 'copying', 0)"
_INSERT_SLOT = "INSERT INTO moving_slots (slot, move_id) VALUES (?, ?)"
_OWNER = "SELECT partition FROM slots WHERE slot = ?"
_MOVE_OF_SLOT = "SELECT move_id FROM moving_slots WHERE slot = ?"
_LIST_MOVES = "SELECT move_id, source, target, state, version FROM moves ORDER BY move_id"
_LIST_SLOTS = "SELECT slot FROM moving_slots WHERE move_id = ? ORDER BY slot"
_DECIDE = "UPDATE moves SET state = ?, version = ? WHERE move_id = ? AND state = 'copying'"
_GIVE_SLOTS = (
    "UPDATE slots SET partition = (SELECT target FROM moves WHERE move_id = ?), version = ?"
    " WHERE slot IN (SELECT slot FROM moving_slots WHERE move_id = ?)"
)
_RAISE_MAP = "UPDATE cluster SET map_version = map_version + 1 WHERE id = 1"
_READ_MAP_VERSION = "SELECT map_version FROM cluster WHERE id = 1"
_DELETE_SLOTS = "DELETE FROM moving_slots WHERE move_id = ?"
_DELETE_MOVE = "DELETE FROM moves WHERE move_id = ?"


@dataclass(frozen=True)
class MoveRecord:
    """A move that has not come to its end. `version` is the map's since it was committed, 0 before; `slots` is empty
    once they were released."""

    move_id: str
    source: int
    target: int
    slots: tuple[int, ...]
    state: str
    version: int


class MoveStore:
    """The moves of one coordinator. Every change is durable when the method returns."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def begin(self, move_id: str, source: int, target: int, slots: Sequence[int]) -> None:
        """Record a move that copies from now on. Raises `MoveRefused` when a slot is not the source's or is moving."""
        with self._transaction():
            self._db.execute(_INSERT_MOVE, (move_id, source, target))
            for slot in slots:
                (owner,) = self._db.execute(_OWNER, (slot,)).fetchone()
                if owner != source or self._db.execute(_MOVE_OF_SLOT, (slot,)).fetchone() is not None:
                    raise MoveRefused(f"slot {slot} can't leave partition {source}: it is not there, or it is moving")
                self._db.execute(_INSERT_SLOT, (slot, move_id))

    def commit(self, move_id: str) -> int | None:
        """Give the slots to the target, unless the move was aborted: the new version of the map, or None."""
        with self._transaction():
            (version,) = self._db.execute(_READ_MAP_VERSION).fetchone()
            if self._db.execute(_DECIDE, (COMMITTED, version + 1, move_id)).rowcount != 1:
                return None
            self._db.execute(_RAISE_MAP)
            self._db.execute(_GIVE_SLOTS, (move_id, version + 1, move_id))
        return int(version) + 1

    def abort(self, move_id: str) -> bool:
        """Call the move off, unless it was committed; whether it is aborted now."""
        with self._transaction():
            return bool(self._db.execute(_DECIDE, (ABORTED, 0, move_id)).rowcount == 1)

    def release(self, move_id: str) -> None:
        """The source of an aborted move runs its slots again: they may be in another move."""
        with self._transaction():
            self._db.execute(_DELETE_SLOTS, (move_id,))

    def end(self, move_id: str) -> None:
        """Both sides have done what was decided."""
        with self._transaction():
            self._db.execute(_DELETE_SLOTS, (move_id,))
            self._db.execute(_DELETE_MOVE, (move_id,))

    def all(self) -> list[MoveRecord]:
        """The moves that have not come to their end."""
        return [
            MoveRecord(move_id, source, target, self._slots(move_id), state, version)
            for move_id, source, target, state, version in self._db.execute(_LIST_MOVES).fetchall()
        ]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.conn.in_transaction:  # a full disk may have rolled back already
                self._db.execute("ROLLBACK")
            raise

    def _slots(self, move_id: str) -> tuple[int, ...]:
        return tuple(slot for (slot,) in self._db.execute(_LIST_SLOTS, (move_id,)).fetchall())
