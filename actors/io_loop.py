"""Event loops for code that has none, and one client for every loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from actors.client import Client
from actors.errors import NoRunningLoop, RuntimeNotStarted, SyncCallInLoop

try:
    import uvloop
except ImportError:  # not on this platform: asyncio's own loop serves, more slowly
    uvloop = None

__all__ = ["ClientPool", "IoLoop", "ensure_no_loop"]

T = TypeVar("T")

#: How long stopping waits for the thread, which has only cancelled tasks to end.
STOP_WAIT_S = 5.0

_forgetful: weakref.WeakSet[IoLoop | ClientPool] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """A child has its parent's memory but neither its threads nor a right to its sessions."""
    for holder in list(_forgetful):
        holder.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def ensure_no_loop(what: str) -> None:
    """Raise `SyncCallInLoop` when this thread runs an event loop, which a blocking call would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SyncCallInLoop(
        f"{what} blocks, and this thread runs an event loop, which would stand still: await the call instead"
    )


class IoLoop:
    """A background thread with an event loop. Started by its first use, and again by the first use after a fork."""

    def __init__(self, name: str = "mainspring-io") -> None:
        self._name = name
        self._stopped = False
        self.forget()
        _forgetful.add(self)

    def forget(self) -> None:
        """In a forked child: the parent's thread is not here."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop, running. Raises `RuntimeNotStarted` after `stop`."""
        with self._lock:
            if self._stopped:
                raise RuntimeNotStarted("the runtime was stopped; start or connect it again before you make calls")
            if self._loop is None:
                self._loop = uvloop.new_event_loop() if uvloop is not None else asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    @property
    def is_running(self) -> bool:
        """Whether the thread has been started and not stopped."""
        return self._loop is not None

    def run(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the loop and wait for its result. Raises `SyncCallInLoop` on a thread with a loop."""
        ensure_no_loop("a synchronous call")
        loop = self.loop
        future = asyncio.run_coroutine_threadsafe(make(), loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the wait was interrupted, by Ctrl-C say; does nothing when the call itself raised
            raise

    def stop(self) -> None:
        """End the loop and its thread, for good. Close what uses it first. Doing it twice does nothing."""
        with self._lock:
            self._stopped = True
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is not None and thread is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join(STOP_WAIT_S)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


class ClientPool:
    """One client for every event loop that makes calls. A forked child gets clients of its own."""

    def __init__(self, make: Callable[[], Client]) -> None:
        self._make = make
        self._closed = False
        self.forget()
        _forgetful.add(self)

    def forget(self) -> None:
        """In a forked child: sessions belong to the process that made them."""
        self._lock = threading.Lock()
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Client] = weakref.WeakKeyDictionary()
        self._last: tuple[asyncio.AbstractEventLoop | None, Client | None] = (None, None)

    def get(self) -> Client:
        """The client of the running loop. Raises `NoRunningLoop`, or `RuntimeNotStarted` after `close`."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise NoRunningLoop(
                "this thread runs no event loop, so a call can't be awaited: use stub.method.sync(...) in plain code"
            ) from None
        last_loop, client = self._last
        if last_loop is loop and client is not None:
            return client
        with self._lock:
            if self._closed:
                raise RuntimeNotStarted("the runtime was stopped; start or connect it again before you make calls")
            client = self._clients.get(loop)
            if client is None:
                self._drop_dead()
                client = self._clients[loop] = self._make()
            self._last = (loop, client)
            return client

    def _drop_dead(self) -> None:
        # A client holds its loop, so entries never vanish by themselves.
        for loop in [loop for loop in self._clients if loop.is_closed()]:
            del self._clients[loop]

    async def close(self) -> None:
        """Close the clients of all loops that still run, each on its own loop. No new ones are made."""
        here = asyncio.get_running_loop()
        with self._lock:
            self._closed = True
            clients = dict(self._clients)
            self._clients.clear()
            self._last = (None, None)
        for loop, client in clients.items():
            if loop is here:
                await client.close()
            elif loop.is_running():
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(client.close(), loop))
