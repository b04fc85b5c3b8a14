"""The messages of one object to another: which one may be sent now, and what an answer means for the others.

They are sent in the order of their numbers, several at a time. Each names its predecessor in the run, and the receiver
runs it only when that one was applied. So a run stops at its first failure; what was sent after it is refused, and the
next run begins where this one stopped, once everything that was sent has been answered.
"""

from __future__ import annotations

from collections import deque
from typing import Final

__all__ = ["AGAIN_BASE_MS", "AGAIN_CAP_MS", "NO_PREDECESSOR", "PairQueue", "again_delay_ms"]

#: The first of a run: everything before it has been applied, or has become a dead letter.
NO_PREDECESSOR: Final = 0

#: A message that was not run (a full queue, a partition that does not answer) is sent again soon at first...
AGAIN_BASE_MS: Final = 50
#: ...and this often in the end, so that the messages go on soon after their cause is gone.
AGAIN_CAP_MS: Final = 10_000
_DOUBLINGS_TO_CAP: Final = 8


def again_delay_ms(failures: int) -> int:
    """The pause after the `failures`-th time in a row that a message was not run. Uses up no try of it."""
    return min(AGAIN_BASE_MS << min(max(failures - 1, 0), _DOUBLINGS_TO_CAP), AGAIN_CAP_MS)


class PairQueue:
    """Decides; knows no clock and sends nothing. `most_in_flight` bounds a run's messages without an answer."""

    __slots__ = (
        "_entries",
        "_failures",
        "_flying",
        "_held",
        "_last",
        "_most",
        "_not_before_ms",
        "_sent",
        "_stopped",
        "_window",
        "tail",
    )

    def __init__(self, most_in_flight: int) -> None:
        self._entries: deque[int] = deque()
        self._most = most_in_flight
        #: how many may be in flight now: fewer with a receiver that starts the next before it has ended the last
        self._window = most_in_flight
        #: leading entries that were sent in this run
        self._sent = 0
        #: those of them without an answer
        self._flying = 0
        self._last = NO_PREDECESSOR
        self._stopped = False
        #: outcomes that are on their way to disk and decide about what may be sent
        self._held = 0
        self._failures = 0
        self._not_before_ms = 0
        #: the highest number that was ever here
        self.tail = 0

    def __len__(self) -> int:
        """Messages that have not been applied or buried."""
        return len(self._entries)

    @property
    def head(self) -> int:
        """The first of them; 0 when there is none."""
        return self._entries[0] if self._entries else NO_PREDECESSOR

    @property
    def not_before_ms(self) -> int:
        """When the next run may begin (epoch ms)."""
        return self._not_before_ms

    @property
    def idle(self) -> bool:
        """Whether it waits for nobody's answer and for no commit."""
        return not self._flying and not self._held

    def append(self, number: int) -> None:
        """Take the message with the next higher number."""
        self._entries.append(number)
        self.tail = number

    def peek(self, now_ms: int) -> int | None:
        """The message that may be sent now, or None."""
        if self._stopped or self._held or self._sent >= len(self._entries) or self._flying >= self._window:
            return None
        return None if self._not_before_ms > now_ms else self._entries[self._sent]

    def sent(self) -> int:
        """The message that `peek` gave is under way; the predecessor that it names."""
        predecessor, self._last = self._last, self._entries[self._sent]
        self._sent += 1
        self._flying += 1
        return predecessor

    def wait_until(self, due_ms: int) -> None:
        """Send nothing before this instant (epoch ms)."""
        self._not_before_ms = due_ms

    # --- answers ----------------------------------------------------------------------------------

    def applied(self, number: int) -> None:
        """It was applied."""
        self._failures = 0
        self._window = min(2 * self._window, self._most)
        self._remove(number)
        self._answered()

    def out_of_order(self) -> None:
        """A message was refused since its predecessor has not been applied."""
        self._window = 1
        self._stop()

    def not_run(self, now_ms: int) -> int:
        """A message was not run, or nobody knows: it will be sent again under the same id. When, in epoch ms."""
        self._failures += 1
        self.wait_until(now_ms + again_delay_ms(self._failures))
        self._stop()
        return self._not_before_ms

    def raised(self) -> None:
        """A message's run raised: what becomes of it is on its way to disk. `retried` or `buried` follows."""
        self._held += 1
        self._stop()

    def retried(self, next_ms: int) -> None:
        """The failed try is recorded; the message is sent again at `next_ms`."""
        self._held -= 1
        self.wait_until(next_ms)

    def buried(self, number: int) -> None:
        """The message is among the dead letters; those after it go on."""
        self._held -= 1
        self._remove(number)

    def _stop(self) -> None:
        self._stopped = True
        self._answered()

    def _answered(self) -> None:
        self._flying -= 1
        if self._flying == 0:
            self._stopped = False
            self._sent = 0
            self._last = NO_PREDECESSOR

    def _remove(self, number: int) -> None:
        if self._entries[0] == number:
            self._entries.popleft()
            self._sent = max(0, self._sent - 1)
            return
        place = self._entries.index(number)
        del self._entries[place]
        if place < self._sent:
            self._sent -= 1
