"""How the clients of a `LocalRuntime` find its partitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from actors.channel import Channel, ChannelHandler, Hello
from actors.errors import ChannelClosed
from actors.loopback import connect_loopback

if TYPE_CHECKING:
    from actors.testing import LocalRuntime

__all__ = ["LocalDirectory"]


class LocalDirectory:
    """Implements `actors.client.Directory` in this process."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self._runtime = runtime

    @property
    def map_version(self) -> int:
        return self._runtime.moves.version

    def partition_of(self, slot: int) -> int:
        return self._runtime.moves.partition_of(slot)

    def partitions(self) -> Sequence[int]:
        return range(self._runtime.partition_count)

    async def refresh(self, seen_version: int) -> None:
        return None

    async def connect(self, partition: int, session: bytes, connection: int, handler: ChannelHandler) -> Channel:
        return self._connect(partition, session, connection, handler, trusted_pickle=False)

    async def connect_trusted(
        self, partition: int, session: bytes, connection: int, handler: ChannelHandler
    ) -> Channel:
        return self._connect(partition, session, connection, handler, trusted_pickle=True)

    def _connect(
        self, partition: int, session: bytes, connection: int, handler: ChannelHandler, *, trusted_pickle: bool
    ) -> Channel:
        found = self._runtime.find_partition(partition)
        if found is None or found.stopped:
            raise ChannelClosed(f"partition {partition} is not running")
        return connect_loopback(
            found.accept,
            Hello(session, connection, partition, found.epoch),
            Hello(session, connection, partition, found.epoch),
            handler,
            self._runtime.settings.max_frame_bytes,
            trusted_pickle=trusted_pickle,
        )
