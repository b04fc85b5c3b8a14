"""Whatever is armed, whatever the handlers do and however small the budget: nothing is forgotten, nothing is early."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.manual_clock import ManualClock
from tests.support.timer_store import Note, make_timer_store
from tests.support.timer_table import A, B, C, Table, timer
from timers.backoff import RETRY_BACKOFF_MS, retry_delay_ms
from timers.batch import Batch, NotAfter, Present, Put
from timers.budget import TickBudget, TickState
from timers.engine import RunReport
from timers.firing import Done, DueTimer, Fired, Reschedule, Retry, TimerCtx
from timers.registry import TimerRegistry
from timers.rows import USER_LANE, TimerRow

START = 1_000_000
UNKNOWN = 0xFA

#: What a handler does at one call; after its script a timer is done.
STEPS = st.sampled_from(["retry", "raise", "race", "late", "refused", "again", "slow"])


@dataclass
class Plan:
    """One timer: when it is due and what its handler does at each call before it ends."""

    due_ms: int
    kind: int
    script: list[str]


PLANS = st.builds(
    Plan,
    due_ms=st.integers(START - 20_000, START + 20_000),
    kind=st.sampled_from([A, B, C]),
    script=st.lists(STEPS, max_size=3),
)
BUDGETS = st.builds(
    TickBudget,
    max_fired=st.integers(1, 12),
    max_per_kind=st.integers(1, 6),
    max_scanned=st.integers(2, 40),
    max_elapsed_ms=st.integers(1, 50),
)


@dataclass
class World:
    """The handlers' side: what each timer still has to do, and what happened."""

    clock: ManualClock
    scripts: dict[bytes, list[str]]
    armed_for: dict[bytes, int]
    calls: Counter[int] = field(default_factory=Counter)
    early: list[bytes] = field(default_factory=list)

    def decide(self, ctx: TimerCtx, due: DueTimer) -> Fired:
        self.calls[due.kind] += 1
        ref = due.reference
        if due.due_at_ms > ctx.now_ms or due.due_at_ms != self.armed_for[ref]:
            self.early.append(ref)
        step = self.scripts[ref].pop(0) if self.scripts[ref] else "done"
        if step == "slow":
            self.clock.step_monotonic(20)
        if step in ("done", "slow"):
            return Done(Batch(writes=(Put(Note(ref.decode(), 1)),)))
        if step == "retry":
            return Retry()
        if step == "race":
            return Done(Batch((Present("notes", ("missing",)),)))
        if step == "late":
            return Done(Batch((NotAfter(ctx.now_ms - 1),)))
        if step == "refused":
            return Done(Batch(writes=(Put(Note("refused")),)))
        if step == "again":
            self.armed_for[ref] = ctx.now_ms + 700 + int(ref)
            return Reschedule(self.armed_for[ref], b"")
        raise RuntimeError(step)


@dataclass
class Scripted:
    """Serves one kind by the world's scripts."""

    kind: int
    world: World
    max_per_tick: int | None = None

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        return self.world.decide(ctx, timer)


async def world_of(plans: list[list[Plan]]) -> tuple[World, list[Table]]:
    clock = ManualClock(START)
    world = World(clock, {}, {})
    tables = []
    for head, its_plans in enumerate(plans):
        table = Table(make_timer_store(clock), clock)
        table.store.refuse = lambda batch: Put(Note("refused")) in batch.writes
        for number, plan in enumerate(its_plans):
            ref = b"%d" % (head * 100 + number)
            world.scripts[ref] = list(plan.script)
            world.armed_for[ref] = plan.due_ms
            await table.put(timer(plan.due_ms, kind=plan.kind, ref=ref))
        tables.append(table)
    return world, tables


def assert_wake_is_early_enough(report: RunReport, left: list[TimerRow], now_ms: int) -> None:
    """Exact for a future row, unless the budget ended before it could be looked for; then, and for what is due, 5 s."""
    for row in left:
        assert report.next_wake_ms is not None
        is_exact = row.due_ms > now_ms and not report.stopped_on_budget
        assert report.next_wake_ms <= (row.due_ms if is_exact else now_ms + RETRY_BACKOFF_MS)
    assert report.next_wake_ms is None or report.next_wake_ms >= now_ms


def assert_within(budget: TickBudget, state: TickState, caps: dict[int, int], calls: Counter[int]) -> None:
    assert state.examined <= budget.max_scanned
    assert state.committed <= budget.max_fired
    for kind, count in calls.items():
        assert count <= min(budget.max_per_kind, caps.get(kind, budget.max_per_kind))
        assert count == state.attempted_for(kind)


@settings(max_examples=150, deadline=None)
@given(plans=st.lists(st.lists(PLANS, max_size=12), min_size=1, max_size=3), budget=BUDGETS, own_cap=st.integers(1, 4))
def test_following_the_wakes_alone_every_timer_ends_never_early_and_within_the_shared_budget(
    plans: list[list[Plan]], budget: TickBudget, own_cap: int
) -> None:
    async def check() -> None:
        world, tables = await world_of(plans)
        handlers = [Scripted(A, world, own_cap), Scripted(B, world), Scripted(C, world)]
        clock = world.clock
        for tick in range(5_000):
            now_ms = clock.wall_ms()
            # Both rotations advance, one inside the other, so that each lane of each table is first some time.
            state = TickState.new(budget, clock.monotonic_ms, rotation=tick // len(tables))
            first = tick % len(tables)
            world.calls.clear()
            wakes: list[int] = []
            for table in tables[first:] + tables[:first]:
                report = await table.run_shared(state, *handlers, now_ms=now_ms)
                assert_wake_is_early_enough(report, await table.timers(), now_ms)
                if report.next_wake_ms is not None:
                    wakes.append(report.next_wake_ms)
            assert_within(budget, state, {A: own_cap}, world.calls)
            if not wakes:
                break
            clock.set_wall(min(wakes))
        assert world.early == []
        for table in tables:
            assert await table.timers() == []
        ended = [name for table in tables for name in world.scripts if await table.store.note(name.decode()) == 1]
        assert sorted(ended) == sorted(world.scripts)

    asyncio.run(check())


@settings(max_examples=150, deadline=None)
@given(
    plans=st.lists(PLANS, max_size=30),
    unknown=st.lists(st.integers(START - 100, START + 100), max_size=5),
    user=st.lists(st.integers(START - 100, START + 100), max_size=5),
    budget=BUDGETS,
    rotation=st.integers(0, 10),
)
def test_one_tick_accounts_for_every_row_that_it_read_and_for_every_row_that_is_left(
    plans: list[Plan], unknown: list[int], user: list[int], budget: TickBudget, rotation: int
) -> None:
    async def check() -> None:
        world, [table] = await world_of([plans])
        await table.put(*(timer(due, kind=UNKNOWN, ref=b"%d" % n) for n, due in enumerate(unknown)))
        users = [timer(due, kind=33, lane=USER_LANE, ref=b"%d" % n) for n, due in enumerate(user)]
        await table.put(*users)
        before = await table.timers()
        report = await table.run(
            Scripted(A, world), Scripted(B, world), Scripted(C, world), now_ms=START, budget=budget, rotation=rotation
        )
        after = await table.timers()

        handled = report.fired + report.raced + report.failed + report.unknown + report.deferred
        assert handled <= report.scanned <= budget.max_scanned
        due = sum(row.due_ms <= START for row in before)
        if report.stopped_on_budget:
            assert handled <= due
        else:
            assert handled == due  # nothing due was left out, and nothing else was touched
        assert_wake_is_early_enough(report, after, START)
        for row in users:
            assert await table.store.get(TimerRow, row.key()) == row
        for row in set(before) - set(after):
            assert row.due_ms <= START

    asyncio.run(check())


@settings(max_examples=100, deadline=None)
@given(
    due=st.integers(0, START),
    late_ms=st.integers(0, 10**9),
    attempt=st.integers(0, 20),
    generation=st.integers(0, 2**63 - 1),
    payload=st.binary(max_size=20),
)
def test_a_retry_move_changes_the_due_time_and_the_attempt_and_nothing_else(
    due: int, late_ms: int, attempt: int, generation: int, payload: bytes
) -> None:
    async def check() -> None:
        clock = ManualClock(START)
        table = Table(make_timer_store(clock), clock)
        row = timer(START, generation=generation, first_due_ms=due, attempt=attempt, payload=payload)
        await table.put(row)
        now_ms = START + late_ms
        world = World(clock, {b"r": ["retry"]}, {b"r": due})
        report = await table.run(Scripted(A, world), now_ms=now_ms)
        next_ms = now_ms + retry_delay_ms(attempt + 1)
        assert await table.timers() == [
            timer(next_ms, generation=generation, first_due_ms=due, attempt=attempt + 1, payload=payload)
        ]
        assert report.next_wake_ms == next_ms

    asyncio.run(check())


@settings(max_examples=40, deadline=None)
@example(heads=16, rows=32, cap=32)
@given(heads=st.integers(1, 20), rows=st.integers(1, 40), cap=st.integers(1, 40))
def test_heads_that_share_a_state_share_the_cap_of_a_kind(heads: int, rows: int, cap: int) -> None:
    """With the defaults, 16 heads of 32 failing rows are tried exactly 32 times."""

    async def check() -> None:
        world, tables = await world_of([[Plan(START, A, ["raise"]) for _ in range(rows)] for _ in range(heads)])
        state = TickState.new(TickBudget(max_per_kind=cap), world.clock.monotonic_ms)
        reports = [await table.run_shared(state, Scripted(A, world), now_ms=START) for table in tables]
        assert world.calls[A] == sum(report.failed for report in reports) == min(cap, heads * rows)
        for report, table in zip(reports, tables, strict=True):
            assert_wake_is_early_enough(report, await table.timers(), START)

    asyncio.run(check())


@settings(max_examples=60, deadline=None)
@example(many=100, few=5, cap=10)
@given(many=st.integers(0, 120), few=st.integers(0, 20), cap=st.integers(1, 15))
def test_a_capped_kind_never_hides_another_and_repeated_ticks_drain_both(many: int, few: int, cap: int) -> None:
    """100 and 5 rows with a cap of 10: 15 fire, 90 are deferred, and the next wake is now."""

    async def check() -> None:
        world, [table] = await world_of([[Plan(START - 1, A, [])] * many + [Plan(START, B, [])] * few])
        handlers = [Scripted(A, world), Scripted(B, world)]
        budget = TickBudget(max_per_kind=cap)
        report = await table.run(*handlers, now_ms=START, budget=budget)
        fired = min(many, cap) + min(few, cap)
        assert (report.fired, report.deferred) == (fired, many + few - fired)
        ticks = 1
        while report.next_wake_ms is not None:
            assert report.next_wake_ms == START
            report = await table.run(*handlers, now_ms=START, budget=budget)
            ticks += 1
        assert ticks == max(1, -(-many // cap), -(-few // cap))
        assert (world.calls[A], world.calls[B]) == (many, few)

    asyncio.run(check())


def test_the_registry_of_these_tests_leaves_one_kind_unknown() -> None:
    world = World(ManualClock(), {}, {})
    assert TimerRegistry([Scripted(kind, world) for kind in (A, B, C)]).get(UNKNOWN) is None
