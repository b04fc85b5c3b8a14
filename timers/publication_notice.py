"""Tells of a publication once it is durable (kind 36): the object's `on_published`, and those that wait for it."""

from __future__ import annotations

from typing import Final, Protocol

from timers.batch import Batch, NotAfter
from timers.firing import Done, DueTimer, Fired, Reschedule, TimerCtx
from timers.publication_recheck import COMMIT_WINDOW_MS
from timers.publication_rows import LineRow, parse_notice_ref
from timers.registry import TimerKind

__all__ = ["NOTICE_RETRY_MS", "PublicationNotice", "Subscribers"]

#: When the object's class is still being loaded, or its commit failed, it is told again after this.
NOTICE_RETRY_MS: Final = 1_000


class Subscribers(Protocol):
    """Those who want to know."""

    async def published(self, line: LineRow) -> bool:
        """Advances of the line were published, durably. False: could not be told now. Bears being told twice."""
        ...


class PublicationNotice:
    """Serves the notices that publishing leaves behind."""

    kind = TimerKind.PUBLICATION_NOTICE

    def __init__(self, subscribers: Subscribers) -> None:
        self._subscribers = subscribers

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        """Raises `CorruptRow` for a reference that names no line."""
        window = Batch((NotAfter(ctx.now_ms + COMMIT_WINDOW_MS),))
        line = await ctx.store.get(LineRow, parse_notice_ref(timer.reference))
        if line is not None and not await self._subscribers.published(line):
            return Reschedule(ctx.now_ms + NOTICE_RETRY_MS, b"", window)
        return Done(window)
