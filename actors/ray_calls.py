"""Calls of the runtime's own named Ray actors: the control plane. Never blocks an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from actors.errors import ActorUnreachable, MainspringError

__all__ = [
    "COORDINATOR",
    "RELEASE_WHEEL",
    "ActorUnreachable",
    "RayCalls",
    "partition_actor",
    "ray_namespace",
    "release_wheel_actor",
    "remote_method",
]

Method = TypeVar("Method", bound=Callable[..., Any])

#: The coordinator's name in the runtime's Ray namespace.
COORDINATOR = "coordinator"
#: The names of release wheels begin with this.
RELEASE_WHEEL = "release-wheel"
#: Threads that look names up and hand calls to Ray, which takes milliseconds; they do not wait for answers.
_THREADS = 2


def ray_namespace(runtime: str) -> str:
    """The Ray namespace that holds the actors of the runtime of that name."""
    return f"mainspring-{runtime}"


def partition_actor(partition: int) -> str:
    """The name of a partition's actor in the runtime's Ray namespace."""
    return f"partition-{partition:04d}"


def release_wheel_actor(disk: str | None) -> str:
    """The name of the release wheel on the node that has this disk; None: on the only node."""
    return RELEASE_WHEEL if disk is None else f"{RELEASE_WHEEL}-{disk}"


def remote_method(**options: Any) -> Callable[[Method], Method]:
    """Ray's decorator for an actor's method, with a type."""
    decorator: Callable[[Method], Method] = ray.method(**options)
    return decorator


class RayCalls:
    """Calls methods of the actors in one Ray namespace by name. Thread-safe."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._handles: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def handle(self, actor: str) -> Any:
        """The actor's handle, looked up once. Raises `ActorUnreachable` when there is none of that name."""
        found = self._handles.get(actor)
        if found is None:
            try:
                found = ray.get_actor(actor, namespace=self.namespace)
            except (ValueError, RayError) as error:
                raise ActorUnreachable(f"there is no actor {actor} in {self.namespace}: {error}") from error
            self._handles[actor] = found
        return found

    def forget(self, actor: str) -> None:
        """Look the name up again next time."""
        self._handles.pop(actor, None)

    def call(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Call and wait. Raises the actor's own error, or `ActorUnreachable`: then it may or may not have run."""
        with self._translated(actor, method):
            return self._submit(actor, method, args).result(timeout_s)

    async def call_async(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """The same for event loops."""
        with self._translated(actor, method):
            # The limit holds for the hand-over too: without its control service Ray lets a lookup hang for a minute.
            return await asyncio.wait_for(self._ask(actor, method, args), timeout_s)

    async def handle_async(self, actor: str) -> Any:
        """`handle` for event loops."""
        loop = asyncio.get_running_loop()
        return self._handles.get(actor) or await loop.run_in_executor(self._executor(), self.handle, actor)

    async def kill_async(self, actor: str) -> None:
        """End the actor's process; Ray starts it again. Raises `ActorUnreachable`."""
        handle = await self.handle_async(actor)
        loop = asyncio.get_running_loop()
        with self._translated(actor, "kill"):
            await loop.run_in_executor(self._executor(), lambda: ray.kill(handle, no_restart=False))

    def close(self) -> None:
        """Let go of the threads; calls that wait still get their answer."""
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown(wait=False, cancel_futures=True)
                self._threads = None

    async def _ask(self, actor: str, method: str, args: tuple[Any, ...]) -> Any:
        loop = asyncio.get_running_loop()
        return await asyncio.wrap_future(
            await loop.run_in_executor(self._executor(), self._submit, actor, method, args)
        )

    def _submit(self, actor: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        # A future and not `ray.get`, which holds a thread, and complains in the process of an async actor.
        future: Future[Any] = getattr(self.handle(actor), method).remote(*args).future()
        return future

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mainspring-control")
            return self._threads

    @contextmanager
    def _translated(self, actor: str, method: str) -> Iterator[None]:
        try:
            yield
        except RayTaskError as error:
            if isinstance(error.cause, MainspringError):
                raise error.cause from None
            raise
        except (RayError, concurrent.futures.TimeoutError, asyncio.TimeoutError) as error:
            # The name may belong to another actor by now: a runtime was stopped and started again.
            self.forget(actor)
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ActorUnreachable(f"{actor} did not answer {method}(): {text}") from error
