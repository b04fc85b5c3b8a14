"""Moves that are over at one of their sides, so that a request which arrives after its time begins nothing again."""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["EndedMoves"]

#: How many are remembered: a request can't be on its way for longer than so many moves take.
_REMEMBERED = 1_000


class EndedMoves:
    """Ids of moves, the latest ones."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, move_id: str) -> bool:
        return move_id in self._ids

    def add(self, move_id: str) -> None:
        """The move is over here."""
        self._ids[move_id] = None
        if len(self._ids) > _REMEMBERED:
            self._ids.popitem(last=False)
