"""Partitions that keep the protocol's promises and run nothing: the other side of a client under test.

Frames, executions and replies move only when a test says so. What a call does is to be noted; its value is the
number of the execution. Outcomes are kept by call id, for all partitions together, as they move with their slots.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.address import SLOTS, ClassRef, slot_of
from actors.channel import Channel, ChannelHandler, Hello
from actors.client import Client, Connect
from actors.codec import decode, encode
from actors.errors import ChannelClosed
from actors.messages import (
    OK,
    PICKLED,
    RESUMED,
    STALE,
    Admin,
    CallRow,
    Calls,
    Classes,
    ClientMessage,
    Question,
    Release,
    decode_from_client,
    encode_answer,
    encode_replies,
    outside_call_id,
)
from actors.ranges import merged, numbers
from actors.settings import Settings
from tests.support.manual_timers import ManualTimers
from tests.support.memory_channel import MemoryChannel, connected_pair

__all__ = ["CART", "Executed", "FakeCluster", "FakePartition", "World"]

CART = ClassRef("Cart", "shop.carts", "Cart")


@dataclass(frozen=True)
class Executed:
    """One execution of a method."""

    call_id: bytes
    type_name: str
    key: str
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


@dataclass
class FakePartition:
    """One partition: its connections, what it was sent, and what it is about to run."""

    number: int
    cluster: FakeCluster
    is_down: bool = False
    final_error: Exception | None = None
    messages: list[ClientMessage] = field(default_factory=list)
    connections: dict[bytes, _Connection] = field(default_factory=dict)
    highest: dict[bytes, int] = field(default_factory=dict)
    acked: dict[bytes, list[int]] = field(default_factory=dict)
    admin_values: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> list[CallRow]:
        """All calls in the order in which they arrived, repeats too."""
        return [call for message in self.messages if isinstance(message, Calls) for call in message.calls]

    @property
    def connection(self) -> _Connection:
        """The only connection."""
        (connection,) = self.connections.values()
        return connection

    def acks(self) -> list[int]:
        """What the only session has acknowledged here, as ranges."""
        (acked,) = self.acked.values()
        return merged(acked)

    def connect(self, session: bytes, number: int, handler: ChannelHandler, trusted: bool = False) -> Channel:
        if self.final_error is not None:
            raise self.final_error
        if self.is_down:
            raise ChannelClosed(f"partition {self.number} does not run")
        if number <= self.highest.get(session, 0):
            raise ChannelClosed(f"connection {number} is an old one")
        old = self.connections.get(session)
        if old is not None:
            old.cut()
        self.highest[session] = number
        client, server = connected_pair(
            Hello(session, number, self.number, 0), Hello(session, number, self.number, 1), **self.cluster.limits
        )
        client.trusted_pickle = server.trusted_pickle = trusted
        connection = self.connections[session] = _Connection(self, client, server)
        server.open(connection)
        client.open(handler)
        return client

    def drop(self) -> None:
        """All connections break: frames under way and calls not yet run are gone."""
        for connection in list(self.connections.values()):
            connection.cut()

    def run(self, count: int | None = None) -> None:
        """Run the next calls that have arrived."""
        for connection in list(self.connections.values()):
            connection.run(count)


class _Connection:
    """The server's side of one connection."""

    def __init__(self, partition: FakePartition, client: MemoryChannel, server: MemoryChannel) -> None:
        self.partition = partition
        self.client = client
        self.server = server
        self.session = server.peer.session
        self.todo: deque[CallRow | Admin | Question] = deque()
        self.ready: deque[tuple[int, int, bytes]] = deque()
        self.stale_slots: set[int] = set()
        self.known: set[str] = set()

    def opened(self, channel: Channel) -> None:
        self.partition.acked.setdefault(self.session, [])

    def writable(self, ok: bool) -> None:
        pass

    def closed(self, error: Exception | None) -> None:
        if self.partition.connections.get(self.session) is self:
            del self.partition.connections[self.session]

    def cut(self) -> None:
        self.client.outbox.clear()
        self.todo.clear()
        self.ready.clear()
        self.partition.connections.pop(self.session, None)
        self.server.close(ChannelClosed("the connection broke"))

    def frame_received(self, frame: bytes) -> None:
        message = decode_from_client(frame)
        self.partition.messages.append(message)
        if isinstance(message, Calls):
            for seq in numbers(message.acks):
                self.partition.cluster.released.add(outside_call_id(self.session, seq))
            self.partition.acked[self.session] += message.acks
            self.todo.extend(message.calls)
        elif isinstance(message, Classes):
            self.known.update(ref.type_name for ref in message.classes)
        elif not isinstance(message, Release):
            self.todo.append(message)

    def run(self, count: int | None = None) -> None:
        while self.todo and (count is None or count > 0):
            if count is not None:
                count -= 1
            item = self.todo.popleft()
            if isinstance(item, Question):
                self.server.send(encode_answer(item.seq, [turn_id == b"open" for _, _, turn_id in item.callers]))
            elif isinstance(item, Admin):
                self._run_admin(item)
            else:
                self._run_call(item)

    def _run_admin(self, item: Admin) -> None:
        if item.op == "delete_object" and not self._owns(slot_of(*decode(item.args)), 0):
            self.ready.append((item.seq, STALE, b""))
        else:
            self.ready.append((item.seq, OK, encode(self.partition.admin_values.get(item.op))))

    def _owns(self, slot: int, flags: int) -> bool:
        if flags & RESUMED:
            self.stale_slots.discard(slot)
        if slot in self.stale_slots or self.partition.cluster.owners[slot] != self.partition.number:
            self.stale_slots.add(slot)
            return False
        return True

    def _run_call(self, call: CallRow) -> None:
        seq, type_name, key, method, args, flags, timeout_ms, extra = call
        cluster = self.partition.cluster
        assert type_name in self.known, "a class must be announced before its first call"
        assert timeout_ms > 0
        if not self._owns(slot_of(type_name, key), flags):
            self.ready.append((seq, STALE, b""))
            return
        call_id = extra[0] if extra is not None and extra[0] is not None else outside_call_id(self.session, seq)
        assert call_id not in cluster.released, "a call came after it had been acknowledged"
        if call_id not in cluster.outcomes:
            assert not flags & PICKLED or self.server.trusted_pickle, "a pickle came over a link"
            positional, named = pickle.loads(args) if flags & PICKLED else decode(args)
            cluster.executed.append(Executed(call_id, type_name, key, method, positional, named))
            cluster.outcomes[call_id] = encode(len(cluster.executed))
        self.ready.append((seq, OK, cluster.outcomes[call_id]))

    def reply(self, seqs: Sequence[int] | None = None) -> None:
        """Send the answers that are ready: all in one frame, or only those to some calls, in the order given."""
        if seqs is None:
            chosen = list(self.ready)
        else:
            by_seq = {row[0]: row for row in self.ready}
            chosen = [by_seq[seq] for seq in seqs]
        for row in chosen:
            self.ready.remove(row)
        if chosen:
            self.server.send(encode_replies(chosen))


class FakeCluster:
    """A `Directory`. `owners` is the truth, `map` what a client that has refreshed knows."""

    def __init__(self, partitions: int = 1, *, trusted: bool = False, **limits: int) -> None:
        """`trusted`: it also opens channels that carry pickles."""
        self.connect_trusted: Connect | None = self._connect_trusted if trusted else None
        self.limits = limits
        self.all = [FakePartition(number, self) for number in range(partitions)]
        self.owners = [slot % partitions for slot in range(SLOTS)]
        self.executed: list[Executed] = []
        self.outcomes: dict[bytes, bytes] = {}
        self.released: set[bytes] = set()
        self.refreshes = 0
        self.map_is_late = False
        self._version = 1
        self._true_version = 1
        self._map = list(self.owners)

    @property
    def map_version(self) -> int:
        return self._version

    def partition_of(self, slot: int) -> int:
        return self._map[slot]

    def partitions(self) -> Sequence[int]:
        return range(len(self.all))

    async def refresh(self, seen_version: int) -> None:
        self.refreshes += 1
        await asyncio.sleep(0)
        if not self.map_is_late:
            self._version = self._true_version
            self._map = list(self.owners)

    async def connect(self, partition: int, session: bytes, connection: int, handler: ChannelHandler) -> Channel:
        await asyncio.sleep(0)
        return self.all[partition].connect(session, connection, handler)

    async def _connect_trusted(
        self, partition: int, session: bytes, connection: int, handler: ChannelHandler
    ) -> Channel:
        await asyncio.sleep(0)
        return self.all[partition].connect(session, connection, handler, trusted=True)

    def move(self, slot: int, target: int) -> None:
        """The slot has a new owner; clients learn of it when they refresh."""
        self.owners[slot] = target
        self._true_version += 1


class World:
    """A client, its clock, and a cluster."""

    def __init__(
        self,
        partitions: int = 1,
        limits: dict[str, int] | None = None,
        session: bytes = b"s" * 16,
        trusted: bool = False,
        **settings: Any,
    ) -> None:
        self.timers = ManualTimers()
        self.cluster = FakeCluster(partitions, trusted=trusted, **(limits or {}))
        self.settings = Settings(**settings)
        self.client = Client(
            self.cluster,
            self.settings,
            session=session,
            now=self.timers.now,
            call_later=self.timers.call_later,
            jitter=lambda: 1.0,
        )

    def call(self, key: str, method: str = "add", *args: Any, **options: Any) -> asyncio.Future[Any]:
        return self.client.call(CART, key, method, args, {}, **options)

    async def ticks(self, count: int = 12) -> None:
        """Let the loop turn: enough for every chain of call-backs here, none of which waits for time."""
        for _ in range(count):
            await asyncio.sleep(0)

    async def deliver(self) -> None:
        """Let the loop turn, and everything that was sent arrive."""
        await self.ticks()
        for partition in self.cluster.all:
            for connection in list(partition.connections.values()):
                connection.client.deliver()
        await self.ticks()

    async def answer(self) -> None:
        """Run everything that has arrived and bring the answers back."""
        for partition in self.cluster.all:
            for connection in list(partition.connections.values()):
                connection.run()
                connection.reply()
                connection.server.deliver()
        await self.ticks()

    async def round_trip(self) -> None:
        await self.deliver()
        await self.answer()

    async def break_connections(self, partition: int = 0) -> None:
        """Break them, and let the pause pass after which a client that had no answer yet connects again."""
        self.cluster.all[partition].drop()
        await self.ticks()
        await self.advance(0.02)

    async def advance(self, seconds: float) -> None:
        self.timers.advance(seconds)
        await self.ticks()
