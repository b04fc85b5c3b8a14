"""Random senders, receivers, failures and crashes: each message is applied once, in order for each pair."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from actors import testing
from actors.errors import MainspringError
from actors.settings import Settings
from actors.testing import LocalRuntime
from tests.support.crash_points import CommitControl, runtime_with
from tests.support.mail import Box, Leaf, LoosePost, Post, until_delivered

PARTITIONS = 2
SENDERS = 3
RECEIVERS = 3
STEPS = 14


async def play(seed: int) -> None:
    """One schedule; the seed decides everything that the schedule can decide."""
    chance = random.Random(seed)
    control = CommitControl()
    small = Settings(
        durability="off",
        ack_delay_ms=1,
        max_outbox_pairs=chance.choice([2, 100]),
        message_page=chance.choice([1, 3, 32]),
        max_messages_in_flight=chance.choice([2, 100]),
    )
    async with runtime_with(control, partitions=PARTITIONS, settings=small) as runtime:
        post_class = chance.choice([Post, LoosePost])
        for cls in (Post, LoosePost, Box, Leaf):
            runtime.namespace(cls)
        sent: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        calls: list[tuple[asyncio.Future[Any], tuple[str, str], list[str]]] = []
        for step in range(STEPS):
            action = chance.choices(["send", "crash", "fail", "time", "idle"], [6, 2, 1, 2, 1])[0]
            if action == "send":
                sender, receiver = f"p{chance.randrange(SENDERS)}", f"b{chance.randrange(RECEIVERS)}"
                values = [f"{sender} {step} {number}" for number in range(chance.choice([1, 2, 10]))]
                for value in values:
                    if chance.random() < 0.1:
                        Box.failing[value] = chance.choice([1, 2])
                method = chance.choice(["put", "put_slowly", "put_and_wait"])
                call = runtime.namespace(post_class).get(sender).send_many([receiver], values, method)
                calls.append((asyncio.ensure_future(call), (sender, receiver), values))
            elif action == "crash":
                await runtime.crash(chance.choice([None, *range(PARTITIONS)]))
            elif action == "fail":
                control.fail_next()
            elif action == "time":
                await runtime.advance(ms=chance.choice([1, 100, 5_000]))
            else:
                await runtime.run_until_idle()
            for _ in range(chance.randrange(8)):
                await asyncio.sleep(0)
        control.calm()
        await ended(runtime, calls, sent)
        await until_delivered(runtime)
        await judge(runtime, sent)


async def ended(runtime: LocalRuntime, calls: list[Any], sent: dict[tuple[str, str], list[str]]) -> None:
    """Wait for the sending turns; what they sent counts when they succeeded."""
    for call, pair, values in calls:
        for _ in range(200):
            await asyncio.wait([call], timeout=0.02)
            if call.done():
                break
            await runtime.advance(seconds=1)
        try:
            await call
        except MainspringError:
            continue  # rolled back: nothing of it may be applied
        sent[pair] += values


async def judge(runtime: LocalRuntime, sent: dict[tuple[str, str], list[str]]) -> None:
    for number in range(RECEIVERS):
        receiver = f"b{number}"
        found = await runtime.namespace(Box).get(receiver).values()
        for each in range(SENDERS):
            sender = f"p{each}"
            mine = [value for value in found if value.startswith(f"{sender} ")]
            assert sorted(mine) == sorted(sent[sender, receiver])
            by_turn: defaultdict[str, list[int]] = defaultdict(list)
            for value in mine:
                _, step, place = value.split()
                by_turn[step].append(int(place))
            assert all(places == sorted(places) for places in by_turn.values()), mine
    assert await runtime.dead_letters() == []


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_each_message_is_applied_once_and_in_order_whatever_fails_and_whatever_crashes(seed: int) -> None:
    patience = testing._PATIENCE_S
    testing._PATIENCE_S = 0.0
    for shared_by_tests in (Box.runs, Box.failing, Box.gates):
        shared_by_tests.clear()  # type: ignore[attr-defined]
    try:
        asyncio.run(play(seed))
    finally:
        testing._PATIENCE_S = patience
