"""A writer connection that tells each statement before it is run: the moments at which a process can be killed, or
another one can hold the lock."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from actors.testing import VirtualClock
from drivers.native import NativeDriver

__all__ = ["ToldConnection", "told_driver"]


class ToldConnection(sqlite3.Connection):
    """Every connection of the class tells the same listener."""

    listener: ClassVar[Callable[[str], None] | None] = None

    @classmethod
    @contextmanager
    def telling(cls, listener: Callable[[str], None]) -> Iterator[None]:
        """Inside the block the listener gets the text of each statement, before it is run."""
        cls.listener = listener
        try:
            yield
        finally:
            cls.listener = None

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:  # type: ignore[override]
        self._tell(sql)
        return super().execute(sql, *args)

    def executemany(self, sql: str, *args: Any) -> sqlite3.Cursor:  # type: ignore[override]
        self._tell(sql)
        return super().executemany(sql, *args)

    def _tell(self, sql: str) -> None:
        if self.listener is not None:
            type(self).listener(sql)  # type: ignore[misc]


def told_driver(clock: VirtualClock) -> NativeDriver:
    """A driver on virtual time whose writers are `ToldConnection`s."""
    return NativeDriver(
        clock=clock, inline=True, durability="off", poll_ms=None, lock_wait_ms=1_000, writer_factory=ToldConnection
    )
