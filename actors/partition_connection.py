"""One client's connection to a partition: its frames in order, its replies in batches."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from actors.channel import Channel
from actors.errors import ChannelClosed, FrameTooLarge, MainspringError, MalformedFrame, ReplyLost
from actors.logs import log_event
from actors.messages import (
    OK_PICKLED,
    PICKLED,
    RAISED,
    Admin,
    Calls,
    Classes,
    Question,
    Release,
    ReplyRow,
    decode_from_client,
    encode_answer,
    encode_replies,
)
from actors.wire_errors import encode_error

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["PartitionConnection", "ReplyTo"]

#: A batch of calls is worked through in slices of this length, so that commits and other connections get their turn.
_SLICE_NS = 2_000_000
#: How many calls are run between looks at the clock.
_SLICE_STRIDE = 16
#: What a frame holds besides the one answer in it, generously.
_FRAME_OVERHEAD = 64


class ReplyTo:
    """Where the reply of one call goes."""

    __slots__ = ("_connection", "_seq")

    def __init__(self, connection: PartitionConnection, seq: int) -> None:
        self._connection = connection
        self._seq = seq

    def __call__(self, status: int, payload: bytes) -> None:
        self._connection.reply(self._seq, status, payload)

    def turn_away(self, slot: int) -> None:
        """The call is about to be answered Stale: so is whatever the client has sent after it, until it starts over."""
        self._connection.stale_slots.add(slot)


class PartitionConnection:
    """Implements `ChannelHandler` on the partition's side."""

    __slots__ = (
        "_backlog",
        "_channel",
        "_flushing",
        "_paused",
        "_replies",
        "_running",
        "aliases",
        "partition",
        "refused_classes",
        "stale_slots",
    )

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self._channel: Channel | None = None
        #: what has arrived and was not looked at yet: messages and single calls, in order
        self._backlog: deque[Callable[[], None]] = deque()
        self._running = False
        self._paused = False
        self._replies: list[ReplyRow] = []
        self._flushing = False
        #: slots that this connection was told are not here; see `messages.RESUMED`
        self.stale_slots: set[int] = set()
        #: seq -> call id of calls that were first sent in another session (their slot has moved)
        self.aliases: dict[int, bytes] = {}
        #: classes that this client may not use, since another class has their name
        self.refused_classes: dict[str, MainspringError] = {}

    @property
    def session(self) -> bytes:
        assert self._channel is not None
        return self._channel.peer.session

    @property
    def trusted_pickle(self) -> bool:
        """Whether pickles may travel on this connection, in both directions."""
        return self._channel is not None and self._channel.trusted_pickle

    # --- ChannelHandler ---------------------------------------------------------------------------

    def opened(self, channel: Channel) -> None:
        self._channel = channel
        self.partition.connected(self)

    def frame_received(self, frame: bytes) -> None:
        try:
            message = decode_from_client(frame)
        except MalformedFrame as error:
            self._close(error)
            return
        backlog = self._backlog
        if isinstance(message, Calls):
            acks = message.acks
            if acks:
                backlog.append(partial(self.partition.acknowledge, self, acks))
            admit = self.partition.admission.admit
            trusted = self.trusted_pickle
            for row in message.calls:
                if row[5] & PICKLED and not trusted:
                    self._close(MalformedFrame("a pickled call came over a link, which never carries pickle"))
                    return
                backlog.append(partial(admit, self, row))
        elif isinstance(message, Classes):
            if not self.trusted_pickle and any(ref.shipped is not None for ref in message.classes):
                self._close(MalformedFrame("a class came by value over a link, which never carries pickle"))
                return
            backlog.append(partial(self.partition.tell_classes, self, message.classes))
        elif isinstance(message, Release):
            backlog.append(partial(self.partition.release_ids, message.call_ids))
        elif isinstance(message, Question):
            backlog.append(partial(self._question, message))
        else:
            assert isinstance(message, Admin)
            backlog.append(partial(self.partition.administer, self, message))
        self._work()

    def closed(self, error: Exception | None) -> None:
        self._backlog.clear()
        channel, self._channel = self._channel, None
        if channel is not None:
            self.partition.disconnected(self, channel.peer.session)

    def writable(self, ok: bool) -> None:
        # a slow reader pauses its own calls: its replies are what fills the buffer
        self._paused = not ok
        if ok:
            self._work()

    # --- working through the backlog --------------------------------------------------------------

    def _work(self) -> None:
        if self._running or self._paused:
            return
        self._running = True
        backlog = self._backlog
        until = time.perf_counter_ns() + _SLICE_NS
        count = 0
        try:
            while backlog and not self._paused:
                try:
                    backlog.popleft()()
                except Exception as error:  # a mistake here must not keep everything behind it waiting
                    log_event(logging.ERROR, "request_failed", f"a client's request failed: {error!r}", error=error)
                count += 1
                if count % _SLICE_STRIDE == 0 and time.perf_counter_ns() > until:
                    break
        finally:
            self._running = False
        if backlog and not self._paused:
            self.partition.loop.call_soon(self._work)

    def _question(self, message: Question) -> None:
        if self._channel is not None:
            self._send(encode_answer(message.seq, self.partition.admission.unfinished(message.callers)))

    # --- replies ----------------------------------------------------------------------------------

    def reply(self, seq: int, status: int, payload: bytes) -> None:
        """Queue a reply; all replies of a loop turn travel in one frame."""
        if self._channel is None:
            return  # the client repeats on its next connection and is answered there
        if status == OK_PICKLED and not self._channel.trusted_pickle:
            # the call was first made over Ray and is repeated over a link
            lost = ReplyLost("the call ran, but its reply is one that only pickle can carry, which a link never does")
            status, payload = RAISED, encode_error(lost)
        most = self.partition.settings.max_frame_bytes - _FRAME_OVERHEAD
        if len(payload) > most:  # sent as it is it would cost the connection, again at each repeat
            lost = ReplyLost(f"it was done, but its answer takes {len(payload):,} bytes (limit {most:,}): ask for less")
            status, payload = RAISED, encode_error(lost)
        self._replies.append((seq, status, payload))
        if not self._flushing:
            self._flushing = True
            self.partition.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        replies, self._replies = self._replies, []
        if self._channel is None or not replies:
            return
        limit = self.partition.settings.max_frame_bytes // 2
        start = size = 0
        for index, row in enumerate(replies):
            size += len(row[2]) + 32
            if size > limit and index > start:
                self._send(encode_replies(replies[start:index]))
                start, size = index, len(row[2]) + 32
        self._send(encode_replies(replies[start:]))

    def _send(self, frame: bytes) -> None:
        if self._channel is None:
            return
        try:
            self._channel.send(frame)
        except FrameTooLarge as error:
            self._close(error)
        except ChannelClosed:
            pass  # `closed` follows; the client repeats on its next connection

    def _close(self, error: Exception) -> None:
        if self._channel is not None:
            self._channel.close(error)

    def close(self, error: Exception | None = None) -> None:
        """The partition stops (None), or is gone."""
        if self._channel is not None:
            self._channel.close(error)
