"""Calls that only pickle can carry: in order with all others, healed like them, and never over a link."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from actors.address import ClassRef, slot_of
from actors.durable_object import DurableObject, shared
from actors.errors import (
    CallExpired,
    MalformedFrame,
    Overloaded,
    ReplyLost,
    RuntimeNotStarted,
    UnstorableValue,
    ValueTooLarge,
    ValueTypeUnavailable,
)
from actors.messages import OK_PICKLED, PICKLED, REPEAT, encode_replies, lane_session, pickled_session
from actors.settings import Settings
from actors.testing import LocalRuntime
from actors.work import MAY_PICKLE
from tests.support.fake_cluster import CART, World
from tests.support.peer import Peer, nested

PLAIN = lane_session(b"s" * 16, 0)
BY_PICKLE = lane_session(pickled_session(b"s" * 16), 0)


class Matrix:
    """Something that the codec does not carry and pickle does."""

    def __init__(self, *cells: int) -> None:
        self.cells = cells

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Matrix) and other.cells == self.cells

    def __hash__(self) -> int:
        return hash(self.cells)


class Trap:
    """Leaves a trace when it is unpickled."""

    sprung = 0

    @staticmethod
    def spring() -> Trap:
        Trap.sprung += 1
        return Trap()

    def __reduce__(self) -> tuple[Callable[[], Trap], tuple[()]]:
        return Trap.spring, ()


# --- the client: lanes and order ----------------------------------------------------------------------


def trusting(**settings: Any) -> World:
    return World(trusted=True, **settings)


def ran(world: World) -> list[Any]:
    """The first argument of everything that was run, in order."""
    return [executed.args[0] for executed in world.cluster.executed]


async def test_arguments_that_the_codec_can_not_carry_travel_as_a_pickle_over_a_trusted_channel() -> None:
    world = trusting()
    plain = world.call("alice", "add", 1)
    call = world.client.call(CART, "bob", "add", (Matrix(1, 2),), {"more": Matrix(3)})
    await world.round_trip()
    assert (await plain, await call) == (1, 2)
    executed = world.cluster.executed[1]
    assert (executed.args, executed.kwargs) == ([Matrix(1, 2)], {"more": Matrix(3)})
    connections = world.cluster.all[0].connections
    assert {session: link.server.trusted_pickle for session, link in connections.items()} == {
        PLAIN: False,
        BY_PICKLE: True,
    }
    assert [(row[2], row[5]) for row in world.cluster.all[0].calls] == [("alice", 0), ("bob", PICKLED)]


async def test_without_a_way_for_pickles_the_codecs_error_goes_to_the_caller() -> None:
    world = World()
    with pytest.raises(UnstorableValue, match="Matrix"):
        world.call("alice", "add", Matrix(1))
    await world.ticks()
    assert not world.cluster.all[0].connections


async def test_what_pickle_can_not_carry_either_is_refused_with_both_reasons() -> None:
    world = trusting()
    with pytest.raises(UnstorableValue, match=r"value\[0\]\[0\].*pickle can't carry the arguments of Cart\.add either"):
        world.call("alice", "add", threading.Lock())
    await world.ticks()
    assert not world.cluster.all[0].connections


async def test_a_pickle_over_the_limit_is_refused_before_it_is_whole() -> None:
    class Endless:
        def __reduce__(self) -> Any:
            return list, (), None, (b"x" * 100 for _ in iter(int, 1))

    world = trusting(max_args_bytes=100_000)
    with pytest.raises(ValueTooLarge, match="max_args_bytes"):
        world.call("alice", "add", Endless())


async def test_a_pickled_call_goes_when_all_earlier_calls_of_its_object_have_been_answered() -> None:
    world = trusting()
    calls = [world.call("alice", "add", item) for item in (1, 2, Matrix(3))]
    await world.deliver()
    partition = world.cluster.all[0]
    assert set(partition.connections) == {PLAIN}
    partition.connections[PLAIN].run()
    partition.connections[PLAIN].reply([1])
    partition.connections[PLAIN].server.deliver()
    await world.deliver()
    assert set(partition.connections) == {PLAIN}  # the second has not been answered
    await world.answer()
    await world.round_trip()
    assert [await call for call in calls] == [1, 2, 3]
    assert ran(world) == [1, 2, Matrix(3)]


async def test_later_calls_of_the_object_wait_for_a_pickled_one_and_those_of_others_do_not() -> None:
    world = trusting()
    for item in (Matrix(1), 2, 3, Matrix(4), Matrix(5), 6):
        world.call("alice", "add", item)
    world.call("bob", "add", "bob")
    batches = []
    for _ in range(4):
        done = len(world.cluster.executed)
        await world.round_trip()
        batches.append(set(ran(world)[done:]))
    assert batches == [{Matrix(1), "bob"}, {2, 3}, {Matrix(4), Matrix(5)}, {6}]
    assert [item for item in ran(world) if item != "bob"] == [Matrix(1), 2, 3, Matrix(4), Matrix(5), 6]


async def test_nothing_stands_in_the_way_once_pickled_calls_have_been_answered() -> None:
    world = trusting()
    world.call("alice", "add", Matrix(1))
    world.call("alice", "add", 2)
    await world.round_trip()
    await world.round_trip()
    assert world.client._barriers is not None
    assert not world.client._barriers.by_place
    assert world.client._barriers.waiting == 0


@pytest.mark.parametrize("first", [Matrix(1), 1])
async def test_order_holds_while_connections_break_and_calls_are_repeated(first: Any) -> None:
    world = trusting()
    second = 2 if isinstance(first, Matrix) else Matrix(2)
    calls = [world.call("alice", "add", item) for item in (first, second, "third")]
    await world.deliver()
    world.cluster.all[0].run()  # the first has run, and its answer is lost
    await world.break_connections()
    await world.advance(1)
    for _ in range(3):
        await world.round_trip()
    assert [await call for call in calls] == [1, 2, 3]
    assert ran(world) == [first, second, "third"]
    repeats = [row for row in world.cluster.all[0].calls if row[5] & REPEAT]
    assert [row[5] & PICKLED for row in repeats] == [PICKLED if isinstance(first, Matrix) else 0]


async def test_order_holds_while_the_slot_moves() -> None:
    world = World(2, trusted=True)
    key = next(key for key in map(str, range(100)) if slot_of("Cart", key) % 2 == 0)
    calls = [world.call(key, "add", item) for item in (Matrix(1), 2, Matrix(3))]
    await world.deliver()
    world.cluster.move(slot_of("Cart", key), 1)
    for _ in range(6):
        await world.answer()
        await world.advance(1)
        await world.deliver()
    await world.answer()
    assert [await call for call in calls] == [1, 2, 3]
    assert ran(world) == [Matrix(1), 2, Matrix(3)]


async def test_pickled_calls_are_acknowledged_in_their_own_numbering() -> None:
    world = trusting()
    for item in (Matrix(1), 2, Matrix(3)):
        world.call("alice", "add", item)
        await world.round_trip()
    await world.advance(0.1)
    await world.deliver()
    acked = world.cluster.all[0].acked
    assert (acked[PLAIN], acked[BY_PICKLE][-1]) == ([1, 1], 2)


async def test_a_call_that_its_caller_gives_up_while_it_waits_is_never_sent() -> None:
    world = trusting()
    pickled = world.call("alice", "add", Matrix(1))
    given_up, kept = world.call("alice", "add", 2), world.call("alice", "add", 3)
    given_up.cancel()
    await world.round_trip()
    await world.round_trip()
    assert (await pickled, await kept) == (1, 2)
    assert ran(world) == [Matrix(1), 3]


async def test_a_pickled_call_that_its_caller_gave_up_still_holds_the_later_ones_until_it_is_answered() -> None:
    world = trusting()
    given_up = world.call("alice", "add", Matrix(1))
    later = world.call("alice", "add", 2)
    await world.deliver()
    given_up.cancel()
    await world.deliver()
    assert len(world.cluster.all[0].calls) == 1
    await world.answer()
    await world.round_trip()
    assert await later == 2


async def test_calls_that_wait_keep_their_deadlines() -> None:
    world = trusting()
    world.call("alice", "add", Matrix(1))
    later = world.call("alice", "add", 2, timeout_ms=5_000)
    await world.deliver()
    await world.advance(5.1)
    with pytest.raises(CallExpired):
        await later
    assert world.client._barriers is not None
    assert world.client._barriers.waiting == 0


async def test_callers_beyond_the_bound_are_refused_and_the_rest_goes_on() -> None:
    world = trusting(max_queued_calls=3)
    calls = [world.call("alice", "add", item) for item in (Matrix(1), 2, 3, 4)]
    with pytest.raises(Overloaded, match="max_queued_calls"):
        world.call("alice", "add", 5)
    await world.round_trip()
    await world.round_trip()
    assert [await call for call in calls] == [1, 2, 3, 4]


async def test_deleting_an_object_waits_for_the_pickled_calls_made_before() -> None:
    world = trusting()
    world.call("alice", "add", Matrix(1))
    deleted = asyncio.ensure_future(world.client.admin_object(CART, "alice", "delete_object", ["Cart", "alice"]))
    await world.deliver()
    assert set(world.cluster.all[0].connections) == {BY_PICKLE}
    await world.answer()
    await world.round_trip()
    await deleted


async def test_closing_the_client_ends_what_waits() -> None:
    world = trusting()
    world.call("alice", "add", Matrix(1)).cancel()
    waiting = world.call("alice", "add", Matrix(2)), world.call("alice", "add", 3)
    await world.deliver()
    await world.client.close()
    assert isinstance(waiting[1].exception(), RuntimeNotStarted)
    assert waiting[0].done()


@pytest.mark.parametrize("raw", [False, True])
async def test_a_pickle_that_comes_over_a_link_is_never_loaded(raw: bool) -> None:
    world = trusting()
    Trap.sprung = 0
    make = world.client.submit(CART, "alice", "add", b"\x92\x90\x80") if raw else world.call("alice")
    await world.deliver()
    world.cluster.all[0].connections[PLAIN].server.send(encode_replies([(1, OK_PICKLED, pickle.dumps(Trap()))]))
    world.cluster.all[0].connections[PLAIN].server.deliver()
    await world.ticks()
    with pytest.raises(MalformedFrame, match="over a link"):
        await make
    assert Trap.sprung == 0


async def test_a_pickled_reply_over_a_trusted_channel_is_the_value() -> None:
    world = trusting()
    call = world.call("alice", "add", Matrix(1))
    await world.deliver()
    connection = world.cluster.all[0].connections[BY_PICKLE]
    connection.server.send(encode_replies([(1, OK_PICKLED, pickle.dumps(Matrix(5)))]))
    connection.server.deliver()
    assert await call == Matrix(5)


# --- the partition ------------------------------------------------------------------------------------


class Store(DurableObject):
    """Takes and gives what only pickle carries, and keeps what the codec can."""

    def add(self, matrix: Matrix) -> int:
        total: int = self.storage.get("total", 0) + sum(matrix.cells)
        self.storage.put("total", total)
        return total

    def double(self, matrix: Matrix) -> Matrix:
        self.storage.put("doubled", self.storage.get("doubled", 0) + 1)
        return Matrix(*(2 * cell for cell in matrix.cells))

    def matrix(self) -> Matrix:
        self.storage.put("total", 1_000)
        return Matrix(1, 2)

    def lock(self, matrix: Matrix) -> Any:
        self.storage.put("total", 1_000)
        return threading.Lock()

    def large(self, matrix: Matrix) -> Matrix:
        self.storage.put("total", 1_000)
        return Matrix(*range(100_000))

    def keep(self, matrix: Matrix) -> None:
        self.storage.put("matrix", matrix)

    def write(self, item: Any) -> None:
        self.storage.put("log", [*self.storage.get("log", []), item if isinstance(item, int) else "pickled"])

    def log(self) -> list[Any]:
        found: list[Any] = self.storage.get("log", [])
        return found

    @shared
    def totals(self) -> tuple[int, int]:
        return self.storage.get("total", 0), self.storage.get("doubled", 0)

    async def double_elsewhere(self, key: str, cell: int) -> list[int]:
        doubled = await self.namespace(Store).get(key).double(Matrix(cell))
        self.storage.put("elsewhere", self.storage.get("elsewhere", 0) + 1)
        return list(doubled.cells)

    async def write_elsewhere(self, key: str) -> None:
        other = self.namespace(Store).get(key)
        await asyncio.gather(*(other.write(item) for item in (1, Matrix(), 3, Matrix(), Matrix(), 6)))


@pytest.fixture
async def runtime() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime(settings=Settings(durability="off", max_args_bytes=100_000)) as started:
        yield started


async def test_an_object_takes_and_gives_what_only_pickle_carries(runtime: LocalRuntime) -> None:
    store = runtime.namespace(Store).get("a")
    assert await store.add(Matrix(1, 2)) == 3
    assert await store.double(Matrix(1, 2)) == Matrix(2, 4)
    assert await store.totals() == (3, 1)


async def test_storage_never_takes_what_came_as_a_pickle(runtime: LocalRuntime) -> None:
    with pytest.raises(UnstorableValue):
        await runtime.namespace(Store).get("a").keep(Matrix(1))


async def test_calls_of_an_object_keep_their_order_whatever_carries_them(runtime: LocalRuntime) -> None:
    store = runtime.namespace(Store).get("a")
    items = [1, 2, Matrix(), 3, Matrix(), Matrix(), 4, 5]
    await asyncio.gather(*(store.write(item) for item in items))
    assert await store.log() == [item if isinstance(item, int) else "pickled" for item in items]


async def test_a_result_that_only_pickle_carries_is_refused_over_a_link_and_its_turn_rolled_back(
    runtime: LocalRuntime,
) -> None:
    store = runtime.namespace(Store).get("a")
    with pytest.raises(UnstorableValue, match="Matrix"):
        await store.matrix()
    assert await store.totals() == (0, 0)


@pytest.mark.parametrize(("method", "error"), [("lock", UnstorableValue), ("large", ValueTooLarge)])
async def test_a_result_that_pickle_can_not_carry_rolls_its_turn_back(
    runtime: LocalRuntime, method: str, error: type[Exception]
) -> None:
    store = runtime.namespace(Store).get("a")
    with pytest.raises(error):
        await getattr(store, method)(Matrix(1))
    assert await store.totals() == (0, 0)


async def test_arguments_that_can_not_be_loaded_there_say_so(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Store, "a", trusted=True)
    await peer.call(1, "add", flags=PICKLED, payload=pickle.dumps(Matrix()).replace(b"Matrix", b"Nobody"))
    with pytest.raises(ValueTypeUnavailable, match=r"arguments of Store\.add.*Nobody"):
        await peer.result()


@pytest.mark.parametrize("flags", [PICKLED, PICKLED | REPEAT])
async def test_a_pickled_call_over_a_link_closes_it_and_is_never_loaded(runtime: LocalRuntime, flags: int) -> None:
    Trap.sprung = 0
    peer = Peer(runtime, Store, "a")
    await peer.call(1, "add", flags=flags, payload=pickle.dumps(([Trap()], {})))
    await runtime.run_until_idle()
    assert (peer.is_closed, peer.replies, Trap.sprung) == (True, [], 0)


async def test_a_class_by_value_over_a_link_closes_it_and_is_never_loaded(runtime: LocalRuntime) -> None:
    Trap.sprung = 0
    peer = Peer(runtime, Store, "a")
    peer.tell(ClassRef("Trap", __name__, "Trap", pickle.dumps(Trap())))
    await runtime.run_until_idle()
    assert (peer.is_closed, Trap.sprung) == (True, 0)


async def test_a_peer_of_a_link_can_not_ask_for_a_pickle(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Store, "a")
    await peer.call(1, "matrix", flags=MAY_PICKLE)
    with pytest.raises(UnstorableValue):
        await peer.result()


async def test_a_recorded_pickle_answers_the_repeat_after_a_crash(runtime: LocalRuntime) -> None:
    payload = pickle.dumps(([Matrix(4)], {}))
    first = Peer(runtime, Store, "a", trusted=True)
    await first.call(1, "double", flags=PICKLED, payload=payload)
    await first.received(1)
    await runtime.crash()
    again = Peer(runtime, Store, "a", connection=2, trusted=True)
    await again.call(1, "double", flags=PICKLED | REPEAT, payload=payload)
    await again.received(1)
    assert again.replies == first.replies
    assert again.replies[0][1] == OK_PICKLED
    assert pickle.loads(again.replies[0][2]) == Matrix(8)
    assert await runtime.namespace(Store).get("a").totals() == (0, 1)


async def test_a_plain_call_over_ray_may_be_answered_with_a_pickle_and_its_repeat_over_a_link_says_what_is_lost(
    runtime: LocalRuntime,
) -> None:
    first = Peer(runtime, Store, "a", trusted=True)
    await first.call(1, "matrix")
    await first.received(1)
    assert first.replies[0][1] == OK_PICKLED
    await first.disconnect()
    again = Peer(runtime, Store, "a", connection=2)
    await again.call(1, "matrix", flags=REPEAT)
    with pytest.raises(ReplyLost):
        await again.result()
    assert await runtime.namespace(Store).get("a").totals() == (1_000, 0)


async def test_a_plain_call_of_a_turn_is_never_answered_with_a_pickle_as_it_may_be_repeated_over_a_link(
    runtime: LocalRuntime,
) -> None:
    peer = Peer(runtime, Store, "a", trusted=True)
    await peer.call(1, "matrix", extra=nested("call"))
    with pytest.raises(UnstorableValue):
        await peer.result()


# --- calls of turns -----------------------------------------------------------------------------------


async def test_a_turn_can_make_pickled_calls_and_keeps_their_order(runtime: LocalRuntime) -> None:
    stores = runtime.namespace(Store)
    assert await stores.get("a").double_elsewhere("b", 3) == [6]
    await stores.get("a").write_elsewhere("c")
    assert await stores.get("c").log() == [1, "pickled", 3, "pickled", "pickled", 6]


async def test_calls_of_turns_do_not_wait_for_the_pickled_calls_of_others(runtime: LocalRuntime) -> None:
    """A pickled call whose turn reads the same object by a shared method, through another one, would wait for ever."""
    assert await runtime.namespace(Ring).get("a").begin("b", Matrix(1)) == "read"


class Ring(DurableObject):
    """Calls on to another object, which reads the one that waits for it."""

    async def begin(self, key: str, matrix: Matrix) -> str:
        answer: str = await self.namespace(Ring).get(key).middle(self.key, matrix)
        return answer

    async def middle(self, key: str, matrix: Matrix) -> str:
        answer: str = await self.namespace(Ring).get("c").read_back(self.key)
        return answer

    async def read_back(self, key: str) -> str:
        answer: str = await self.namespace(Ring).get(key).read()
        return answer

    @shared
    def read(self) -> str:
        return "read"


async def test_a_nested_pickled_call_is_not_taken_for_another_when_its_turn_is_run_again(
    runtime: LocalRuntime,
) -> None:
    """Pickles of equal values can differ in another process."""
    peer = Peer(runtime, Store, "a", trusted=True)
    value = ([Matrix(4)], {})
    for number, protocol in enumerate((4, 5, 2), 1):
        await peer.call(number, "double", flags=PICKLED, payload=pickle.dumps(value, protocol), extra=nested("call"))
        await peer.received(number)
    assert {status for _, status, _ in peer.replies} == {OK_PICKLED}
    assert await runtime.namespace(Store).get("a").totals() == (0, 1)


class Caller(DurableObject):
    """Stops in the middle of its turn, so that a crash can cut it short."""

    called: asyncio.Event
    gate: asyncio.Event
    runs = 0

    async def double(self, key: str, matrix: Matrix) -> Matrix:
        Caller.runs += 1
        doubled: Matrix = await self.namespace(Store).get(key).double(matrix)
        Caller.called.set()
        await Caller.gate.wait()
        self.storage.put("done", True)
        return doubled

    def done(self) -> bool:
        found: bool = self.storage.get("done", False)
        return found


async def test_a_turn_with_pickled_arguments_is_run_again_after_a_crash_and_calls_once(runtime: LocalRuntime) -> None:
    Caller.called, Caller.gate, Caller.runs = asyncio.Event(), asyncio.Event(), 0
    call = asyncio.ensure_future(runtime.namespace(Caller).get("a").double("b", Matrix(4)))
    stores = runtime.namespace(Store)
    await Caller.called.wait()
    await runtime.crash()
    Caller.gate.set()
    assert await call == Matrix(8)
    assert (Caller.runs, await runtime.namespace(Caller).get("a").done()) == (2, True)
    assert await stores.get("b").totals() == (0, 1)


# --- objects whose class has been defined again -------------------------------------------------------


class Sleeper(DurableObject):
    """Is busy for as long as a test wants."""

    gate: asyncio.Event

    async def sleep(self) -> int:
        await Sleeper.gate.wait()
        return id(self)

    def touch(self) -> int:
        return id(self)


async def test_objects_of_an_outdated_class_leave_memory_when_their_turns_have_ended(runtime: LocalRuntime) -> None:
    Sleeper.gate = asyncio.Event()
    sleepers = runtime.namespace(Sleeper)
    partition = runtime.partitions[0]
    assert partition is not None
    await sleepers.get("idle").touch()
    busy = sleepers.get("busy").sleep()
    await runtime.run_until_idle()
    partition.classes.on_outdated("Sleeper")
    assert partition.find_host("Sleeper", "idle") is None
    assert partition.find_host("Sleeper", "busy") is not None
    Sleeper.gate.set()
    await busy
    assert partition.find_host("Sleeper", "busy") is None
    await sleepers.get("busy").touch()
