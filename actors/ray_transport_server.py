"""The partition's end of the Ray transport: lives on the partition's loop, is posted to by the actor's methods."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from actors.base_channel import LINGER_S, BaseChannel
from actors.channel import SESSION_BYTES, Accept, Hello
from actors.errors import ChannelClosed, FrameTooLarge, MalformedFrame
from actors.handshake import Refusal, Refused
from actors.ray_transport import (
    CLOSE_SEQ,
    CLOSED,
    FRAMES,
    OPEN_SEQ,
    OPENED,
    POLL_MS,
    REFUSED,
    TAKEN,
    WANTED,
    Answer,
    take_batch,
)
from actors.sessions import SessionTable
from actors.settings import Settings

__all__ = ["RayServerChannel", "RayTransportServer"]

logger = logging.getLogger("mainspring.link")

#: A process that neither polls nor submits for this many poll times is gone: Ray does not report its death.
SILENT_POLLS = 3


class RayServerChannel(BaseChannel):
    """The partition's end of one channel."""

    trusted_pickle = True

    def __init__(
        self,
        peer: Hello,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        poll_ms: int,
        gone: Callable[[RayServerChannel], None],
    ) -> None:
        super().__init__(settings, loop)
        self._peer = peer
        self._poll_s = poll_ms / 1_000
        self._gone = gone
        self._taken = OPEN_SEQ
        self._out: deque[bytes] = deque()  # frames that no poll has acknowledged
        self._out_first = 1  # the number of its first
        self._out_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._heard_at = loop.time()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def buffered_bytes(self) -> int:
        return self._out_bytes

    def send(self, frame: bytes) -> None:
        self._check_send(len(frame))
        self._out.append(frame)
        self._out_bytes += len(frame)
        self._wake()
        if self._out_bytes > self._high_water:
            self._check_backlog()

    def start(self, accept: Accept) -> None:
        """Find the handler and open. Raises what `accept` raises."""
        self._timer = self._loop.call_later(self._silence_s, self._check_silence)
        handler = accept(self)
        if not self._closed:
            self._open(handler)

    def take(self, seq: int, frames: list[bytes]) -> Answer:
        """The next batch of the process."""
        self._heard_at = self._loop.time()
        if self._closed and not self._out:
            return self._closed_answer()
        if self._closed or seq <= self._taken:
            # Closed but still polled for its last frames, which an error here would cut off; or delivered twice.
            return (TAKEN,)
        try:
            if seq != self._taken + 1:
                raise MalformedFrame(f"batch {seq} came after {self._taken}")
            self._taken = seq
            for frame in frames:
                self._take_frame(frame)
                if self._closed:
                    return self._closed_answer()
        except ChannelClosed as error:
            self.close(error)
            return self._closed_answer()
        except Exception as error:
            self._handler_failed(error)
            return self._closed_answer()
        return (TAKEN,)

    def _take_frame(self, frame: bytes) -> None:
        if not isinstance(frame, bytes):
            raise MalformedFrame(f"a frame is bytes, not {type(frame).__name__}")
        if len(frame) > self._max_frame_bytes:
            raise FrameTooLarge(f"the peer sent a frame of {len(frame)} bytes; the limit is {self._max_frame_bytes}")
        assert self._handler is not None
        self._handler.frame_received(frame)

    async def poll(self, after: int) -> Answer:
        """Drop what the process has, wait for frames (for the poll time), give them."""
        self._heard_at = self._loop.time()
        if after >= self._out_first + len(self._out):
            self.close(MalformedFrame(f"a poll acknowledged frame {after}, which was never sent"))
        while self._out and self._out_first <= after:
            self._out_bytes -= len(self._out.popleft())
            self._out_first += 1
        self._check_backlog()
        self._wake()  # one poll waits at a time: the process has given up on an earlier one
        if not self._out and not self._closed:
            await self._wait()
        if self._out:
            return (FRAMES, self._out_first, take_batch(self._out))
        if self._closed:
            self._end_linger()
            return self._closed_answer()
        return (FRAMES, self._out_first, [])

    async def _wait(self) -> None:
        waiter = self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._poll_s, _resolve, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._heard_at = self._loop.time()

    def _wake(self) -> None:
        if self._waiter is not None:
            _resolve(self._waiter)
            self._waiter = None

    @property
    def _silence_s(self) -> float:
        return SILENT_POLLS * self._poll_s

    def _check_silence(self) -> None:
        silent = self._loop.time() - self._heard_at
        if silent >= self._silence_s:
            self.close(ChannelClosed(f"the process has not been heard of for {silent:.0f} s"))
        else:
            self._timer = self._loop.call_later(self._silence_s - silent, self._check_silence)

    def _closed_answer(self) -> Answer:
        return (CLOSED, str(self._error) if self._error is not None else "closed by the partition")

    def _shut(self, error: Exception | None) -> None:
        self._wake()
        self._cancel_timer()
        if error is None and self._out:
            self._timer = self._loop.call_later(LINGER_S, self._end_linger)
        else:
            self._end_linger()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_linger(self) -> None:
        self._cancel_timer()
        self._out.clear()
        self._out_bytes = 0
        self._gone(self)


class RayTransportServer:
    """Accepts channels over the actor's calls for one partition, in one epoch.

    Made on the partition's loop, to which it is bound. Only the `_threadsafe` methods may be called elsewhere.
    """

    def __init__(
        self, accept: Accept, settings: Settings, *, partition: int, epoch: int, poll_ms: int = POLL_MS
    ) -> None:
        self._accept = accept
        self._settings = settings
        self._partition = partition
        self._epoch = epoch
        self._poll_ms = poll_ms
        self._loop = asyncio.get_running_loop()
        self._sessions: SessionTable[RayServerChannel] = SessionTable(settings.max_connections)
        self._stopping = False
        self._drained: asyncio.Future[None] | None = None

    @property
    def connections(self) -> int:
        """Live connections."""
        return len(self._sessions)

    def submit_threadsafe(self, session: bytes, connection: int, seq: int, frames: list[bytes]) -> Future[Answer]:
        """What the actor's `submit` awaits. Raises RuntimeError when the partition's loop is closed."""
        future: Future[Answer] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self.submit(session, connection, seq, frames))
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        self._loop.call_soon_threadsafe(run)
        return future

    def replies_threadsafe(self, session: bytes, connection: int, after_seq: int) -> Future[Answer]:
        """What the actor's `replies` awaits. Raises RuntimeError when the partition's loop is closed."""
        if self._loop.is_closed():
            raise RuntimeError("the partition's event loop is closed")
        return asyncio.run_coroutine_threadsafe(self.replies(session, connection, after_seq), self._loop)

    def submit(self, session: bytes, connection: int, seq: int, frames: list[bytes]) -> Answer:
        """Take a batch; returns once its frames are handed to the handler."""
        if seq == OPEN_SEQ:
            try:
                return self._open(session, connection, frames)
            except Refused as refused:
                return (REFUSED, int(refused.code), refused.detail)
        channel = self._sessions.find(session, connection)
        if channel is None:
            return (CLOSED, "the partition has no such connection")
        if seq == CLOSE_SEQ:
            channel.close(ChannelClosed("the peer closed the connection"))
            return (TAKEN,)
        return channel.take(seq, frames)

    async def replies(self, session: bytes, connection: int, after_seq: int) -> Answer:
        """The frames after `after_seq`, waiting for the first for one poll time at most."""
        channel = self._sessions.find(session, connection)
        if channel is None:
            return (CLOSED, "the partition has no such connection")
        return await channel.poll(after_seq)

    async def stop(self) -> None:
        """Take no more connections and close all; what was queued can still be polled for a moment."""
        self._stopping = True
        for channel in self._sessions.channels():
            channel.close()
        if len(self._sessions):
            self._drained = self._loop.create_future()
            await self._drained

    def _open(self, session: bytes, connection: int, frames: list[bytes]) -> Answer:
        if len(session) != SESSION_BYTES or len(frames) != 1 or len(frames[0]) != WANTED.size:
            raise Refused(Refusal.MALFORMED)
        partition, epoch = WANTED.unpack(frames[0])
        if self._stopping:
            raise Refused(Refusal.NOT_ACCEPTED)
        if partition != self._partition:
            raise Refused(Refusal.OTHER_PARTITION, f"{self._partition} instead of {partition}")
        if epoch > self._epoch:
            raise Refused(Refusal.OLD_EPOCH, f"epoch {self._epoch}, the peer knows {epoch}")
        peer = Hello(session, connection, partition, epoch)
        channel = RayServerChannel(peer, self._settings, self._loop, self._poll_ms, self._gone)
        older = self._sessions.claim(session, connection, channel)
        if older is not None:
            older.close_now(ChannelClosed("a newer connection of the session replaced this one"))
        try:
            channel.start(self._accept)
        except Exception as error:
            logger.error("a connection could not be accepted", exc_info=error)
            channel.close(error)
            raise Refused(Refusal.NOT_ACCEPTED) from error
        return (OPENED, self._partition, self._epoch)

    def _gone(self, channel: RayServerChannel) -> None:
        self._sessions.release(channel.peer.session, channel.peer.connection, channel)
        if self._drained is not None and not len(self._sessions) and not self._drained.done():
            self._drained.set_result(None)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
