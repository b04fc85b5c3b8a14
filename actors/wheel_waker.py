"""A partition's way to the release wheel of its node: keeps connected, arms its next wake, waits out the rest."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from actors.channel import SESSION_BYTES, Channel, ChannelHandler, Endpoint, Hello
from actors.errors import ChannelClosed, MalformedFrame
from actors.link import connect_link
from actors.logs import log_event
from actors.settings import Settings
from actors.wheel_frames import WHEEL, WheelFrame, ack_frame, arm_frame, decode_wheel_frame
from drivers.waker import ProcessWaker

__all__ = ["FindWheel", "WheelWaker"]

#: Tells where the wheel of this node serves now. What it raises means: not there, look again later.
FindWheel = Callable[[], Awaitable[Endpoint]]
_MS_NS = 1_000_000


class WheelWaker:
    """A `drivers.waker.Waker` in two stages: the wheel wakes the partition a little too early, and the partition's own
    release timer waits out the rest. While there is no wheel the own timer does all of it."""

    def __init__(
        self,
        find: FindWheel,
        secret: bytes,
        settings: Settings,
        node: str,
        *,
        near: ProcessWaker | None = None,
        wall_ns: Callable[[], int] = time.time_ns,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._find = find
        self._secret = secret
        self._settings = settings
        self._node = node
        self._near = near or ProcessWaker()
        self._wall_ns = wall_ns
        self._session = random_bytes(SESSION_BYTES)
        self._connection = 0
        self._channel: Channel | None = None
        self._generation = 0
        self._armed: tuple[int, Callable[[], None]] | None = None
        self._task: asyncio.Task[None] | None = None
        self._missing = ""
        #: Wakes that came from the wheel, and those of them that were for something armed before.
        self.wakes = self.stale = 0

    # --- Waker ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._task = asyncio.ensure_future(self._keep_connected())

    def arm(self, due_ms: int, wake: Callable[[], None]) -> None:
        self._generation += 1
        self._armed = (due_ms, wake)
        self._place()

    def disarm(self) -> None:
        # The wheel is not told: its wake will be stale, or the next one takes its place.
        self._generation += 1
        self._armed = None
        self._near.disarm()

    def stop(self) -> None:
        self.disarm()
        if self._task is not None:
            self._task.cancel()
        if self._channel is not None:
            self._channel.close()

    def status(self) -> dict[str, Any]:
        return {
            **self._near.status(),
            "backend": "process" if self._channel is None else "release-wheel",
            "wakes": self.wakes,
            "stale": self.stale,
            "wheel_missing": self._missing or None,
        }

    # --- what is armed ----------------------------------------------------------------------------

    def _place(self) -> None:
        """Have what is armed looked after: by the wheel if it is there and worth it, else by our own timer."""
        if self._armed is None:
            return
        due_ms, wake = self._armed
        is_near = due_ms * _MS_NS - self._wall_ns() <= self._settings.wheel_near_ms * _MS_NS
        if self._channel is None or is_near:
            self._near.arm(due_ms, wake)
            return
        try:
            self._channel.send(arm_frame(self._generation, due_ms))
        except ChannelClosed:  # just now; it will be placed again when we are told
            self._near.arm(due_ms, wake)
        else:
            self._near.disarm()

    # --- ChannelHandler ---------------------------------------------------------------------------

    def received(self, frame: bytes) -> None:
        """The wheel says something."""
        kind, generation, _ = decode_wheel_frame(frame)
        if kind is not WheelFrame.WAKE:
            raise MalformedFrame("the wheel only wakes")
        if self._channel is not None:
            self._channel.send(ack_frame(generation))
        if self._armed is None or generation != self._generation:
            self.stale += 1
            return
        self.wakes += 1
        self._near.arm(*self._armed)

    def connected(self, channel: Channel) -> None:
        """The wheel is there (again): it gets what is armed."""
        self._channel = channel
        self._missing = ""
        self._place()

    def lost(self, channel: Channel) -> None:
        """The wheel is gone, and with it what it had of ours."""
        if channel is self._channel:
            self._channel = None
            self._place()

    # --- the connection ---------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        while True:
            try:
                await self._connect()
            except Exception as error:  # whatever it is: the partition serves, and its own timer wakes it
                self._could_not(error)
            await asyncio.sleep(self._settings.wheel_retry_ms / 1_000)

    async def _connect(self) -> None:
        """Connect, and return when the connection has ended."""
        endpoint = await self._find()
        if endpoint.node != self._node:
            raise ChannelClosed(f"the wheel runs on another node ({endpoint.node}) than this partition ({self._node})")
        self._connection += 1
        hello = Hello(self._session, self._connection, WHEEL, 0)
        link = _WheelLink(self)
        await connect_link(endpoint, hello, self._secret, link, self._settings, node=self._node)
        await link.ended.wait()

    def _could_not(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text != self._missing:  # once, not each second
            log_event(logging.INFO, "wheel_missing", f"No release wheel; the partition wakes itself: {text}")
        self._missing = text


class _WheelLink(ChannelHandler):
    """The handler of one connection."""

    def __init__(self, waker: WheelWaker) -> None:
        self._waker = waker
        self._channel: Channel | None = None
        self.ended = asyncio.Event()

    def opened(self, channel: Channel) -> None:
        self._channel = channel
        self._waker.connected(channel)

    def frame_received(self, frame: bytes) -> None:
        self._waker.received(frame)

    def closed(self, error: Exception | None) -> None:
        self.ended.set()
        if self._channel is not None:
            self._waker.lost(self._channel)

    def writable(self, ok: bool) -> None:
        return None  # a frame of 17 bytes per wake
