"""Finds partitions through Ray: the slot map from the coordinator, addresses from the partitions themselves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal

from actors.channel import Channel, ChannelHandler, Endpoint, Hello
from actors.client import Connect
from actors.coordinator_store import SlotMap
from actors.errors import ChannelClosed, PartitionAbsent
from actors.link import connect_link
from actors.logs import log_event
from actors.node import node_identity
from actors.ray_calls import COORDINATOR, ActorUnreachable, RayCalls, partition_actor
from actors.ray_transport import connect_ray
from actors.settings import Settings

__all__ = ["RayDirectory", "Transport"]

#: "auto": a link where one can be made, else Ray calls; "link" and "ray": only that.
Transport = Literal["auto", "link", "ray"]

#: How long to wait for the address of a partition that restarts: a restart takes 1 to 2 s, or waits 10 s for a lock.
_RESOLVE_TIMEOUT_S = 15.0
#: A partition that has not answered by then may have lost its node: the coordinator is asked. Restarts take 1 to 2 s.
_ABSENT_AFTER_S = 3.0
#: How long the coordinator may take to say where a partition's files are.
_ABSENCES_TIMEOUT_S = 3.0
#: How long to wait for a newer slot map before going on with the one that is known.
_MAP_TIMEOUT_S = 5.0
#: How long the coordinator may wait for a newer map before it answers with the one there is: whoever was answered Stale
#: in the middle of a move learns of the new owner at once.
_MAP_WAIT_MS = 1_000


class RayDirectory:
    """A `Directory` (see `actors.client`). Holds no reference to an event loop: any loop may use it."""

    def __init__(
        self,
        calls: RayCalls,
        slot_map: SlotMap,
        secret: bytes | None,
        settings: Settings,
        *,
        transport: Transport = "auto",
        node: str | None = None,
    ) -> None:
        """`secret` is the cluster's; None lets the directory get it through Ray when it is first needed."""
        self._calls = calls
        self._secret = secret
        self._settings = settings
        self._transport = transport
        self._node = node_identity() if node is None else node
        self._endpoints: dict[int, Endpoint] = {}
        #: partitions without a node, when somebody last looked
        self._absent: set[int] = set()
        self._use_map(slot_map)

    # --- the slot map ---------------------------------------------------------------------------

    @property
    def map_version(self) -> int:
        """The version of the slot map in use."""
        return self._slot_map.version

    @property
    def slot_map(self) -> SlotMap:
        """The slot map in use."""
        return self._slot_map

    def partition_of(self, slot: int) -> int:
        """The owner of a slot, as far as this process knows."""
        return self._owners[slot]

    def partitions(self) -> Sequence[int]:
        """Every partition that owns slots."""
        return self._partitions

    async def refresh(self, seen_version: int) -> None:
        """Get a newer slot map than `seen_version` if there is one; without a coordinator the known one goes on."""
        if self._slot_map.version > seen_version:
            return
        try:
            wait = (self._slot_map.version, _MAP_WAIT_MS)
            self.take_map(await self._calls.call_async(COORDINATOR, "slot_map", *wait, timeout_s=_MAP_TIMEOUT_S))
        except ActorUnreachable as error:
            log_event(logging.INFO, "slot_map_stale", f"Going on with slot map {self.map_version}: {error}")

    def take_map(self, slot_map: SlotMap) -> None:
        """Use this map, unless the one in use is as new."""
        if slot_map.version <= self._slot_map.version:
            return
        self._use_map(slot_map)

    def _use_map(self, slot_map: SlotMap) -> None:
        self._slot_map = slot_map
        self._owners = slot_map.owners()
        self._partitions = sorted(set(self._owners))

    # --- connections ----------------------------------------------------------------------------

    async def connect(self, partition: int, session: bytes, connection: int, handler: ChannelHandler) -> Channel:
        """Open a channel to a partition wherever it runs now.

        Raises OSError or `ChannelClosed` when trying again makes sense (`PartitionAbsent`: once its node is back),
        and the partition's own error (`DataMissing`, `PartitionBusy`, `DataRolledBack`, ...) when it can't serve.
        """
        known = self._endpoints.get(partition)
        if known is not None:
            try:
                return await self._open(known, session, connection, handler)
            except ChannelClosed:
                self._endpoints.pop(partition, None)
                raise  # the handler may have been used, so another try is the caller's, with a new connection
            except OSError:
                self._endpoints.pop(partition, None)  # nobody listens there any more: it has moved or restarted
        endpoint = await self._resolve(partition)
        try:
            channel = await self._open(endpoint, session, connection, handler)
        except OSError:
            self._endpoints.pop(partition, None)
            raise
        self._endpoints[partition] = endpoint
        return channel

    @property
    def connect_trusted(self) -> Connect | None:
        """The same for channels that may carry pickles, which always go through Ray; None where only links may."""
        return None if self._transport == "link" else self._connect_through_ray

    async def _connect_through_ray(
        self, partition: int, session: bytes, connection: int, handler: ChannelHandler
    ) -> Channel:
        endpoint = self._endpoints.get(partition) or await self._resolve(partition)
        hello = Hello(session, connection, partition, endpoint.epoch)
        try:
            channel = await connect_ray(await self._actor(endpoint), hello, handler, self._settings)
        except ChannelClosed:
            self._endpoints.pop(partition, None)
            raise
        self._endpoints[partition] = endpoint
        return channel

    async def _resolve(self, partition: int) -> Endpoint:
        if partition in self._absent:
            # First: Ray keeps each call of an actor that it can't place until it can, and there may be many.
            await self._check_present(partition)
        actor = partition_actor(partition)
        asking = asyncio.ensure_future(self._calls.call_async(actor, "endpoint", timeout_s=_RESOLVE_TIMEOUT_S))
        try:
            await asyncio.wait({asking}, timeout=_ABSENT_AFTER_S)
            if not asking.done():
                await self._check_present(partition)
            endpoint: Endpoint = await asking
        except ActorUnreachable as error:
            raise ChannelClosed(f"partition {partition} can't be found: {error}") from error
        finally:
            asking.cancel()
        return endpoint

    async def _check_present(self, partition: int) -> None:
        """Raises `PartitionAbsent` when the partition's node is gone; without a coordinator nobody knows."""
        try:
            absences = await self._calls.call_async(COORDINATOR, "absences", timeout_s=_ABSENCES_TIMEOUT_S)
        except ActorUnreachable:
            return
        self._absent = set(absences)
        if partition in absences:
            raise PartitionAbsent(absences[partition])

    async def _open(self, endpoint: Endpoint, session: bytes, connection: int, handler: ChannelHandler) -> Channel:
        hello = Hello(session, connection, endpoint.partition, endpoint.epoch)
        if self._transport != "ray" and self._reachable(endpoint):
            try:
                return await connect_link(
                    endpoint, hello, await self._get_secret(), handler, self._settings, node=self._node
                )
            except ChannelClosed:
                raise
            except OSError as error:
                # Refused or absent on the same node means that the partition is gone, not that the way is barred.
                if self._transport == "link" or isinstance(error, ConnectionRefusedError | FileNotFoundError):
                    raise
                log_event(
                    logging.WARNING,
                    "link_impossible",
                    f"No link to partition {endpoint.partition} ({error}): its calls go through Ray.",
                    partition=endpoint.partition,
                )
        elif self._transport == "link":
            raise ChannelClosed(f"partition {endpoint.partition} has no address that this node can reach")
        actor = await self._actor(endpoint)
        return await connect_ray(actor, hello, handler, self._settings)

    def _reachable(self, endpoint: Endpoint) -> bool:
        same_node = endpoint.unix_path is not None and endpoint.node == self._node
        return same_node or endpoint.host is not None

    async def _actor(self, endpoint: Endpoint) -> object:
        try:
            return await self._calls.handle_async(partition_actor(endpoint.partition))
        except ActorUnreachable as error:
            raise ChannelClosed(f"partition {endpoint.partition} can't be found: {error}") from error

    async def _get_secret(self) -> bytes:
        if self._secret is None:
            try:
                description = await self._calls.call_async(COORDINATOR, "describe", timeout_s=_RESOLVE_TIMEOUT_S)
            except ActorUnreachable as error:
                raise ChannelClosed(f"the cluster's secret is not known yet: {error}") from error
            self._secret = description.secret
        return self._secret
