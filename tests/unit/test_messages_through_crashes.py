"""Messages are applied once and in order whichever commit a crash is at, and when commits fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors import testing
from actors.errors import CommitFailed
from actors.testing import LocalRuntime
from tests.support.crash_points import (
    CommitControl,
    crash_when_stopped,
    finish,
    key_in,
    runtime_with,
    until_forgotten,
)
from tests.support.mail import Box, Leaf, Post, until_delivered
from timers.backoff import RetryPolicy

PARTITIONS = 3
SENDER, RECEIVER, LEAF = (key_in(name, place, PARTITIONS) for place, name in enumerate(("Post", "Box", "Leaf")))
OTHER = key_in("Box", 0, PARTITIONS)  # lives where the sender lives
VALUES = ["a", "b", "bad", "c"]
#: As few virtual seconds as the retries of a message may take: clients reconnect in real time meanwhile.
RETRY = RetryPolicy(max_attempts=6, base_ms=100, factor=1.0, cap_ms=100)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing, "_PATIENCE_S", 0.0)
    for shared_by_tests in (Box.runs, Box.failing, Box.gates):
        shared_by_tests.clear()  # type: ignore[attr-defined]


@asynccontextmanager
async def started(control: CommitControl) -> AsyncIterator[LocalRuntime]:
    async with runtime_with(control, partitions=PARTITIONS) as runtime:
        for cls in (Post, Box, Leaf):
            runtime.namespace(cls)
        yield runtime


async def exchange(runtime: LocalRuntime) -> None:
    """Messages of every kind: to two partitions, retried, buried, delayed, with calls in the receiver's turn."""
    post = runtime.namespace(Post).get(SENDER)
    await finish(runtime, post.send_many([RECEIVER, OTHER], VALUES, "put", RETRY))
    await finish(runtime, post.send_with(RECEIVER, "put_and_call", "called", LEAF))
    await finish(runtime, post.send_with(RECEIVER, "send_back", SENDER, "back"))
    await finish(runtime, post.send_after(OTHER, "later", "5s"))
    await until_delivered(runtime)
    for _ in range(20):
        if "later" in await finish(runtime, runtime.namespace(Box).get(OTHER).values()):
            break
        await runtime.advance(seconds=1)
        await until_delivered(runtime)


async def check(runtime: LocalRuntime, where: str) -> None:
    box, post = runtime.namespace(Box), runtime.namespace(Post).get(SENDER)
    sent = [value for value in VALUES if Box.failing.get(value, 0) >= 0]
    assert await finish(runtime, box.get(RECEIVER).values()) == [*sent, "called", "back"], where
    assert await finish(runtime, box.get(OTHER).values()) == [*sent, "later"], where
    assert await finish(runtime, post.values()) == ["back"], where
    assert await finish(runtime, runtime.namespace(Leaf).get(LEAF).total()) == 1, where
    letters = await finish(runtime, runtime.dead_letters())
    assert len(letters) == 2 * (len(VALUES) - len(sent)), where
    assert {letter.attempts for letter in letters} <= {RETRY.max_attempts}, where


@pytest.mark.parametrize(
    "fails",
    [pytest.param(0, marks=pytest.mark.soak), 2, -1],
    ids=["nothing raises", "one is retried", "one is buried"],
)
@pytest.mark.parametrize("applied", [True, False], ids=["after the commit", "before the commit"])
async def test_messages_are_applied_once_and_in_order_whichever_commit_the_crash_is_at(
    applied: bool, fails: int
) -> None:
    number = 1
    while True:
        Box.failing["bad"] = 2 * fails if fails > 0 else fails
        if not fails:
            Box.failing.clear()
        control = CommitControl(number, applied=applied)
        async with started(control) as runtime:
            async with crash_when_stopped(runtime, control, all_partitions=number % 2 == 0):
                await exchange(runtime)
                await check(runtime, f"crash at commit {number}")
            await until_forgotten(runtime)
        if not control.stopped:
            break
        number += 1
    assert number > 15  # so many crash points were tried


@pytest.mark.parametrize("victim", range(PARTITIONS))
async def test_messages_are_applied_once_when_one_partition_dies_at_any_commit_of_any(victim: int) -> None:
    for number in range(1, 30, 2):
        control = CommitControl()
        async with started(control) as runtime:
            exchanging = asyncio.ensure_future(exchange(runtime))
            begun = asyncio.ensure_future(control.begun(number))
            await asyncio.wait([begun, exchanging], return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            await runtime.crash(victim)
            await exchanging
            await check(runtime, f"partition {victim} crashed at commit {number}")


async def test_messages_are_applied_once_when_any_one_commit_fails() -> None:
    number = 1
    while True:
        control = CommitControl()
        control.fail_at(number)
        async with started(control) as runtime:
            post = runtime.namespace(Post).get(SENDER)
            sent: list[Any] = []
            for value in range(6):
                try:
                    await finish(runtime, post.send_one(RECEIVER, value))
                    sent.append(value)
                except CommitFailed:
                    pass
            await until_delivered(runtime)
            assert await runtime.namespace(Box).get(RECEIVER).values() == sent, f"commit {number} failed"
            await until_forgotten(runtime)
            if control.commits < number:
                break
        number += 1
    assert number > 8
