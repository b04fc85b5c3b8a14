"""kill -9 of senders' and receivers' partitions in the middle of messages: each is applied once, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from actors.address import slot_of
from actors.namespace import Stub
from actors.runtime import Runtime
from tests.cluster.message_apps import Inbox, Sender
from tests.support.killing import kill_9, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]

SENDERS = 5
TURNS = 10
PER_TURN = 10


@pytest.fixture(scope="module")
def runtime(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with Runtime.start(tmp_path_factory.mktemp("messages"), 2, name="messages") as started:
        yield started


def key_at(runtime: Runtime, cls: type[Any], partition: int, prefix: str) -> str:
    """A key of the class that lives in this partition."""
    numbered = (f"{prefix}-{number}" for number in range(10_000))
    return next(key for key in numbered if runtime._directory.partition_of(slot_of(cls.type_name, key)) == partition)


def kill_partition(runtime: Runtime, partition: int) -> None:
    pid = wait_for(lambda: runtime.partition_pids().get(partition, 0), f"partition {partition}")
    kill_9(pid)


def senders_at(runtime: Runtime, partition: int, prefix: str) -> list[Stub]:
    namespace = runtime.namespace(Sender)
    return [namespace.get(key_at(runtime, Sender, partition, f"{prefix} {number}")) for number in range(SENDERS)]


def send_all(runtime: Runtime, senders: list[Stub], to: list[str], method: str) -> asyncio.Future[Any]:
    """Begin `TURNS` sending turns of each sender."""

    async def begin() -> list[asyncio.Future[Any]]:
        calls = [sender.run(to, PER_TURN, method) for _ in range(TURNS) for sender in senders]
        return [asyncio.ensure_future(asyncio.gather(*calls))]  # in a list: the future itself is not awaited

    (future,) = runtime.run_sync(begin)
    return future


def wait_sent(runtime: Runtime, sending: asyncio.Future[Any]) -> None:
    async def wait() -> None:
        await sending

    runtime.run_sync(wait)


@pytest.mark.parametrize("method", [pytest.param("take", marks=pytest.mark.soak), "take_if_lucky"])
@pytest.mark.parametrize(
    "killed",
    [[0, 0], [1, 1], [0, 1], pytest.param([1, 0], marks=pytest.mark.soak)],
    ids=["source", "target", "both", "both, reversed"],
)
def test_each_of_1000_messages_is_applied_once_and_in_order_whatever_is_killed_in_the_middle(
    runtime: Runtime, killed: list[int], method: str
) -> None:
    """The senders live in partition 0, the receivers in partitions 0 and 1."""
    name = f"{method} {killed}"
    senders = senders_at(runtime, 0, name)
    inboxes = [runtime.namespace(Inbox).get(key_at(runtime, Inbox, number, name)) for number in (1, 0)]
    expected = SENDERS * TURNS * PER_TURN
    sending = send_all(runtime, senders, [inbox.key for inbox in inboxes], method)
    for number, partition in enumerate(killed, start=1):
        wait_for(lambda least=expected * number // 5: inboxes[0].count.sync() >= least, "messages to be on their way")
        kill_partition(runtime, partition)
    wait_sent(runtime, sending)
    for inbox in inboxes:
        wait_for(lambda inbox=inbox: inbox.count.sync() >= expected, "all messages")
        found = inbox.messages.sync()
        assert len(found) == expected
        for sender in senders:
            mine = [number for key, number in found if key == sender.key]
            assert mine == list(range(TURNS * PER_TURN))
    assert runtime.run_sync(runtime.dead_letters) == []


@pytest.mark.parametrize(
    "source",
    [0, pytest.param(1, marks=pytest.mark.soak)],
    ids=["from another partition", "from its own partition"],
)
def test_a_message_that_kills_its_process_becomes_a_dead_letter_of_its_sender_and_the_next_one_is_applied(
    runtime: Runtime, source: int
) -> None:
    sender = runtime.namespace(Sender).get(key_at(runtime, Sender, source, f"poisoner {source}"))
    inbox = runtime.namespace(Inbox).get(key_at(runtime, Inbox, 1, f"poisoned {source}"))
    sender.send_poison.sync(inbox.key)
    (letter,) = wait_for(lambda: runtime.run_sync(runtime.dead_letters), "the dead letter")
    assert (letter.key, letter.name, letter.crashes) == (sender.key, f"Inbox/{inbox.key}.poison", 3)
    assert "PoisonCall" in letter.error
    wait_for(inbox.count.sync, "the message after it")
    assert inbox.messages.sync() == [(sender.key, 0)]
    assert not inbox.poisoned.sync()
    assert runtime.run_sync(lambda: runtime.discard(letter))
