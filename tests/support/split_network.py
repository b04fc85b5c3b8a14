"""A network that splits: links between the processes of a `LocalRuntime` are cut and heal again, without a word.

What was sent over a cut link waits, as it does in TCP: it arrives late when the link heals soon. A connection that has
been cut for as long as TCP is patient here ends on both sides, each at its own moment, and neither knows what arrived.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.channel import Channel, ChannelHandler, Hello
from actors.errors import ActorUnreachable, ChannelClosed
from actors.link import TCP_USER_TIMEOUT_MS
from actors.local_directory import LocalDirectory
from actors.mover import MovePort
from actors.testing import LocalRuntime

__all__ = ["APP", "COORDINATOR", "Network", "SplitRuntime"]

APP = "app"
COORDINATOR = "coordinator"
#: How long it takes until a peer behind a cut link is known to be out of reach: a connection attempt, a control call.
_TIMEOUT_S = 5.0


class Network:
    """Which places can reach each other: "app", "coordinator" and partitions by number."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self._cut: set[frozenset[str]] = set()
        self._connections: list[_Connection] = []

    def cut(self, one: str, other: str) -> None:
        """Nothing gets through between these two from now on."""
        self._cut.add(frozenset((one, other)))
        for connection in self._connections:
            connection.cut()

    def heal(self) -> None:
        """Everybody reaches everybody again."""
        self._cut.clear()
        for connection in list(self._connections):
            connection.healed()
        self._connections = [connection for connection in self._connections if not connection.over]

    def reaches(self, one: str, other: str) -> bool:
        return frozenset((one, other)) not in self._cut

    def opened(self, connection: _Connection) -> None:
        self._connections.append(connection)


class _Connection:
    """A channel with a link beneath it: stands between the client and its end, and between the end and the client."""

    trusted_pickle = False

    def __init__(self, network: Network, one: str, other: str, handler: ChannelHandler) -> None:
        self._network = network
        self._ends = (one, other)
        self._handler = handler
        self._inner: Channel
        #: what waits on its way there and back
        self._there: list[bytes] = []
        self._back: list[bytes] = []
        self._patience: list[asyncio.TimerHandle] = []
        #: each side by itself knows that the connection has ended
        self._near_over = self._far_over = False

    # --- what the client has in its hands

    @property
    def peer(self) -> Hello:
        return self._inner.peer

    @property
    def buffered_bytes(self) -> int:
        return sum(map(len, self._there))

    def send(self, frame: bytes) -> None:
        if self._near_over:
            raise ChannelClosed("the channel is closed")
        if self._up and not self._there:
            self._inner.send(frame)
        else:
            self._there.append(frame)

    def close(self, error: Exception | None = None) -> None:
        self._end_near(error)
        if self._up:
            self._end_far()

    # --- what the client's end calls

    def opened(self, channel: Channel) -> None:
        self._inner = channel
        self._handler.opened(self)

    def frame_received(self, frame: bytes) -> None:
        if self._near_over:
            return
        if self._up and not self._back:
            self._handler.frame_received(frame)
        else:
            self._back.append(frame)

    def writable(self, ok: bool) -> None:
        if not self._near_over:
            self._handler.writable(ok)

    def closed(self, error: Exception | None) -> None:
        """The partition has closed it, or has died."""
        self._far_over = True
        if self._up:
            self._end_near(error)

    # --- the link

    @property
    def _up(self) -> bool:
        return self._network.reaches(*self._ends)

    @property
    def over(self) -> bool:
        return self._near_over and self._far_over

    def cut(self) -> None:
        if self._up or self._patience or self.over:
            return
        loop, chance = asyncio.get_running_loop(), self._network.chance
        lost = ChannelClosed("the connection was lost: nothing has arrived for too long")
        for end in (lambda: self._end_near(lost), self._end_far):
            patience_s = TCP_USER_TIMEOUT_MS / 1_000 * chance.uniform(0.5, 1.0)
            self._patience.append(loop.call_later(patience_s, end))

    def healed(self) -> None:
        for timer in self._patience:
            timer.cancel()
        self._patience.clear()
        if self._near_over or self._far_over:  # one side has given up: the other one learns of it now
            self._end_far()
            self._end_near(ChannelClosed("the connection was reset by the peer"))
            return
        there, self._there = self._there, []
        for frame in there:
            self._inner.send(frame)
        back, self._back = self._back, []
        for frame in back:
            self.frame_received(frame)

    def _end_near(self, error: Exception | None) -> None:
        if not self._near_over:
            self._near_over = True
            self._there.clear()
            self._back.clear()
            asyncio.get_running_loop().call_soon(self._handler.closed, error)

    def _end_far(self) -> None:
        if not self._far_over:
            self._far_over = True
            self._inner.close(ChannelClosed("the connection was lost"))


class _Directory(LocalDirectory):
    """The directory of one place."""

    def __init__(self, runtime: LocalRuntime, network: Network, place: str) -> None:
        super().__init__(runtime)
        self._network = network
        self._place = place

    # Pickles would go through Ray, which is not what is tested here.
    connect_trusted = None  # type: ignore[assignment]

    async def connect(self, partition: int, session: bytes, connection: int, handler: ChannelHandler) -> Channel:
        if not self._network.reaches(self._place, str(partition)):
            await asyncio.sleep(_TIMEOUT_S)
            raise ChannelClosed(f"no connection to partition {partition} within {_TIMEOUT_S} s")
        wired = _Connection(self._network, self._place, str(partition), handler)
        await super().connect(partition, session, connection, wired)
        self._network.opened(wired)
        return wired


class SplitRuntime(LocalRuntime):
    """A `LocalRuntime` whose processes are places in a network."""

    def __init__(self, network: Network, **options: Any) -> None:
        super().__init__(**options)
        self._network = network
        self._directory = _Directory(self, network, APP)

    async def _open(self, number: int, *, is_new: bool = False) -> None:
        ours, self._directory = self._directory, _Directory(self, self._network, str(number))
        try:
            await super()._open(number, is_new=is_new)
        finally:
            self._directory = ours

    def restart_coordinator(self) -> None:
        """The coordinator's process is killed and another one begins."""
        self.moves.restart(lambda port: _Port(self._network, port))


class _Port:
    """Control calls of the coordinator over the network: what is asked, or what is answered, may not arrive."""

    def __init__(self, network: Network, inner: MovePort) -> None:
        self._network = network
        self._inner = inner

    async def _ask(self, partition: int, step: Callable[[], Awaitable[Any]]) -> Any:
        await self._pass(partition)
        answer = await step()
        await self._pass(partition)
        return answer

    async def _pass(self, partition: int) -> None:
        await asyncio.sleep(self._network.chance.choice([0, 0.001, 0.05]))
        if not self._network.reaches(COORDINATOR, str(partition)):
            await asyncio.sleep(_TIMEOUT_S)
            raise ActorUnreachable(f"partition {partition} did not answer")

    async def check(self, partition: int) -> None:
        await self._ask(partition, lambda: self._inner.check(partition))

    async def send_slots(
        self, source: int, move_id: str, slots: Sequence[int], target: int, patience_ms: int, cut_short: bool
    ) -> int:
        args = (source, move_id, slots, target, patience_ms, cut_short)
        sent: int = await self._ask(source, lambda: self._inner.send_slots(*args))
        return sent

    async def call_off(self, source: int, move_id: str) -> None:
        await self._ask(source, lambda: self._inner.call_off(source, move_id))

    async def complete(self, source: int, move_id: str) -> None:
        await self._ask(source, lambda: self._inner.complete(source, move_id))

    async def own(self, target: int, move_id: str, version: int) -> None:
        await self._ask(target, lambda: self._inner.own(target, move_id, version))

    async def discard(self, target: int, move_id: str) -> None:
        await self._ask(target, lambda: self._inner.discard(target, move_id))
