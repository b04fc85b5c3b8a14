"""Runs of durable functions that stay in memory between two segments: a replay is needed after a restart only."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from actors.durable_object import DurableObject
    from actors.execution_run import ExecutionRun

__all__ = ["KeptRuns"]

#: Executions of one object that are kept as they stand; those beyond it are replayed. Executions that wait for months
#: must not fill the memory of an object that is always busy.
MAX_KEPT_RUNS: Final = 16


class KeptRuns:
    """Of one object, while its instance lives: a run holds on to the instance, so it never outlives it."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: OrderedDict[str, ExecutionRun] = OrderedDict()

    def take(self, execution_id: str, instance: DurableObject) -> ExecutionRun | None:
        """The run, if it can go on where it stands."""
        run = self._runs.pop(execution_id, None)
        if run is None:
            return None
        if run.can_stay and run.instance is instance:
            return run
        run.close()
        return None

    def keep(self, execution_id: str, run: ExecutionRun) -> None:
        """Keep it for its next segment; those kept longest make room."""
        self._runs[execution_id] = run
        while len(self._runs) > MAX_KEPT_RUNS:
            self._runs.popitem(last=False)[1].close()

    def drop(self, execution_id: str) -> None:
        """It does not go on."""
        run = self._runs.pop(execution_id, None)
        if run is not None:
            run.close()

    def clear(self) -> None:
        """None of them goes on: the instance is gone."""
        while self._runs:
            self._runs.popitem()[1].close()
