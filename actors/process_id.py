"""Names a process so that a signal can't hit another one that has got its number."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

from actors.node import node_identity

__all__ = ["ProcessId"]

#: Field of /proc/PID/stat, counted behind the command's closing parenthesis: the start time in clock ticks.
_START_FIELD = 19


@dataclass(frozen=True)
class ProcessId:
    """A process of a node. `started` is when it began, in the kernel's ticks; 0 where that can't be told."""

    node: str
    pid: int
    started: int

    @classmethod
    def own(cls) -> ProcessId:
        """The running process."""
        return cls(node_identity(), os.getpid(), _started(os.getpid()))

    def kill(self) -> bool:
        """SIGKILL, if it is a process of this node and still the same one; whether the signal was sent."""
        if self.node != node_identity() or _started(self.pid) != self.started:
            return False
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def _started(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[_START_FIELD])
    except (OSError, ValueError, IndexError):  # gone, or not Linux
        return 0
