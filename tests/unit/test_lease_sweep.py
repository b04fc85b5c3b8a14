"""The timer kind that removes leases nobody renewed: its rules, one by one (A.5), on every timer store."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.timer_store import make_timer_store
from tests.support.timer_table import NOW, PARTITION, Table
from timers.backoff import RETRY_BACKOFF_MS
from timers.batch import Batch, NotAfter, Outcome
from timers.engine import RunReport, run_due
from timers.errors import CorruptRow
from timers.firing import PartitionName, PartitionRole
from timers.lease_sweep import KEEP_MS, LAG_WARNING_MS, HolderBacklog, LeaseSweep
from timers.leases import (
    GRANT_WINDOW_MS,
    Holder,
    LeaseRow,
    end_lease,
    grant_lease,
    lease_name,
    lease_ref,
    renew_lease,
    sweep_timer,
)
from timers.registry import TimerKind, TimerRegistry
from timers.rows import TimerRow

KIND = int(TimerKind.LEASE_SWEEP)
COORDINATOR = PartitionName(PartitionRole.COORDINATOR, -1)
HOLDER = Holder("Worker", "a")
#: Granted so that it ends just now.
ROW = LeaseRow("job", 7, HOLDER, "request", NOW, NOW)


class Backlogs:
    """What holders have sent and has not arrived."""

    def __init__(self) -> None:
        self.messages = 0
        self.watermark_ms = 0
        self.error: Exception | None = None
        self.asked: list[Holder] = []

    async def backlog(self, holder: Holder) -> HolderBacklog:
        self.asked.append(holder)
        if self.error is not None:
            raise self.error
        return HolderBacklog(self.messages, self.watermark_ms)


class Sweep:
    """A coordinator's leases and the kind that sweeps them."""

    def __init__(self, table: Table, clock: ManualClock) -> None:
        self.table = table
        self.clock = clock
        self.backlogs = Backlogs()
        self.lagging: list[tuple[str, int]] = []
        self.has_client = True

    async def put(self, row: LeaseRow) -> LeaseRow:
        await self.table.put(row, sweep_timer(row))
        return row

    async def apply(self, batch: Batch) -> Outcome:
        (outcome,) = await self.table.store.inner.apply([batch])
        return outcome

    async def run(self, now_ms: int = NOW, where: PartitionName = COORDINATOR) -> RunReport:
        handler = LeaseSweep(
            self.backlogs if self.has_client else None,
            lambda row, late_ms: self.lagging.append((row.name, late_ms)),
        )
        return await run_due(
            self.table.store,
            TimerRegistry([handler]),
            now_ms,
            monotonic_ms=self.clock.monotonic_ms,
            partition=where,
            warn=self.table.faults.append,
        )

    async def row(self, name: str = "job") -> LeaseRow | None:
        return await self.table.store.get(LeaseRow, (name,))

    async def timer(self) -> TimerRow:
        (timer,) = await self.table.timers()
        return timer


@pytest.fixture
def sweep(table: Table, clock: ManualClock) -> Sweep:
    return Sweep(table, clock)


async def test_1_outside_a_coordinator_it_is_retried(sweep: Sweep) -> None:
    await sweep.put(ROW)
    assert (await sweep.run(where=PARTITION)).failed == 1
    assert await sweep.row() == ROW
    timer = await sweep.timer()
    assert (timer.due_ms, timer.first_due_ms, timer.attempt) == (NOW + RETRY_BACKOFF_MS, NOW, 1)


@pytest.mark.parametrize("ref", [b"", b"\xff\xfe", b"a\0b", b"x" * 513])
async def test_2_a_reference_that_names_no_lease_ends_its_timer_with_a_warning(
    sweep: Sweep, ref: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await sweep.table.put(ROW, TimerRow(KIND, NOW, KIND, ref, 0, NOW))
    with caplog.at_level(logging.WARNING, "timers.lease_sweep"):
        assert (await sweep.run()).fired == 1
    assert "no lease's name" in caplog.text
    assert await sweep.table.timers() == []
    assert await sweep.row() == ROW


def test_2_a_reference_is_the_name() -> None:
    assert lease_name(lease_ref("Straße")) == "Straße"


async def test_3_a_lease_that_is_gone_ends_its_timer(sweep: Sweep) -> None:
    await sweep.table.put(sweep_timer(ROW))
    assert (await sweep.run()).fired == 1
    assert await sweep.table.timers() == []


@pytest.mark.parametrize(
    "wrong",
    [{"epoch": -1}, {"expires_ms": "x"}, {"watermark_ms": None}, {"holder": Holder("", "a")}],
)
async def test_4_a_row_that_cannot_be_read_is_kept_and_retried(clock: ManualClock, wrong: dict[str, object]) -> None:
    sweep = Sweep(Table(make_timer_store(clock), clock), clock)
    row = await sweep.put(replace(ROW, **wrong))  # type: ignore[arg-type]
    assert (await sweep.run()).failed == 1
    assert await sweep.row() == row
    assert (await sweep.timer()).due_ms == NOW + RETRY_BACKOFF_MS
    assert isinstance(sweep.table.faults[0].error, CorruptRow)
    assert sweep.backlogs.asked == []


async def test_5_a_timer_that_is_not_the_lease_s_own_is_stale(sweep: Sweep) -> None:
    row = replace(ROW, sweep_due_ms=NOW + 5, expires_ms=NOW + 5)
    await sweep.put(row)
    await sweep.table.put(sweep_timer(ROW))
    assert (await sweep.run()).fired == 1
    assert await sweep.row() == row
    assert (await sweep.timer()).due_ms == NOW + 5


async def test_6_a_lease_that_lasts_longer_is_looked_at_again_at_its_end(sweep: Sweep) -> None:
    row = await sweep.put(replace(ROW, expires_ms=NOW + 9_000))
    assert (await sweep.run()).fired == 1
    assert await sweep.row() == replace(row, sweep_due_ms=NOW + 9_000)
    assert (await sweep.timer()).due_ms == NOW + 9_000
    assert sweep.backlogs.asked == []


async def test_7_without_a_way_to_ask_the_holder_the_lease_is_kept_and_retried(sweep: Sweep) -> None:
    await sweep.put(ROW)
    sweep.has_client = False
    assert (await sweep.run()).failed == 1
    assert await sweep.row() == ROW
    assert (await sweep.timer()).due_ms == NOW + RETRY_BACKOFF_MS


async def test_8_a_holder_that_does_not_answer_keeps_the_lease(sweep: Sweep) -> None:
    await sweep.put(ROW)
    sweep.backlogs.error = ConnectionError("its partition is away")
    assert (await sweep.run()).failed == 1
    assert await sweep.row() == ROW
    sweep.backlogs.error = None
    assert (await sweep.run(NOW + RETRY_BACKOFF_MS)).fired == 1
    assert await sweep.row() is None


async def test_9_an_expired_lease_whose_holder_has_nothing_under_way_goes_with_its_timer(sweep: Sweep) -> None:
    await sweep.put(ROW)
    assert (await sweep.run()).fired == 1
    assert await sweep.row() is None
    assert await sweep.table.timers() == []
    assert sweep.backlogs.asked == [HOLDER]
    assert len(sweep.table.store.applied) == 1


async def test_10_a_holder_with_messages_under_way_keeps_the_lease_in_sight(sweep: Sweep) -> None:
    await sweep.put(ROW)
    sweep.backlogs.messages, sweep.backlogs.watermark_ms = 3, NOW - 100
    assert (await sweep.run()).fired == 1
    kept = replace(ROW, sweep_due_ms=NOW + KEEP_MS, watermark_ms=NOW - 100)
    assert await sweep.row() == kept
    assert (await sweep.timer()).due_ms == NOW + KEEP_MS
    sweep.backlogs.watermark_ms = NOW - 200  # never goes back
    await sweep.run(NOW + KEEP_MS)
    assert await sweep.row() == replace(kept, sweep_due_ms=NOW + 2 * KEEP_MS)
    sweep.backlogs.messages = 0
    await sweep.run(NOW + 2 * KEEP_MS)
    assert await sweep.row() is None


async def test_10_the_next_look_is_later_than_the_last_also_when_the_clock_went_back(sweep: Sweep) -> None:
    row = replace(ROW, sweep_due_ms=NOW + 50_000)
    await sweep.table.put(row, replace(sweep_timer(row), due_ms=NOW))
    sweep.backlogs.messages = 1
    await sweep.run()
    assert (await sweep.timer()).due_ms == NOW + 50_001


async def test_11_a_lease_kept_for_more_than_a_minute_is_reported(
    sweep: Sweep, caplog: pytest.LogCaptureFixture
) -> None:
    row = await sweep.put(replace(ROW, sweep_due_ms=NOW + LAG_WARNING_MS))
    sweep.backlogs.messages = 2
    with caplog.at_level(logging.WARNING, "timers.lease_sweep"):
        await sweep.run(NOW + LAG_WARNING_MS)
        assert sweep.lagging == []  # strictly more
        await sweep.run(NOW + LAG_WARNING_MS + KEEP_MS)
    assert sweep.lagging == [(row.name, LAG_WARNING_MS + KEEP_MS)]
    assert "2 of its holder's messages" in caplog.text


async def test_12_a_renewal_between_plan_and_commit_survives(sweep: Sweep) -> None:
    await sweep.put(ROW)
    renewed, batch = renew_lease(ROW, NOW + 30_000, NOW)

    async def renew() -> None:
        assert await sweep.apply(batch) is Outcome.COMMITTED

    sweep.table.store.before_apply = renew
    assert (await sweep.run()).raced == 1
    assert await sweep.row() == renewed
    assert [timer.due_ms for timer in await sweep.table.timers()] == [NOW + 30_000]


async def test_13_each_lease_owns_one_timer_which_grant_renewal_and_release_write_with_it(sweep: Sweep) -> None:
    first = replace(ROW, expires_ms=NOW + 10, sweep_due_ms=NOW + 10)
    assert await sweep.apply(grant_lease(None, first, NOW)) is Outcome.COMMITTED
    assert (await sweep.timer()).due_ms == NOW + 10
    second, batch = renew_lease(first, NOW + 20, NOW)
    assert await sweep.apply(batch) is Outcome.COMMITTED
    assert (await sweep.timer()).due_ms == NOW + 20
    third = replace(second, epoch=8, holder=Holder("Worker", "b"), expires_ms=NOW + 30, sweep_due_ms=NOW + 30)
    assert await sweep.apply(grant_lease(second, third, NOW)) is Outcome.COMMITTED
    assert (await sweep.timer()).due_ms == NOW + 30
    assert await sweep.apply(end_lease(second)) is Outcome.PRECONDITION_FAILED
    assert await sweep.apply(end_lease(third)) is Outcome.COMMITTED
    assert await sweep.table.timers() == []


async def test_13_a_timer_that_was_on_its_retry_ladder_ends_by_itself_after_a_renewal(sweep: Sweep) -> None:
    await sweep.put(ROW)
    sweep.backlogs.error = ConnectionError("away")
    await sweep.run()
    renewed, batch = renew_lease(ROW, NOW + 60_000, NOW)
    assert await sweep.apply(batch) is Outcome.COMMITTED
    await sweep.run(NOW + RETRY_BACKOFF_MS)
    assert await sweep.row() == renewed
    assert [timer.due_ms for timer in await sweep.table.timers()] == [NOW + 60_000]


async def test_14_the_instant_of_expiry_counts_as_expired(sweep: Sweep) -> None:
    assert ROW.is_expired(NOW)
    assert not ROW.is_expired(NOW - 1)
    await sweep.put(ROW)
    assert (await sweep.run(NOW - 1)).fired == 0
    assert (await sweep.run(NOW)).fired == 1
    assert await sweep.row() is None


def test_a_grant_is_written_soon_after_it_was_decided_or_not_at_all() -> None:
    assert NotAfter(NOW + GRANT_WINDOW_MS) in grant_lease(None, ROW, NOW).preconditions
    assert NotAfter(NOW + GRANT_WINDOW_MS) in renew_lease(ROW, NOW + 1, NOW)[1].preconditions
