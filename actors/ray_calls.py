"""Calls of the runtime's own named Ray actors: the control plane. Never blocks an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

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

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])

#: The coordinator's name in the runtime's Ray namespace.
COORDINATOR = "coordinator"
#: The names of release wheels begin with this.
RELEASE_WHEEL = "release-wheel"
#: Threads that hand calls to Ray, which takes milliseconds; they do not wait for answers.
_THREADS = 2
#: Threads that ask Ray's control service, which takes a millisecond, or a minute while the service is gone.
_LOOKUP_THREADS = 4
#: How long to wait until an actor's process has been told to end.
_KILL_TIMEOUT_S = 10.0


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
        # Threads of their own: lookups that hang must not keep calls of known actors waiting.
        self._lookup_threads: ThreadPoolExecutor | None = None

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
        deadline = time.monotonic() + timeout_s
        with self._translated(actor, method):
            # The limit holds for the lookup too: without its control service Ray lets it hang for a minute.
            handle = self._handles.get(actor) or self._lookups().submit(self.handle, actor).result(timeout_s)
            return _submit(handle, method, args).result(max(0.0, deadline - time.monotonic()))

    async def call_async(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        """The same for event loops."""
        with self._translated(actor, method):
            return await asyncio.wait_for(self._ask(actor, method, args), timeout_s)

    async def handle_async(self, actor: str) -> Any:
        """`handle` for event loops."""
        loop = asyncio.get_running_loop()
        return self._handles.get(actor) or await loop.run_in_executor(self._lookups(), self.handle, actor)

    def ask_ray(self, question: Callable[[], T], timeout_s: float) -> T:
        """Something that Ray's control service answers. Raises `ActorUnreachable` when that does not happen in time."""
        try:
            return self._lookups().submit(question).result(timeout_s)
        except (RayError, concurrent.futures.TimeoutError) as error:
            raise ActorUnreachable(f"Ray's control service did not answer within {timeout_s:g} s: {error}") from error

    async def kill_async(self, actor: str) -> None:
        """End the actor's process; Ray starts it again. Raises `ActorUnreachable`."""
        with self._translated(actor, "kill"):
            await asyncio.wait_for(self._kill(actor), _KILL_TIMEOUT_S)

    def close(self) -> None:
        """Let go of the threads; calls that wait still get their answer."""
        with self._lock:
            for threads in (self._threads, self._lookup_threads):
                if threads is not None:
                    threads.shutdown(wait=False, cancel_futures=True)
            self._threads = self._lookup_threads = None

    async def _ask(self, actor: str, method: str, args: tuple[Any, ...]) -> Any:
        handle = await self.handle_async(actor)
        loop = asyncio.get_running_loop()
        return await asyncio.wrap_future(await loop.run_in_executor(self._executor(), _submit, handle, method, args))

    async def _kill(self, actor: str) -> None:
        handle = await self.handle_async(actor)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._lookups(), lambda: ray.kill(handle, no_restart=False))

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="mainspring-control")
            return self._threads

    def _lookups(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._lookup_threads is None:
                self._lookup_threads = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="mainspring-lookup")
            return self._lookup_threads

    @contextmanager
    def _translated(self, actor: str, method: str) -> Iterator[None]:
        try:
            yield
        except RayTaskError as error:
            if isinstance(error.cause, MainspringError):
                raise error.cause from None
            raise
        except (RayError, concurrent.futures.TimeoutError, asyncio.TimeoutError) as error:
            if isinstance(error, RayError) and not isinstance(error, ActorUnavailableError):
                # The name may belong to another actor by now: a runtime was stopped and started again. An actor that
                # restarts or is slow stays the same, and without Ray's control service it could not be found again.
                self.forget(actor)
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ActorUnreachable(f"{actor} did not answer {method}(): {text}") from error


def _submit(handle: Any, method: str, args: tuple[Any, ...]) -> Future[Any]:
    # A future and not `ray.get`, which holds a thread, and complains in the process of an async actor.
    future: Future[Any] = getattr(handle, method).remote(*args).future()
    return future
