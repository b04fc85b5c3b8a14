"""The running turn as the object's code sees it."""

from __future__ import annotations

import random
from datetime import datetime, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.execution_run import ExecutionRun
    from actors.turn import Turn

__all__ = ["TurnInfo"]


class TurnInfo:
    """The running turn, as the object's code sees it: stable when the platform runs the turn again."""

    __slots__ = ("_turn",)

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    @property
    def id(self) -> bytes:
        """Names this turn for ever; the same when the platform runs it again."""
        return self._turn.turn_id

    @property
    def attempt(self) -> int:
        """1 for the first run, more when the platform runs the turn again after a crash."""
        return self._turn.attempt

    @property
    def now_ms(self) -> int:
        """When the turn first began, in epoch ms; the same when it is run again after it called out or synced. In a
        durable function, outside of its steps, this is `ctx.now_ms`."""
        run = self._run
        return self._turn.now_ms if run is None else run.now_ms()

    @property
    def now(self) -> datetime:
        """`now_ms` as an aware datetime in UTC."""
        return datetime.fromtimestamp(self.now_ms / 1_000, tz=timezone.utc)

    @property
    def random(self) -> random.Random:
        """Random numbers drawn from the turn's id. In a durable function, outside of its steps, the context's."""
        run = self._run
        return self._turn.random() if run is None else run.here().random

    @property
    def _run(self) -> ExecutionRun | None:
        """The run of a durable function whose own code runs. Each of its segments is another turn, so what belongs to
        the turn would be something else at a replay."""
        return self._turn.execution if self._turn.outside_step else None
