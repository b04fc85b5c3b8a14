"""The second transport: the same channels over Ray actor calls, for where no link can be made.

The process calls `submit` with one batch of frames in flight, so their order is by construction, and keeps one long
poll `replies` waiting at the actor. Ray carries every frame by pickle anyway, so frames may hold pickled values.

The actor's two methods look like this; Ray runs them on a loop thread of its own, so they only post::

    async def submit(self, session, connection, seq, frames):
        return await asyncio.wrap_future(self.transport.submit_threadsafe(session, connection, seq, frames))

    async def replies(self, session, connection, after_seq):
        return await asyncio.wrap_future(self.transport.replies_threadsafe(session, connection, after_seq))

`submit` numbers its batches from 1; batch 0 opens the channel and batch -1 closes it. Reply frames are numbered from 1
and kept until a later poll acknowledges them, so a lost reply is sent again and a second delivery is recognised.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from typing import Any

from actors.base_channel import LINGER_S, BaseChannel
from actors.channel import Channel, ChannelHandler, Hello
from actors.errors import ChannelClosed, FrameTooLarge, MalformedFrame
from actors.handshake import Refusal, Refused
from actors.settings import KIB, Settings

__all__ = [
    "BATCH_BYTES",
    "CLOSED",
    "CLOSE_SEQ",
    "FRAMES",
    "OPENED",
    "OPEN_SEQ",
    "POLL_MS",
    "REFUSED",
    "TAKEN",
    "WANTED",
    "Answer",
    "RayChannel",
    "connect_ray",
    "take_batch",
]

#: A long poll is answered after this at the latest, and asked again: an actor task does not wait for ever.
POLL_MS = 10_000
#: An answer is this much later than the poll's own end before it counts as lost.
LATE_MS = 5_000
#: Polls lost in a row that end the channel.
MAX_LOST_POLLS = 3
#: Above 100 KiB Ray moves an argument to its object store, which costs four times as much as the call.
BATCH_BYTES = 90 * KIB

OPEN_SEQ = 0
CLOSE_SEQ = -1
#: What batch 0 carries: the wanted partition and the lowest epoch that is accepted.
WANTED = struct.Struct("!qQ")

#: Answers of `submit` and `replies`: the first element says which.
Answer = tuple[Any, ...]
OPENED = "opened"  # partition, epoch
TAKEN = "taken"
FRAMES = "frames"  # number of the first frame, frames
CLOSED = "closed"  # reason
REFUSED = "refused"  # code, detail


def take_batch(pending: deque[bytes]) -> list[bytes]:
    """Frames from the left of `pending`, which stay there: as many as one Ray call carries well, at least one."""
    batch: list[bytes] = []
    size = 0
    for frame in pending:
        size += len(frame)
        if batch and size > BATCH_BYTES:
            break
        batch.append(frame)
    return batch


class RayChannel(BaseChannel):
    """The process's end. Any error of the actor's calls, such as its death, closes it with `ChannelClosed`."""

    trusted_pickle = True

    def __init__(self, actor: Any, hello: Hello, settings: Settings, poll_ms: int) -> None:
        super().__init__(settings, asyncio.get_running_loop())
        self._actor = actor
        self._hello = hello
        self._poll_timeout_s = (poll_ms + LATE_MS) / 1_000
        self._pending: deque[bytes] = deque()
        self._pending_bytes = 0
        self._batch_seq = OPEN_SEQ
        self._received = 0
        self._peer_closed = False
        self._submitting: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None

    @property
    def buffered_bytes(self) -> int:
        return self._pending_bytes

    def send(self, frame: bytes) -> None:
        self._check_send(len(frame))
        self._pending.append(frame)
        self._pending_bytes += len(frame)
        if self._submitting is None:
            self._submitting = self._loop.create_task(self._submit_all())
        if self._pending_bytes > self._high_water:
            self._check_backlog()

    async def open(self, handler: ChannelHandler) -> None:
        """Batch 0. Raises `ChannelClosed` when the actor is gone or refuses."""
        hello = self._hello
        wanted = WANTED.pack(hello.partition, hello.epoch)
        kind, *rest = await self._ask(self._actor.submit, OPEN_SEQ, [wanted])
        if kind == REFUSED:
            code, detail = rest
            self._peer_closed = True
            raise Refused(Refusal(code), detail, by_peer=True).error()
        if kind != OPENED:
            raise ChannelClosed(f"the partition did not open the channel: {rest}")
        partition, epoch = rest
        self._peer = Hello(hello.session, hello.connection, partition, epoch)
        self._polling = self._loop.create_task(self._poll())
        self._open(handler)

    async def _ask(self, method: Any, *args: Any) -> Answer:
        try:
            answer: Answer = await method.remote(self._hello.session, self._hello.connection, *args)
        except Exception as error:
            # Whatever Ray raises (death, unavailability, a full queue), the batch's fate is unknown.
            raise ChannelClosed(f"the partition's actor did not answer: {error}") from error
        if answer[0] == CLOSED:
            self._peer_closed = True
            raise ChannelClosed(f"the partition closed the channel: {answer[1]}")
        return answer

    async def _submit_all(self) -> None:
        try:
            while self._pending:
                batch = take_batch(self._pending)
                self._batch_seq += 1
                await self._ask(self._actor.submit, self._batch_seq, batch)
                # An error-close meanwhile has dropped what was pending.
                for _ in range(min(len(batch), len(self._pending))):
                    self._pending_bytes -= len(self._pending.popleft())
                self._check_backlog()
        except ChannelClosed as error:
            self.close(error)
        finally:
            self._submitting = None

    async def _poll(self) -> None:
        lost = 0
        while not self._closed:
            try:
                answer = await asyncio.wait_for(self._ask(self._actor.replies, self._received), self._poll_timeout_s)
            except asyncio.TimeoutError:
                lost += 1
                if lost == MAX_LOST_POLLS:
                    self.close(ChannelClosed(f"the partition's actor did not answer {lost} polls"))
            except ChannelClosed as error:
                self.close(error)
            else:
                lost = 0
                self._take_frames(answer)

    def _take_frames(self, answer: Answer) -> None:
        try:
            _, first, frames = answer
            if first > self._received + 1:
                raise MalformedFrame(f"reply {first} came after {self._received}")
            for number, frame in enumerate(frames, first):
                if self._closed:
                    return
                if number <= self._received:
                    continue  # sent again because an earlier answer seemed lost
                if len(frame) > self._max_frame_bytes:
                    raise FrameTooLarge(f"the peer sent {len(frame)} bytes; the limit is {self._max_frame_bytes}")
                self._received = number
                assert self._handler is not None
                self._handler.frame_received(frame)
        except ChannelClosed as error:
            self.close(error)
        except Exception as error:
            self._handler_failed(error)

    def _shut(self, error: Exception | None) -> None:
        if error is not None:
            self._pending.clear()
            self._pending_bytes = 0
        if self._polling is not None:
            self._polling.cancel()
        if not self._peer_closed:
            self._leaving = self._loop.create_task(self._leave())

    async def _leave(self) -> None:
        """Pass on what is queued, then tell the actor; nobody waits for either longer than the channel lingers."""
        if self._submitting is not None:
            await asyncio.wait((self._submitting,), timeout=LINGER_S)
        if self._peer_closed:
            return
        try:
            await asyncio.wait_for(self._ask(self._actor.submit, CLOSE_SEQ, []), LINGER_S)
        except (ChannelClosed, asyncio.TimeoutError):
            # The expected end when the actor is gone; if it is not, it notices that no poll comes any more.
            return


async def connect_ray(
    actor: Any,
    hello: Hello,
    handler: ChannelHandler,
    settings: Settings,
    *,
    poll_ms: int = POLL_MS,
) -> Channel:
    """Open a channel to a partition through its Ray actor handle.

    `hello.epoch` is the lowest epoch that is accepted; `channel.peer.epoch` is the real one. Raises `ChannelClosed`
    when the actor is gone, refuses, or does not answer within `handshake_timeout_ms`.
    """
    channel = RayChannel(actor, hello, settings, poll_ms)
    try:
        await asyncio.wait_for(channel.open(handler), settings.handshake_timeout_ms / 1_000)
    except asyncio.TimeoutError:
        error = ChannelClosed(f"no channel within {settings.handshake_timeout_ms} ms")
        channel.close(error)
        raise error from None
    except BaseException as failure:
        channel.close(ChannelClosed(f"connecting ended early: {failure!r}"))
        raise
    if not channel.is_open:
        raise channel.error or ChannelClosed("the channel was closed while it opened")
    return channel
