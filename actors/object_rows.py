"""Typed rows of the runtime's own that belong to one object: read and changed in its turns, committed with them.

The core decides about them in batches, and so do turns: `apply` takes a batch into the running turn's write set.
Between turns the timer engine changes the same rows; `engine_gate` keeps the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from actors.errors import RowConflict
from timers.batch import Absent, Batch, Equals, NotAfter, Put
from timers.rows import Row

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.turn import Turn

__all__ = ["ObjectRows"]

R = TypeVar("R", bound=Row)


class ObjectRows:
    """The rows of one object: every key begins with the object's number, `oid`."""

    __slots__ = ("_host",)

    def __init__(self, host: ObjectHost) -> None:
        self._host = host

    @property
    def oid(self) -> int:
        """The object's number in its partition. One that has never written gets it with its first write."""
        self._host.reading_turn()
        return self._host.state.reserve_oid()

    @property
    def now_ms(self) -> int:
        """The running turn's time, epoch ms: the same when the turn is run again."""
        return self._host.reading_turn().now_ms

    def get(self, row_type: type[R], *key: Any) -> R | None:
        """The row with this key, which is given without the object's number; or None."""
        turn = self._host.reading_turn()
        whole = (self._host.state.reserve_oid(), *key)
        values = self._values(turn, row_type.table, whole)
        return None if values is None else row_type.from_columns(whole, values)

    def scan(self, row_type: type[R], *prefix: Any, after: tuple[Any, ...] | None = None, limit: int) -> Sequence[R]:
        """At most `limit` rows whose key begins with the object's number and `prefix`, in key order, after `after`."""
        turn = self._host.reading_turn()
        whole = (self._host.state.reserve_oid(), *prefix)
        rows = self._host.state.scan_rows(turn.buffer, row_type.table, whole, after=after, limit=limit)
        return [row_type.from_columns(key, values) for key, values in rows]

    def apply(self, batch: Batch) -> None:
        """Take a batch into the turn. Its preconditions must hold as the turn sees the rows.

        Raises `RowConflict` when one does not, and what any write of a turn raises; nothing is changed then.
        """
        turn = self._host.writing_turn()
        for precondition in batch.preconditions:
            if not self._holds(turn, precondition):
                raise RowConflict(f"{self._host.id}: {precondition} does not hold in this turn; nothing was changed")
        top = turn.buffer.top
        for write in batch.writes:
            if isinstance(write, Put):
                top.put_row((write.row.table, write.row.key()), write.row.values())
            else:
                top.put_row((write.table, write.key), None)
        if batch.writes:
            turn.wrote()

    def _values(self, turn: Turn, table: str, key: tuple[Any, ...]) -> tuple[Any, ...] | None:
        known, values = turn.buffer.lookup_row((table, key))
        return values if known else self._host.state.read_row((table, key))

    def _holds(self, turn: Turn, precondition: Any) -> bool:
        if isinstance(precondition, NotAfter):
            return self._host.partition.clock.wall_ms() <= precondition.deadline_ms
        if isinstance(precondition, Equals):
            row = precondition.row
            return self._values(turn, row.table, row.key()) == row.values()
        found = self._values(turn, precondition.table, precondition.key) is not None
        return found is not isinstance(precondition, Absent)
