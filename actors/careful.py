"""After an unclean stop: what may have ended the process runs one at a time, each claimed durably first.

Only what was alone when the process died counts a crash. Fresh work waits meanwhile, so that "alone" is true; an item
that takes long is let go on beside the others, and is then no longer counted as alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from actors.claims import Claim, claim_op
from actors.logs import log_event
from actors.work import Work
from drivers.clock import Handle
from drivers.tables import CLAIMS
from drivers.write_set import WriteSet

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["Careful"]


class Careful:
    """Runs suspects one by one. `admit` runs fresh work at once when no suspect is waiting or running."""

    def __init__(self, partition: Partition, unclean: bool, crashes: dict[bytes, int]) -> None:
        self._partition = partition
        self.unclean = unclean
        #: crashes counted so far, by turn id
        self._crashes = crashes
        self._suspects: deque[tuple[Work, Callable[[], None]]] = deque()
        self._running: Work | None = None
        self._parked: deque[Callable[[], None]] = deque()
        self._solo: Handle | None = None
        if unclean:
            # by then every call that was made before the crash has been repeated or given up
            partition.clock.call_later(partition.settings.call_memory_ms, self._forgive)

    def _forgive(self) -> None:
        self.unclean = False

    @property
    def active(self) -> bool:
        """Whether suspects are waiting or running."""
        return self._running is not None or bool(self._suspects)

    def admit(self, start: Callable[[], None]) -> None:
        """Fresh work: at once, or after the suspects, in order of arrival."""
        if self.active or self._parked:
            self._parked.append(start)
        else:
            start()

    def suspect(self, work: Work, start: Callable[[], None]) -> None:
        """Run `start` when it is this work's turn, with a durable claim."""
        self._suspects.append((work, start))
        if self._running is None:
            self._next()

    def _next(self) -> None:
        if not self._suspects:
            self._release_parked()
            return
        work, start = self._suspects.popleft()
        self._running = work
        claim = Claim.of(work, alone=True, crashes=self._crashes.get(work.turn_id, 0))
        work.claimed = True
        work.when_settled(lambda: self._ended(work))
        write_set = WriteSet([claim_op(claim)])
        write_set.waiters.append(lambda error: self._claimed(work, start, error))
        self._partition.submit(write_set)

    def _claimed(self, work: Work, start: Callable[[], None], error: BaseException | None) -> None:
        if error is not None:
            # without a durable claim a crash could not be counted; the work itself is not to blame for that
            log_event(logging.WARNING, "claim_failed", f"{work.host.id}: its claim was not written: {error}")
        self._solo = self._partition.clock.call_later(
            self._partition.settings.careful_solo_ms, lambda: self._takes_long(work)
        )
        start()

    def _takes_long(self, work: Work) -> None:
        """It runs on beside others from now on, so a crash would not be its own."""
        self._solo = None
        if self._running is work:
            claim = Claim.of(work, alone=False, crashes=self._crashes.get(work.turn_id, 0))
            write_set = WriteSet([claim_op(claim)])
            write_set.waiters.append(lambda error: self._let_go(work))
            self._partition.submit(write_set)

    def _let_go(self, work: Work) -> None:
        if self._running is work:
            self._running = None
            self._next()

    def handed_over(self, work: Work) -> None:
        """The outcome is on its way to disk: the next suspect's claim shares its commit, and so one fsync serves
        both. When the claim is durable, so is the outcome, and the next one is alone."""
        if self._running is work and self._suspects:
            self._stop_solo()
            self._next()

    def _stop_solo(self) -> None:
        if self._solo is not None:
            self._solo.cancel()
            self._solo = None

    def _ended(self, work: Work) -> None:
        self._crashes.pop(work.turn_id, None)
        # turns that wrote nothing have no commit of their own that ends the claim
        self._partition.submit(WriteSet([(CLAIMS, (work.turn_id,), None)]))
        if self._running is work:
            self._stop_solo()
            self._running = None
            self._next()

    def _release_parked(self) -> None:
        while self._parked and not self.active:
            self._parked.popleft()()
