"""The calls of one process to one partition: what waits, what is in flight, what must be sent again."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from actors.address import ClassRef
from actors.call import IN_FLIGHT, LOST, UNSENT, Call, fail, likeness
from actors.call_queue import CallQueue
from actors.channel import Channel
from actors.connector import Connector
from actors.errors import ChannelClosed, FrameTooLarge, MalformedFrame, Overloaded, ValueTooLarge
from actors.messages import (
    ADMIN,
    CALLS,
    OK,
    QUESTION,
    REPEAT,
    RESUMED,
    STALE,
    Replies,
    decode_from_partition,
    encode_admin,
    encode_calls,
    encode_classes,
    encode_question,
    encode_release,
    lane_session,
    outside_call_id,
)
from actors.ranges import all_but, merged

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from actors.client import Cancellable, Client
    from actors.routes import Routes

__all__ = ["Lane", "lane_session"]

#: A frame is closed once its arguments have this many bytes, so that a large batch does not hold up the replies
#: to its first calls, and stays far from `max_frame_bytes`.
FRAME_BYTES: Final = 256 * 1024
#: Releases kept while the partition can't be reached. Lost ones only cost a question of its sweep.
MAX_KEPT_RELEASES: Final = 100_000
#: Releases in one frame: about 40 KB.
RELEASES_PER_FRAME: Final = 1_000
#: A full queue is searched for given-up calls this often at most: 20,000 calls take about a millisecond.
LOOK_FOR_ROOM_S: Final = 0.02


class Lane:
    """One queue, one numbering, one connection.

    Calls of one object never stand in two lanes, and leave this one in the order in which they came.
    """

    def __init__(self, client: Client, routes: Routes, partition: int) -> None:
        settings = client.settings
        self._client = client
        self.routes = routes
        self.partition = partition
        self.session = lane_session(routes.session, partition)
        self.connector = Connector(client, self)
        #: Sent on this connection and not answered, in the order of sending. Given-up calls stay until answered.
        self.in_flight: dict[int, Call] = {}
        #: Seqs without a call in this lane whose ids may still come back here: not to be acknowledged.
        self.held: set[int] = set()
        #: Not sent, or to be sent again.
        self.waiting = CallQueue()
        self._next_seq = 1
        self._acks: list[int] = []
        self._releases: list[bytes] = []
        self._announced: dict[str, ClassRef] = {}
        self._resumed: set[int] = set()
        self._writable = True
        self._flush_scheduled = False
        self._ack_timer: Cancellable | None = None
        self._look_for_room_at = 0.0
        self._trusted_pickle = False
        self._window = settings.max_in_flight_calls
        self._max_queued = settings.max_queued_calls
        self._ack_delay_s = settings.ack_delay_ms / 1000

    # --- taking calls in ----------------------------------------------------------------------------

    def put(self, call: Call) -> None:
        """Take a new call. Raises `Overloaded` when too many wait."""
        if call.urgent:
            self.waiting.urgent.append(call)
        else:
            queue = self.waiting.outside
            if len(queue) >= self._max_queued and not self._found_room():
                raise Overloaded(
                    f"{len(queue)} calls already wait in this process for partition {self.partition}"
                    " (`max_queued_calls`); nothing was run: wait for answers before you make more calls"
                )
            queue.append(call)
        if not self._flush_scheduled:
            self.flush_soon()

    def _found_room(self) -> bool:
        """Throw out calls that were given up, unless that was just done: a full queue is asked at every call."""
        now = self._client.now()
        if now >= self._look_for_room_at:
            self._look_for_room_at = now + LOOK_FOR_ROOM_S
            self._drop_given_up()
        return len(self.waiting.outside) < self._max_queued

    def readmit(self, slot: int, again: Iterable[Call], fresh: Iterable[Call]) -> None:
        """Take calls that waited for their slot's owner: those sent before, and those that were not."""
        self.waiting.readmit(again, fresh)
        if self.connector.channel is not None:
            self._resumed.add(slot)
        self.flush_soon()

    def release(self, call_ids: Iterable[bytes]) -> None:
        """Tell the partition, with the next frame, that nobody will ask for these replies again."""
        self._releases += call_ids
        if len(self._releases) > MAX_KEPT_RELEASES:
            del self._releases[:-MAX_KEPT_RELEASES]
        self._arm_ack_timer()

    def acknowledge(self, seq: int) -> None:
        """Nobody waits for this seq's reply any more, and its call will not come back."""
        acks = self._acks
        if acks and acks[-1] + 1 == seq:
            acks[-1] = seq
        else:
            acks += (seq, seq)
        self._arm_ack_timer()

    def has_work(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self.waiting)

    # --- sending ------------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        """Send what may be sent at the end of this loop tick."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._client.flush_soon(self.flush)

    def flush(self) -> None:
        """Send what may be sent now."""
        self._flush_scheduled = False
        channel = self.connector.channel
        if channel is None:
            if self.has_work():
                self.connector.ensure()
        elif self._writable:
            try:
                self._send_waiting(channel)
                self._send_releases(channel)
            except ChannelClosed:
                pass  # `lost` follows: it keeps all that was in flight, also what this send did not take

    def _send_waiting(self, channel: Channel) -> None:
        again, urgent, outside = self.waiting.again, self.waiting.urgent, self.waiting.outside
        in_flight = self.in_flight
        now = self._client.now()
        batch: list[list[Any]] = []
        size = 0
        while True:
            if again:
                call = again.popleft()
            elif urgent:
                call = urgent.popleft()
            elif outside and len(in_flight) < self._window:
                call = outside.popleft()
            else:
                break
            if call.deadline <= now:
                call.expire(self.partition, self.connector.last_error)
            if call.future.done():
                self.drop(call)
                continue
            wire = call.wire
            seq = wire[0]
            if seq == UNSENT:
                seq = wire[0] = self._next_seq
                self._next_seq = seq + 1
            in_flight[seq] = call
            call.doubt |= IN_FLIGHT
            if call.kind != CALLS:
                call.sent = True
                self._send_calls(channel, batch)
                batch, size = [], 0
                try:
                    channel.send(encode_admin(*wire) if call.kind == ADMIN else encode_question(*wire))
                except FrameTooLarge as error:
                    self._refuse_large(call, error)
            else:
                wire[6] = int((call.deadline - now) * 1000) + 1
                if call.sent:
                    wire[5] = wire[5] & ~RESUMED | REPEAT
                else:
                    call.sent = True
                if self._announced.get(wire[1]) is not call.ref:
                    try:
                        self._announce(channel, call.ref)
                    except FrameTooLarge as error:
                        self._refuse_large(call, error)
                        continue
                if wire[7] is not None and wire[7][0] is None:
                    wire[7] = (outside_call_id(self.session, seq), *wire[7][1:])
                if self._resumed and call.slot in self._resumed:
                    self._resumed.discard(call.slot)
                    wire[5] |= RESUMED
                batch.append(wire)
                size += len(wire[4])
            if size >= FRAME_BYTES:
                self._send_calls(channel, batch)
                batch, size = [], 0
            if not self._writable:
                break
        if batch or self._acks:
            self._send_calls(channel, batch)

    def _send_calls(self, channel: Channel, batch: list[list[Any]]) -> None:
        if not batch and not self._acks:
            return
        acks = merged(self._acks)
        try:
            channel.send(encode_calls(acks, batch))
        except FrameTooLarge as error:
            if len(batch) > 1:
                half = len(batch) // 2
                self._send_calls(channel, batch[:half])
                self._send_calls(channel, batch[half:])
            elif batch:
                self._refuse_large(self.in_flight[batch[0][0]], error)
            else:  # nothing but acknowledgements: those of a new connection, after a very busy one
                self._acks = []  # the partition forgets these replies by age
        else:
            self._acks = []

    def _refuse_large(self, call: Call, error: FrameTooLarge) -> None:
        del self.in_flight[call.seq]
        fail(call.future, ValueTooLarge(f"{call.title} does not fit into a frame, nothing was run: {error}"))
        self.drop(call)

    def _announce(self, channel: Channel, ref: ClassRef | None) -> None:
        assert ref is not None  # every call has one
        if self._announced.get(ref.type_name) != ref:
            channel.send(encode_classes([ref]))
        self._announced[ref.type_name] = ref

    def _send_releases(self, channel: Channel) -> None:
        while self._releases and self._writable:
            page = self._releases[:RELEASES_PER_FRAME]
            del self._releases[:RELEASES_PER_FRAME]
            channel.send(encode_release(page))

    def _arm_ack_timer(self) -> None:
        if self._ack_timer is None and self.connector.channel is not None:
            self._ack_timer = self._client.call_later(self._ack_delay_s, self._acks_due)

    def _acks_due(self) -> None:
        self._ack_timer = None
        if (self._acks or self._releases) and self.connector.channel is not None:
            self.flush()

    # --- receiving ----------------------------------------------------------------------------------

    def received(self, frame: bytes) -> None:
        """Give replies to their callers. Raises `MalformedFrame`, which closes the channel."""
        message = decode_from_partition(frame)
        self.connector.proved()
        if isinstance(message, Replies):
            self._take_replies(message)
        else:
            call = self.in_flight.get(message.seq)
            if call is not None and call.kind != QUESTION:
                raise MalformedFrame(f"partition {self.partition} answered {call.title} like a question")
            self.in_flight.pop(message.seq, None)
            self._take_unawaited(message.seq)
            if call is not None and not call.future.done():
                call.future.set_result(list(message.unfinished))
        if self._acks:
            self._arm_ack_timer()
        if self.waiting:
            self.flush_soon()

    def _take_replies(self, message: Replies) -> None:
        partition, take, acks = self.partition, self.in_flight.pop, self._acks
        detours = self.routes.detours
        stale: list[Call] = []
        unknown: list[int] = []
        for seq, status, payload in message.replies:
            call = take(seq, None)
            if call is None:
                unknown.append(seq)
                continue
            if status == STALE and call.slot >= 0:
                stale.append(call)
                continue
            if acks and acks[-1] + 1 == seq:
                acks[-1] = seq
            else:
                acks += (seq, seq)
            if call.endings is not None:
                call.ended()
            if detours and call.slot in detours:
                self.routes.answered(call.slot)
            if (status == STALE or (status == OK and call.kind == QUESTION)) and not call.raw:
                fail(call.future, MalformedFrame(f"partition {partition} answered {call.title} with status {status}"))
            else:
                call.answer(partition, status, payload, self._trusted_pickle)
        if stale:
            self.routes.stale(self, stale)
        for seq in unknown:
            self._take_unawaited(seq)

    def _take_unawaited(self, seq: int) -> None:
        """Acknowledge a reply that nobody waits for, but never a number that a later call will have."""
        if not 1 <= seq < self._next_seq:
            raise MalformedFrame(f"partition {self.partition} answered call {seq}, which was never made")
        if seq not in self.held and seq not in self.in_flight:
            self.acknowledge(seq)

    def drop(self, call: Call) -> None:
        """Forget a call that its caller has given up and that is not in flight."""
        if call.seq != UNSENT:
            self.settle(call.seq)
        call.ended()

    def settle(self, seq: int) -> None:
        """The call that had this seq here has ended."""
        self.held.discard(seq)
        self.acknowledge(seq)

    # --- the connection -----------------------------------------------------------------------------

    def opened(self, channel: Channel) -> None:
        """A new connection: acknowledge everything that no call waits for, then repeat, then go on."""
        self._writable = True
        self._trusted_pickle = channel.trusted_pickle
        self._announced.clear()
        self._resumed.clear()
        wanted = (call.seq for call in self.waiting.again if not call.future.done())
        self._acks = all_but(chain(wanted, self.held), self._next_seq - 1)
        self.flush()

    def writable(self, ok: bool) -> None:
        """The channel is full, or has room again."""
        self._writable = ok
        if ok:
            self.flush_soon()

    def lost(self) -> None:
        """The connection is gone: what was in flight goes to the front, in its order; only given-up calls leave."""
        calls = list(self.in_flight.values())
        self.in_flight.clear()
        again: list[Call] = []
        for call in calls:
            call.doubt = LOST
            if call.future.done():
                call.ended()
            elif not self.routes.keep_lost(self, call):
                again.append(call)
        self.waiting.again.extendleft(reversed(again))
        self.routes.lane_lost(self)

    # --- ending calls without an answer -------------------------------------------------------------

    def sweep(self, now: float) -> float:
        """End the calls whose deadline has passed. Returns the earliest deadline of those that are left."""
        earliest = float("inf")
        for call in chain(self.in_flight.values(), self.waiting):
            if call.deadline <= now:
                call.expire(self.partition, self.connector.last_error)
            elif call.deadline < earliest and not call.future.done():
                earliest = call.deadline
        self._drop_given_up()
        return earliest

    def _drop_given_up(self) -> None:
        for call in self.waiting.take_given_up():
            self.drop(call)

    def fail_waiting(self, error: Exception) -> None:
        """Give the error to every call that waits for the connection."""
        for call in self.waiting.take_all():
            fail(call.future, likeness(error))
            self.drop(call)

    def close(self, describe: Callable[[Call], Exception]) -> asyncio.Task[None] | None:
        """End every call with `describe(call)`, acknowledge what was received and close the connection."""
        for call in chain(self.in_flight.values(), self.waiting.take_all()):
            fail(call.future, describe(call))
        self.flush()
        self.in_flight.clear()
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        return self.connector.close()
