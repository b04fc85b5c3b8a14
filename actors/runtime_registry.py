"""The runtimes of this process by name: where stubs that come from another process find theirs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from actors.errors import RuntimeNotStarted
from actors.settings import Settings

if TYPE_CHECKING:
    from actors.client import Client

__all__ = ["RuntimePort", "RuntimeRegistry", "runtime_registry"]

T = TypeVar("T")


class RuntimePort(Protocol):
    """What namespaces and stubs need of a runtime."""

    @property
    def name(self) -> str:
        """Under which stubs that were pickled in another process find it."""
        ...

    @property
    def settings(self) -> Settings:
        """The limits."""
        ...

    def client(self) -> Client:
        """The client of the running event loop."""
        ...

    def run_sync(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on a background loop and wait for it."""
        ...


class RuntimeRegistry:
    """The runtimes of one process. Thread-safe."""

    def __init__(self) -> None:
        self._runtimes: dict[str, RuntimePort] = {}
        self._connecting = threading.Lock()

    def register(self, runtime: RuntimePort) -> None:
        """Make a started or connected runtime known; one of the same name is replaced."""
        self._runtimes[runtime.name] = runtime

    def unregister(self, runtime: RuntimePort) -> None:
        """Forget a stopped runtime."""
        if self._runtimes.get(runtime.name) is runtime:
            del self._runtimes[runtime.name]

    def get(self, name: str) -> RuntimePort | None:
        """The runtime of that name, if this process has one already."""
        return self._runtimes.get(name)

    def find(self, name: str) -> RuntimePort:
        """The runtime of that name. A process that is in a Ray, such as a task's, connects to it when it is first
        needed, which blocks for some milliseconds. Raises `RuntimeNotStarted`."""
        return self._runtimes.get(name) or self._connect(name)

    def _connect(self, name: str) -> RuntimePort:
        failure: RuntimeNotStarted | None = None
        ray = sys.modules.get("ray")  # a process that has not imported it is in no Ray
        if ray is not None and ray.is_initialized():
            from actors.runtime import Runtime  # here: applications without Ray use stubs too

            with self._connecting:
                found = self._runtimes.get(name)  # another thread was first
                try:
                    return found if found is not None else Runtime.connect(name)
                except RuntimeNotStarted as error:
                    failure = error
        known = ", ".join(sorted(self._runtimes)) or "none"
        raise RuntimeNotStarted(
            f"no runtime named {name!r} is connected in this process (connected: {known}); call Runtime.connect before"
            " you use stubs that come from another process"
        ) from failure


#: The runtimes of this process.
runtime_registry = RuntimeRegistry()
