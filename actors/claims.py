"""Claims: which timer turns were running, and what ran alone when a process died.

A claim never stands between a due timer and its run: it rides in the next group commit, if the turn still runs then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from actors.timer_work import TimerWork
from actors.work import CallWork, Work
from drivers.tables import CLAIMS, Key, Op
from drivers.write_set import InboxEntry

__all__ = ["Claim", "Claims", "claim_op"]

TIMER_CLAIM = "timer"
CALL_CLAIM = "call"


@dataclass(frozen=True)
class Claim:
    """One row of the claims table. `crashes` counts processes that died while this ran alone, `let_go` how often it
    took too long to be left alone."""

    turn_id: bytes
    kind: str
    class_name: str
    key: str
    name: str
    generation: int
    alone: bool
    let_go: int
    crashes: int

    @classmethod
    def of_row(cls, row: Key) -> Claim:
        turn_id, kind, class_name, key, name, generation, alone, let_go, crashes = row
        return cls(turn_id, kind, class_name, key, name, generation, bool(alone), let_go, crashes)

    @classmethod
    def of(cls, work: Work, *, alone: bool, let_go: int = 0, crashes: int = 0) -> Claim:
        if isinstance(work, TimerWork):
            kind, name, generation = TIMER_CLAIM, work.row.name, work.row.generation
        else:
            assert isinstance(work, CallWork)
            kind, name, generation = CALL_CLAIM, work.method.name, 0
        return cls(
            work.turn_id, kind, work.host.id.type_name, work.host.id.key, name, generation, alone, let_go, crashes
        )


def claim_op(claim: Claim) -> Op:
    """The operation that writes the claim."""
    values = (
        claim.kind,
        claim.class_name,
        claim.key,
        claim.name,
        claim.generation,
        int(claim.alone),
        claim.let_go,
        claim.crashes,
    )
    return (CLAIMS, (claim.turn_id,), values)


class Claims:
    """A `Rider` that writes the claims of timer turns that are still running when a group is committed."""

    def __init__(self) -> None:
        self._started: dict[bytes, Work] = {}

    def started(self, work: Work) -> None:
        if not work.claimed:
            self._started[work.turn_id] = work

    def ended(self, work: Work) -> None:
        """The turn is over: a claim that was not written yet is not needed."""
        self._started.pop(work.turn_id, None)

    def ride(self, commit_seq: int, entries: Sequence[InboxEntry]) -> Iterable[Op]:
        started, self._started = self._started, {}
        ops = []
        for work in started.values():
            work.claimed = True
            ops.append(claim_op(Claim.of(work, alone=False)))
        return ops

    def landed(self, commit_seq: int, now_ms: int) -> None:
        return None

    def lost(self, commit_seq: int) -> None:
        return None  # the delete that ends the turn does no harm where no claim was written
