"""The newest connection of every session."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from actors.handshake import Refusal, Refused

__all__ = ["SessionTable"]

#: Ended sessions whose last connection number is remembered, so that an older connection that was delayed on its
#: way is still refused. It has one handshake timeout to arrive in; this many sessions do not come and go in that.
REMEMBERED_SESSIONS = 16_384

ChannelT = TypeVar("ChannelT")


class SessionTable(Generic[ChannelT]):
    """Per session: the highest connection number seen, and the channel that is live under it."""

    def __init__(self, max_live: int, remembered: int = REMEMBERED_SESSIONS) -> None:
        self._max_live = max_live
        self._remembered = remembered
        self._live: dict[bytes, tuple[int, ChannelT]] = {}
        self._ended: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def channels(self) -> list[ChannelT]:
        """Every live channel."""
        return [channel for _, channel in self._live.values()]

    def find(self, session: bytes, connection: int) -> ChannelT | None:
        """The live channel of exactly this connection."""
        number, channel = self._live.get(session, (None, None))
        return channel if number == connection else None

    def claim(self, session: bytes, connection: int, channel: ChannelT) -> ChannelT | None:
        """Make `connection` the newest of its session.

        Returns the channel that it replaces, which the caller closes before the new one delivers anything. Raises
        `Refused` for a number that is not higher than all before it, and when there are too many sessions.
        """
        live = self._live.get(session)
        highest = live[0] if live is not None else self._ended.get(session)
        if highest is not None and connection <= highest:
            raise Refused(Refusal.OLD_CONNECTION, f"number {connection}, seen {highest}")
        if live is None and len(self._live) >= self._max_live:
            raise Refused(Refusal.FULL)
        self._ended.pop(session, None)
        self._live[session] = (connection, channel)
        return live[1] if live is not None else None

    def release(self, session: bytes, connection: int, channel: ChannelT) -> None:
        """`channel` is gone; its number stays remembered. Does nothing when it is not the live one (any more)."""
        if self.find(session, connection) is not channel:
            return
        del self._live[session]
        self._ended[session] = connection
        if len(self._ended) > self._remembered:
            self._ended.popitem(last=False)
