"""The client: batches, order, bounds, healing, acknowledgements and deadlines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.address import SLOTS, slot_of
from actors.errors import (
    CallExpired,
    CallOutcomeUnknown,
    ChannelClosed,
    DataMissing,
    InvalidOption,
    MalformedFrame,
    NoSuchMethod,
    Overloaded,
    RuntimeNotStarted,
    UnstorableValue,
    ValueTooLarge,
)
from actors.lane import lane_session
from actors.messages import (
    OK_PICKLED,
    RAISED,
    REFUSED,
    REPEAT,
    RESUMED,
    Calls,
    Classes,
    Release,
    encode_answer,
    encode_replies,
    keyed_call_id,
    outside_call_id,
)
from actors.wire_errors import encode_error
from tests.support.fake_cluster import CART, World

SESSION = b"s" * 16


def key_in(partition: int, partitions: int, skip: int = 0) -> str:
    """A key whose slot the fake cluster gives to this partition at first."""
    found = [key for key in map(str, range(100)) if slot_of("Cart", key) % partitions == partition]
    return found[skip]


async def until_error(future: asyncio.Future[Any]) -> BaseException:
    assert future.done()
    error = future.exception()
    assert error is not None
    return error


# --- batches and frames -------------------------------------------------------------------------------


async def test_calls_made_in_one_tick_travel_in_one_frame() -> None:
    world = World()
    calls = [world.call("alice", "add", n) for n in range(50)]
    await world.deliver()
    frames = [message for message in world.cluster.all[0].messages if isinstance(message, Calls)]
    assert [len(frame.calls) for frame in frames] == [50]
    await world.answer()
    assert [await call for call in calls] == list(range(1, 51))


async def test_a_class_is_announced_once_per_connection_before_its_first_call() -> None:
    world = World()
    partition = world.cluster.all[0]
    for _ in range(3):
        world.call("alice")
        await world.round_trip()
    assert [type(message) for message in partition.messages[:2]] == [Classes, Calls]
    assert sum(isinstance(message, Classes) for message in partition.messages) == 1
    partition.drop()
    await world.ticks()
    world.call("alice")
    await world.round_trip()
    await world.advance(0.1)
    await world.round_trip()
    assert sum(isinstance(message, Classes) for message in partition.messages) == 2


async def test_arguments_and_results_cross_unchanged() -> None:
    world = World()
    call = world.client.call(CART, "alice", "add", ("apple", (1, 2)), {"count": {3}})
    await world.round_trip()
    (executed,) = world.cluster.executed
    assert (executed.args, executed.kwargs) == (["apple", (1, 2)], {"count": {3}})
    assert await call == 1


async def test_a_large_batch_is_cut_into_several_frames_in_order() -> None:
    world = World()
    for n in range(10):
        world.call("alice", "add", n, b"x" * 100_000)
    await world.deliver()
    frames = [message for message in world.cluster.all[0].messages if isinstance(message, Calls)]
    assert len(frames) > 2
    assert [call[0] for call in world.cluster.all[0].calls] == list(range(1, 11))


async def test_a_batch_that_does_not_fit_into_a_frame_is_split_and_only_the_call_that_does_not_fit_fails() -> None:
    world = World(limits={"max_frame_bytes": 3_000})
    small = [world.call("alice", "add", b"x" * 1_000) for _ in range(4)]
    large = world.call("alice", "add", b"x" * 5_000)
    after = world.call("alice", "add")
    await world.round_trip()
    assert isinstance(await until_error(large), ValueTooLarge)
    assert [await call for call in [*small, after]] == [1, 2, 3, 4, 5]


# --- refused at the caller ----------------------------------------------------------------------------


async def test_arguments_that_can_not_be_stored_are_refused_before_anything_is_queued() -> None:
    world = World()
    with pytest.raises(UnstorableValue):
        world.call("alice", "add", object())
    await world.ticks()
    assert not world.cluster.all[0].connections


async def test_arguments_over_the_limit_are_refused() -> None:
    world = World(max_args_bytes=1_000)
    with pytest.raises(ValueTooLarge, match="max_args_bytes"):
        world.call("alice", "add", b"x" * 1_000)


@pytest.mark.parametrize("timeout_ms", [0, -1])
async def test_a_timeout_that_makes_no_sense_is_refused(timeout_ms: int) -> None:
    with pytest.raises(InvalidOption):
        World().call("alice", timeout_ms=timeout_ms)


# --- bounds -------------------------------------------------------------------------------------------


async def test_callers_beyond_the_window_wait_and_go_on_in_order() -> None:
    world = World(max_in_flight_calls=2)
    calls = [world.call("alice", "add", n) for n in range(5)]
    await world.deliver()
    assert len(world.cluster.all[0].calls) == 2
    for _ in range(3):
        await world.round_trip()
    assert [await call for call in calls] == [1, 2, 3, 4, 5]
    assert [executed.args for executed in world.cluster.executed] == [[n] for n in range(5)]


async def test_past_max_queued_calls_the_caller_gets_overloaded_which_says_what_is_full() -> None:
    world = World(max_in_flight_calls=1, max_queued_calls=3)
    calls = [world.call("alice")]
    await world.deliver()
    calls += [world.call("alice") for _ in range(3)]
    with pytest.raises(Overloaded, match=r"partition 0.*max_queued_calls"):
        world.call("alice")
    for _ in range(4):
        await world.round_trip()
    assert [await call for call in calls] == [1, 2, 3, 4]


async def test_given_up_calls_make_room_in_a_full_queue() -> None:
    world = World(max_queued_calls=3)
    world.cluster.all[0].is_down = True
    calls = [world.call("alice") for _ in range(3)]
    calls[1].cancel()
    world.call("alice")


async def test_calls_of_turns_pass_the_window_and_those_that_wait_for_it() -> None:
    world = World(max_in_flight_calls=1, max_queued_calls=1)
    world.call("alice", "outside")
    await world.deliver()
    world.call("alice", "waiting")
    caller = ("Cart", "bob", b"turn")
    world.call("alice", "nested", call_id=b"i" * 17, chain=[("Cart", "bob")], caller=caller)
    await world.deliver()
    calls = world.cluster.all[0].calls
    assert [call[3] for call in calls] == ["outside", "nested"]
    assert calls[1][7] == (b"i" * 17, (("Cart", "bob"),), caller)


async def test_a_call_with_an_idempotency_key_comes_from_outside_and_waits() -> None:
    world = World(max_in_flight_calls=1)
    world.call("alice", "first")
    world.call("alice", "second", call_id=keyed_call_id("Cart", "alice", "second", "once"))
    await world.deliver()
    assert [call[3] for call in world.cluster.all[0].calls] == ["first"]


async def test_a_channel_that_is_full_is_left_alone_until_it_has_room() -> None:
    world = World()
    world.call("alice")
    await world.round_trip()
    handler = world.cluster.all[0].connection.client.handler
    assert handler is not None
    handler.writable(False)
    world.call("alice")
    await world.deliver()
    assert len(world.cluster.all[0].calls) == 1
    handler.writable(True)
    await world.deliver()
    assert len(world.cluster.all[0].calls) == 2


# --- sessions and ids ---------------------------------------------------------------------------------


async def test_each_lane_has_its_own_session_and_numbers_its_calls_without_gaps() -> None:
    world = World(partitions=2)
    for n in range(3):
        world.call(key_in(0, 2, n))
        world.call(key_in(1, 2, n))
    await world.deliver()
    for partition in world.cluster.all:
        assert [call[0] for call in partition.calls] == [1, 2, 3]
        assert partition.connection.session == lane_session(SESSION, partition.number)
    assert lane_session(SESSION, 0) != lane_session(SESSION, 1)


async def test_a_call_with_a_chain_but_no_id_gets_the_id_that_it_has_as_an_outside_call() -> None:
    world = World()
    world.call("alice", chain=[("Cart", "bob")])
    await world.deliver()
    (call,) = world.cluster.all[0].calls
    assert call[7] == (outside_call_id(lane_session(SESSION, 0), 1), (("Cart", "bob"),), None)


# --- answers ------------------------------------------------------------------------------------------


async def test_answers_may_come_in_any_order() -> None:
    world = World()
    first, second = world.call("alice"), world.call("bob")
    await world.deliver()
    connection = world.cluster.all[0].connection
    connection.run()
    connection.reply([2, 1])
    connection.server.deliver()
    assert (first.result(), second.result()) == (1, 2)


@pytest.mark.parametrize("status", [RAISED, REFUSED])
async def test_an_exception_of_the_method_or_the_platform_reaches_the_caller(status: int) -> None:
    world = World()
    call = world.call("alice")
    await world.deliver()
    connection = world.cluster.all[0].connection
    connection.server.send(encode_replies([(1, status, encode_error(NoSuchMethod("Cart.add: no such method")))]))
    connection.server.deliver()
    with pytest.raises(NoSuchMethod, match=r"Cart\.add"):
        await call


async def test_the_raw_form_gives_the_partition_the_status_and_the_payload() -> None:
    world = World(partitions=2)
    future = world.client.submit(CART, key_in(1, 2), "add", b"\x92\x90\x80")
    await world.round_trip()
    assert await future == (1, 0, b"\x01")


async def test_an_answer_that_can_not_be_decoded_fails_that_call_alone() -> None:
    world = World()
    broken, whole = world.call("alice"), world.call("alice")
    await world.deliver()
    connection = world.cluster.all[0].connection
    connection.server.send(encode_replies([(1, 0, b"\xc1"), (2, 0, b"\x07")]))
    connection.server.deliver()
    assert broken.exception() is not None
    assert whole.result() == 7


async def test_a_pickle_is_never_loaded_from_a_link() -> None:
    world = World()
    call = world.call("alice")
    await world.deliver()
    connection = world.cluster.all[0].connection
    connection.server.send(encode_replies([(1, OK_PICKLED, b"cos\nsystem\n")]))
    connection.server.deliver()
    assert isinstance(await until_error(call), MalformedFrame)


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x01", encode_replies([(9, 0, b"\x01")]), encode_answer(1, [True])])
async def test_a_frame_that_makes_no_sense_breaks_the_connection_and_the_calls_are_made_again(frame: bytes) -> None:
    world = World()
    call = world.call("alice")
    await world.deliver()
    connection = world.cluster.all[0].connection
    connection.server.send(frame)
    connection.server.deliver()
    await world.ticks()
    assert connection.client.is_closed
    await world.advance(1)
    await world.round_trip()
    assert await call == 1


# --- acknowledgements ---------------------------------------------------------------------------------


async def test_replies_are_acknowledged_with_the_next_calls_as_ranges() -> None:
    world = World()
    for n in range(10):
        world.call("alice", "add", n)
    await world.deliver()
    connection = world.cluster.all[0].connection
    connection.run()
    connection.reply([1, 2, 3, 7, 5, 8])
    connection.server.deliver()
    world.call("alice")
    await world.deliver()
    last = world.cluster.all[0].messages[-1]
    assert isinstance(last, Calls)
    assert (last.acks, len(last.calls)) == ((1, 3, 5, 5, 7, 8), 1)


async def test_an_idle_client_acknowledges_after_ack_delay_ms() -> None:
    world = World(ack_delay_ms=50)
    world.call("alice")
    await world.round_trip()
    await world.advance(0.049)
    await world.deliver()
    assert world.cluster.all[0].acks() == []
    await world.advance(0.001)
    await world.deliver()
    assert world.cluster.all[0].acks() == [1, 1]
    assert world.cluster.all[0].messages[-1] == Calls((1, 1), ())


async def test_a_cancelled_call_still_acknowledges_its_reply() -> None:
    world = World()
    call = world.call("alice")
    await world.deliver()
    call.cancel()
    await world.answer()
    await world.advance(1)
    await world.deliver()
    assert world.cluster.all[0].acks() == [1, 1]


async def test_a_call_cancelled_before_it_was_sent_is_not_sent() -> None:
    world = World()
    world.call("alice").cancel()
    kept = world.call("alice", "kept")
    await world.round_trip()
    assert [call[3] for call in world.cluster.all[0].calls] == ["kept"]
    assert await kept == 1


async def test_a_reply_that_nobody_waits_for_is_ignored_and_acknowledged() -> None:
    world = World()
    world.call("alice")
    await world.round_trip()
    connection = world.cluster.all[0].connection
    connection.server.send(encode_replies([(1, 0, b"\x01")]))
    connection.server.deliver()
    await world.advance(1)
    await world.deliver()
    assert world.cluster.all[0].acks() == [1, 1]
    assert not connection.client.is_closed


async def test_a_new_connection_acknowledges_everything_that_no_call_waits_for() -> None:
    world = World()
    calls = [world.call("alice") for _ in range(6)]
    await world.deliver()
    connection = world.cluster.all[0].connection
    connection.run()
    connection.reply([1, 2, 4])
    connection.server.deliver()
    calls[4].cancel()
    world.cluster.all[0].drop()
    await world.deliver()
    assert world.cluster.all[0].acks() == [1, 2, 4, 5]
    assert [call[0] for call in world.cluster.all[0].calls[6:]] == [3, 6]


# --- healing ------------------------------------------------------------------------------------------


async def test_after_a_lost_connection_all_unanswered_calls_are_sent_again_in_order_with_the_same_ids() -> None:
    world = World()
    calls = [world.call("alice", "add", n) for n in range(5)]
    await world.deliver()
    partition = world.cluster.all[0]
    partition.run(3)
    partition.connection.reply([2])
    partition.connection.server.deliver()
    partition.drop()
    calls.append(world.call("alice", "add", 5))
    await world.round_trip()
    assert [(call[0], call[5]) for call in partition.calls[5:]] == [
        (1, REPEAT),
        (3, REPEAT),
        (4, REPEAT),
        (5, REPEAT),
        (6, 0),
    ]
    assert [await call for call in calls] == [1, 2, 3, 4, 5, 6]
    assert [executed.args for executed in world.cluster.executed] == [[n] for n in range(6)]


async def test_calls_are_repeated_in_order_also_when_the_repeating_is_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("actors.lane.FRAME_BYTES", 1)
    world = World(limits={"max_waiting": 2})
    calls = [world.call("alice", "add", n) for n in range(4)]
    for _ in range(2):
        await world.deliver()
    await world.break_connections()  # the new connection has room for two of the four
    assert len(world.cluster.all[0].connection.client.outbox) == 3
    world.cluster.all[0].drop()
    await world.ticks()
    await world.advance(0.04)
    for _ in range(3):
        await world.round_trip()
    assert [await call for call in calls] == [1, 2, 3, 4]
    assert [executed.args for executed in world.cluster.executed] == [[0], [1], [2], [3]]


async def test_each_connection_has_a_higher_number() -> None:
    world = World()
    numbers = []
    for _ in range(3):
        call = world.call("alice")
        await world.advance(2)
        await world.round_trip()
        assert call.done()
        numbers.append(world.cluster.all[0].connection.server.peer.connection)
        world.cluster.all[0].drop()
        await world.ticks()
    assert numbers == sorted(set(numbers))


async def test_an_idle_client_does_not_reconnect() -> None:
    world = World()
    world.call("alice")
    await world.round_trip()
    world.cluster.all[0].drop()
    await world.ticks()
    await world.advance(10)
    assert not world.cluster.all[0].connections


async def test_a_partition_that_is_down_is_tried_again_with_growing_capped_pauses() -> None:
    world = World(call_timeout_ms=60_000)
    partition = world.cluster.all[0]
    partition.is_down = True
    call = world.call("alice")
    await world.ticks()
    pauses = []
    for _ in range(10):
        due = world.timers.next_due()
        assert due is not None
        pauses.append(round(due - world.timers.now(), 3))
        await world.advance(due - world.timers.now())
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0, 1.0, 1.0]
    partition.is_down = False
    await world.advance(1)
    await world.round_trip()
    assert await call == 1


async def test_an_error_that_is_final_reaches_every_call_that_waits() -> None:
    world = World()
    partition = world.cluster.all[0]
    partition.final_error = DataMissing("partition 0 had its files on node-7 in /data")
    calls = [world.call("alice"), world.call("bob")]
    await world.ticks()
    for call in calls:
        with pytest.raises(DataMissing, match="node-7"):
            await call
    partition.final_error = None
    again = world.call("alice")
    await world.round_trip()
    assert await again == 1


async def test_a_partition_that_is_gone_for_good_does_not_fail_calls_whose_objects_have_moved() -> None:
    world = World(partitions=2)
    key = key_in(0, 2)
    call = world.call(key)
    await world.deliver()
    world.cluster.move(slot_of("Cart", key), 1)
    world.cluster.all[0].final_error = DataMissing("partition 0 was removed")
    await world.break_connections()
    await world.round_trip()
    assert await call == 1


async def test_the_frames_of_an_old_connection_are_ignored() -> None:
    world = World()
    call = world.call("alice")
    await world.deliver()
    old = world.cluster.all[0].connection
    await world.break_connections()
    await world.deliver()
    assert old.client.handler is not None
    old.client.handler.frame_received(encode_replies([(1, 0, b"\x63")]))
    await world.answer()
    assert await call == 1


# --- slots that move ----------------------------------------------------------------------------------


async def test_calls_of_a_moved_object_go_to_the_new_owner_in_order_and_keep_their_ids() -> None:
    world = World(partitions=2)
    key = key_in(0, 2)
    world.cluster.move(slot_of("Cart", key), 1)
    calls = [world.call(key, "add", n) for n in range(3)]
    await world.round_trip()
    calls += [world.call(key, "add", n) for n in range(3, 5)]
    await world.round_trip()
    assert [await call for call in calls] == [1, 2, 3, 4, 5]
    assert [executed.args for executed in world.cluster.executed] == [[n] for n in range(5)]
    moved = world.cluster.all[1].calls
    first_session = lane_session(SESSION, 0)
    assert [call[7] for call in moved[:3]] == [(outside_call_id(first_session, n), (), None) for n in (1, 2, 3)]
    assert [call[7] for call in moved[3:]] == [None, None]
    assert [call[0] for call in moved] == [1, 2, 3, 4, 5]


async def test_while_one_call_is_stale_later_ones_of_its_slot_wait_and_others_do_not() -> None:
    world = World(partitions=2)
    key, other = key_in(0, 2), key_in(0, 2, skip=1)
    world.cluster.map_is_late = True
    world.cluster.move(slot_of("Cart", key), 1)
    stale = world.call(key, "first")
    await world.round_trip()
    later, free = world.call(key, "second"), world.call(other)
    await world.round_trip()
    assert free.done()
    assert not stale.done()
    assert not later.done()
    world.cluster.map_is_late = False
    await world.advance(1)
    await world.round_trip()
    await world.round_trip()
    assert [executed.method for executed in world.cluster.executed if executed.key == key] == ["first", "second"]
    assert (await stale, await later) == (2, 3)


async def test_a_partition_that_is_not_the_owner_yet_is_asked_again_after_a_pause_and_told_that_all_is_sent_again() -> (
    None
):
    world = World(partitions=2)
    key = key_in(0, 2)
    slot = slot_of("Cart", key)
    world.cluster.owners[slot] = 1  # on its way to 0, which the map says already
    calls = [world.call(key, "add", n) for n in range(3)]
    await world.deliver()
    partition = world.cluster.all[0]
    partition.run(1)
    world.cluster.owners[slot] = 0
    await world.answer()
    assert not any(call.done() for call in calls)
    await world.advance(0.05)
    await world.round_trip()
    assert [await call for call in calls] == [1, 2, 3]
    assert [executed.args for executed in world.cluster.executed] == [[0], [1], [2]]
    assert [call[5] for call in partition.calls] == [0, 0, 0, REPEAT | RESUMED, REPEAT, REPEAT]
    assert [call[0] for call in partition.calls] == [1, 2, 3, 1, 2, 3]


async def test_a_stale_answer_is_acknowledged_only_when_its_call_has_ended_elsewhere() -> None:
    world = World(partitions=2)
    key = key_in(0, 2)
    world.cluster.move(slot_of("Cart", key), 1)
    call = world.call(key)
    await world.round_trip()
    await world.advance(1)
    await world.deliver()
    assert world.cluster.all[0].acks() == []
    await world.answer()
    assert call.done()
    await world.advance(1)
    await world.deliver()
    assert world.cluster.all[0].acks() == [1, 1]
    assert world.cluster.all[1].acks() == [1, 1]


async def test_an_object_that_moves_there_and_back_keeps_order_and_ids() -> None:
    world = World(partitions=2)
    key = key_in(0, 2)
    slot = slot_of("Cart", key)
    calls = [world.call(key, "add", n) for n in range(3)]
    await world.deliver()
    world.cluster.move(slot, 1)
    await world.answer()
    await world.deliver()
    world.cluster.move(slot, 0)
    await world.answer()
    await world.round_trip()
    assert [await call for call in calls] == [1, 2, 3]
    assert [executed.call_id for executed in world.cluster.executed] == [
        outside_call_id(lane_session(SESSION, 0), n) for n in (1, 2, 3)
    ]


async def test_a_call_lost_with_its_partition_is_sent_to_the_new_owner_and_not_run_twice() -> None:
    world = World(partitions=2)
    key = key_in(0, 2)
    first, second = world.call(key, "add", 1), world.call(key, "add", 2)
    await world.deliver()
    world.cluster.all[0].run(1)
    world.cluster.move(slot_of("Cart", key), 1)
    world.cluster.all[0].is_down = True
    world.cluster.all[0].drop()
    await world.round_trip()
    await world.advance(1)
    await world.round_trip()
    assert (await first, await second) == (1, 2)
    assert [executed.args for executed in world.cluster.executed] == [[1], [2]]


async def test_after_a_newer_map_later_calls_wait_for_those_under_way_to_the_old_owner() -> None:
    world = World(partitions=2)
    moving, other = key_in(0, 2), key_in(0, 2, skip=1)
    slow = world.call(moving, "slow")
    await world.deliver()
    world.cluster.all[0].run()
    world.cluster.move(slot_of("Cart", moving), 1)
    await world.cluster.refresh(0)
    later, unmoved = world.call(moving, "later"), world.call(other)
    await world.deliver()
    assert not world.cluster.all[1].connections
    await world.answer()
    await world.round_trip()
    assert (await slow, await unmoved, await later) == (1, 2, 3)
    assert world.cluster.all[1].calls[0][3] == "later"


async def test_too_many_calls_waiting_for_a_moving_object_are_refused() -> None:
    world = World(partitions=2, max_queued_calls=2)
    key = key_in(0, 2)
    world.cluster.map_is_late = True
    world.cluster.move(slot_of("Cart", key), 1)
    world.call(key)
    await world.round_trip()
    world.call(key)
    world.call(key)
    with pytest.raises(Overloaded, match="being moved"):
        world.call(key)


async def test_the_map_is_refreshed_once_for_many_stale_calls() -> None:
    world = World(partitions=2)
    for slot in range(SLOTS):
        world.cluster.owners[slot] = 1
    world.cluster.move(0, 1)
    calls = [world.call(key_in(0, 2, n)) for n in range(30)]
    await world.round_trip()
    await world.round_trip()
    assert all(call.done() for call in calls)
    assert world.cluster.refreshes <= 2


# --- deadlines ----------------------------------------------------------------------------------------


async def test_a_call_without_an_answer_before_its_deadline_has_an_unknown_outcome() -> None:
    world = World(call_timeout_ms=5_000)
    call = world.call("alice")
    await world.deliver()
    await world.advance(4.999)
    assert not call.done()
    await world.advance(0.1)
    with pytest.raises(CallOutcomeUnknown, match=r"Cart\('alice'\)\.add.*may have run"):
        await call


async def test_a_call_that_was_never_sent_has_expired() -> None:
    world = World()
    world.cluster.all[0].is_down = True
    call = world.call("alice", timeout_ms=100)
    await world.ticks()
    await world.advance(0.2)
    with pytest.raises(CallExpired, match=r"nothing was run.*does not run"):
        await call


async def test_a_call_that_was_only_ever_answered_stale_has_expired_too() -> None:
    world = World(partitions=2)
    key = key_in(0, 2)
    world.cluster.map_is_late = True
    world.cluster.move(slot_of("Cart", key), 1)
    call = world.call(key, timeout_ms=10)
    await world.round_trip()
    await world.advance(0.02)
    assert isinstance(await until_error(call), CallExpired)


async def test_a_call_that_was_lost_and_then_answered_stale_has_an_unknown_outcome() -> None:
    world = World(partitions=2)
    key = key_in(0, 2)
    call = world.call(key, timeout_ms=100)
    await world.deliver()
    world.cluster.all[0].drop()
    world.cluster.map_is_late = True
    world.cluster.move(slot_of("Cart", key), 1)
    await world.round_trip()
    await world.advance(0.2)
    assert isinstance(await until_error(call), CallOutcomeUnknown)


async def test_a_deadline_is_at_most_half_of_call_memory() -> None:
    world = World(call_memory_ms=10_000)
    call = world.call("alice", timeout_ms=3_600_000)
    await world.deliver()
    assert world.cluster.all[0].calls[0][6] <= 5_001
    await world.advance(5.1)
    assert isinstance(await until_error(call), CallOutcomeUnknown)


async def test_the_time_that_is_left_travels_with_the_call() -> None:
    world = World(call_timeout_ms=1_000)
    call = world.call("alice")
    await world.deliver()
    world.cluster.all[0].is_down = True
    world.cluster.all[0].drop()
    await world.advance(0.5)
    world.cluster.all[0].is_down = False
    await world.advance(0.4)
    await world.round_trip()
    first, repeat = world.cluster.all[0].calls
    assert 1_000 <= first[6] <= 1_001
    assert repeat[6] <= 501
    assert await call == 1


async def test_a_call_with_a_shorter_deadline_is_not_held_up_by_an_earlier_longer_one() -> None:
    world = World()
    long, short = world.call("alice", timeout_ms=60_000), world.call("alice", timeout_ms=200)
    await world.deliver()
    await world.advance(0.21)
    assert not long.done()
    assert isinstance(await until_error(short), CallOutcomeUnknown)


async def test_one_timer_serves_all_deadlines() -> None:
    world = World()
    for n in range(500):
        world.call("alice", timeout_ms=1_000 + n)
    await world.deliver()
    assert world.timers.pending() == 1


async def test_a_given_up_call_is_not_repeated() -> None:
    world = World(call_timeout_ms=100)
    given_up = world.call("alice", "given_up")
    await world.deliver()
    await world.advance(0.2)
    assert given_up.exception() is not None
    world.cluster.all[0].drop()
    await world.ticks()
    kept = world.call("alice", "kept")
    await world.ticks()
    await world.advance(0.02)
    await world.round_trip()
    assert [call[3] for call in world.cluster.all[0].calls] == ["given_up", "kept"]
    assert await kept == 1


# --- questions, admin requests, releases --------------------------------------------------------------


async def test_a_partition_is_asked_which_turns_are_unfinished() -> None:
    world = World()
    question = asyncio.ensure_future(world.client.ask(0, [("Cart", "a", b"open"), ("Cart", "b", b"over")]))
    await world.round_trip()
    assert await question == [True, False]


async def test_an_admin_request_is_answered_and_repeated_after_a_lost_connection() -> None:
    world = World()
    world.cluster.all[0].admin_values["status"] = {"epoch": 7}
    request = asyncio.ensure_future(world.client.admin(0, "status", []))
    await world.deliver()
    await world.break_connections()
    await world.round_trip()
    assert await request == {"epoch": 7}


async def test_an_admin_request_about_an_object_follows_it_to_its_owner() -> None:
    world = World(partitions=2)
    key = key_in(0, 2)
    world.cluster.all[1].admin_values["delete_object"] = True
    world.cluster.move(slot_of("Cart", key), 1)
    request = asyncio.ensure_future(world.client.admin_object(CART, key, "delete_object", ["Cart", key]))
    await world.round_trip()
    await world.round_trip()
    assert await request is True


async def test_releases_travel_with_the_next_frame_or_after_ack_delay() -> None:
    world = World()
    world.call("alice")
    await world.round_trip()
    world.client.release(0, [b"i" * 17, b"j" * 17])
    await world.advance(0.05)
    await world.deliver()
    assert Release((b"i" * 17, b"j" * 17)) in world.cluster.all[0].messages


# --- the end ------------------------------------------------------------------------------------------


async def test_closing_ends_what_waits_and_says_what_may_have_run() -> None:
    world = World(max_in_flight_calls=1)
    sent, queued = world.call("alice"), world.call("alice")
    await world.deliver()
    await world.client.close()
    assert isinstance(await until_error(sent), ChannelClosed)
    assert isinstance(await until_error(queued), RuntimeNotStarted)
    with pytest.raises(RuntimeNotStarted):
        world.call("alice")
    await world.client.close()


async def test_closing_acknowledges_what_was_received() -> None:
    world = World()
    world.call("alice")
    await world.round_trip()
    await world.client.close()
    await world.deliver()
    assert world.cluster.all[0].acks() == [1, 1]


async def test_closing_stops_reconnecting() -> None:
    world = World()
    world.cluster.all[0].is_down = True
    call = world.call("alice")
    await world.ticks()
    await world.client.close()
    assert isinstance(await until_error(call), RuntimeNotStarted)
    world.cluster.all[0].is_down = False
    await world.advance(10)
    assert not world.cluster.all[0].connections
