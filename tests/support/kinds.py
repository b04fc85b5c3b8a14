"""A timer table with one object, and batches as its turns would commit them: for the kinds that serve objects."""

from __future__ import annotations

from typing import TypeVar

from tests.support.timer_table import NOW, Table
from timers.batch import Batch, Outcome
from timers.outcomes import Backlog, ObjectPlace, OutcomeRow
from timers.rows import Row

__all__ = ["OID", "PLACE", "ObjectTable"]

R = TypeVar("R", bound=Row)
OID = 7
PLACE = ObjectPlace(OID, 1, "Desk", "a")


class ObjectTable:
    """The rows of the object `OID`."""

    def __init__(self, table: Table) -> None:
        self.table = table

    async def commit(self, batch: Batch) -> Outcome:
        """What a turn commits."""
        (outcome,) = await self.table.store.inner.apply([batch])
        return outcome

    async def must(self, batch: Batch) -> None:
        assert await self.commit(batch) is Outcome.COMMITTED

    async def get(self, row_type: type[R], *key: object) -> R | None:
        return await self.table.store.get(row_type, (OID, *key))

    async def rows(self, row_type: type[R]) -> list[R]:
        return list(await self.table.store.scan(row_type, (OID,), limit=1_000))

    async def outcomes(self) -> list[OutcomeRow]:
        return await self.rows(OutcomeRow)

    async def queued(self) -> int:
        backlog = await self.get(Backlog)
        return 0 if backlog is None else backlog.next_seq - 1

    async def timers(self, kind: int) -> list[int]:
        """When the timers of a kind are due."""
        return [timer.due_ms - NOW for timer in await self.table.timers() if timer.kind == kind]
