"""What the outcome of a message changes on disk; those of one loop turn are written together."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from actors.outbox_pair import Pair
from drivers.tables import Op
from timers.message_rows import OutboxRow

__all__ = ["Change", "Kind"]


class Kind(enum.Enum):
    """What becomes of the message's row."""

    REMOVED = "removed"
    RETRIED = "retried"
    BURIED = "buried"


@dataclass(frozen=True)
class Change:
    """What an outcome changes on disk, and what follows once that is durable."""

    pair: Pair
    row: OutboxRow
    kind: Kind
    ops: list[Op]
    answered_by: int
    next_ms: int = 0
