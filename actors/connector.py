"""Keeps one lane connected to its partition for as long as there is work for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from actors.channel import Channel
from actors.errors import ChannelClosed

if TYPE_CHECKING:
    from actors.client import Client
    from actors.lane import Lane

__all__ = ["Connector", "back_off_s"]

#: First pause between two attempts: about a tenth of the time in which a killed partition can be back.
BASE_DELAY_S: Final = 0.02
#: Longest pause: what a client may add to a partition's recovery, which itself takes up to 3 s.
MAX_DELAY_S: Final = 1.0
#: How long a final error waits for a newer slot map, which may show that the calls belong elsewhere by now.
LAST_LOOK_S: Final = 1.0


def back_off_s(attempt: int, jitter: float) -> float:
    """Seconds to wait before attempt 1, 2, ...; `jitter` from 0 to 1 spreads the clients over half of it."""
    return min(MAX_DELAY_S, BASE_DELAY_S * 2.0 ** min(attempt - 1, 16)) * (0.5 + 0.5 * jitter)


class Connector:
    """Connects, notices the end of the connection and connects again, with a higher number each time."""

    def __init__(self, client: Client, lane: Lane) -> None:
        self._client = client
        self._lane = lane
        self._number = 0
        self._attempts = 0
        self._link: _Link | None = None
        self._task: asyncio.Task[None] | None = None
        #: The open channel, or None.
        self.channel: Channel | None = None
        #: Why the last connection or attempt ended.
        self.last_error: Exception | None = None

    def ensure(self) -> None:
        """Start connecting unless it is under way."""
        if self.channel is None and self._task is None and not self._client.is_closed:
            self._task = self._client.spawn(self._connect())
            self._task.add_done_callback(self._ended)

    def proved(self) -> None:
        """The partition has answered on this connection: the next loss is a new one."""
        self._attempts = 0
        self.last_error = None

    def close(self) -> asyncio.Task[None] | None:
        """Close the channel and stop connecting; returns the task that is ending, if there is one."""
        channel, self.channel = self.channel, None
        self._link = None
        if channel is not None:
            channel.close()
        task = self._task
        if task is not None:
            task.cancel()
        return task

    async def _connect(self) -> None:
        client, lane = self._client, self._lane
        while self.channel is None and lane.has_work():
            if self._attempts:
                await client.sleep(back_off_s(self._attempts, client.jitter()))
            self._attempts += 1
            self._number += 1
            link = self._link = _Link(self)
            try:
                await lane.routes.connect(lane.partition, lane.session, self._number, link)
            except (ChannelClosed, OSError, asyncio.TimeoutError) as error:
                self.last_error = error
                lane.routes.refresh_soon()
            except Exception as error:  # final for the calls that wait, which get it
                self.last_error = error
                self._attempts = 0
                await lane.routes.refresh(LAST_LOOK_S)
                lane.fail_waiting(error)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled() and task.exception() is not None:
            self._client.report("connecting to a partition failed unexpectedly", task.exception())
        if self._lane.has_work():
            self.ensure()

    def opened(self, link: _Link, channel: Channel) -> None:
        if link is not self._link or self._client.is_closed:
            channel.close()
            return
        self.channel = channel
        self._lane.opened(channel)

    def received(self, link: _Link, frame: bytes) -> None:
        if link is self._link:
            self._lane.received(frame)

    def writable(self, link: _Link, ok: bool) -> None:
        if link is self._link:
            self._lane.writable(ok)

    def closed(self, link: _Link, error: Exception | None) -> None:
        if link is not self._link:
            return
        self._link = None
        self.channel = None
        self.last_error = error
        self._lane.lost()
        if self._lane.has_work():
            self.ensure()


class _Link:
    """The handler of one connection. Events of any but the newest are dropped by the connector."""

    __slots__ = ("_connector",)

    def __init__(self, connector: Connector) -> None:
        self._connector = connector

    def opened(self, channel: Channel) -> None:
        self._connector.opened(self, channel)

    def frame_received(self, frame: bytes) -> None:
        self._connector.received(self, frame)

    def closed(self, error: Exception | None) -> None:
        self._connector.closed(self, error)

    def writable(self, ok: bool) -> None:
        self._connector.writable(self, ok)
