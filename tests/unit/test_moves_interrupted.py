"""Moves whose coordinator, source or target goes away in the middle: one owner at each step, and an end in any case.

Time is simulated, so that deadlines of seconds and minutes cost nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import pytest

import actors.mover
from actors import DurableObject, TimerInfo
from actors.address import SLOTS, slot_of
from actors.arrival import Arrivals
from actors.departure import CHUNK_TIMEOUT_MS
from actors.errors import ActorUnreachable, InvalidOption, MoveRefused
from actors.mover import COPY_TIMEOUT_S, MAX_RETRY_S, MovePort, Mover
from actors.testing import LocalRuntime
from tests.support.simulated_loop import run_simulated

KEYS = [f"key-{number}" for number in range(12)]
STEPS = ("check", "send_slots", "own", "complete")
MINUTE_MS = 60_000


class Chest(DurableObject):
    """Holds what it is given, once each, and is rung by timers."""

    def put(self, token: str) -> int:
        self.storage[token] = self.storage.get(token, 0) + 1
        return int(self.storage[token])

    def contents(self) -> dict[str, int]:
        return self.storage.list()

    def arm(self, name: str, due_ms: int, payload: Any) -> None:
        self.timers.set(name, at=due_ms, method="on_ring", payload=payload)

    def on_ring(self, timer: TimerInfo) -> None:
        self.storage[f"rung {timer.name}"] = 1


class Ports:
    """Stands between a mover and the partitions: `before` and `after` are told each step, and may raise."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self.runtime = runtime
        self.before: Callable[[str], Awaitable[None]] | None = None
        self.after: Callable[[str], Awaitable[None]] | None = None
        #: every step that was asked for, so that it can be asked for again
        self.asked: list[tuple[str, tuple[Any, ...]]] = []
        self.inner: MovePort

    def __call__(self, inner: MovePort) -> MovePort:
        self.inner = inner
        return self

    def __getattr__(self, step: str) -> Callable[..., Awaitable[Any]]:
        async def ask(*args: Any) -> Any:
            self.asked.append((step, args))
            if self.before is not None:
                await self.before(step)
            answer = await getattr(self.inner, step)(*args)
            if self.after is not None:
                await self.after(step)
            return answer

        return ask

    # named, so that it is a `MovePort`; all of them are `__getattr__`'s
    check: Any
    send_slots: Any
    call_off: Any
    complete: Any
    own: Any
    discard: Any


def owners_of(runtime: LocalRuntime, slot: int) -> list[int]:
    """The partitions that run the objects of a slot."""
    return [number for number, each in enumerate(runtime.partitions) if each is not None and each.runs_slot(slot)]


def check_owners(runtime: LocalRuntime) -> None:
    """No slot is run by two partitions."""
    for slot in range(SLOTS):
        assert len(owners_of(runtime, slot)) <= 1, f"slot {slot} runs in {owners_of(runtime, slot)}"


def check_settled(runtime: LocalRuntime) -> None:
    """Every slot is run by the partition that the map names, no move is on record, and no other partition has rows."""
    for slot in range(SLOTS):
        assert owners_of(runtime, slot) == [runtime.moves.partition_of(slot)]
    assert runtime.moves.mover()._store.all() == []
    for partition in runtime.partitions:
        assert partition is not None
        assert partition.moves == {}
        for _, slot, _, _ in partition.store.scan("objects"):
            assert partition.runs_slot(slot)


async def vanish(runtime: LocalRuntime, number: int) -> None:
    """Kill a partition that is not started again."""
    partition = runtime.partitions[number]
    assert partition is not None
    runtime.partitions[number] = None
    await partition.abandon()


async def after_s(seconds: float, step_s: float = 0.25) -> None:
    """Let simulated time pass."""
    for _ in range(int(seconds / step_s)):
        await asyncio.sleep(step_s)


async def ended(mover: Mover) -> None:
    """Until both sides of every move have done what was decided."""
    for _ in range(1_000):
        if not mover._store.all():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"never ended: {mover._store.all()}")


def simulated(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_simulated(main())


# --- the coordinator --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("done", [False, True], ids=["before_it_is_asked", "before_its_answer"])
def test_a_slot_has_one_owner_while_the_coordinator_is_killed_at_any_step_of_its_move(step: str, done: bool) -> None:
    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            chest = runtime.namespace(Chest).get("a")
            await chest.put("before")
            target = 1 - runtime.moves.partition_of(chest.id.slot)
            ports = Ports(runtime)
            killed = asyncio.Event()

            async def kill(asked: str) -> None:
                check_owners(runtime)
                if asked == step:
                    killed.set()
                    await asyncio.Event().wait()  # the process is gone: no answer arrives, no later step is asked for

            setattr(ports, "after" if done else "before", kill)
            moving = asyncio.ensure_future(runtime.moves.restart(ports).move([chest.id.slot], target))
            during = asyncio.ensure_future(chest.put("during"))
            await killed.wait()
            await after_s(1)
            check_owners(runtime)
            successor = runtime.moves.restart()
            moving.cancel()
            await successor.resume()
            check_owners(runtime)
            await successor.move([chest.id.slot], target)
            await ended(successor)
            check_settled(runtime)
            assert await during == 1
            assert owners_of(runtime, chest.id.slot) == [target]
            assert await chest.contents() == {"before": 1, "during": 1}

    simulated(main)


def test_slots_have_one_owner_while_the_coordinator_is_killed_again_and_again_in_a_rebalance() -> None:
    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            chests = runtime.namespace(Chest)
            runtime.moves.add(2)
            runtime.partitions.append(None)
            runtime.partition_count += 1
            await runtime._open(2, is_new=True)
            ports = Ports(runtime)
            steps = 0
            kill_now = asyncio.Event()

            async def count(_: str) -> None:
                nonlocal steps
                steps += 1
                check_owners(runtime)
                if steps % 23 == 0:  # two moves and a bit: each life gets somewhere
                    kill_now.set()
                    await asyncio.Event().wait()

            ports.before = ports.after = count
            calls: list[asyncio.Future[int]] = []
            kills = 0
            for _ in range(100):
                kill_now.clear()
                calls += [chests.get(key).put(f"{key} {kills}") for key in KEYS]
                spreading = asyncio.ensure_future(runtime.moves.restart(ports).spread([0, 1, 2]))
                killing = asyncio.ensure_future(kill_now.wait())
                await asyncio.wait((spreading, killing), return_when=asyncio.FIRST_COMPLETED)
                killing.cancel()
                if spreading.done():
                    break
                kills += 1
                spreading.cancel()
            assert spreading.done()
            await spreading
            assert kills > 5
            ports.before = ports.after = None
            await runtime.moves.restart().resume()
            check_settled(runtime)
            assert set(await asyncio.gather(*calls)) == {1}
            counts = [len(runtime.moves.slots_of(number)) for number in range(3)]
            assert max(counts) - min(counts) <= 1

    simulated(main)


# --- the target -------------------------------------------------------------------------------------


def test_a_move_whose_target_is_killed_is_called_off_in_time_for_the_callers_and_planned_again() -> None:
    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            chest = runtime.namespace(Chest).get("a")
            await chest.put("before")
            source = runtime.moves.partition_of(chest.id.slot)
            ports = Ports(runtime)

            async def kill(step: str) -> None:
                if step == "send_slots":
                    ports.before = None
                    await vanish(runtime, 1 - source)

            ports.before = kill
            mover = runtime.moves.restart(ports)
            moving = asyncio.ensure_future(mover.move([chest.id.slot], 1 - source))
            await after_s(0.5)
            during = asyncio.ensure_future(chest.put("during"))
            await after_s(CHUNK_TIMEOUT_MS / 1_000 + MAX_RETRY_S)
            assert during.done(), "the source has its slot back long before the caller gives up"
            assert await during == 1
            assert mover.progress.put_off >= 1
            assert not moving.done()
            assert owners_of(runtime, chest.id.slot) == [source]
            await runtime._open(1 - source)
            await after_s(2 * MAX_RETRY_S)
            assert moving.done(), "it was planned again by itself"
            await ended(mover)
            check_settled(runtime)
            assert owners_of(runtime, chest.id.slot) == [1 - source]
            assert await chest.contents() == {"before": 1, "during": 1}

    simulated(main)


def test_a_target_that_never_comes_back_holds_up_no_other_move_also_after_a_restart() -> None:
    async def main() -> None:
        async with LocalRuntime(partitions=3, memory=True) as runtime:
            chests = runtime.namespace(Chest)
            for key in KEYS:
                await chests.get(key).put("x")
            ports = Ports(runtime)

            async def kill(step: str) -> None:
                if step == "send_slots":
                    ports.before = None
                    await vanish(runtime, 2)

            ports.before = kill
            mover = runtime.moves.restart(ports)
            slot = next(slot for slot in range(SLOTS) if runtime.moves.partition_of(slot) == 0)
            moving = asyncio.ensure_future(mover.move([slot], 2))
            await after_s(2 * CHUNK_TIMEOUT_MS / 1_000)
            moving.cancel()
            await asyncio.wait_for(mover.move([slot], 1), 60)
            assert owners_of(runtime, slot) == [1]
            successor = runtime.moves.restart()
            await asyncio.wait_for(successor.move([slot], 0), 60)
            assert owners_of(runtime, slot) == [0]
            (left,) = successor._store.all()
            assert (left.target, left.slots) == (2, ())
            await runtime._open(2)
            await ended(successor)
            check_settled(runtime)

    simulated(main)


def test_moves_to_other_partitions_go_on_while_one_target_is_away() -> None:
    async def main() -> None:
        async with LocalRuntime(partitions=1, memory=True) as runtime:
            for number in (1, 2):
                runtime.moves.add(number)
                runtime.partitions.append(None)
                runtime.partition_count += 1
                await runtime._open(number, is_new=True)
            await vanish(runtime, 1)
            ports = Ports(runtime)
            spreading = asyncio.ensure_future(runtime.moves.restart(ports).spread([0, 1, 2]))
            await after_s(120)
            assert len(runtime.moves.slots_of(2)) in (SLOTS // 3, SLOTS // 3 + 1)
            assert runtime.moves.slots_of(1) == []
            assert not spreading.done()
            sent = [args for step, args in ports.asked if step == "send_slots"]
            assert {target for _, _, _, target, *_ in sent} == {2}, "no slot was frozen for the one that is away"
            await runtime._open(1)
            await after_s(60)
            assert spreading.done()
            counts = [len(runtime.moves.slots_of(number)) for number in range(3)]
            assert max(counts) - min(counts) <= 1
            check_settled(runtime)

    simulated(main)


# --- late answers -----------------------------------------------------------------------------------


def test_an_answer_that_comes_after_the_deadline_changes_nothing_and_the_move_is_made_anew() -> None:
    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            chest = runtime.namespace(Chest).get("a")
            await chest.put("before")
            target = 1 - runtime.moves.partition_of(chest.id.slot)
            ports = Ports(runtime)
            late = 0

            async def delay(step: str) -> None:
                nonlocal late
                if step == "send_slots" and not late:
                    late += 1
                    await asyncio.sleep(COPY_TIMEOUT_S + 60)

            ports.after = delay
            mover = runtime.moves.restart(ports)
            await mover.move([chest.id.slot], target)
            assert late == 1
            assert mover.progress.put_off == 1
            await ended(mover)
            check_settled(runtime)
            assert await chest.contents() == {"before": 1}
            assert owners_of(runtime, chest.id.slot) == [target]

    simulated(main)


def test_every_step_of_a_move_that_comes_again_after_its_end_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[tuple[Arrivals, tuple[Any, ...]]] = []
    take_in = Arrivals.take_in

    async def spy(self: Arrivals, *args: Any) -> None:
        chunks.append((self, args))
        await take_in(self, *args)

    monkeypatch.setattr(Arrivals, "take_in", spy)

    async def main() -> None:
        async with LocalRuntime(partitions=3, memory=True) as runtime:
            chest = runtime.namespace(Chest).get("a")
            await chest.put("before")
            slot = chest.id.slot
            ports = Ports(runtime)
            failures = 1

            async def lose(step: str) -> None:
                nonlocal failures
                if step == "send_slots" and failures:
                    failures -= 1
                    raise ActorUnreachable("its answer was lost")

            ports.after = lose
            mover = runtime.moves.restart(ports)
            home = runtime.moves.partition_of(slot)
            for target in ((home + 1) % 3, (home + 2) % 3, home, (home + 1) % 3):
                await mover.move([slot], target)
                await ended(mover)
            await chest.put("after")
            steps, stored = list(ports.asked), list(chunks)
            assert {step for step, _ in steps} == {"check", "send_slots", "own", "complete", "call_off", "discard"}
            for late in (*stored, *reversed(stored)):
                with pytest.raises(MoveRefused):
                    await take_in(late[0], *late[1])
                check_settled(runtime)
            for step, args in (*steps, *reversed(steps)):
                try:
                    await getattr(ports.inner, step)(*args)
                except MoveRefused:
                    assert step == "send_slots"
                check_settled(runtime)
            assert await chest.contents() == {"before": 1, "after": 1}

    simulated(main)


def test_every_step_may_be_asked_for_twice_at_once() -> None:
    class Twice(Ports):
        def __getattr__(self, step: str) -> Callable[..., Awaitable[Any]]:
            async def ask(*args: Any) -> Any:
                method = getattr(self.inner, step)
                first, second = await asyncio.gather(method(*args), method(*args))
                assert first == second
                return first

            return ask

    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            chests = runtime.namespace(Chest)
            for key in KEYS:
                await chests.get(key).put("x")
            mover = runtime.moves.restart(Twice(runtime))
            for target in (0, 1, 0):
                await mover.move([chests.get(key).id.slot for key in KEYS], target)
                await ended(mover)
                check_settled(runtime)
                for key in KEYS:
                    assert await chests.get(key).contents() == {"x": 1}

    simulated(main)


@pytest.mark.parametrize("seed", range(10))
def test_requests_of_ended_moves_change_nothing_in_whatever_order_they_come_together(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    again: list[Callable[[], Awaitable[Any]]] = []
    take_in = Arrivals.take_in

    async def noted(self: Arrivals, *args: Any) -> None:
        again.append(lambda: take_in(self, *args))
        await take_in(self, *args)

    monkeypatch.setattr(Arrivals, "take_in", noted)

    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            chest = runtime.namespace(Chest).get("a")
            await chest.put("x")
            ports = Ports(runtime)
            answers = [ActorUnreachable("lost"), None, ActorUnreachable("lost"), None]

            async def lose(step: str) -> None:
                if step == "send_slots" and (error := answers.pop(0)) is not None:
                    raise error

            ports.after = lose
            mover = runtime.moves.restart(ports)
            home = runtime.moves.partition_of(chest.id.slot)
            for target in (1 - home, home):
                await mover.move([chest.id.slot], target)
            await ended(mover)
            for step, args in ports.asked:
                again.append(partial(getattr(ports.inner, step), *args))
            late = [*again, *again]
            random.Random(seed).shuffle(late)
            results = await asyncio.gather(*(ask() for ask in late), return_exceptions=True)
            for each in results:
                assert not isinstance(each, BaseException) or isinstance(each, MoveRefused), each
            check_settled(runtime)
            assert await chest.contents() == {"x": 1}
            assert await chest.put("y") == 1

    simulated(main)


# --- the planner ------------------------------------------------------------------------------------


def test_an_exception_in_the_planner_is_counted_and_the_next_round_works(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_moves = actors.mover.plan_moves
    failures = [ZeroDivisionError("no"), KeyError(3)]

    def fail_at_first(owners: Sequence[int], partitions: Sequence[int], most_slots: int) -> Any:
        if failures:
            raise failures.pop()
        return plan_moves(owners, partitions, most_slots)

    monkeypatch.setattr(actors.mover, "plan_moves", fail_at_first)

    async def main() -> None:
        async with LocalRuntime(partitions=1, memory=True) as runtime:
            await runtime.scale(3)
            progress = runtime.moves.mover().progress
            assert progress.errors == 2
            assert "ZeroDivisionError" in progress.last_error
            counts = [len(runtime.moves.slots_of(number)) for number in range(3)]
            assert max(counts) - min(counts) <= 1
            check_settled(runtime)
            with pytest.raises(InvalidOption):
                await runtime.moves.mover().spread([])

    simulated(main)


@pytest.mark.parametrize("change", ["begin", "commit", "abort", "release", "end"])
def test_a_record_that_can_not_be_written_delays_a_move_and_is_counted(change: str) -> None:
    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            chest = runtime.namespace(Chest).get("a")
            await chest.put("before")
            target = 1 - runtime.moves.partition_of(chest.id.slot)
            ports = Ports(runtime)
            mover = runtime.moves.restart(ports)
            lost = 1 if change in ("abort", "release") else 0

            async def lose(step: str) -> None:
                nonlocal lost
                if step == "send_slots" and lost:
                    lost -= 1
                    raise ActorUnreachable("its answer was lost")

            ports.after = lose
            write, failures = getattr(mover._store, change), 1

            def fail_at_first(*args: Any) -> Any:
                nonlocal failures
                if failures:
                    failures -= 1
                    raise OSError("no space left on device")
                return write(*args)

            setattr(mover._store, change, fail_at_first)
            await asyncio.wait_for(mover.move([chest.id.slot], target), 120)
            await ended(mover)
            assert failures == 0
            check_settled(runtime)
            assert await chest.contents() == {"before": 1}

    simulated(main)


# --- timers and order -------------------------------------------------------------------------------


def test_a_timer_that_moves_there_and_back_keeps_due_time_method_and_payload_to_the_byte() -> None:
    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            chest = runtime.namespace(Chest).get("a")
            slot = slot_of("Chest", "a")
            payload = {"bytes": bytes(range(256)), "text": "ä\u2028", "big": 2**70, "nested": [(1, None), {"x": 0.1}]}
            for number in range(5):
                await chest.arm(f"t{number}", runtime.clock.wall_ms() + MINUTE_MS + 7 * number + 1, payload)
            before = timer_rows(runtime, slot)
            mover = runtime.moves.mover()
            home = runtime.moves.partition_of(slot)
            for target in (1 - home, home, 1 - home, home):
                await runtime.advance(ms=333)
                await mover.move([slot], target)
                assert timer_rows(runtime, slot) == before
            await runtime.crash()
            assert timer_rows(runtime, slot) == before
            await runtime.advance(ms=2 * MINUTE_MS)
            assert sorted(await chest.contents()) == [f"rung t{number}" for number in range(5)]

    simulated(main)


def timer_rows(runtime: LocalRuntime, slot: int) -> list[tuple[Any, ...]]:
    """The directory and timer rows of the only object of a slot at its owner, without the object's number."""
    partition = runtime.partitions[runtime.moves.partition_of(slot)]
    assert partition is not None
    directory = [row[1:] for row in partition.store.scan("directory")]
    timers = [row[:3] + row[4:] for row in partition.store.scan("timers")]
    assert len(directory) == len(timers) == 5
    return [*directory, *timers]


def test_a_move_keeps_the_order_of_calls_and_no_time_passes() -> None:
    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            chest = runtime.namespace(Chest).get("a")
            await chest.arm("t", runtime.clock.wall_ms() + MINUTE_MS, None)
            began_ms = runtime.clock.wall_ms()
            target = 1 - runtime.moves.partition_of(chest.id.slot)
            moving = asyncio.ensure_future(runtime.moves.mover().move([chest.id.slot], target))
            calls: list[asyncio.Future[int]] = []
            order: list[int] = []
            for number in range(500):
                calls.append(chest.put(f"{number:03}"))
                calls[-1].add_done_callback(lambda _, number=number: order.append(number))  # type: ignore[misc]
                await asyncio.sleep(0)
            await asyncio.gather(*calls)
            await moving
            assert owners_of(runtime, chest.id.slot) == [target]
            assert order == list(range(500))
            assert await chest.contents() == {f"{number:03}": 1 for number in range(500)}
            assert runtime.clock.wall_ms() == began_ms, "nobody had to wait for a time to pass"
            await runtime.advance(ms=MINUTE_MS)
            assert (await chest.contents())["rung t"] == 1

    simulated(main)


def test_timers_that_come_due_while_their_owner_changes_are_late_by_less_than_a_second() -> None:
    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            bells = runtime.namespace(Bells)
            keys = [f"bells-{number}" for number in range(40)]
            begin_ms = runtime.clock.wall_ms() + 1_000
            for index, key in enumerate(keys):
                await bells.get(key).arm([begin_ms + 40 * number + index for number in range(50)])
            mover = runtime.moves.mover()
            slots = [bells.get(key).id.slot for key in keys]

            async def change_owners() -> int:
                for changes in range(1_000):
                    if runtime.clock.wall_ms() > begin_ms + 2_100:
                        return changes
                    await mover.move(slots, changes % 2)
                    await asyncio.sleep(0.2)
                raise AssertionError("time does not pass")

            changing = asyncio.ensure_future(change_owners())
            while not changing.done():
                await asyncio.sleep(0.1)
                await runtime.advance(ms=100)
            assert await changing > 4
            await runtime.advance(seconds=1)
            lateness_ms = [late_ms for key in keys for late_ms in await bells.get(key).lateness()]
            assert len(lateness_ms) == len(keys) * 50
            assert min(lateness_ms) >= 0
            assert max(lateness_ms) < 1_000

    simulated(main)


class Bells(DurableObject):
    """Notes how late each of its timers ran."""

    def arm(self, due_ms: list[int]) -> None:
        for number, at in enumerate(due_ms):
            self.timers.set(f"t{number}", at=at, method="on_ring")

    def on_ring(self, timer: TimerInfo) -> None:
        self.storage[timer.name] = timer.fired_ms - timer.due_ms

    def lateness(self) -> list[int]:
        return list(self.storage.list().values())


def test_no_call_waits_for_long_while_a_partition_is_added_and_taken_away() -> None:
    """In simulated time only pauses of the runtime's own count, and here what a control call takes."""

    async def main() -> None:
        async with LocalRuntime(partitions=2, memory=True) as runtime:
            chests = runtime.namespace(Chest)
            ports = Ports(runtime)
            loop = asyncio.get_running_loop()
            waited_s: list[float] = []
            going = True

            async def control_call(_: str) -> None:
                await asyncio.sleep(0.002)

            async def call(key: str) -> None:
                number = 0
                while going:
                    began_s = loop.time()
                    assert await chests.get(key).put(f"{number}") == 1
                    waited_s.append(loop.time() - began_s)
                    number += 1
                    await asyncio.sleep(0.01)

            ports.before = ports.after = control_call
            runtime.moves.restart(ports)
            callers = [asyncio.ensure_future(call(key)) for key in KEYS]
            for partitions in (3, 2):
                await runtime.scale(partitions)
                assert all(not caller.done() for caller in callers), "no caller has seen an error"
            going = False
            await asyncio.gather(*callers)
            assert max(waited_s) > 0, "some of them met a slot that was moving"
            assert max(waited_s) < 0.25

    simulated(main)
