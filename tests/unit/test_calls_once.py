"""Calls happen once: the inbox, turn intents, what is forgotten and when, and every crash point of a tree of calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors.address import ClassRef
from actors.durable_object import DurableObject, class_info, shared
from actors.errors import CallDiverged, CommitFailed, ObjectReset, Rejected, ReplyLost
from actors.messages import outside_call_id
from actors.settings import Settings
from actors.testing import LocalRuntime
from tests.support.crash_points import (
    CommitControl,
    crash_when_stopped,
    finish,
    kept,
    key_in,
    runtime_with,
    until_forgotten,
)
from tests.support.peer import Peer, nested

PARTITIONS = 3
SECOND_MS = 1_000


class Refused(Rejected):
    """An application's own no."""


class Leaf(DurableObject):
    """The innermost object of a tree of calls."""

    def add(self, count: int) -> int:
        total: int = self.storage.get("n", 0) + count
        self.storage.put("n", total)
        return total

    def refuse(self) -> None:
        self.storage.put("n", 1_000)
        raise Refused("never")

    def large(self, size: int) -> bytes:
        self.storage.put("n", self.storage.get("n", 0) + 1)
        return b"x" * size

    def total(self) -> int:
        count: int = self.storage.get("n", 0)
        return count


class Branch(DurableObject):
    """Calls leaves one after the other, then together, and writes before and after."""

    async def add(self, leaves: list[str], count: int) -> list[int]:
        self._count("begun", count)
        namespace = self.namespace(Leaf)
        totals = [await namespace.get(key).add(count) for key in leaves]
        totals += await asyncio.gather(*(namespace.get(key).add(count) for key in leaves))
        self._count("ended", count)
        return totals

    async def add_patiently(self, leaves: list[str], count: int) -> int:
        for key in leaves:
            await self.namespace(Leaf).get(key).add(count)
        self._count("ended", count)
        return count

    async def add_and_raise(self, leaf: str) -> None:
        await self.namespace(Leaf).get(leaf).add(1)
        self._count("ended", 1)
        raise ValueError("after the call")

    async def add_by_background_call(self, leaf: str) -> str:
        self.namespace(Leaf).get(leaf).add(1)
        self._count("ended", 1)
        return "returned first"

    async def sync_then_add(self, leaf: str) -> int:
        self._count("begun", 1)
        await self.storage.sync()
        await self.namespace(Leaf).get(leaf).add(1)
        self._count("ended", 1)
        return self.turn.attempt

    async def add_from_timer(self, info: Any) -> None:
        self._count("begun", 1)
        for key in info.payload:
            await self.namespace(Leaf).get(key).add(info.missed + 1)
        self._count("ended", 1)

    def arm(self, leaves: list[str], after: str) -> None:
        self.timers.set("t", after=after, method="add_from_timer", payload=leaves)

    def arm_every(self, leaves: list[str], every: str) -> None:
        self.timers.set("t", every=every, method="add_from_timer", payload=leaves)

    def cancel(self) -> None:
        self.timers.cancel("t")

    def _count(self, name: str, count: int) -> None:
        self.storage.put(name, self.storage.get(name, 0) + count)

    def totals(self) -> tuple[int, int]:
        return self.storage.get("begun", 0), self.storage.get("ended", 0)


class Root(DurableObject):
    """The outermost object: a tree of three levels over all partitions."""

    async def run(self, branches: list[str], leaves: list[str]) -> int:
        self.storage.put("begun", self.storage.get("begun", 0) + 1)
        for key in branches:
            await self.namespace(Branch).get(key).add(leaves, 1)
        self.storage.put("ended", self.storage.get("ended", 0) + 1)
        return self.turn.attempt

    def totals(self) -> tuple[int, int]:
        return self.storage.get("begun", 0), self.storage.get("ended", 0)


LEAVES = [key_in("Leaf", partition, PARTITIONS) for partition in range(PARTITIONS)]
BRANCHES = [key_in("Branch", partition, PARTITIONS) for partition in range(1, PARTITIONS)]
ROOT = key_in("Root", 0, PARTITIONS)


def tree(control: CommitControl, *, memory: bool = True) -> LocalRuntime:
    return runtime_with(control, partitions=PARTITIONS, memory=memory)


async def leaf_totals(runtime: LocalRuntime) -> list[int]:
    return [await runtime.namespace(Leaf).get(key).total() for key in LEAVES]


async def branch_totals(runtime: LocalRuntime) -> list[tuple[int, int]]:
    return [await runtime.namespace(Branch).get(key).totals() for key in BRANCHES]


# --- every crash point of a tree of calls -----------------------------------------------------------


async def tree_with_a_crash_at(number: int, *, applied: bool, everything: bool, memory: bool) -> bool:
    """Run the tree with a crash at that commit; whether it was reached."""
    control = CommitControl(number, applied=applied)
    async with tree(control, memory=memory) as runtime:
        root = runtime.namespace(Root).get(ROOT)
        async with crash_when_stopped(runtime, control, all_partitions=everything):
            await finish(runtime, root.run(BRANCHES, LEAVES))
            where = f"crash at commit {number}"
            assert await root.totals() == (1, 1), where
            assert await branch_totals(runtime) == [(1, 1)] * len(BRANCHES), where
            assert await leaf_totals(runtime) == [2 * len(BRANCHES)] * PARTITIONS, where
        await until_forgotten(runtime)
        return control.stopped


@pytest.mark.parametrize("applied", [True, False], ids=["after_the_commit", "before_the_commit"])
@pytest.mark.parametrize("everything", [True, False], ids=["all_partitions", "the_committing_partition"])
@pytest.mark.parametrize("memory", [pytest.param(True, marks=pytest.mark.soak), False], ids=["memory", "sqlite"])
async def test_a_tree_of_calls_happens_once_whichever_commit_the_crash_is_at(
    applied: bool, everything: bool, memory: bool
) -> None:
    number = 1
    while await tree_with_a_crash_at(number, applied=applied, everything=everything, memory=memory):
        number += 1
    assert number > 20  # the tree takes that many commits, so that many crash points were tried


@pytest.mark.parametrize("victim", range(PARTITIONS))
async def test_a_tree_of_calls_happens_once_when_one_partition_dies_at_any_commit_of_any(victim: int) -> None:
    for number in range(1, 30):
        control = CommitControl()
        async with tree(control) as runtime:
            root = runtime.namespace(Root).get(ROOT)
            call = asyncio.ensure_future(root.run(BRANCHES, LEAVES))
            begun = asyncio.ensure_future(control.begun(number))
            await asyncio.wait([begun, call], return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
            await runtime.crash(victim)
            await finish(runtime, call)
            assert await root.totals() == (1, 1)
            assert await branch_totals(runtime) == [(1, 1)] * len(BRANCHES)
            assert await leaf_totals(runtime) == [2 * len(BRANCHES)] * PARTITIONS


async def test_a_tree_of_calls_happens_once_through_a_crash_at_every_fifth_commit() -> None:
    control = CommitControl()
    async with tree(control) as runtime:
        root = runtime.namespace(Root).get(ROOT)
        call = asyncio.ensure_future(root.run(BRANCHES, LEAVES))
        crashed_at = 0
        while not call.done():
            if control.commits - crashed_at >= 5:
                crashed_at = control.commits
                await runtime.crash()
            await asyncio.wait([call], timeout=0.001)
            await runtime.run_until_idle()
            if not call.done() and crashed_at > 100:
                break
        assert await finish(runtime, call) >= 1
        assert await root.totals() == (1, 1)
        assert await branch_totals(runtime) == [(1, 1)] * len(BRANCHES)
        assert await leaf_totals(runtime) == [2 * len(BRANCHES)] * PARTITIONS


@pytest.mark.parametrize("everything", [True, False], ids=["all_partitions", "the_committing_partition"])
@pytest.mark.parametrize("applied", [True, False], ids=["after_the_commit", "before_the_commit"])
async def test_calls_of_a_timer_happen_once_whichever_commit_the_crash_is_at(applied: bool, everything: bool) -> None:
    number = 1
    while True:
        control = CommitControl(number, applied=applied)
        async with tree(control) as runtime:
            branch = runtime.namespace(Branch).get(BRANCHES[0])
            async with crash_when_stopped(runtime, control, all_partitions=everything):
                await finish(runtime, branch.arm(LEAVES, "1m"))
                await runtime.advance(minutes=2)
                for _ in range(20):  # clients reconnect in real time
                    await asyncio.sleep(0.005)
                    await runtime.advance(seconds=5)
                    if (await branch.totals())[1]:
                        break
                assert await branch.totals() == (1, 1), f"crash at commit {number}"
                assert await leaf_totals(runtime) == [1] * PARTITIONS, f"crash at commit {number}"
                assert await runtime.dead_letters() == []
            await until_forgotten(runtime)
        if not control.stopped:
            break
        number += 1
    assert number > 5


async def test_many_trees_at_once_happen_once_each_whichever_commit_the_crash_is_at() -> None:
    roots = [key_in("Root", partition, PARTITIONS, prefix=f"r{each}-") for partition in range(3) for each in range(2)]
    for number in range(1, 40, 3):
        control = CommitControl(number)
        async with tree(control) as runtime:
            async with crash_when_stopped(runtime, control, all_partitions=number % 2 == 0):
                calls = [runtime.namespace(Root).get(key).run(BRANCHES, LEAVES) for key in roots]
                await finish(runtime, asyncio.gather(*calls))
                for key in roots:
                    assert await runtime.namespace(Root).get(key).totals() == (1, 1)
                assert await branch_totals(runtime) == [(len(roots),) * 2] * len(BRANCHES)
                assert await leaf_totals(runtime) == [len(roots) * 2 * len(BRANCHES)] * PARTITIONS
            await until_forgotten(runtime)


async def test_a_commit_that_fails_means_not_applied_at_every_commit_of_a_tree() -> None:
    number = 0
    while True:
        control = CommitControl()
        async with tree(control) as runtime:
            branch = runtime.namespace(Branch).get(BRANCHES[0])
            await branch.totals()
            before = control.commits
            control.fail_at(before + number + 1)
            try:
                await finish(runtime, branch.add_patiently(LEAVES, 1))
                done = 1
            except (CommitFailed, ObjectReset):
                done = 0
            reached = control.commits > before + number
            assert (await branch.totals())[1] == done
            # calls are made in order and the first that failed ended the turn
            totals = await leaf_totals(runtime)
            assert totals == sorted(totals, reverse=True)
            assert totals == [1] * PARTITIONS or not done
            assert set(totals) <= {0, 1}
        if (done and not reached) or number > 20:
            break
        number += 1


# --- repeats of calls from outside --------------------------------------------------------------


@pytest.fixture
async def runtime() -> AsyncIterator[LocalRuntime]:
    async with tree(CommitControl()) as running:
        yield running


async def test_a_repeat_after_a_crash_gets_the_recorded_reply_and_does_not_run_again() -> None:
    control = CommitControl()
    async with tree(control) as runtime:
        leaf = runtime.namespace(Leaf).get(LEAVES[0])
        await leaf.add(1)
        control.crash_at = control.commits + 1
        async with crash_when_stopped(runtime, control, all_partitions=True):
            assert await leaf.add(1) == 2
            assert await leaf.total() == 2
        assert control.stopped


async def test_a_call_whose_commit_did_not_happen_runs_on_the_old_state() -> None:
    control = CommitControl(applied=False)
    async with tree(control) as runtime:
        leaf = runtime.namespace(Leaf).get(LEAVES[0])
        await leaf.add(1)
        control.crash_at = control.commits + 1
        async with crash_when_stopped(runtime, control, all_partitions=True):
            assert await leaf.add(1) == 2
        assert control.stopped


class Slow(DurableObject):
    """Waits until the test lets it go on."""

    gates: dict[str, asyncio.Event] = {}
    runs = 0

    async def add(self) -> int:
        type(self).runs += 1
        await self.gates.setdefault(self.key, asyncio.Event()).wait()
        self.storage.put("n", self.storage.get("n", 0) + 1)
        value: int = self.storage.get("n")
        return value

    @shared
    def peek(self) -> int:
        value: int = self.storage.get("n", 0)
        return value


async def test_a_repeat_joins_the_original_while_it_runs(runtime: LocalRuntime) -> None:
    Slow.runs, Slow.gates = 0, {"s": asyncio.Event()}
    peer = Peer(runtime, Slow, "s")
    await peer.call(1, "add", [])
    await peer.call(1, "add", [], flags=1)
    assert peer.replies == []
    Slow.gates["s"].set()
    assert await peer.result() == 1
    await peer.received(2)
    assert Slow.runs == 1


async def test_a_repeat_joins_the_original_while_it_waits_in_the_queue(runtime: LocalRuntime) -> None:
    Slow.runs, Slow.gates = 0, {"s": asyncio.Event()}
    peer = Peer(runtime, Slow, "s")
    await peer.call(1, "add", [])
    await peer.call(2, "add", [])
    await peer.call(2, "add", [], flags=1)
    Slow.gates["s"].set()
    await peer.received(3)
    assert [seq for seq, _, _ in peer.replies] == [1, 2, 2]
    assert await runtime.namespace(Slow).get("s").peek() == 2


async def test_a_repeat_joins_the_original_while_its_commit_is_on_the_way() -> None:
    control = CommitControl()
    async with runtime_with(control) as runtime:
        peer = Peer(runtime, Leaf, "a")
        with control.hold():
            await peer.call(1, "add", [1])
            for _ in range(5):
                await asyncio.sleep(0)
            await peer.call(1, "add", [1], flags=1)
            assert peer.replies == []  # nothing leaves before it is durable
        assert await peer.result() == 1
        await runtime.run_until_idle()
        assert len(peer.replies) == 2
        assert await runtime.namespace(Leaf).get("a").total() == 1


async def test_other_arguments_under_one_id_raise_call_diverged_and_run_nothing(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Leaf, LEAVES[0])
    await peer.call(1, "add", [1])
    assert await peer.result() == 1
    await peer.call(1, "add", [2], flags=1)
    with pytest.raises(CallDiverged):
        await peer.result()
    assert await runtime.namespace(Leaf).get(LEAVES[0]).total() == 1


async def test_another_method_under_one_id_raises_call_diverged(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Leaf, LEAVES[0])
    await peer.call(1, "add", [1])
    await peer.result()
    await peer.call(1, "large", [1], flags=1)
    with pytest.raises(CallDiverged):
        await peer.result()


async def test_other_arguments_diverge_from_a_call_that_still_runs(runtime: LocalRuntime) -> None:
    Slow.gates = {"s": asyncio.Event()}
    peer = Peer(runtime, Slow, "s")
    await peer.call(1, "add", [])
    await peer.call(1, "add", [5], flags=1)
    with pytest.raises(CallDiverged):
        await peer.result()
    Slow.gates["s"].set()
    await peer.received(2)


async def test_a_reply_too_large_to_keep_is_marked_and_a_repeat_raises_reply_lost(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Leaf, LEAVES[0])
    size = runtime.settings.max_reply_memory_bytes + 1
    await peer.call(1, "large", [size])
    assert len(await peer.result()) == size
    await peer.call(1, "large", [size], flags=1)
    with pytest.raises(ReplyLost, match="ran and is durable"):
        await peer.result()
    assert await runtime.namespace(Leaf).get(LEAVES[0]).total() == 1


async def test_large_replies_to_nested_calls_are_kept() -> None:
    control = CommitControl()
    async with tree(control) as runtime:
        peer = Peer(runtime, Leaf, LEAVES[0])
        extra = nested("1")
        size = 1_000_000
        await peer.call(1, "large", [size], extra=extra)
        assert len(await peer.result()) == size
        await runtime.crash()
        again = Peer(runtime, Leaf, LEAVES[0])
        await again.call(1, "large", [size], flags=1, extra=extra)
        assert len(await again.result()) == size
        assert await runtime.namespace(Leaf).get(LEAVES[0]).total() == 1


async def test_an_exception_after_writes_is_not_recorded_and_a_repeat_runs_again(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Leaf, LEAVES[0])
    await peer.call(1, "refuse", [])
    with pytest.raises(Refused):
        await peer.result()
    assert kept(runtime) == 0
    assert await runtime.namespace(Leaf).get(LEAVES[0]).total() == 0


async def test_an_exception_after_an_outgoing_call_is_recorded_and_the_call_is_not_made_again() -> None:
    control = CommitControl()
    async with tree(control) as runtime:
        peer = Peer(runtime, Branch, BRANCHES[0])
        await peer.call(1, "add_and_raise", [LEAVES[2]])
        for _ in range(100):
            await asyncio.sleep(0)
        with pytest.raises(ValueError, match="after the call"):
            await peer.result()
        await runtime.crash()
        again = Peer(runtime, Branch, BRANCHES[0])
        await again.call(1, "add_and_raise", [LEAVES[2]], flags=1)
        with pytest.raises(ValueError, match="after the call"):
            await again.result()
        assert await branch_totals(runtime) == [(0, 0)] * 2
        assert await leaf_totals(runtime) == [0, 0, 1]


async def test_a_released_id_that_arrives_late_is_dropped_without_running(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Leaf, LEAVES[0])
    await peer.call(1, "add", [1])
    await peer.result()
    await peer.acknowledge(1, 1)
    await peer.call(1, "add", [1], flags=1)
    await runtime.run_until_idle()
    assert len(peer.replies) == 1
    assert await runtime.namespace(Leaf).get(LEAVES[0]).total() == 1


async def test_a_released_nested_id_is_dropped_for_a_minute(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Leaf, LEAVES[0])
    extra = nested("2")
    await peer.call(1, "add", [1], extra=extra)
    await peer.result()
    await peer.release(extra[0] or b"")
    await runtime.advance(seconds=50)
    await peer.call(1, "add", [1], flags=1, extra=extra)
    await runtime.run_until_idle()
    assert len(peer.replies) == 1
    assert await runtime.namespace(Leaf).get(LEAVES[0]).total() == 1


# --- forgetting -----------------------------------------------------------------------------------


async def test_the_inbox_is_empty_once_the_clients_have_acknowledged(runtime: LocalRuntime) -> None:
    leaves = [runtime.namespace(Leaf).get(key) for key in LEAVES]
    await asyncio.gather(*(leaf.add(1) for leaf in leaves for _ in range(50)))
    await until_forgotten(runtime)
    await runtime.advance(seconds=31)  # rows that hold nothing any more go with the next commit, or with the sweep
    assert [partition.store.scan("inbox") for partition in runtime.partitions if partition] == [[]] * PARTITIONS


async def test_nested_outcomes_are_forgotten_once_the_calling_turn_is_durable(runtime: LocalRuntime) -> None:
    await runtime.namespace(Root).get(ROOT).run(BRANCHES, LEAVES)
    await until_forgotten(runtime)


async def test_acknowledged_ids_are_forgotten_across_a_crash(runtime: LocalRuntime) -> None:
    leaf = runtime.namespace(Leaf).get(LEAVES[0])
    await leaf.add(1)
    await until_forgotten(runtime)
    await runtime.advance(seconds=31)
    await runtime.crash()
    assert kept(runtime) == 0


async def test_what_a_vanished_client_left_is_swept_after_call_memory_ms(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Leaf, LEAVES[0])
    await peer.call(1, "add", [1])
    await peer.result()
    await peer.disconnect()
    memory_ms = runtime.settings.call_memory_ms
    await runtime.advance(ms=memory_ms - SECOND_MS)
    assert kept(runtime) == 1
    await runtime.advance(minutes=1)
    assert kept(runtime) == 0


async def test_a_connected_client_keeps_its_outcomes_however_old_they_get(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Leaf, LEAVES[0])
    await peer.call(1, "add", [1])
    await peer.result()
    await runtime.advance(hours=2)
    assert kept(runtime) == 1


async def test_after_a_restart_an_outcome_is_kept_for_call_memory_ms_of_serving_time(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Leaf, LEAVES[0])
    await peer.call(1, "add", [1])
    await peer.result()
    await runtime.advance(minutes=9)
    await runtime.crash()
    await runtime.advance(minutes=9)
    again = Peer(runtime, Leaf, LEAVES[0])
    await again.call(1, "add", [1], flags=1)
    assert await again.result() == 1
    await again.disconnect()
    await runtime.advance(minutes=9)
    assert kept(runtime) == 1
    await runtime.advance(minutes=2)
    assert kept(runtime) == 0


async def test_a_nested_outcome_is_never_forgotten_by_age_while_its_caller_is_unfinished(runtime: LocalRuntime) -> None:
    Slow.gates = {}
    caller = runtime.namespace(Waiter).get("w")
    call = asyncio.ensure_future(caller.add_then_wait(LEAVES[1], "slow"))
    await runtime.run_until_idle()
    assert (await leaf_totals(runtime))[1] == 1
    before = kept(runtime)
    for partition in runtime.partitions:
        assert partition is not None
        partition.inbox.sweep(partition.serving_ms() + 10**9, runtime.settings.call_memory_ms)
    await asyncio.sleep(0.005)
    assert kept(runtime) >= 1, before
    Slow.gates["slow"].set()
    await finish(runtime, call)
    await until_forgotten(runtime)


async def test_a_nested_outcome_whose_caller_is_unknown_is_released_by_asking(runtime: LocalRuntime) -> None:
    peer = Peer(runtime, Leaf, LEAVES[0])
    extra = nested("3", ("Branch", BRANCHES[0]), b"a turn that has ended")
    await peer.call(1, "add", [1], extra=extra)
    await peer.result()
    assert kept(runtime) == 1
    await runtime.advance(seconds=31)
    await until_forgotten(runtime)


class Waiter(DurableObject):
    """Calls a leaf, then waits for another object."""

    turn_timeout_ms = 10**9

    async def add_then_wait(self, leaf: str, slow: str) -> int:
        total: int = await self.namespace(Leaf).get(leaf).add(1)
        await Slow.gates.setdefault(slow, asyncio.Event()).wait()
        self.storage.put("ended", self.storage.get("ended", 0) + 1)
        return total

    def poke(self) -> int:
        self.storage.put("pokes", self.storage.get("pokes", 0) + 1)
        return int(self.storage.get("ended", 0))

    @shared
    def look(self) -> int:
        return int(self.storage.get("ended", 0))


# --- idempotency keys -----------------------------------------------------------------------------


async def test_calls_with_one_idempotency_key_run_once(runtime: LocalRuntime) -> None:
    leaf = runtime.namespace(Leaf).get(LEAVES[0]).with_options(idempotency_key="order-1")
    assert await leaf.add(1) == 1
    assert await leaf.add(1) == 1
    assert await asyncio.gather(leaf.add(1), leaf.add(1)) == [1, 1]
    assert await leaf.total() == 1


async def test_an_idempotency_key_holds_across_a_crash_and_for_other_clients(runtime: LocalRuntime) -> None:
    leaf = runtime.namespace(Leaf).get(LEAVES[0]).with_options(idempotency_key="order-1")
    assert await leaf.add(1) == 1
    await runtime.crash()
    from actors.client import Client

    client = Client(runtime._directory, runtime.settings)
    from actors.messages import keyed_call_id

    ref: ClassRef = class_info(Leaf).ref
    call_id = keyed_call_id("Leaf", LEAVES[0], "add", "order-1")
    assert await client.call(ref, LEAVES[0], "add", (1,), {}, call_id=call_id) == 1
    await client.close()
    assert await leaf.total() == 1


async def test_an_idempotency_key_with_other_arguments_diverges(runtime: LocalRuntime) -> None:
    leaf = runtime.namespace(Leaf).get(LEAVES[0]).with_options(idempotency_key="order-1")
    await leaf.add(1)
    with pytest.raises(CallDiverged):
        await leaf.add(2)
    assert await leaf.total() == 1


async def test_other_idempotency_keys_other_methods_and_other_objects_are_other_calls(runtime: LocalRuntime) -> None:
    namespace = runtime.namespace(Leaf)
    await namespace.get(LEAVES[0]).with_options(idempotency_key="1").add(1)
    await namespace.get(LEAVES[0]).with_options(idempotency_key="2").add(1)
    await namespace.get(LEAVES[0]).with_options(idempotency_key="1").large(1)
    await namespace.get(LEAVES[1]).with_options(idempotency_key="1").add(1)
    assert await leaf_totals(runtime) == [3, 1, 0]


async def test_an_idempotency_key_is_forgotten_after_call_memory_ms(runtime: LocalRuntime) -> None:
    leaf = runtime.namespace(Leaf).get(LEAVES[0]).with_options(idempotency_key="order-1")
    await leaf.add(1)
    await runtime.advance(ms=runtime.settings.call_memory_ms - SECOND_MS)
    assert await leaf.add(1) == 1
    await runtime.advance(minutes=1)
    assert kept(runtime) == 0
    assert await leaf.add(1) == 2


# --- intents --------------------------------------------------------------------------------------


async def test_a_turn_that_called_out_is_run_again_without_its_caller(runtime: LocalRuntime) -> None:
    Slow.gates = {}
    peer = Peer(runtime, Waiter, "w")
    await peer.call(1, "add_then_wait", [LEAVES[1], "gate"])
    await runtime.run_until_idle()
    assert (await leaf_totals(runtime))[1] == 1
    await runtime.crash()
    Slow.gates["gate"].set()
    for _ in range(20):
        await asyncio.sleep(0.005)
        await runtime.run_until_idle()
    assert await runtime.namespace(Waiter).get("w").look() == 1
    assert (await leaf_totals(runtime))[1] == 1
    again = Peer(runtime, Waiter, "w")
    await again.call(1, "add_then_wait", [LEAVES[1], "gate"], flags=1)
    assert await again.result() == 1


async def test_an_intent_runs_before_other_turns_of_the_object(runtime: LocalRuntime) -> None:
    Slow.gates = {}
    waiter = runtime.namespace(Waiter).get("w")
    call = asyncio.ensure_future(waiter.add_then_wait(LEAVES[1], "gate"))
    await runtime.run_until_idle()
    await runtime.crash()
    poke, look = waiter.poke(), waiter.look()  # both arrive before the turn has been run again
    await asyncio.sleep(0.05)
    await runtime.advance(seconds=5)
    assert not poke.done()
    Slow.gates["gate"].set()
    assert await finish(runtime, poke) == 1
    assert await finish(runtime, look) in (0, 1)
    assert await finish(runtime, call) == 1


async def test_the_intent_is_gone_once_the_outcome_is_durable(runtime: LocalRuntime) -> None:
    await runtime.namespace(Root).get(ROOT).run(BRANCHES, LEAVES)
    await runtime.run_until_idle()
    for partition in runtime.partitions:
        assert partition is not None
        assert partition.store.scan("intents") == []


async def test_the_time_and_randomness_of_a_turn_are_the_same_when_it_is_run_again(runtime: LocalRuntime) -> None:
    Slow.gates = {}
    dice = runtime.namespace(Dice).get("d")
    call = asyncio.ensure_future(dice.roll(LEAVES[0]))
    await runtime.run_until_idle()
    await runtime.advance(seconds=7)
    await runtime.crash()
    Slow.gates["d"].set()
    first, second = await finish(runtime, call), Dice.seen
    assert len(second) == 2
    assert second[0][:2] == second[1][:2]
    assert [attempt for _, _, attempt in second] == [1, 2]
    assert tuple(first) == second[1]


class Dice(DurableObject):
    """Asks for the time and for random numbers around a call."""

    seen: list[tuple[int, float, int]] = []

    async def roll(self, leaf: str) -> tuple[int, float, int]:
        if self.turn.attempt == 1:
            type(self).seen = []
        await self.namespace(Leaf).get(leaf).add(1)
        rolled = (self.turn.now_ms, self.turn.random.random(), self.turn.attempt)
        self.seen.append(rolled)
        await Slow.gates.setdefault(self.key, asyncio.Event()).wait()
        return rolled


async def test_a_timer_that_called_out_is_run_again_with_what_it_was_told_the_first_time() -> None:
    """Otherwise `missed` would grow with the downtime, and its calls would diverge."""
    control = CommitControl()
    async with tree(control) as runtime:
        branch = runtime.namespace(Branch).get(BRANCHES[0])
        await branch.arm_every(LEAVES, "1m")
        # intent, then the first leaf's commit: stop there
        control.crash_at = control.commits + 2
        stopped = asyncio.ensure_future(control.wait_stopped())
        await runtime.advance(minutes=1)
        assert control.stopped
        await stopped
        runtime.clock.move_to(runtime.clock.wall_ms() + 5 * 60_000)  # type: ignore[attr-defined]
        await runtime.crash()
        for _ in range(20):
            await asyncio.sleep(0.005)
            await runtime.run_until_idle()
        await branch.cancel()
        assert await runtime.dead_letters() == []
        assert sum(status["retries"] for status in runtime.status()) == 0
        begun, ended = (await branch_totals(runtime))[0]
        assert begun == ended == 2
        # one occurrence of its own, and then one run for the five that came meanwhile
        assert await leaf_totals(runtime) == [6, 6, 6]


async def test_a_turn_that_synced_and_called_runs_again_from_its_start() -> None:
    for number in range(1, 8):
        control = CommitControl(number)
        async with tree(control) as runtime:
            branch = runtime.namespace(Branch).get(BRANCHES[0])
            async with crash_when_stopped(runtime, control, all_partitions=True):
                attempt = await finish(runtime, branch.sync_then_add(LEAVES[0]))
                begun, ended = await branch.totals()
                assert ended == 1
                assert begun == attempt  # what was synced repeats with each attempt, and with nothing else
                assert await leaf_totals(runtime) == [1, 0, 0]


async def test_a_call_that_nobody_awaits_belongs_to_the_turn(runtime: LocalRuntime) -> None:
    assert await runtime.namespace(Branch).get(BRANCHES[0]).add_by_background_call(LEAVES[0]) == "returned first"
    assert await leaf_totals(runtime) == [1, 0, 0]


def test_outside_ids_name_session_and_number() -> None:
    assert outside_call_id(b"s" * 16, 7) != outside_call_id(b"s" * 16, 8)
    assert outside_call_id(b"s" * 16, 7) != outside_call_id(b"t" * 16, 7)


def test_settings_make_a_stub_give_up_before_the_partition_forgets() -> None:
    settings = Settings()
    assert settings.call_timeout_ms <= settings.call_memory_ms // 2


# --- two syncs, and objects that leave memory while their work is held back ----------------------------


class Parts(DurableObject):
    """Commits in two parts, and calls between them."""

    async def run(self, leaf: str) -> int:
        self.storage.put("one", self.turn.attempt)
        await self.storage.sync()
        await self.namespace(Leaf).get(leaf).add(1)
        self.storage.put("two", self.turn.attempt)
        await self.storage.sync()
        self.storage.put("three", self.turn.attempt)
        return self.turn.attempt

    def state(self) -> dict[str, int]:
        return self.storage.list()


async def test_a_second_sync_that_fails_runs_the_turn_again_and_never_says_that_nothing_was_applied() -> None:
    number = 2
    while True:
        control = CommitControl()
        async with tree(control) as runtime:
            parts = runtime.namespace(Parts).get(key_in("Parts", 0, PARTITIONS))
            await parts.state()
            await leaf_totals(runtime)
            before = control.commits
            control.fail_at(before + number)
            try:
                attempt = await finish(runtime, parts.run(LEAVES[1]))
            except CommitFailed:  # the leaf's commit: its call was not applied, and the turn ended with that
                assert await leaf_totals(runtime) == [0, 0, 0]
                assert await parts.state() == {"one": 1}
            else:
                assert set((await parts.state()).values()) == {attempt}
                assert await leaf_totals(runtime) == [0, 1, 0]
            reached = control.commits >= before + number
            assert all(partition.store.scan("intents") == [] for partition in runtime.partitions if partition)
        if not reached:
            break
        number += 1
    assert number == 5  # the leaf's commit, the second sync and the outcome failed in turn


async def test_calls_that_careful_mode_holds_back_find_their_object_as_others_left_it() -> None:
    """An object that left memory meanwhile would come back beside the one that the held call was given to."""
    Slow.gates = {}
    settings = Settings(durability="off", ack_delay_ms=1, idle_timeout_ms=50)
    async with runtime_with(CommitControl(), settings=settings) as runtime:
        leaf = runtime.namespace(Leaf).get("held")
        running = asyncio.ensure_future(runtime.namespace(Waiter).get("w").add_then_wait("a", "gate"))
        await runtime.run_until_idle()
        await runtime.crash()
        peer = Peer(runtime, Leaf, "held")  # connected at once, while the waiter's turn runs alone
        await peer.call(1, "add", [1])
        await runtime.advance(ms=300)
        assert peer.replies == []
        await peer.call(2, "add", [1])
        await runtime.advance(ms=300)
        Slow.gates["gate"].set()
        await finish(runtime, running)
        await peer.received(2)
        assert await leaf.total() == 2


async def test_a_new_object_does_not_push_itself_out_of_a_full_memory() -> None:
    Slow.gates = {}
    settings = Settings(durability="off", ack_delay_ms=1, max_active_objects=1)
    async with runtime_with(CommitControl(), settings=settings) as runtime:
        held = asyncio.ensure_future(runtime.namespace(Slow).get("s").add())
        await runtime.run_until_idle()
        leaf = runtime.namespace(Leaf).get("a")
        assert await asyncio.gather(*(leaf.add(1) for _ in range(5))) == [1, 2, 3, 4, 5]
        Slow.gates["s"].set()
        assert await held == 1


# --- what a turn that is run again may still see otherwise ----------------------------------------------


class Decides(DurableObject):
    """Acts on what other objects answered."""

    async def retry(self, leaf: str) -> None:
        for _ in range(3):
            try:
                await self.namespace(Leaf).get(leaf).add(1)
                break
            except CommitFailed:
                continue
        self.storage.put("done", 1)

    async def choose(self, stock: str, empty: str, full: str) -> None:
        count = await self.namespace(Leaf).get(stock).total()
        await self.namespace(Leaf).get(full if count else empty).add(1)
        self.storage.put("done", 1)

    def done(self) -> bool:
        return "done" in self.storage


async def test_a_turn_that_met_a_refusal_meets_it_again_when_it_is_run_again() -> None:
    control = CommitControl()
    async with runtime_with(control, partitions=2) as runtime:
        decides = runtime.namespace(Decides).get(key_in("Decides", 0, 2))
        key = key_in("Leaf", 1, 2)
        leaf = runtime.namespace(Leaf).get(key)
        await decides.done()
        await leaf.total()
        before = control.commits
        control.fail_at(before + 2)  # the leaf's first commit: the intent was the one before it
        control.crash_at, control.applied = before + 4, False  # the outcome of the caller
        async with crash_when_stopped(runtime, control, all_partitions=False):
            await finish(runtime, decides.retry(key))
        assert control.stopped
        assert await leaf.total() == 1


async def test_a_turn_that_decided_on_a_nested_read_decides_the_same_when_it_is_run_again() -> None:
    control = CommitControl()
    async with runtime_with(control, partitions=2) as runtime:
        decides = runtime.namespace(Decides).get(key_in("Decides", 0, 2))
        stock, empty, full = (key_in("Leaf", 1, 2, prefix=prefix) for prefix in ("stock", "empty", "full"))
        leaves = runtime.namespace(Leaf)
        await decides.done()
        await leaves.get(stock).total()
        control.crash_at, control.applied = control.commits + 4, False  # its intent, the read, the add, its outcome
        call = asyncio.ensure_future(decides.choose(stock, empty, full))
        await control.wait_stopped()
        await leaves.get(stock).add(5)
        await runtime.crash(0)
        await finish(runtime, call)
        assert await leaves.get(empty).total() + await leaves.get(full).total() == 1
