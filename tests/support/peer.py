"""A client of a `LocalRuntime` that says exactly what a test wants: sequence numbers, flags and ids by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from actors.address import ClassRef
from actors.channel import Channel, Hello
from actors.codec import decode, encode
from actors.durable_object import DurableObject, class_info
from actors.loopback import connect_loopback
from actors.messages import (
    CallExtra,
    Replies,
    decode_from_partition,
    encode_calls,
    encode_classes,
    encode_release,
)
from actors.testing import LocalRuntime
from actors.wire_errors import decode_error

__all__ = ["Peer", "nested"]

#: Loop turns after which a frame has been delivered and its call has been admitted.
DELIVERED = 6


class Peer:
    """One connection to the partition of one object. `replies` are (seq, status, payload) in order of arrival."""

    def __init__(
        self,
        runtime: LocalRuntime,
        cls: type[DurableObject],
        key: str,
        *,
        session: bytes = b"p" * 16,
        connection: int = 1,
        trusted: bool = False,
    ) -> None:
        """`trusted`: the connection carries pickles, as over Ray."""
        self.is_closed = False
        self._type_name, self._key = cls.type_name, key
        self.partition = runtime._partition_of(runtime.namespace(cls).get(key))
        self.replies: list[tuple[int, int, bytes]] = []
        hello = Hello(session, connection, self.partition.config.partition, self.partition.epoch)
        self._channel: Channel = connect_loopback(
            self.partition.accept,
            hello,
            hello,
            self,
            runtime.settings.max_frame_bytes,
            trusted_pickle=trusted,
        )
        self._channel.send(encode_classes([class_info(cls).ref]))

    # --- ChannelHandler ---------------------------------------------------------------------------

    def opened(self, channel: Channel) -> None:
        return None

    def frame_received(self, frame: bytes) -> None:
        message = decode_from_partition(frame)
        assert isinstance(message, Replies)
        self.replies.extend(message.replies)

    def closed(self, error: Exception | None) -> None:
        self.is_closed = True

    def writable(self, ok: bool) -> None:
        return None

    # --- what tests do ----------------------------------------------------------------------------

    async def call(
        self,
        seq: int,
        method: str,
        args: Sequence[Any] = (),
        *,
        flags: int = 0,
        extra: CallExtra | None = None,
        payload: bytes | None = None,
    ) -> None:
        """Send one call and let it arrive. `payload` are its arguments when they are encoded already."""
        if payload is None:
            payload = encode([list(args), {}])
        row = [seq, self._type_name, self._key, method, payload, flags, 60_000, extra]
        self._channel.send(encode_calls([], [row]))
        await self._deliver()

    def tell(self, ref: ClassRef) -> None:
        """Say where a class comes from."""
        self._channel.send(encode_classes([ref]))

    async def acknowledge(self, low: int, high: int) -> None:
        """Say that the replies of these calls have arrived."""
        self._channel.send(encode_calls([low, high], []))
        await self._deliver()

    async def release(self, call_id: bytes) -> None:
        """Say that the turn which made this nested call is durable."""
        self._channel.send(encode_release([call_id]))
        await self._deliver()

    async def disconnect(self) -> None:
        """Vanish."""
        self._channel.close()
        await self._deliver()

    @staticmethod
    async def _deliver() -> None:
        for _ in range(DELIVERED):
            await asyncio.sleep(0)

    async def received(self, count: int) -> None:
        """Wait until that many replies have arrived."""
        for _ in range(1_000):
            if len(self.replies) >= count:
                return
            await asyncio.sleep(0)
        raise AssertionError(f"{len(self.replies)} replies instead of {count}")

    async def result(self, index: int = -1) -> Any:
        """The value of a reply, or its exception raised."""
        await self.received(1)
        _, status, payload = self.replies[index]
        if status:
            raise decode_error(payload)
        return decode(payload)


def nested(name: str, caller: tuple[str, str] = ("Branch", "caller"), turn_id: bytes = b"turn") -> CallExtra:
    """What makes a call one that a turn of `caller` has made."""
    return (b"i" + name.encode().ljust(16, b"-"), (caller,), (*caller, turn_id))
