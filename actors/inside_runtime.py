"""The runtime as objects see it from inside their partition."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from actors.client import Client
from actors.durable_object import DurableObject
from actors.errors import SyncCallInLoop
from actors.namespace import Namespace
from actors.settings import Settings

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["InsideRuntime"]

T = TypeVar("T")


class InsideRuntime:
    """Addresses other objects with the partition's own client."""

    def __init__(self, name: str, partition: Partition) -> None:
        self._name = name
        self._partition = partition

    @property
    def name(self) -> str:
        return self._name

    @property
    def settings(self) -> Settings:
        return self._partition.settings

    def client(self) -> Client:
        return self._partition.client

    def namespace(self, cls: type[DurableObject]) -> Namespace:
        """The objects of a class. Raises `DuplicateTypeName`."""
        return Namespace(self, self._partition.classes.add(cls))

    def run_sync(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        raise SyncCallInLoop("a durable object runs on its partition's loop, which `.sync` would block: await the call")
