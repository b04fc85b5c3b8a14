"""After an unclean stop: what may have ended the process runs one at a time, each claimed durably first.

Only what was alone when the process died counts a crash. Fresh work waits meanwhile, so that "alone" is true; an item
that takes long is let go on beside the others, and nothing counts as alone before it has ended. What was let go when
the process died is given more time alone the next time, so that what ends its process late is found out as well.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from actors.claims import Claim, claim_op
from actors.logs import log_event
from actors.timer_work import TimerWork
from actors.work import CallWork, Work
from drivers.clock import Handle
from drivers.tables import CLAIMS, INTENTS
from drivers.write_set import WriteSet

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["Careful"]

#: Each time that an item was let go before its process died, it gets this many times longer alone...
_MORE_TIME = 4
#: ...up to this often: a default second becomes 64, longer than a call's turn may take by default.
_MOST_LET_GO = 3
#: A claim that could not be removed (a full disk) is removed after this.
_UNCLAIM_RETRY_MS = 1_000


class Careful:
    """Runs suspects one by one. `admit` runs fresh work at once when no suspect is waiting or running."""

    def __init__(
        self, partition: Partition, unclean: bool, crashes: Mapping[bytes, int], let_go: Mapping[bytes, int]
    ) -> None:
        self._partition = partition
        self.unclean = unclean
        self._opened_ms = partition.clock.wall_ms()
        #: crashes counted so far, by turn id
        self._crashes = dict(crashes)
        #: how often it took too long to be left alone, by turn id
        self._let_go = dict(let_go)
        self._suspects: deque[tuple[Work, Callable[[], None]]] = deque()
        #: calls of turns: first, since somebody in this very partition may be waiting for them
        self._inner: deque[tuple[Work, Callable[[], None]]] = deque()
        self._running: Work | None = None
        #: what was let go and still runs: as long as that may end the process, nothing is alone
        self._beside: set[Work] = set()
        self._alone = False
        self._claiming = 0
        self._parked: deque[Callable[[], None]] = deque()
        self._solo: Handle | None = None
        if unclean:
            # by then every call that was made before the crash has been repeated or given up
            partition.clock.call_later(partition.settings.call_memory_ms, self._forgive)

    def _forgive(self) -> None:
        self.unclean = False
        if self._partition.stopped:
            return
        held = [work for work, _ in (*self._inner, *self._suspects)]
        here = {work.turn_id for work in (*held, *self._beside, *([self._running] if self._running else ()))}
        here.update(turn_id for _, _, turn_id, _ in self._partition.store.scan(INTENTS))
        # calls that were claimed, and that nobody has repeated: their claims would stay for ever
        gone = [turn_id for turn_id in {**self._crashes, **self._let_go} if turn_id not in here]
        if gone:
            self._partition.submit(WriteSet([(CLAIMS, (turn_id,), None) for turn_id in gone]))

    @property
    def active(self) -> bool:
        """Whether suspects are waiting or running."""
        return self._running is not None or bool(self._suspects) or bool(self._inner)

    # --- fresh work -------------------------------------------------------------------------------

    def admit(self, start: Callable[[], None]) -> None:
        """Fresh work: at once, or after the suspects, in order of arrival."""
        if self.active or self._parked:
            self._parked.append(start)
        else:
            start()

    def admit_timer(self, work: TimerWork, start: Callable[[], None]) -> None:
        """A timer that is not known to have run. One that was due when the process died may have ended it before its
        claim was written, so it is claimed before it starts; many share one commit."""
        if self.unclean and (work.row.due_ms <= self._opened_ms or self._claiming):
            self._claim_and_admit(work, start)
        else:
            self.admit(start)

    def admit_message(self, work: Work, start: Callable[[], None]) -> None:
        """A message. One that comes again, or was running at a crash, is a suspect. Any other may have been under way
        as well, from an outbox in this very process that can't tell: it is claimed, so that the next crash knows it."""
        assert isinstance(work, CallWork)
        if work.turn_id in self._crashes or work.turn_id in self._let_go or (work.is_repeat and self.unclean):
            self.suspect(work, start)
        elif self.unclean:
            self._claim_and_admit(work, start)
        else:
            self.admit(start)

    def _claim_and_admit(self, work: Work, start: Callable[[], None]) -> None:
        self._claiming += 1
        self._claim(work, alone=False, then=lambda: self._claimed_in_time(start))
        work.when_settled(lambda: self._unclaim(work))

    def _claimed_in_time(self, start: Callable[[], None]) -> None:
        self._claiming -= 1
        self.admit(start)

    # --- suspects ---------------------------------------------------------------------------------

    def suspect(self, work: Work, start: Callable[[], None]) -> None:
        """Run `start` when it is this work's turn, with a durable claim."""
        self._suspects.append((work, start))
        if self._running is None:
            self._next()

    def suspect_inner(self, work: Work, start: Callable[[], None]) -> None:
        """The same for a call that a turn makes; what the suspect that runs now waits for is a part of it."""
        if self._running is not None and (self._running.host.id.type_name, self._running.host.id.key) in work.chain:
            start()
            return
        self._inner.append((work, start))
        if self._running is None:
            self._next()

    def _next(self) -> None:
        if not self._inner and not self._suspects:
            self._release_parked()
            return
        work, start = (self._inner or self._suspects).popleft()
        self._running = work
        self._alone = not self._beside
        self._claim(work, alone=self._alone, then=lambda: self._start(work, start))
        work.when_settled(lambda: self._ended(work))

    def _claim(self, work: Work, *, alone: bool, then: Callable[[], None]) -> None:
        turn_id = work.turn_id
        claim = Claim.of(work, alone=alone, let_go=self._let_go.get(turn_id, 0), crashes=self._crashes.get(turn_id, 0))
        work.claimed = True
        write_set = WriteSet([claim_op(claim)])
        write_set.waiters.append(lambda error: self._claimed(work, then, error))
        self._partition.submit(write_set)

    @staticmethod
    def _claimed(work: Work, then: Callable[[], None], error: BaseException | None) -> None:
        if error is not None:
            # without a durable claim a crash could not be counted; the work itself is not to blame for that
            log_event(logging.WARNING, "claim_failed", f"{work.host.id}: its claim was not written: {error}")
        then()

    def _start(self, work: Work, start: Callable[[], None]) -> None:
        patience_ms = self._partition.settings.careful_solo_ms * _MORE_TIME ** self._let_go.get(work.turn_id, 0)
        self._solo = self._partition.clock.call_later(patience_ms, lambda: self._takes_long(work))
        start()

    def _takes_long(self, work: Work) -> None:
        """It runs on beside others from now on, so a crash would not be its own."""
        self._solo = None
        if self._running is work:
            if self._alone:
                self._let_go[work.turn_id] = min(self._let_go.get(work.turn_id, 0) + 1, _MOST_LET_GO)
            self._claim(work, alone=False, then=lambda: self._release(work))

    def _release(self, work: Work) -> None:
        if self._running is work:
            self._running = None
            self._beside.add(work)
            self._next()

    def handed_over(self, work: Work) -> None:
        """The outcome is on its way to disk: the next suspect's claim shares its commit, and so one fsync serves
        both. When the claim is durable, so is the outcome, and the next one is alone."""
        if self._running is work and (self._inner or self._suspects):
            self._stop_solo()
            self._next()

    def _stop_solo(self) -> None:
        if self._solo is not None:
            self._solo.cancel()
            self._solo = None

    def _ended(self, work: Work) -> None:
        self._crashes.pop(work.turn_id, None)
        self._let_go.pop(work.turn_id, None)
        self._beside.discard(work)
        self._unclaim(work)
        if self._running is work:
            self._stop_solo()
            self._running = None
            self._next()

    def _unclaim(self, work: Work) -> None:
        # turns that wrote nothing have no commit of their own that ends the claim
        write_set = WriteSet([(CLAIMS, (work.turn_id,), None)])
        write_set.waiters.append(lambda error: self._unclaimed(work, error))
        self._partition.submit(write_set)

    def _unclaimed(self, work: Work, error: BaseException | None) -> None:
        """A claim that stayed would blame, at the next crash, what has ended long ago: remove it later."""
        if error is not None:
            self._partition.clock.call_later(_UNCLAIM_RETRY_MS, lambda: self._unclaim_again(work))

    def _unclaim_again(self, work: Work) -> None:
        running = {each.turn_id for each in (*self._beside, *([self._running] if self._running else ()))}
        if work.turn_id not in running:  # the same turn may be running again, under a claim of its own
            self._unclaim(work)

    def _release_parked(self) -> None:
        while self._parked and not self.active:
            self._parked.popleft()()
