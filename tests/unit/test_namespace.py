"""Namespaces and stubs: what an application sees of its objects."""

from __future__ import annotations

import asyncio
import datetime as dt
import pickle
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest

from actors.address import ClassRef, slot_of
from actors.client import Client
from actors.current import CURRENT
from actors.errors import (
    InvalidKey,
    InvalidOption,
    InvalidSchedule,
    MethodNotCallable,
    NoRunningLoop,
    NoSuchMethod,
    RuntimeNotStarted,
    SyncCallInLoop,
)
from actors.io_loop import ClientPool, IoLoop
from actors.messages import DELETE, keyed_call_id
from actors.namespace import Namespace, ObjectEntry, runtime_registry
from actors.settings import Settings
from tests.support.fake_cluster import CART, World

T = TypeVar("T")


class CartInfo:
    """A class with the methods `add` and `remove`."""

    durable: dict[str, object] = {}

    ref = CART

    def method(self, name: str) -> object:
        if name not in ("add", "remove"):
            raise NoSuchMethod(f"Cart.{name}: the class has no such method")
        return name


class Port:
    """A runtime with one client and no background thread."""

    name = "test"

    def __init__(self, world: World) -> None:
        self.world = world
        self.settings: Settings = world.settings

    def client(self) -> Client:
        return self.world.client

    def run_sync(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        raise AssertionError("no test here waits in plain code")


class Turn:
    """A turn that notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def outgoing_call(
        self,
        ref: ClassRef,
        key: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_ms: int | None,
    ) -> Awaitable[Any]:
        self.calls.append((ref.type_name, key, method, args, kwargs, timeout_ms))
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        future.set_result("from the turn")
        return future


def carts(world: World | None = None, **options: Any) -> Namespace:
    return Namespace(Port(world or World()), CartInfo(), **options)


@pytest.fixture
def turn() -> Iterator[Turn]:
    turn = Turn()
    token = CURRENT.set(turn)
    yield turn
    CURRENT.reset(token)


# --- stubs --------------------------------------------------------------------------------------------


async def test_getting_a_stub_starts_nothing() -> None:
    world = World()
    stub = carts(world).get("alice")
    await world.ticks()
    assert not world.cluster.all[0].connections
    assert (stub.key, stub.id.slot) == ("alice", slot_of("Cart", "alice"))


async def test_a_key_is_checked_at_once() -> None:
    with pytest.raises(InvalidKey):
        carts().get("")


async def test_unique_makes_a_key_from_the_given_source() -> None:
    ids = iter(["one", "two"])
    namespace = carts(ids=lambda: next(ids))
    assert [namespace.unique().key, namespace.unique().key] == ["one", "two"]


async def test_unique_keys_differ_by_default() -> None:
    namespace = carts()
    assert len({namespace.unique().key for _ in range(100)}) == 100


async def test_calls_start_at_once_and_run_in_order_without_being_awaited() -> None:
    world = World()
    stub = carts(world).get("alice")
    futures = [stub.add("apple", n) for n in range(3)]
    await world.round_trip()
    assert [executed.args for executed in world.cluster.executed] == [["apple", 0], ["apple", 1], ["apple", 2]]
    assert [await future for future in futures] == [1, 2, 3]


async def test_order_holds_across_stubs_of_one_object() -> None:
    world = World()
    namespace = carts(world)
    for n in range(4):
        namespace.get("alice").add(n)
    await world.round_trip()
    assert [executed.args for executed in world.cluster.executed] == [[n] for n in range(4)]


@pytest.mark.parametrize("name", ["_secret", "__len__", "_"])
async def test_private_names_are_refused_at_access(name: str) -> None:
    stub = carts().get("alice")
    with pytest.raises(MethodNotCallable):
        getattr(stub, name)
    assert not hasattr(stub, name)


async def test_names_that_the_class_does_not_have_are_refused_at_access() -> None:
    with pytest.raises(NoSuchMethod):
        carts().get("alice").refund  # noqa: B018


async def test_repeated_access_gives_the_same_method() -> None:
    stub = carts().get("alice")
    assert stub.add is stub.add
    assert repr(stub.add) == "Cart('alice').add"


async def test_stubs_are_equal_by_class_and_key() -> None:
    namespace = carts()
    alice = namespace.get("alice")
    assert alice == namespace.get("alice")
    assert alice == alice.with_options(timeout=5)
    assert alice != namespace.get("bob")
    assert alice != "alice"
    assert len({alice, namespace.get("alice"), namespace.get("bob")}) == 2
    assert repr(alice) == "<Stub Cart('alice')>"


def test_a_call_on_a_thread_without_a_loop_says_what_to_do() -> None:
    def no_client() -> Client:
        raise AssertionError("no loop, no client")

    pool = ClientPool(no_client)
    with pytest.raises(NoRunningLoop, match="sync"):
        pool.get()


# --- options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [5_000, dt.timedelta(seconds=5), "5s"])
async def test_a_timeout_is_milliseconds_or_a_timedelta_or_a_text(timeout: int | dt.timedelta | str) -> None:
    world = World()
    carts(world).get("alice").with_options(timeout=timeout).add()
    await world.deliver()
    assert 5_000 <= world.cluster.all[0].calls[0][6] <= 5_001


@pytest.mark.parametrize("timeout", [0, -1, True, 1.5, dt.timedelta(0), "soon"])
async def test_a_timeout_that_makes_no_sense_is_refused(timeout: Any) -> None:
    with pytest.raises((InvalidOption, InvalidSchedule)):
        carts().get("alice").with_options(timeout=timeout)


async def test_an_idempotency_key_decides_the_id_of_the_call() -> None:
    world = World()
    for session_of_another_process in (False, True):
        namespace = carts(world) if not session_of_another_process else carts(other := World(session=b"t" * 16))
        namespace.get("alice").with_options(idempotency_key="order-1").add("apple")
    await world.deliver()
    await other.deliver()
    ids = [call[7] for w in (world, other) for call in w.cluster.all[0].calls]
    assert ids == [(keyed_call_id("Cart", "alice", "add", "order-1"), (), None)] * 2


async def test_options_add_up_and_leave_the_stub_as_it_was() -> None:
    world = World()
    stub = carts(world).get("alice")
    stub.with_options(timeout=100).with_options(idempotency_key="k").add()
    stub.add()
    await world.deliver()
    first, second = world.cluster.all[0].calls
    assert (first[6] <= 101, first[7] is not None) == (True, True)
    assert (second[6] > 50_000, second[7]) == (True, None)


@pytest.mark.parametrize("key", ["", 7, "a\ud800"])
async def test_an_idempotency_key_is_text(key: Any) -> None:
    with pytest.raises(InvalidOption):
        carts().get("alice").with_options(idempotency_key=key)


# --- in a turn ----------------------------------------------------------------------------------------


async def test_inside_a_turn_a_call_belongs_to_the_turn(turn: Turn) -> None:
    world = World()
    stub = carts(world).get("alice").with_options(timeout="1s")
    assert await stub.add("apple", count=2) == "from the turn"
    assert turn.calls == [("Cart", "alice", "add", ("apple",), {"count": 2}, 1_000)]
    await world.ticks()
    assert not world.cluster.all[0].connections


async def test_inside_a_turn_an_idempotency_key_is_refused(turn: Turn) -> None:
    with pytest.raises(InvalidOption, match="inside a turn"):
        carts().get("alice").with_options(idempotency_key="k").add()


async def test_an_object_can_not_be_deleted_inside_a_turn(turn: Turn) -> None:
    with pytest.raises(InvalidOption, match="delete_all"):
        await carts().delete("alice")


async def test_sync_is_refused_inside_a_turn_also_on_a_thread_of_it(turn: Turn) -> None:
    with pytest.raises(SyncCallInLoop, match="inside a turn"):
        await asyncio.to_thread(carts().get("alice").add.sync)


async def test_sync_is_refused_on_a_thread_that_runs_a_loop() -> None:
    namespace = carts()
    with pytest.raises(SyncCallInLoop, match="await"):
        namespace.get("alice").add.sync()
    with pytest.raises(SyncCallInLoop):
        namespace.list_sync()
    with pytest.raises(SyncCallInLoop):
        namespace.delete_sync("alice")


# --- listing and deleting -----------------------------------------------------------------------------


async def test_list_merges_all_partitions_in_the_order_of_utf8_bytes() -> None:
    world = World(partitions=2)
    world.cluster.all[0].admin_values["list_objects"] = [["a", 5], ["\ue000", None]]
    world.cluster.all[1].admin_values["list_objects"] = [["b", None], ["\N{GRINNING FACE}", 7]]
    listing = asyncio.ensure_future(carts(world).list(prefix="", limit=3))
    await world.round_trip()
    entries = await listing
    assert entries == [ObjectEntry("a", 5), ObjectEntry("b", None), ObjectEntry("\ue000", None)]
    assert [entry.key.encode() for entry in entries] == sorted(entry.key.encode() for entry in entries)


async def test_an_object_that_two_partitions_know_is_listed_once() -> None:
    world = World(partitions=2)
    for partition in world.cluster.all:
        partition.admin_values["list_objects"] = [["a", 5]]
    listing = asyncio.ensure_future(carts(world).list())
    await world.round_trip()
    assert await listing == [ObjectEntry("a", 5)]


@pytest.mark.parametrize("limit", [0, -1, True, 10_000_000])
async def test_a_limit_that_makes_no_sense_is_refused(limit: int) -> None:
    with pytest.raises(InvalidOption, match="max_list_rows"):
        await carts().list(limit=limit)


async def test_delete_goes_to_the_owner_of_the_object() -> None:
    world = World(partitions=2)
    deleting = asyncio.ensure_future(carts(world).delete("alice"))
    await world.round_trip()
    await deleting
    (call,) = world.cluster.all[slot_of("Cart", "alice") % 2].calls
    assert call[1:4] == ("Cart", "alice", DELETE)


# --- pickling -----------------------------------------------------------------------------------------


async def test_a_stub_travels_without_its_session_and_finds_the_runtime_of_that_name() -> None:
    stub = carts().get("alice").with_options(timeout="5s", idempotency_key="k")
    arrived = pickle.loads(pickle.dumps(stub))
    assert arrived == stub
    with pytest.raises(RuntimeNotStarted, match=r"'test'.*Runtime\.connect"):
        arrived.add()
    world = World()
    port = Port(world)
    runtime_registry.register(port)
    try:
        call = arrived.add("apple")
        await world.round_trip()
        assert await call == 1
        assert world.cluster.all[0].calls[0][7] == (keyed_call_id("Cart", "alice", "add", "k"), (), None)
    finally:
        runtime_registry.unregister(port)
    with pytest.raises(RuntimeNotStarted):
        arrived.add("apple")


async def test_a_namespace_travels_too() -> None:
    arrived = pickle.loads(pickle.dumps(carts()))
    assert arrived.get("alice") == carts().get("alice")
    with pytest.raises(RuntimeNotStarted):
        await arrived.list()


async def test_an_arrived_stub_still_refuses_private_names() -> None:
    arrived = pickle.loads(pickle.dumps(carts().get("alice")))
    with pytest.raises(MethodNotCallable):
        arrived._secret()
    with pytest.raises(MethodNotCallable):
        getattr(arrived, "no name")


# --- plain code ---------------------------------------------------------------------------------------


class ThreadedPort:
    """A runtime with a background loop, on which a fake partition answers everything."""

    name = "threaded"

    def __init__(self) -> None:
        self.io_loop = IoLoop()
        self.pool = ClientPool(self._make_client)
        self.settings = Settings()
        self.worlds: list[World] = []

    def _make_client(self) -> Client:
        world = World()
        self.worlds.append(world)
        return world.client

    def client(self) -> Client:
        return self.pool.get()

    def run_sync(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def answered() -> T:
            call = asyncio.ensure_future(make())
            await asyncio.sleep(0)
            await self.worlds[-1].round_trip()
            return await call

        return self.io_loop.run(answered)


def test_sync_waits_for_the_result_in_plain_code() -> None:
    port = ThreadedPort()
    stub = Namespace(port, CartInfo()).get("alice")
    assert [stub.add.sync("apple"), stub.add.sync("apple")] == [1, 2]
    assert len(port.worlds) == 1
    port.io_loop.run(port.pool.close)
    port.io_loop.stop()
    with pytest.raises(RuntimeNotStarted):
        stub.add.sync()
