"""A page of the timer engine's batches as one unit of the group commit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from timers.batch import Batch, Outcome

__all__ = ["BatchUnit"]


class BatchUnit:
    """A page of engine batches in the commit queue: each batch is judged alone, all commit together."""

    __slots__ = ("batches", "error", "future", "outcomes")

    def __init__(self, batches: Sequence[Batch], future: asyncio.Future[Sequence[Outcome]]) -> None:
        self.batches = batches
        self.future = future
        self.outcomes: list[Outcome] = []
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(self.outcomes)
        else:
            self.future.set_exception(error)
