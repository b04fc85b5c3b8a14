"""How much one tick may do, and how much of that is spent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

__all__ = ["TickBudget", "TickState"]


@dataclass(frozen=True)
class TickBudget:
    """Limits of one physical tick, over all its timer tables. Anything below 1 counts as 1.

    `max_fired`: batches committed, retry moves too; a tick is then a few fsyncs.
    `max_per_kind`: handler calls per kind, failing ones too; one kind can't fill the tick.
    `max_scanned`: rows read, whatever becomes of them, plus one per page.
    `max_elapsed_ms`: milliseconds of the injected clock; no handler is started after that.
    """

    max_fired: int = 128
    max_per_kind: int = 32
    max_scanned: int = 512
    max_elapsed_ms: int = 10_000

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, max(1, getattr(self, field.name)))


class TickState:
    """What one physical tick has used of its budget. One state is shared by all timer tables of the tick.

    `monotonic_ms` is the clock; a clock that goes backwards counts as no time passed. `rotation` is a number that
    the driver raises by one each tick: it says which lane is visited first, so that no lane is always last.
    """

    def __init__(self, budget: TickBudget, monotonic_ms: Callable[[], int], rotation: int = 0) -> None:
        self.budget = budget
        self.rotation = rotation
        self._monotonic_ms = monotonic_ms
        self._started_ms = monotonic_ms()
        self._examined = 0
        self._committed = 0
        self._attempts: dict[int, int] = {}

    @classmethod
    def new(cls, budget: TickBudget, monotonic_ms: Callable[[], int], rotation: int = 0) -> TickState:
        """A state with nothing spent, whose time starts now."""
        return cls(budget, monotonic_ms, rotation)

    @property
    def examined(self) -> int:
        """Scan units charged so far."""
        return self._examined

    @property
    def committed(self) -> int:
        """Batches committed so far."""
        return self._committed

    @property
    def attempted(self) -> int:
        """Handler calls so far, over all kinds."""
        return sum(self._attempts.values())

    @property
    def remaining_scanned(self) -> int:
        """Scan units left."""
        return self.budget.max_scanned - self._examined

    def attempted_for(self, kind: int) -> int:
        """Handler calls so far for one kind."""
        return self._attempts.get(kind, 0)

    def elapsed_ms(self) -> int:
        """Milliseconds since the tick began, never negative."""
        return max(0, self._monotonic_ms() - self._started_ms)

    def clock_exhausted(self) -> bool:
        """True when the time is used up; the exact limit counts as used up."""
        return self.elapsed_ms() >= self.budget.max_elapsed_ms

    def work_exhausted(self) -> bool:
        """True when no further handler may be started: commits or time are used up."""
        return self._committed >= self.budget.max_fired or self.clock_exhausted()

    def exhausted(self) -> bool:
        """True when the tick is over: no scan unit left, or `work_exhausted`."""
        return self.remaining_scanned <= 0 or self.work_exhausted()

    def charge_scan(self, units: int) -> bool:
        """Charge scan units, all of them or none; False when there are not enough left."""
        if units > self.remaining_scanned:
            return False
        self._examined += units
        return True

    def claim_attempt(self, kind: int, cap: int) -> bool:
        """Count one handler call of this kind before it is made; False when `cap` calls were made already."""
        attempts = self.attempted_for(kind)
        if attempts >= cap:
            return False
        self._attempts[kind] = attempts + 1
        return True

    def record_commit(self) -> None:
        """Count one committed batch."""
        self._committed += 1
