"""Messages between objects: part of the turn, applied once, in order for each pair, retried, and buried in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors import testing
from actors.admission import Admission
from actors.dead_letters import DeadLetter
from actors.errors import (
    ChannelClosed,
    CommitFailed,
    DataMissing,
    InvalidKey,
    InvalidOption,
    InvalidSchedule,
    MethodNotCallable,
    NoSuchMethod,
    OutboxFull,
    ReadOnlyTurn,
    UnstorableValue,
    ValueTooLarge,
)
from actors.message_ids import MessageMark, message_call_id
from actors.messages import OK
from actors.namespace import Stub
from actors.settings import Settings
from actors.testing import LocalRuntime, VirtualClock
from tests.support.crash_points import CommitControl, kept, key_in, runtime_with, until_forgotten
from tests.support.mail import (
    Box,
    Greeter,
    Leaf,
    LooseBox,
    LoosePost,
    NoThanks,
    Post,
    outbox,
    received,
    until_delivered,
)
from tests.support.peer import Peer
from timers.backoff import MESSAGE_RETRY, RetryPolicy
from timers.inbox_sweep import FORGET_MS
from timers.message_rows import OutboxRow

MINUTE_MS = 60_000


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the test before. Receivers that are held wait for the test: virtual time need not wait for them."""
    monkeypatch.setattr(testing, "_PATIENCE_S", 0.0)
    for shared_by_tests in (Box.runs, Box.failing, Box.gates, Box.noted):
        shared_by_tests.clear()  # type: ignore[attr-defined]


@pytest.fixture
async def runtime() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime(memory=True, partitions=2) as started:
        yield started


def post(runtime: LocalRuntime, key: str = "p") -> Stub:
    return runtime.namespace(Post).get(key)


def box(runtime: LocalRuntime, key: str = "b") -> Stub:
    return runtime.namespace(Box).get(key)


async def values(runtime: LocalRuntime, key: str = "b") -> list[Any]:
    await until_delivered(runtime)
    found: list[Any] = await box(runtime, key).values()
    return found


def store_of(runtime: LocalRuntime, stub: Stub) -> Any:
    return runtime._partition_of(stub).store


# --- part of the turn ---------------------------------------------------------------------------------


async def test_a_message_is_applied_once_in_a_turn_of_its_receiver(runtime: LocalRuntime) -> None:
    await post(runtime).send_one("b", 1)
    assert await values(runtime) == [1]
    assert Box.runs == {1: 1}


async def test_a_message_leaves_with_the_commit_of_its_turn_and_not_before(runtime: LocalRuntime) -> None:
    control = CommitControl()
    async with runtime_with(control) as held:
        await box(held).values()
        with control.hold():
            sending = asyncio.ensure_future(post(held).send_one("b", 1))
            await held.run_until_idle()
            assert Box.runs == {}
        await sending
        assert await values(held) == [1]


async def test_a_turn_that_raises_sends_nothing(runtime: LocalRuntime) -> None:
    with pytest.raises(NoThanks):
        await post(runtime).send_and_raise("b", 1)
    await runtime.advance(minutes=1)
    assert await values(runtime) == []
    assert store_of(runtime, post(runtime)).scan("delayed") == []


async def test_a_transaction_that_is_rolled_back_takes_its_messages_with_it(runtime: LocalRuntime) -> None:
    await post(runtime).send_in_transaction("b")
    assert await values(runtime) == ["kept", "after"]


async def test_a_turn_whose_commit_fails_sends_nothing_and_the_next_one_sends() -> None:
    control = CommitControl()
    async with runtime_with(control) as runtime:
        await post(runtime).send_one("b", 0)
        await until_delivered(runtime)
        control.fail_next()
        with pytest.raises(CommitFailed):
            await post(runtime).send_one("b", 1)
        await post(runtime).send_one("b", 2)
        assert await values(runtime) == [0, 2]


async def test_what_was_synced_is_sent_also_when_the_turn_raises_after_it(runtime: LocalRuntime) -> None:
    with pytest.raises(NoThanks):
        await post(runtime).send_synced_and_raise("b")
    assert await values(runtime) == ["synced"]


async def test_a_sender_that_writes_nothing_else_does_not_come_into_being(runtime: LocalRuntime) -> None:
    await post(runtime).send_with("b", "put", 1)
    assert await values(runtime) == [1]
    assert [entry.key for entry in await runtime.namespace(Post).list()] == []


# --- where it may be sent -----------------------------------------------------------------------------


async def test_interleaved_turns_send_in_the_order_of_their_commits(runtime: LocalRuntime) -> None:
    loose = runtime.namespace(LoosePost).get("p")
    await asyncio.gather(loose.send_around_waits("b", [1, 2, 3]), loose.send_around_waits("b", [11, 12, 13]))
    found = await values(runtime)
    assert sorted(found) == [1, 2, 3, 11, 12, 13]
    assert [v for v in found if v < 10] == [1, 2, 3]
    assert [v for v in found if v > 10] == [11, 12, 13]


async def test_transactions_of_interleaved_turns_send_with_their_end(runtime: LocalRuntime) -> None:
    await runtime.namespace(LoosePost).get("p").send_in_transaction("b")
    assert await values(runtime) == ["kept", "after"]


async def test_timers_send(runtime: LocalRuntime) -> None:
    await post(runtime).arm("b", "1m")
    await runtime.advance(minutes=1)
    assert await values(runtime) == ["from the timer"]


async def test_on_start_sends(runtime: LocalRuntime) -> None:
    assert await runtime.namespace(Greeter).get("g").hello() == "hello"
    assert await values(runtime, "greeted") == ["g"]


async def test_a_shared_method_can_not_send(runtime: LocalRuntime) -> None:
    with pytest.raises(ReadOnlyTurn):
        await post(runtime).send_from_shared("b")


async def test_an_object_may_send_to_itself(runtime: LocalRuntime) -> None:
    for value in range(3):
        await post(runtime).send_to_self(value)
    await until_delivered(runtime)
    assert await post(runtime).values() == [0, 1, 2]


async def test_a_message_begins_a_chain_of_its_own_so_its_sender_may_be_called(runtime: LocalRuntime) -> None:
    assert await post(runtime).send_and_call("b") == 1
    await until_delivered(runtime)
    assert await post(runtime).values() == ["back"]


# --- what is refused at once --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("an unknown method", NoSuchMethod),
        ("a private method", MethodNotCallable),
        ("a method that only reads", InvalidOption),
        ("an empty key", InvalidKey),
        ("a value that can't be stored", UnstorableValue),
        ("too large a value", ValueTooLarge),
        ("after and at", InvalidOption),
        ("a retry that is none", InvalidOption),
    ],
)
async def test_what_could_never_be_delivered_is_refused_in_the_senders_turn(
    runtime: LocalRuntime, what: str, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await post(runtime).send_wrongly("b", what)
    assert await values(runtime) == []


async def test_times_that_make_no_sense_are_refused(runtime: LocalRuntime) -> None:
    with pytest.raises(InvalidSchedule):
        await post(runtime).send_after("b", 1, "soon")
    with pytest.raises(InvalidSchedule):
        await post(runtime).send_after("b", 1, 5)
    assert await values(runtime) == []


async def test_a_turn_may_send_so_many_messages_and_one_more_is_refused() -> None:
    async with LocalRuntime(memory=True, settings=Settings(durability="off", max_messages_per_turn=3)) as runtime:
        await post(runtime).send_many(["b"], [1, 2, 3])
        with pytest.raises(OutboxFull, match="max_messages_per_turn"):
            await post(runtime).send_many(["b"], [4, 5, 6, 7])
        assert await values(runtime) == [1, 2, 3]


async def test_an_object_may_have_so_many_undelivered_messages_and_one_more_is_refused() -> None:
    async with LocalRuntime(memory=True, settings=Settings(durability="off", max_outbox_messages=3)) as runtime:
        Box.gates["b"] = asyncio.Event()
        await post(runtime).send_many(["b"], [1, 2], "put_at_gate")
        await post(runtime).send_after("b", 3, "1h")  # a delayed one counts as well
        with pytest.raises(OutboxFull, match="max_outbox_messages"):
            await post(runtime).send_one("b", 4)
        await runtime.evict(post(runtime))
        with pytest.raises(OutboxFull):  # counted again from what is stored
            await post(runtime).send_one("b", 4)
        await post(runtime, "other").send_one("b2", "others may")
        Box.gates["b"].set()
        await until_delivered(runtime)
        await post(runtime).send_one("b", 4)
        assert await values(runtime) == [1, 2, 4]
        await runtime.advance(hours=1)
        assert await values(runtime) == [1, 2, 4, 3]


# --- order and failures -------------------------------------------------------------------------------


async def test_messages_of_a_pair_are_applied_in_order(runtime: LocalRuntime) -> None:
    for first in range(0, 300, 100):
        await post(runtime).send_many(["b", "b2"], list(range(first, first + 100)))
    assert await values(runtime) == list(range(300))
    assert await values(runtime, "b2") == list(range(300))


async def test_what_raises_is_retried_and_what_comes_after_it_waits(runtime: LocalRuntime) -> None:
    Box.failing[1] = 3
    await post(runtime).send_many(["b"], [0, 1, 2])
    await runtime.run_until_idle()
    assert await box(runtime).values() == [0]
    assert (Box.runs[1], Box.runs[2]) == (1, 0)  # a page stops at its first failure
    assert await values(runtime) == [0, 1, 2]
    assert (Box.runs[1], Box.runs[2]) == (4, 1)


async def test_another_pair_does_not_wait_for_one_that_fails(runtime: LocalRuntime) -> None:
    Box.failing["bad"] = -1
    await post(runtime).send_one("b", "bad")
    await post(runtime).send_one("b2", "good")
    await post(runtime, "other").send_one("b", "good")
    await runtime.run_until_idle()
    assert await box(runtime, "b2").values() == ["good"]
    assert await box(runtime).values() == ["good"]


def test_by_default_a_message_has_ten_tries_and_pauses_of_ten_minutes_at_most() -> None:
    assert (MESSAGE_RETRY.max_attempts, MESSAGE_RETRY.cap_ms) == (10, 600_000)


async def test_a_message_whose_tries_are_used_up_is_a_dead_letter_and_the_next_ones_go_on(
    runtime: LocalRuntime,
) -> None:
    Box.failing["bad"] = -1
    await post(runtime).send_many(["b"], ["bad", "next"])
    await runtime.advance(hours=3)
    assert await values(runtime) == ["next"]
    assert Box.runs["bad"] == 10
    (letter,) = await runtime.dead_letters()
    assert (letter.type_name, letter.key, letter.name, letter.attempts, letter.crashes) == (
        "Post",
        "p",
        "Box/b.put",
        10,
        0,
    )
    assert "NoThanks: not 'bad'" in letter.error


async def test_the_pauses_between_tries_are_those_of_the_policy_given_with_the_message(runtime: LocalRuntime) -> None:
    Box.failing["bad"] = -1
    retry = RetryPolicy(max_attempts=3, base_ms=1_000, factor=10, jitter=0)
    await post(runtime).send_one("b", "bad", retry=retry)
    await runtime.advance(ms=999)
    assert Box.runs["bad"] == 1
    await runtime.advance(ms=1)
    assert Box.runs["bad"] == 2
    await runtime.advance(ms=9_999)
    assert Box.runs["bad"] == 2
    await runtime.advance(ms=1)
    assert Box.runs["bad"] == 3
    await runtime.run_until_idle()
    assert [letter.attempts for letter in await runtime.dead_letters()] == [3]


async def test_tries_and_pauses_survive_a_crash(runtime: LocalRuntime) -> None:
    Box.failing["bad"] = -1
    retry = RetryPolicy(max_attempts=3, base_ms=60_000, jitter=0)
    await post(runtime).send_one("b", "bad", retry=retry)
    await runtime.run_until_idle()
    for runs in (1, 2):
        await runtime.crash()
        await runtime.advance(ms=59_000 * runs)
        assert Box.runs["bad"] == runs
        await runtime.advance(ms=1_000 * runs)
        await asyncio.sleep(0.05)  # clients reconnect in real time
        await runtime.advance(seconds=1)
        assert Box.runs["bad"] == runs + 1
    assert [letter.attempts for letter in await runtime.dead_letters()] == [3]


async def test_arguments_that_do_not_fit_use_up_tries(runtime: LocalRuntime) -> None:
    await post(runtime).send_with("b", "put", 1, 2, 3)
    await post(runtime).send_one("b", "next")
    await runtime.advance(hours=3)
    assert await values(runtime) == ["next"]
    (letter,) = await runtime.dead_letters()
    assert letter.attempts == 10
    assert "can't be called like this" in letter.error


async def test_a_method_or_class_that_the_receivers_partition_does_not_have_uses_up_tries(
    runtime: LocalRuntime,
) -> None:
    sender = post(runtime)
    partition = runtime._partition_of(sender)
    slot = sender.id.slot
    for number, (type_name, method) in enumerate((("Box", "gone"), ("Gone", "put"), ("Box", "values")), start=1):
        row = OutboxRow(slot, number, "Post", "p", type_name, "b", method, b"\x92\x90\x80", b"", 1)
        partition.numbers.take(slot)
        partition.persist([("outbox", row.key(), row.values())])
        await partition.committer.drain()
        partition.messages_left([row])
    await runtime.advance(hours=5)
    letters = await runtime.dead_letters()
    assert [letter.attempts for letter in letters] == [10, 10, 10]
    assert {letter.name for letter in letters} == {"Box/b.gone", "Gone/b.put", "Box/b.values"}


async def test_an_overloaded_receiver_uses_up_no_try() -> None:
    class Narrow(Box):
        type_name = "Narrow"
        max_queued_turns = 1

    Narrow.gates["b"] = asyncio.Event()
    async with LocalRuntime(memory=True) as runtime:
        narrow = runtime.namespace(Narrow).get("b")
        holding = [asyncio.ensure_future(narrow.put_at_gate(each)) for each in ("one", "two")]
        await runtime.run_until_idle()
        sender = runtime.namespace(_PostToNarrow).get("p")
        await sender.post(["a", "b"])
        await runtime.advance(seconds=25)  # the turn that is held may run for 30
        assert await runtime.dead_letters() == []
        assert outbox(runtime) == 2
        Narrow.gates["b"].set()
        await asyncio.gather(*holding)
        await until_delivered(runtime)
        assert await narrow.values() == ["one", "two", "a", "b"]


async def test_a_pause_does_not_become_longer_when_the_wall_clock_is_set_back() -> None:
    class Narrow(Box):
        type_name = "Narrow"
        max_queued_turns = 1

    Narrow.gates["b"] = asyncio.Event()
    clock = VirtualClock()
    async with LocalRuntime(memory=True, clock=clock) as runtime:
        narrow = runtime.namespace(Narrow).get("b")
        holding = [asyncio.ensure_future(narrow.put_at_gate(each)) for each in ("one", "two")]
        await runtime.run_until_idle()
        await runtime.namespace(_PostToNarrow).get("p").post(["a"])
        await runtime.advance(seconds=5)
        clock.step_wall(-3_600_000)
        Narrow.gates["b"].set()
        await asyncio.gather(*holding)
        await runtime.advance(seconds=10)
        assert await narrow.values() == ["one", "two", "a"]


class _PostToNarrow(Post):
    type_name = "PostToNarrow"

    def post(self, values: list[Any]) -> None:
        info = self._ms_host.partition.classes.get("Narrow")
        for value in values:
            self.send(info.cls, "b").put(value)  # type: ignore[union-attr]


@pytest.mark.parametrize("error", [ChannelClosed("down"), DataMissing("gone")], ids=["no answer", "DataMissing"])
async def test_a_partition_that_is_away_for_long_uses_up_no_try_and_holds_up_no_other(error: Exception) -> None:
    async with LocalRuntime(memory=True, partitions=2, settings=Settings(durability="off")) as runtime:
        here, there = (key_in("Box", partition, 2) for partition in (0, 1))
        sender = post(runtime, key_in("Post", 0, 2))
        away = runtime.partitions[1]
        assert away is not None
        runtime.partitions[1] = None
        await away.abandon()
        connect = runtime._directory._connect

        def refuse(partition: int, *args: Any, **more: Any) -> Any:
            if partition == 1 and runtime.partitions[1] is None:
                raise error
            return connect(partition, *args, **more)

        runtime._directory._connect = refuse  # type: ignore[method-assign]
        await sender.send_many([there, here], [1, 2, 3])
        for _ in range(20):
            await asyncio.sleep(0.005)
            await runtime.advance(minutes=10)
        assert await box(runtime, here).values() == [1, 2, 3]
        assert [status["outbox"] for status in runtime.status()] == [3]
        await runtime._open(1)
        assert await values(runtime, there) == [1, 2, 3]
        assert await runtime.dead_letters() == []


async def test_an_interleaved_receiver_applies_one_message_of_a_sender_after_the_other(runtime: LocalRuntime) -> None:
    await post(runtime).send_loosely("b", list(range(40)), "put_slowly")
    await until_delivered(runtime)
    assert await runtime.namespace(LooseBox).get("b").values() == list(range(40))
    assert {Box.runs["begun", value] for value in range(40)} == {1}


async def test_a_result_is_not_looked_at(runtime: LocalRuntime) -> None:
    await post(runtime).send_with("b", "answer_with_lock")
    assert await values(runtime) == ["locked"]


# --- once ---------------------------------------------------------------------------------------------


async def test_a_retry_is_a_new_run_with_new_calls_and_a_repeat_by_the_platform_is_not() -> None:
    control = CommitControl()
    async with runtime_with(control, partitions=3) as runtime:
        sender, receiver, leaf = (key_in(name, place, 3) for place, name in enumerate(("Post", "Box", "Leaf")))
        Box.failing["x"] = 1
        await post(runtime, sender).send_with(receiver, "put_and_call", "x", leaf)
        assert await values(runtime, receiver) == ["x"]
        assert await runtime.namespace(Leaf).get(leaf).total() == 2  # by the run that raised, and by its retry
        Box.gates[receiver] = asyncio.Event()
        await post(runtime, sender).send_with(receiver, "put_at_gate", "y")
        await runtime.run_until_idle()
        await runtime.crash(0)  # the sender's partition forgets that it has sent it, and sends it again
        await asyncio.sleep(0.05)
        await runtime.run_until_idle()
        Box.gates[receiver].set()
        assert await values(runtime, receiver) == ["x", "y"]
        assert Box.runs["begun", "y"] == 1


async def test_the_number_is_recorded_also_by_a_turn_that_writes_nothing(runtime: LocalRuntime) -> None:
    await post(runtime).send_with("b", "look")
    await until_delivered(runtime)
    (row,) = received(runtime)
    assert row[2] == 1
    assert [entry.key for entry in await runtime.namespace(Box).list()] == []  # and brings nothing into being


def message(number: int, *, attempt: int = 0, predecessor: int = 0, value: Any = None) -> tuple[Any, ...]:
    """Method, arguments and extra of a message of Post/p to Box/b, as a late frame would carry them."""
    row = OutboxRow(0, number, "Post", "p", "Box", "b", "put", b"", b"", 0, attempt)
    mark = MessageMark(number, attempt, predecessor)
    return "put", [value or number], (message_call_id(row.pair, number, attempt), (), ("Post", "p", mark.to_bytes()))


async def test_a_number_below_the_last_one_is_not_run_again_however_late_it_comes(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Box, "b")
    for seq, number in enumerate((3, 2, 3), start=1):
        method, args, extra = message(number, attempt=seq)
        await peer.call(seq, method, args, extra=extra)
    await runtime.run_until_idle()
    assert await box(runtime).values() == [3]
    assert [status for _, status, _ in peer.replies] == [OK, OK, OK]


async def test_a_message_is_not_run_before_its_predecessor_is_applied(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Box, "b")
    Box.failing[1] = 1
    for seq, (number, predecessor) in enumerate(((1, 0), (2, 1), (3, 2)), start=1):
        method, args, extra = message(number, predecessor=predecessor)
        await peer.call(seq, method, args, extra=extra)
    await runtime.run_until_idle()
    assert await box(runtime).values() == []
    assert Box.runs == {1: 1}


async def test_a_message_that_comes_again_after_its_receiver_was_deleted_is_not_applied_to_the_new_one() -> None:
    control = CommitControl()
    async with runtime_with(control, partitions=2) as runtime:
        sender, receiver = post(runtime, key_in("Post", 0, 2)), box(runtime, key_in("Box", 1, 2))
        await sender.send_one(receiver.key, "first")
        await until_delivered(runtime)
        Box.gates[receiver.key] = asyncio.Event()
        await sender.send_one(receiver.key, "x", "put_at_gate")
        await runtime.run_until_idle()
        runtime.partitions[0].relay.stop()  # type: ignore[union-attr]  # what was applied stays in the outbox
        away = runtime.partitions[0]
        assert away is not None
        runtime.partitions[0] = None
        await away.abandon()
        Box.gates[receiver.key].set()
        await runtime.run_until_idle()
        assert await receiver.values() == ["first", "x"]
        assert await runtime.namespace(Box).delete(receiver.key)
        await runtime._open(0)
        assert await values(runtime, receiver.key) == []


async def test_outcomes_are_forgotten_once_the_outbox_has_forgotten_the_message(runtime: LocalRuntime) -> None:
    Box.failing[1] = 2
    await post(runtime).send_many(["b"], [0, 1, 2])
    await until_delivered(runtime)
    await until_forgotten(runtime)
    assert kept(runtime) == 0


async def test_an_outcome_is_kept_as_long_as_its_message_is_in_the_outbox() -> None:
    control = CommitControl()
    async with runtime_with(control, partitions=2) as runtime:
        sender, receiver = post(runtime, key_in("Post", 0, 2)), box(runtime, key_in("Box", 1, 2))
        await sender.send_one(receiver.key, 1)
        await runtime.run_until_idle()
        partition = runtime.partitions[0]
        assert partition is not None
        row = OutboxRow(sender.id.slot, 1, "Post", sender.key, "Box", receiver.key, "put", b"", b"", 0)
        caller = ("Post", sender.key, MessageMark(1, 0, 0).to_bytes())
        assert Admission(partition).unfinished([caller]) == [False]
        partition.persist([("outbox", row.key(), row.values())])
        await partition.committer.drain()
        assert Admission(partition).unfinished([caller]) == [True]
        retried = ("Post", sender.key, MessageMark(1, 1, 0).to_bytes())
        assert Admission(partition).unfinished([retried]) == [False]


# --- numbers and their end ----------------------------------------------------------------------------


async def test_numbers_go_on_after_the_sender_is_deleted_and_made_again(runtime: LocalRuntime) -> None:
    await post(runtime).send_many(["b"], [1, 2])
    await until_delivered(runtime)
    assert await runtime.namespace(Post).delete("p") is False  # it has written nothing
    await post(runtime).send_one("b", 3)
    await until_delivered(runtime)
    assert await runtime.namespace(Post).delete("p")
    await post(runtime).send_one("b", 4)
    assert await values(runtime) == [1, 2, 3, 4]


async def test_deleting_the_sender_keeps_what_it_has_sent_in_order(runtime: LocalRuntime) -> None:
    Box.gates["b"] = asyncio.Event()
    await post(runtime).send_one("b", 1, "put_at_gate")
    await post(runtime).send_one("b", 2)
    await post(runtime).send_after("b", 9, "1h")
    await runtime.run_until_idle()
    assert await runtime.namespace(Post).delete("p")
    await post(runtime).send_one("b", 3)
    await runtime.crash()
    await asyncio.sleep(0.05)
    await runtime.run_until_idle()
    assert Box.runs == {("begun", 1): 2}
    Box.gates["b"].set()
    assert await values(runtime) == [1, 2, 3]
    await runtime.advance(hours=1)
    assert await values(runtime) == [1, 2, 3, 9]


async def test_the_last_number_is_dropped_ten_minutes_after_the_source_has_said_that_nothing_is_left(
    runtime: LocalRuntime,
) -> None:
    await post(runtime).send_one("b", 1)
    await until_delivered(runtime)
    await runtime.advance(ms=2 * FORGET_MS - 1)
    assert len(received(runtime)) == 1
    await runtime.advance(ms=1)
    assert received(runtime) == []
    assert store_of(runtime, box(runtime)).scan("timers") == []


async def test_the_last_number_stays_when_another_message_was_applied_meanwhile(runtime: LocalRuntime) -> None:
    await post(runtime).send_one("b", 1)
    await until_delivered(runtime)
    await runtime.advance(ms=FORGET_MS + 1_000)
    await post(runtime).send_one("b", 2)
    await until_delivered(runtime)
    await runtime.advance(ms=FORGET_MS)
    assert [row[2] for row in received(runtime)] == [2]
    await runtime.advance(ms=2 * FORGET_MS)
    assert received(runtime) == []


async def test_the_last_number_stays_while_the_source_has_something_left_for_the_pair(runtime: LocalRuntime) -> None:
    await post(runtime).send_one("b", 1)
    await until_delivered(runtime)
    Box.failing["bad"] = -1
    await post(runtime).send_one("b", "bad", retry=RetryPolicy(1_000_000, 60_000, 1.0, 60_000, 0.0))
    await runtime.advance(ms=4 * FORGET_MS)
    assert [row[2] for row in received(runtime)] == [1]


async def test_the_last_number_stays_while_the_source_does_not_answer() -> None:
    async with LocalRuntime(memory=True, partitions=2) as runtime:
        sender, receiver = post(runtime, key_in("Post", 0, 2)), box(runtime, key_in("Box", 1, 2))
        await sender.send_one(receiver.key, 1)
        await until_delivered(runtime)
        away = runtime.partitions[0]
        assert away is not None
        runtime.partitions[0] = None
        await away.abandon()
        await runtime.advance(ms=4 * FORGET_MS)
        rows = runtime.partitions[1].store.scan("received")  # type: ignore[union-attr]
        assert len(rows) == 1
        await runtime._open(0)


async def test_a_message_after_a_long_silence_is_applied_and_remembered_anew(runtime: LocalRuntime) -> None:
    for value in range(3):
        await post(runtime).send_one("b", value)
        await until_delivered(runtime)
        assert [row[2] for row in received(runtime)] == [value + 1]
        await runtime.advance(ms=2 * FORGET_MS)
        assert received(runtime) == []
    assert await values(runtime) == [0, 1, 2]


# --- delayed ------------------------------------------------------------------------------------------


async def test_a_delayed_message_is_never_early_and_comes_at_its_instant(runtime: LocalRuntime) -> None:
    await post(runtime).send_after("b", "after", "5m")
    await post(runtime).send_at("b", "at", runtime.clock.wall_ms() + 10 * MINUTE_MS)
    await runtime.advance(ms=5 * MINUTE_MS - 1)
    assert Box.runs == {}
    await runtime.advance(ms=1)
    assert await values(runtime) == ["after"]
    await runtime.advance(minutes=5)
    assert await values(runtime) == ["after", "at"]


async def test_a_time_in_the_past_means_at_once_and_in_order(runtime: LocalRuntime) -> None:
    await post(runtime).send_one("b", 1)
    await post(runtime).send_at("b", 2, 1)
    await post(runtime).send_one("b", 3)
    assert await values(runtime) == [1, 2, 3]


async def test_a_delayed_message_gets_its_place_when_it_comes_due(runtime: LocalRuntime) -> None:
    await post(runtime).send_after("b", "later", "2m")
    await post(runtime).send_after("b", "sooner", "1m")
    await post(runtime).send_one("b", "now")
    await runtime.advance(minutes=1.5)
    await post(runtime).send_one("b", "between")
    await runtime.advance(minutes=1)
    assert await values(runtime) == ["now", "sooner", "between", "later"]


async def test_delayed_messages_survive_crashes_and_those_due_in_downtime_come_at_once_in_order(
    runtime: LocalRuntime,
) -> None:
    for number in range(20):
        await post(runtime).send_after("b", number, f"{number + 1}m")
    for number in range(2):
        away = runtime.partitions[number]
        assert away is not None
        runtime.partitions[number] = None
        await away.abandon()
    runtime.clock.move_to(runtime.clock.wall_ms() + 30 * MINUTE_MS)  # type: ignore[attr-defined]
    for number in range(2):
        await runtime._open(number)
    assert await values(runtime) == list(range(20))


async def test_due_messages_of_a_sender_that_sends_all_the_time_keep_the_order_of_their_numbers(
    runtime: LocalRuntime,
) -> None:
    """The engine draws the number of a due message while turns of its sender draw theirs."""
    loose = runtime.namespace(LoosePost).get("p")
    for number in range(10):
        await loose.send_after("b", f"due {number}", f"{number + 1}ms")
    sending = asyncio.ensure_future(loose.send_around_waits("b", list(range(500))))
    for _ in range(20):
        await runtime.advance(ms=1)
    await sending
    found = await values(runtime)
    assert [value for value in found if isinstance(value, int)] == list(range(500))
    assert [value for value in found if isinstance(value, str)] == [f"due {number}" for number in range(10)]


async def test_a_due_message_whose_number_was_overtaken_is_tried_again(runtime: LocalRuntime) -> None:
    """A draw that others overtake before its batch is handed over gives its number up."""
    partition = runtime._partition_of(post(runtime))
    numbers, slot = partition.numbers, post(runtime).id.slot
    draw = numbers.draw
    overtaken: list[int] = []

    def overtake(drawn_slot: int) -> int:
        number = draw(drawn_slot)
        if not overtaken:
            overtaken.append(numbers.take(slot))
        return number

    numbers.draw = overtake  # type: ignore[method-assign]
    await post(runtime).send_after("b", "late", "1m")
    await runtime.advance(minutes=2)
    assert await values(runtime) == ["late"]
    assert overtaken != []
    assert received(runtime)[0][2] > overtaken[0]


# --- dead letters -------------------------------------------------------------------------------------


async def _dead(runtime: LocalRuntime, value: Any = "bad") -> DeadLetter:
    Box.failing[value] = -1
    await post(runtime).send_one("b", value, retry=RetryPolicy(max_attempts=1))
    await until_delivered(runtime)
    (letter,) = await runtime.dead_letters()
    return letter


async def test_a_dead_letter_that_is_run_again_is_a_new_message_at_the_end_of_the_order(
    runtime: LocalRuntime,
) -> None:
    letter = await _dead(runtime)
    await post(runtime).send_one("b", "next")
    await until_delivered(runtime)
    Box.failing.clear()
    assert await runtime.redrive(letter)
    assert await values(runtime) == ["next", "bad"]
    assert await runtime.dead_letters() == []
    assert not await runtime.redrive(letter)


async def test_a_dead_letter_that_fails_again_is_a_dead_letter_again(runtime: LocalRuntime) -> None:
    letter = await _dead(runtime)
    assert await runtime.redrive(letter)
    await until_delivered(runtime)
    (again,) = await runtime.dead_letters()
    assert again.id != letter.id
    assert (again.name, again.attempts) == (letter.name, 1)


async def test_a_dead_letter_of_a_sender_that_is_gone_can_be_run_again_and_does_not_bring_it_back(
    runtime: LocalRuntime,
) -> None:
    letter = await _dead(runtime)
    assert await runtime.namespace(Post).delete("p")
    Box.failing.clear()
    assert await runtime.redrive(letter)
    assert await values(runtime) == ["bad"]
    assert await runtime.namespace(Post).list() == []


async def test_a_dead_letter_can_be_discarded(runtime: LocalRuntime) -> None:
    letter = await _dead(runtime)
    assert await runtime.discard(letter)
    assert await runtime.dead_letters() == []
    assert await values(runtime) == []


async def test_a_dead_letter_that_is_run_again_twice_at_once_is_sent_once(runtime: LocalRuntime) -> None:
    letter = await _dead(runtime)
    Box.failing.clear()
    assert await asyncio.gather(runtime.redrive(letter), runtime.redrive(letter)) == [True, True]
    await until_delivered(runtime)
    assert await values(runtime) == ["bad"]


async def test_a_dead_letter_that_is_discarded_while_it_is_run_again_is_run_and_says_so(runtime: LocalRuntime) -> None:
    letter = await _dead(runtime)
    Box.failing.clear()
    assert await asyncio.gather(runtime.redrive(letter), runtime.discard(letter)) == [True, False]
    await until_delivered(runtime)
    assert await values(runtime) == ["bad"]


async def test_a_redrive_while_the_sender_is_in_a_turn_keeps_the_order_of_numbers(runtime: LocalRuntime) -> None:
    letter = await _dead(runtime)
    Box.failing.clear()
    loose = runtime.namespace(LoosePost).get("other")
    sending = asyncio.ensure_future(loose.send_around_waits("b", list(range(50))))
    assert await runtime.redrive(letter)
    await sending
    found = await values(runtime)
    assert sorted(map(str, found)) == sorted(map(str, ["bad", *range(50)]))


# --- what ends its process ----------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [True, False], ids=["from another partition", "from its own partition"])
async def test_a_message_that_ends_its_process_three_times_alone_is_a_dead_letter_of_its_sender(
    elsewhere: bool,
) -> None:
    async with LocalRuntime(partitions=2) as runtime:
        sender, receiver = key_in("Post", 0 if elsewhere else 1, 2), key_in("Box", 1, 2)
        beside = key_in("Box", 1, 2, "beside")
        Box.gates[receiver] = asyncio.Event()
        await post(runtime, sender).send_one(receiver, "poison", "put_at_gate")
        await post(runtime, sender).send_one(receiver, "next")
        await post(runtime, sender).send_one(beside, "innocent")
        deaths = 0
        while not (letters := await runtime.dead_letters()) and deaths < 10:
            for _ in range(200):
                if Box.runs["begun", "poison"]:
                    break
                await asyncio.sleep(0.002)
                await runtime.advance(ms=50)
            if not Box.runs["begun", "poison"]:
                continue
            Box.runs.clear()
            deaths += 1
            await runtime.crash(1)
            await asyncio.sleep(0.03)
            await runtime.run_until_idle()
        (letter,) = letters
        assert (letter.key, letter.name, letter.crashes) == (sender, f"Box/{receiver}.put_at_gate", 3)
        assert "PoisonCall" in letter.error
        assert 4 <= deaths <= 6
        assert await values(runtime, receiver) == ["next"]
        assert await values(runtime, beside) == ["innocent"]


# --- bounds -------------------------------------------------------------------------------------------


async def test_with_room_for_few_pairs_in_memory_everything_is_delivered_in_order() -> None:
    settings = Settings(durability="off", max_outbox_pairs=2, max_messages_in_flight=3, message_page=2)
    async with LocalRuntime(memory=True, partitions=2, settings=settings) as runtime:
        boxes = [f"b{number}" for number in range(12)]
        senders = [post(runtime, f"p{number}") for number in range(3)]
        await asyncio.gather(*(sender.send_many(boxes, [f"{sender.key} {n}" for n in range(8)]) for sender in senders))
        for status in runtime.status():
            assert status["outbox_pairs"] <= 2
            assert status["outbox_in_flight"] <= 6  # three to each of two partitions
        for key in boxes:
            found = await values(runtime, key)
            for sender in senders:
                mine = [value for value in found if value.startswith(f"{sender.key} ")]
                assert mine == [f"{sender.key} {n}" for n in range(8)]


async def test_a_long_queue_of_a_pair_is_not_kept_in_memory_and_is_delivered_in_order() -> None:
    async with LocalRuntime(memory=True, settings=Settings(durability="off")) as runtime:
        Box.gates["b"] = asyncio.Event()
        await post(runtime).send_one("b", "gate", "put_at_gate")
        for first in range(0, 3_000, 500):
            await post(runtime).send_many(["b"], list(range(first, first + 500)), "note")
        await post(runtime).send_one("b2", "another pair")
        await runtime.run_until_idle()
        assert await box(runtime, "b2").values() == ["another pair"]
        await runtime.crash()
        await post(runtime).send_many(["b"], [3_000], "note")
        Box.gates["b"].set()
        await until_delivered(runtime)
        assert await box(runtime).values() == ["gate"]
        assert Box.noted == list(range(3_001))


# --- what is shown ------------------------------------------------------------------------------------


async def test_status_counts_what_is_on_its_way_and_tells_the_age_of_the_oldest(runtime: LocalRuntime) -> None:
    Box.gates["b"] = asyncio.Event()
    await post(runtime).send_many(["b"], [1, 2], "put_at_gate")
    await runtime.advance(minutes=1)
    await post(runtime).send_many(["b"], [3], "put_at_gate")
    (status,) = [status for status in runtime.status() if status["outbox"]]
    assert (status["outbox"], status["outbox_pairs"], status["outbox_oldest_age_ms"]) == (3, 1, MINUTE_MS)
    await runtime.crash()
    assert sum(status["outbox"] for status in runtime.status()) == 3
    Box.gates["b"].set()
    await until_delivered(runtime)
    assert [status["outbox_oldest_age_ms"] for status in runtime.status()] == [None, None]


async def test_run_until_idle_waits_for_messages_and_for_what_they_send(runtime: LocalRuntime) -> None:
    await post(runtime).send_with("b", "send_back", "p", "there and back")
    await runtime.run_until_idle()
    assert await post(runtime).values() == ["there and back"]


async def test_a_runtime_that_stops_keeps_its_messages(tmp_path: Any) -> None:
    async with LocalRuntime(data_dir=tmp_path) as first:
        Box.failing["x"] = 1
        await post(first).send_many(["b"], ["x", "y"])
    async with LocalRuntime(data_dir=tmp_path) as second:
        second.namespace(Post)
        second.namespace(Box)
        assert await values(second) == ["x", "y"]


# --- moves --------------------------------------------------------------------------------------------


async def test_messages_numbers_and_what_was_received_move_with_their_slots() -> None:
    async with LocalRuntime(memory=True, partitions=2) as runtime:
        senders = [post(runtime, f"p{number}") for number in range(6)]
        boxes = [f"b{number}" for number in range(6)]
        for sender in senders:
            await sender.send_many(boxes, [f"{sender.key} first"])
            await sender.send_after("b0", f"{sender.key} delayed", "10m")
        Box.failing["bad"] = 3
        await senders[0].send_one("b1", "bad", retry=RetryPolicy(10, 60_000, 1.0, 60_000, 0.0))
        await runtime.run_until_idle()
        for partitions in (4, 1, 3):
            await runtime.scale(partitions)
            for sender in senders:
                await sender.send_many(boxes, [f"{sender.key} at {partitions}"])
        await runtime.advance(minutes=11)
        await until_delivered(runtime)
        for key in boxes:
            found = await values(runtime, key)
            for sender in senders:
                mine = [value for value in found if value.startswith(f"{sender.key} ")]
                expected = [f"{sender.key} {what}" for what in ("first", "at 4", "at 1", "at 3")]
                assert mine == [*expected, *([f"{sender.key} delayed"] if key == "b0" else [])]
        assert Box.runs["bad"] == 4
        assert sum(status["outbox"] for status in runtime.status()) == 0
        await runtime.advance(ms=3 * FORGET_MS)
        assert received(runtime) == []
        assert [row for each in runtime.partitions if each for row in each.store.scan("timers")] == []


async def test_messages_are_applied_once_and_in_order_while_slots_move_under_them() -> None:
    async with LocalRuntime(memory=True, partitions=2) as runtime:
        senders = [post(runtime, f"p{number}") for number in range(8)]
        boxes = [f"b{number}" for number in range(5)]
        going = True
        sent = 0

        async def send() -> None:
            nonlocal sent
            while going:
                sent += 1
                this = sent
                await asyncio.gather(*(sender.send_many(boxes, [f"{sender.key} {this:06d}"]) for sender in senders))

        sending = asyncio.ensure_future(send())
        for partitions in (4, 3, 1, 2):
            await runtime.scale(partitions)
        going = False
        await sending
        await until_delivered(runtime)
        for key in boxes:
            found = await values(runtime, key)
            for sender in senders:
                mine = [value for value in found if value.startswith(f"{sender.key} ")]
                assert mine == [f"{sender.key} {number:06d}" for number in range(1, sent + 1)]
        assert await runtime.dead_letters() == []
        await runtime.advance(minutes=11)  # outcomes of the calls from outside, moved to where nobody acknowledges them
        await until_forgotten(runtime)


async def test_dead_letters_and_counts_of_messages_follow_their_slot() -> None:
    async with LocalRuntime(memory=True, partitions=1) as runtime:
        letter = await _dead(runtime)
        Box.gates["held"] = asyncio.Event()
        await post(runtime).send_many(["held"], [1, 2, 3], "put_at_gate")
        await runtime.advance(ms=1)
        Box.gates["held"].set()
        await runtime.scale(3)
        (moved,) = await runtime.dead_letters()
        assert (moved.name, moved.key) == (letter.name, letter.key)
        Box.failing.clear()
        assert await runtime.redrive(moved)
        assert await values(runtime) == ["bad"]
        assert await values(runtime, "held") == [1, 2, 3]
        assert [status["outbox"] for status in runtime.status()] == [0, 0, 0]
