"""The objects that a partition has in memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, cast

from actors.address import ObjectId
from actors.durable_object import ClassInfo
from actors.object_host import ObjectHost
from drivers.write_set import WriteSet

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["PartitionObjects"]


class PartitionObjects:
    """The part of a `Partition` that makes hosts and lets them go."""

    def __init__(self, max_active_objects: int) -> None:
        self._max_active_objects = max_active_objects
        self._hosts: dict[tuple[str, str], ObjectHost] = {}
        #: objects whose deletion is on its way to disk
        self.deletions: dict[tuple[str, str], WriteSet] = {}

    @property
    def active_objects(self) -> int:
        """How many are in memory."""
        return len(self._hosts)

    def host(self, info: ClassInfo, object_id: ObjectId) -> ObjectHost:
        """The object's host, made when it is not in memory."""
        place = (object_id.type_name, object_id.key)
        host = self._hosts.get(place)
        if host is None:
            if len(self._hosts) >= self._max_active_objects:
                self._evict_one()  # before the new one is there: it is idle until it gets its work
            host = self._hosts[place] = ObjectHost(cast("Partition", self), info, object_id)
        return host

    def hosts_in(self, slots: Collection[int]) -> list[ObjectHost]:
        """The objects of these slots that are in memory."""
        return [host for host in self._hosts.values() if host.id.slot in slots]

    def find_host(self, type_name: str, key: str) -> ObjectHost | None:
        return self._hosts.get((type_name, key))

    def _evict_one(self) -> None:
        for host in self._hosts.values():  # oldest first
            if not host.busy:
                self.evict(host)
                return

    def evict(self, host: ObjectHost) -> bool:
        """Let an idle object leave memory; its rows stay. False when it is busy."""
        if host.busy:
            return False
        host.forget()
        self._hosts.pop((host.id.type_name, host.id.key), None)
        host.stop_instance()
        return True

    def _rebuild_objects(self, type_name: str) -> None:
        """The class has a newer definition: its objects leave memory, now or when their turns have ended."""
        for host in [host for host in self._hosts.values() if host.id.type_name == type_name]:
            if not self.evict(host):
                host.outdated = True

    def deletion_began(self, object_id: ObjectId, write_set: WriteSet) -> None:
        """The object is being deleted: until that is durable its rows are still there, and mean nothing."""
        place = (object_id.type_name, object_id.key)
        self.deletions[place] = write_set
        write_set.waiters.append(lambda error: self._deletion_ended(place, write_set))
        write_set.waiters.append(lambda error: self.executions_changed(object_id))

    def _deletion_ended(self, place: tuple[str, str], write_set: WriteSet) -> None:
        if self.deletions.get(place) is write_set:  # and not a later one
            del self.deletions[place]

    def executions_changed(self, object_id: ObjectId) -> None:
        """Executions of durable functions have changed, durably."""
        raise NotImplementedError
