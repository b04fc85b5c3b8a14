"""The background loop, and one client for every loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref

import pytest

from actors.errors import RuntimeNotStarted, SyncCallInLoop
from actors.io_loop import ClientPool, IoLoop
from tests.support.fake_cluster import World


async def nothing() -> None:
    pass


def test_the_thread_starts_with_its_first_use_and_ends_with_stop() -> None:
    io_loop = IoLoop("io-under-test")
    assert not io_loop.is_running
    io_loop.run(nothing)
    assert "io-under-test" in {thread.name for thread in threading.enumerate()}
    io_loop.stop()
    assert "io-under-test" not in {thread.name for thread in threading.enumerate()}
    io_loop.stop()
    with pytest.raises(RuntimeNotStarted):
        io_loop.run(nothing)


def test_what_the_coroutine_raises_is_raised() -> None:
    async def broken() -> None:
        raise ZeroDivisionError("on the loop")

    io_loop = IoLoop()
    with pytest.raises(ZeroDivisionError, match="on the loop"):
        io_loop.run(broken)
    io_loop.stop()


def test_tasks_that_still_run_are_cancelled_by_stop() -> None:
    cancelled = threading.Event()

    async def long() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    tasks = []

    async def start() -> None:
        tasks.append(asyncio.ensure_future(long()))
        await asyncio.sleep(0)

    io_loop = IoLoop()
    io_loop.run(start)
    io_loop.stop()
    assert cancelled.is_set()


async def test_waiting_on_a_thread_with_a_loop_is_refused() -> None:
    io_loop = IoLoop()
    with pytest.raises(SyncCallInLoop):
        io_loop.run(nothing)
    io_loop.stop()


def test_each_loop_has_one_client() -> None:
    pool = ClientPool(lambda: World().client)

    async def two() -> tuple[object, object]:
        return pool.get(), pool.get()

    first, same = asyncio.run(two())
    other, _ = asyncio.run(two())
    assert first is same
    assert other is not first


def test_clients_of_ended_loops_are_let_go() -> None:
    pool = ClientPool(lambda: World().client)

    async def get() -> weakref.ref[object]:
        return weakref.ref(pool.get())

    first = asyncio.run(get())
    asyncio.run(get())
    gc.collect()
    assert first() is None


async def test_a_closed_pool_closes_its_clients_and_makes_no_new_ones() -> None:
    pool = ClientPool(lambda: World().client)
    client = pool.get()
    await pool.close()
    assert client.is_closed
    with pytest.raises(RuntimeNotStarted):
        pool.get()


def test_a_forked_child_has_a_new_loop_and_a_new_session() -> None:
    io_loop = IoLoop()
    pool = ClientPool(lambda: World(session=os.urandom(16)).client)

    async def session() -> bytes:
        return pool.get().session

    mine = io_loop.run(session)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, io_loop.run(session))
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        its = pipe.read()
    os.waitpid(child, 0)
    assert len(its) == 16
    assert its != mine
    assert io_loop.run(session) == mine
    io_loop.stop()
