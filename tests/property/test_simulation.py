"""Seeded schedules of calls, nested calls, timers, crashes, failing commits and clock jumps, judged by invariants.

Everything runs in one order on virtual time, so a seed that fails fails again:
`SEED=n pytest tests/property/test_simulation.py`.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from actors.durable_object import DurableObject, shared
from actors.errors import (
    CallOutcomeUnknown,
    ChannelClosed,
    CommitFailed,
    ObjectReset,
    Overloaded,
    TurnTimeout,
    WriteSetRejected,
)
from actors.settings import Settings
from actors.testing import LocalRuntime, VirtualClock
from tests.support.crash_points import CommitControl, runtime_with
from tests.support.simulated_loop import run_simulated
from timers.backoff import RetryPolicy

PARTITIONS = 3
KEYS = [f"k{number}" for number in range(6)]
STEPS = 60
QUICK = RetryPolicy(max_attempts=5, base_ms=20, jitter=0.5)
SEEDS = [int(os.environ["SEED"])] if "SEED" in os.environ else list(range(40))
SOAK_SEEDS = range(1_000, 3_000)
#: Kinds of operations that note themselves in `ops` when they are acknowledged.
WRITES = ("add", "add_slowly", "add_in_parts", "pass_on", "spread")
#: The call or turn was certainly not applied.
NOT_APPLIED = (CommitFailed, ObjectReset, Overloaded, WriteSetRejected)
#: Nobody can say.
UNKNOWN = (CallOutcomeUnknown, ChannelClosed, TurnTimeout)


class Ledger(DurableObject):
    """Notes each operation under its number, so that what is lost, doubled or out of order can be seen."""

    def _note(self, list_name: str, entry: Any) -> None:
        self.storage.put(list_name, [*self.storage.get(list_name, []), entry])

    def on_start(self) -> None:
        self.storage.put("starts", self.storage.get("starts", 0) + 1)

    def add(self, op: int) -> int:
        self._note("ops", op)
        return op

    async def add_slowly(self, op: int) -> int:
        ops = self.storage.get("ops", [])
        for _ in range(3):
            await asyncio.sleep(0)
        self.storage.put("ops", [*ops, op])
        return op

    async def add_in_parts(self, op: int) -> int:
        """What is written before the sync may repeat when the turn is run again, nothing else may."""
        self._note("synced", [op, self.turn.attempt])
        await self.storage.sync()
        self._note("ops", op)
        return op

    def add_then_raise(self, op: int) -> None:
        self._note("ops", op)
        raise ValueError(f"{op} was not meant")

    async def pass_on(self, op: int, path: list[str]) -> int:
        """Note it here, and at every object along the path, innermost first."""
        self._note("ops", op)
        if path:
            await self.namespace(Ledger).get(path[0]).pass_on(op, path[1:])
        self._note("ends", op)
        return op

    async def spread(self, op: int, targets: list[str]) -> int:
        self._note("ops", op)
        await asyncio.gather(*(self.namespace(Ledger).get(key).add(op) for key in targets))
        self._note("ends", op)
        return op

    def arm(self, op: int, after_ms: int, path: list[str]) -> int:
        self._note("armed", op)
        state = self.timers.set(f"t{op}", after=f"{after_ms}ms", method="fire", payload=[op, path])
        return state.due_ms

    def arm_flaky(self, op: int, failures: int) -> int:
        state = self.timers.set(f"f{op}", after="10ms", method="fire_flaky", payload=[op, failures], retry=QUICK)
        self._note("armed", op)
        return state.due_ms

    def fire_flaky(self, info: Any) -> None:
        op, failures = info.payload
        self._note("fired", [op, info.due_ms, info.fired_ms])
        self._note("attempts", [op, info.attempt])
        if info.attempt < failures:
            raise RuntimeError(f"attempt {info.attempt} of {op}")

    def arm_every(self, op: int, every_ms: int) -> int:
        state = self.timers.set(f"e{op}", every=f"{every_ms}ms", method="tick", payload=op)
        return state.due_ms

    def cancel_every(self, op: int) -> bool:
        return self.timers.cancel(f"e{op}")

    async def fire(self, info: Any) -> None:
        op, path = info.payload
        assert self.turn.now_ms >= info.due_ms
        self._note("fired", [op, info.due_ms, info.fired_ms])
        if path:
            await self.namespace(Ledger).get(path[0]).pass_on(op, path[1:])

    def tick(self, info: Any) -> None:
        self._note("ticks", [info.payload, info.due_ms, info.fired_ms, info.missed])

    @shared
    def read(self) -> list[int]:
        ops: list[int] = self.storage.get("ops", [])
        return ops

    def everything(self) -> dict[str, Any]:
        return self.storage.list()


@dataclass
class Operation:
    """One operation of the schedule, and how it ended."""

    number: int
    kind: str
    key: str
    targets: list[str] = field(default_factory=list)
    failures: int = 0
    result: Any = None
    error: BaseException | None = None
    #: operations on the same object that had been acknowledged when this one began
    seen_before: list[int] = field(default_factory=list)

    @property
    def acknowledged(self) -> bool:
        return self.error is None

    @property
    def refused(self) -> bool:
        return isinstance(self.error, NOT_APPLIED)


@dataclass
class History:
    """What was asked, in order, what was answered, and what the objects hold in the end."""

    operations: list[Operation] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    kept: int = 0
    intents: int = 0
    claims: int = 0
    dead_letters: int = 0

    def list_of(self, key: str, name: str) -> list[Any]:
        found: list[Any] = self.state[key].get(name, [])
        return found


# --- invariants -------------------------------------------------------------------------------------


def each_acknowledged_write_survives(history: History) -> None:
    for op in history.operations:
        if op.acknowledged and op.kind in WRITES:
            assert op.number in history.list_of(op.key, "ops"), f"{op} is lost"


def effects_happen_once(history: History) -> None:
    for key in KEYS:
        for name in ("ops", "ends", "armed"):
            doubled = [op for op, count in Counter(history.list_of(key, name)).items() if count > 1]
            assert not doubled, f"{name} of {key} happened twice: {doubled}"
        fired = Counter(op for op, *_ in history.list_of(key, "fired"))
        assert set(fired.values()) <= {1}, f"timers of {key} took effect twice: {fired}"
        ticks = Counter((op, due_ms) for op, due_ms, *_ in history.list_of(key, "ticks"))
        assert set(ticks.values()) <= {1}, f"occurrences of {key} ran twice: {ticks}"


def what_was_refused_did_not_happen(history: History) -> None:
    for op in history.operations:
        if op.refused or isinstance(op.error, ValueError):
            assert op.number not in history.list_of(op.key, "ops"), f"{op} was refused and happened"


def a_tree_of_calls_happens_whole_or_not_at_all(history: History) -> None:
    for op in history.operations:
        if op.kind not in ("pass_on", "spread"):
            continue
        places = [op.key, *op.targets]
        there = [op.number in history.list_of(key, "ops") for key in places]
        if op.acknowledged:
            assert all(there), f"{op} was acknowledged and is only at {there}"
        if op.kind == "pass_on" and not isinstance(op.error, UNKNOWN):
            # the outermost is last to commit: when it is there, so is everything that it called
            assert all(there) or not there[0], f"{op} is torn: {there}"


def each_timer_fires_once_and_never_early(history: History) -> None:
    for op in history.operations:
        if op.kind not in ("arm", "arm_flaky"):
            continue
        fires = [row for row in history.list_of(op.key, "fired") if row[0] == op.number]
        armed = op.number in history.list_of(op.key, "armed")
        assert len(fires) == armed, f"{op}: {fires}"
        if op.acknowledged:
            assert armed, f"{op} is lost"
        for _, due_ms, fired_ms in fires:
            assert fired_ms >= due_ms, f"{op} fired early"
            if op.acknowledged:
                assert due_ms == op.result
        if armed:
            assert all(op.number in history.list_of(key, "ops") for key in op.targets), f"{op} is torn"


def attempts_count_failures_of_the_handler_alone(history: History) -> None:
    for op in history.operations:
        if op.kind == "arm_flaky":
            attempts = [attempt for number, attempt in history.list_of(op.key, "attempts") if number == op.number]
            assert attempts in ([], [op.failures]), f"{op}: {attempts}"


def only_what_was_synced_repeats(history: History) -> None:
    for key in KEYS:
        attempts: dict[int, list[int]] = {}
        for op, attempt in history.list_of(key, "synced"):
            attempts.setdefault(op, []).append(attempt)
        for op, each in attempts.items():
            assert each == sorted(set(each)), f"{op} synced twice in one attempt: {each}"
            assert op in history.list_of(key, "ops"), f"{op} synced and never ended"


def every_occurrence_is_accounted_for(history: History) -> None:
    for op in history.operations:
        if op.kind != "arm_every":
            continue
        rows = [row[1:] for row in history.list_of(op.key, "ticks") if row[0] == op.number]
        every_ms = op.targets and int(op.targets[0])
        for (due_ms, fired_ms, missed), (next_due_ms, *_) in pairwise(rows):
            assert fired_ms >= due_ms
            assert next_due_ms - due_ms == (missed + 1) * int(every_ms), f"{op}: {rows}"


def calls_of_one_client_to_one_object_keep_their_order(history: History) -> None:
    for key in KEYS:
        ours = {op.number for op in history.operations if op.key == key and not op.kind.startswith("arm")}
        applied = [number for number in history.list_of(key, "ops") if number in ours]
        assert applied == sorted(applied), f"calls of {key} ran out of order: {applied}"


def a_read_sees_what_was_acknowledged_before_it(history: History) -> None:
    for op in history.operations:
        if op.kind == "read" and op.acknowledged:
            missing = set(op.seen_before) - set(op.result)
            assert not missing, f"{op} did not see {missing}"


def what_a_read_saw_stays(history: History) -> None:
    for op in history.operations:
        if op.kind == "read" and op.acknowledged:
            gone = set(op.result) - set(history.list_of(op.key, "ops"))
            assert not gone, f"{op} saw {gone}, which is not durable"


def only_known_errors_reach_callers(history: History) -> None:
    for op in history.operations:
        if op.kind == "add_then_raise":
            assert isinstance(op.error, (ValueError, *NOT_APPLIED, *UNKNOWN)), op
        elif op.error is not None:
            assert isinstance(op.error, (*NOT_APPLIED, *UNKNOWN)), op


def nothing_is_left_behind(history: History) -> None:
    assert history.intents == 0
    assert history.claims == 0
    assert history.kept == 0
    assert history.dead_letters == 0


INVARIANTS: list[Callable[[History], None]] = [
    only_known_errors_reach_callers,
    each_acknowledged_write_survives,
    effects_happen_once,
    what_was_refused_did_not_happen,
    a_tree_of_calls_happens_whole_or_not_at_all,
    each_timer_fires_once_and_never_early,
    attempts_count_failures_of_the_handler_alone,
    only_what_was_synced_repeats,
    every_occurrence_is_accounted_for,
    calls_of_one_client_to_one_object_keep_their_order,
    a_read_sees_what_was_acknowledged_before_it,
    what_a_read_saw_stays,
    nothing_is_left_behind,
]


# --- the schedule -----------------------------------------------------------------------------------


KINDS = (
    *("add", "add", "add_slowly", "add_in_parts", "add_then_raise", "pass_on", "pass_on", "pass_on", "spread"),
    *("arm", "arm", "arm_flaky", "arm_every", "read"),
)


class Simulation:
    """One run. Paths of nested calls go from lower to higher keys, so that no two wait for each other."""

    def __init__(self, seed: int, *, memory: bool) -> None:
        self._random = random.Random(seed)
        self._control = CommitControl()
        self._clock = VirtualClock()
        settings = Settings(
            durability="off",
            ack_delay_ms=1,
            max_active_objects=self._random.choice([2, 50_000]),
            idle_timeout_ms=self._random.choice([50, 10_000]),
            crash_limit=1_000_000,  # nothing here ends its process: the crashes come from outside
        )
        self._runtime = runtime_with(
            self._control, partitions=PARTITIONS, memory=memory, clock=self._clock, settings=settings
        )
        self._calls: list[asyncio.Task[None]] = []
        self._acknowledged: dict[str, list[int]] = {key: [] for key in KEYS}
        self._held: Any = None
        self.history = History()

    async def run(self) -> History:
        async with self._runtime as runtime:
            runtime.namespace(Ledger)
            self._seed_clients()
            for _ in range(STEPS):
                await self._step()
            self._release()
            await self._settle()
            await self._collect(runtime)
        return self.history

    def _seed_clients(self) -> None:
        """Back-off is drawn from the seed too."""
        self._runtime.client().jitter = self._random.random
        for partition in self._runtime.partitions:
            if partition is not None:
                partition.client.jitter = self._random.random

    async def _step(self) -> None:
        for _ in range(self._random.choice([0, 1, 3, 10])):
            await asyncio.sleep(0)
        dice = self._random.random()
        if dice < 0.62:
            self._call()
        elif dice < 0.80:
            await self._wait()
        elif dice < 0.90:
            await self._crash()
        elif dice < 0.95:
            self._disturb_the_disk()
        else:
            self._jump()

    def _path(self, key: str) -> list[str]:
        later = KEYS[KEYS.index(key) + 1 :]
        return sorted(self._random.sample(later, self._random.randint(0, min(3, len(later)))))

    def _call(self) -> None:
        rng = self._random
        kind, key = rng.choice(KINDS), rng.choice(KEYS)
        op = Operation(len(self.history.operations), kind, key)
        self.history.operations.append(op)
        stub = self._runtime.namespace(Ledger).get(key)
        args: tuple[Any, ...] = (op.number,)
        if kind in ("pass_on", "spread"):
            op.targets = self._path(key)
            args = (op.number, op.targets)
        elif kind == "arm":
            op.targets = self._path(key)
            args = (op.number, rng.choice([0, 1, 5, 20, 100, 2_000]), op.targets)
        elif kind == "arm_flaky":
            op.failures = rng.randint(0, 3)
            args = (op.number, op.failures)
        elif kind == "arm_every":
            op.targets = [str(rng.choice([300, 700, 5_000]))]
            args = (op.number, int(op.targets[0]))
        elif kind == "read":
            op.seen_before = list(self._acknowledged[key])
            args = ()
        self._log(f"{op.number}: {kind} {key} {op.targets}")
        self._calls.append(asyncio.ensure_future(self._finish(op, getattr(stub, kind)(*args))))

    async def _finish(self, op: Operation, call: Any) -> None:
        try:
            op.result = await call
        except Exception as error:
            op.error = error
        else:
            if op.kind in WRITES:
                self._acknowledged[op.key].append(op.number)
        self._log(f"{op.number} ends: {op.error!r}" if op.error else f"{op.number} ends")

    async def _wait(self) -> None:
        kind = self._random.choice(["turns", "turns", "ms", "s"])
        if kind == "turns":
            for _ in range(self._random.randint(1, 30)):
                await asyncio.sleep(0)
        elif kind == "ms":
            await self._advance(self._random.randint(1, 50))
        else:
            self._release()
            await self._advance(self._random.randint(500, 4_000))

    async def _advance(self, ms: int) -> None:
        self._log(f"advance {ms}")
        await asyncio.sleep(ms / 1_000)  # the clients' time
        await self._runtime.advance(ms=ms)

    async def _crash(self) -> None:
        self._release()
        rng = self._random
        victims = rng.choice([None, *range(PARTITIONS)])
        if rng.random() < 0.6:
            self._control.applied = rng.random() < 0.5
            self._control.crash_at = self._control.commits + rng.randint(1, 4)
            for _ in range(rng.randint(5, 60)):
                await asyncio.sleep(0)
            self._control.crash_at = 0
            if self._control.stopped_partition is not None and victims is not None:
                victims = self._control.stopped_partition
            self._log(f"stopped at a commit of {self._control.stopped_partition}, applied: {self._control.applied}")
            self._control.stopped_partition = None
        self._log(f"crash of {'all' if victims is None else victims}")
        await self._runtime.crash(victims)
        self._seed_clients()

    def _disturb_the_disk(self) -> None:
        if self._random.random() < 0.5:
            count = self._random.randint(1, 2)
            self._log(f"the next {count} commits fail")
            self._control.fail_next(count)
        elif self._held is None:
            self._log("commits are held")
            self._held = self._control.hold()
            self._held.__enter__()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._log("commits go on")
            held.__exit__(None, None, None)

    def _jump(self) -> None:
        step_ms = self._random.choice([-1_500, -20, 30, 2_500])
        self._log(f"the wall clock is set by {step_ms}")
        self._clock.step_wall(step_ms)

    def _log(self, what: str) -> None:
        self.history.events.append(f"{self._clock.wall_ms() % 1_000_000:>6} {what}")

    async def _settle(self) -> None:
        """No more faults: everything that was asked ends, and every timer runs."""
        self._control.calm()
        self._log("no more faults")
        for _ in range(200):
            await self._advance(250)
            if all(call.done() for call in self._calls):
                break
        waiting = [op for op, call in zip(self.history.operations, self._calls, strict=True) if not call.done()]
        assert not waiting, f"never answered: {waiting}"
        for op in self.history.operations:
            if op.kind == "arm_every":
                await self._until(self._runtime.namespace(Ledger).get(op.key).cancel_every(op.number))
        await self._advance(40_000)
        await self._advance(90_000)

    async def _until(self, call: Any) -> Any:
        future = asyncio.ensure_future(call)
        for _ in range(200):
            if future.done():
                break
            await self._advance(100)
        return await future

    async def _collect(self, runtime: LocalRuntime) -> None:
        history = self.history
        for key in KEYS:
            history.state[key] = await self._until(runtime.namespace(Ledger).get(key).everything())
        history.dead_letters = len(await self._until(runtime.dead_letters()))
        await self._advance(700_000)  # past `call_memory_ms`: what nobody repeats is forgotten
        for partition in runtime.partitions:
            assert partition is not None
            history.kept += partition.status()["inbox"]
            history.intents += len(partition.store.scan("intents"))
            history.claims += len(partition.store.scan("claims"))


def check(seed: int, *, memory: bool = True) -> None:
    """Run one seed and judge it; a failure tells the seed and what happened."""
    simulation = Simulation(seed, memory=memory)
    history = simulation.history
    try:
        run_simulated(simulation.run())
        for invariant in INVARIANTS:
            invariant(history)
    except BaseException:
        print(f"seed {seed} (SEED={seed} pytest tests/property/test_simulation.py runs it again):")
        print("\n".join(history.events))
        raise


@pytest.mark.parametrize("seed", SEEDS)
def test_no_schedule_breaks_an_invariant(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("seed", SEEDS[:5])
def test_no_schedule_breaks_an_invariant_on_sqlite(seed: int) -> None:
    check(seed, memory=False)


def test_a_seed_replays_in_the_same_order() -> None:
    histories = []
    for _ in range(2):
        simulation = Simulation(7, memory=True)
        run_simulated(simulation.run())
        histories.append(simulation.history)
    assert histories[0].events == histories[1].events
    assert histories[0].state == histories[1].state


@pytest.mark.soak
@pytest.mark.parametrize("seed", SOAK_SEEDS)
def test_many_schedules_break_no_invariant(seed: int) -> None:
    check(seed)
