"""The timer kind that delivers outcomes: its rules, one by one (A.6), on every timer store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.manual_clock import ManualClock
from tests.support.timer_table import NOW, Table
from timers.batch import Batch, Outcome
from timers.engine import RunReport
from timers.errors import CorruptRow, SinkRaised, UndeliverableOutcome
from timers.outcome_delivery import (
    FIRE_BUDGET_MS,
    JUNK_PAUSE_MS,
    MAX_BACKOFF_MS,
    MAX_ROWS_PER_FIRE,
    SINK_TIMEOUT_MS,
    OutcomeDelivery,
    Progress,
    backoff_ms,
)
from timers.outcomes import (
    Backlog,
    Delivered,
    NewOutcome,
    ObjectPlace,
    OutcomeRow,
    Waiting,
    acknowledge,
    queue_outcome,
    waiting,
)
from timers.registry import TimerKind
from timers.rows import TimerRow, owned_ref

OID = 7
PLACE = ObjectPlace(OID, 1, "Order", "a")
KIND = int(TimerKind.OUTCOME_DELIVERY)


class Sinks:
    """Takes outcomes, or does what `reply` says; keeps what it was given, and what the watch is told."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.reply: Callable[[OutcomeRow], Exception | None] = lambda row: None
        self.meanwhile: Callable[[], object] | None = None
        self.gauges: list[Waiting] = []
        self.told: list[tuple[str, object]] = []

    async def deliver(self, outcome: OutcomeRow, source: Backlog) -> None:
        self.given.append(outcome.subject)
        if self.meanwhile is not None:
            action, self.meanwhile = self.meanwhile, None
            await action()  # type: ignore[misc]
        error = self.reply(outcome)
        if error is not None:
            raise error

    def backlog_seen(self, backlog: Backlog, left: Waiting) -> None:
        self.gauges.append(left)

    def delivered(self, outcome: OutcomeRow) -> None:
        self.told.append(("delivered", outcome.subject))

    def synthetic(self, outcome: OutcomeRow) -> None:
        self.told.append(("synthetic", outcome.subject))

    def sink_failed(self, outcome: OutcomeRow, error: Exception) -> None:
        self.told.append(("failed", outcome.subject))

    def retained(self, outcome: OutcomeRow, reason: str) -> None:
        self.told.append(("retained", outcome.seq))


class Delivery:
    """One object's outcomes and the kind that serves them."""

    def __init__(self, table: Table, clock: ManualClock) -> None:
        self.table = table
        self.clock = clock
        self.sinks = Sinks()
        self.handler = OutcomeDelivery(self.sinks, self.sinks, monotonic_ms=clock.monotonic_ms)

    async def queue(self, *subjects: str, now_ms: int = NOW, outcome_id: str | None = None) -> None:
        for subject in subjects:
            new = NewOutcome(outcome_id or f"id-{subject}", "done", "sink", b"payload", subject)
            backlog = await self.table.store.get(Backlog, (OID,))
            (outcome,) = await self.table.store.inner.apply([queue_outcome(backlog, PLACE, new, now_ms)])
            assert outcome is Outcome.COMMITTED

    async def run(self, now_ms: int = NOW) -> RunReport:
        return await self.table.run(self.handler, now_ms=now_ms)

    async def rows(self) -> list[str]:
        return [row.subject for row in await self.table.store.scan(OutcomeRow, (OID,), limit=1_000)]

    async def backlog(self) -> Backlog | None:
        return await self.table.store.get(Backlog, (OID,))

    async def left(self) -> Waiting:
        return waiting(await self.backlog(), await self.table.store.get(Delivered, (OID,)))

    async def timer(self) -> TimerRow:
        (timer,) = await self.table.timers()
        return timer

    async def progress(self) -> Progress:
        return Progress.from_bytes((await self.timer()).payload)

    async def damage(self, seq: int, **columns: object) -> None:
        row = await self.table.store.get(OutcomeRow, (OID, seq))
        assert row is not None
        await self.table.put(replace(row, **columns))  # type: ignore[arg-type]

    async def drain(self, now_ms: int) -> int:
        """Run until nothing is left; the time then."""
        while await self.table.timers():
            now_ms = max(now_ms, (await self.timer()).due_ms)
            await self.run(now_ms)
        return now_ms


@pytest.fixture
def delivery(table: Table, clock: ManualClock) -> Delivery:
    return Delivery(table, clock)


def refuse(*subjects: str, error: Callable[[], Exception] = lambda: ConnectionError("down")) -> Callable[..., object]:
    return lambda row: error() if row.subject in subjects else None


async def test_a_6_01_every_fire_emits_the_gauge_of_rows_and_bytes(delivery: Delivery) -> None:
    await delivery.queue("a", "b")
    before = await delivery.left()
    await delivery.run()
    await delivery.run(NOW + 1)
    assert delivery.sinks.gauges == [before, Waiting(0, 0)]
    assert before.rows == 2
    assert before.bytes > 0


async def test_a_6_02_backlog_of_zero_ends_timer_and_backlog_row_guarded(delivery: Delivery) -> None:
    await delivery.queue("a")
    await delivery.run()
    assert await delivery.left() == Waiting(0, 0)

    async def append() -> None:
        await delivery.queue("b")

    delivery.table.store.before_apply = append
    report = await delivery.run(NOW + 1)
    assert (report.fired, report.raced) == (0, 1)
    assert await delivery.drain(NOW + 1) > NOW
    assert delivery.sinks.given == ["a", "b"]
    assert await delivery.backlog() is None


async def test_a_6_03_the_scan_goes_on_at_the_cursor_and_wraps_to_the_head_once(delivery: Delivery) -> None:
    await delivery.queue("a", "b", "c")
    delivery.sinks.reply = refuse("c")
    await delivery.run()
    assert (await delivery.progress()).cursor == 3  # behind c, at the tail
    delivery.sinks.reply = refuse()
    await delivery.run(NOW + 1)
    assert delivery.sinks.given == ["a", "b", "c", "c"]


async def test_a_6_04_rows_that_make_no_sense_are_skipped_with_a_warning_and_retained(delivery: Delivery) -> None:
    await delivery.queue("a", "b", "c")
    await delivery.damage(1, payload="text")
    delivery.sinks.reply = refuse("b", error=lambda: UndeliverableOutcome("no such sink"))
    await delivery.run()
    assert delivery.sinks.told == [("retained", 1), ("retained", 2), ("delivered", "c")]
    assert await delivery.rows() == ["a", "b"]


@pytest.mark.parametrize(
    "columns",
    [
        {"outcome_id": ""},
        {"outcome_id": b"x"},
        {"kind": 1},
        {"subject": b"x"},
        {"sink": b""},
        {"payload": "text"},
        {"created_ms": -1},
        {"created_ms": "soon"},
        {"tries": -1},
    ],
    ids=str,
)
async def test_a_6_04_what_makes_a_row_unreadable(columns: dict[str, object]) -> None:
    row = OutcomeRow(OID, 1, "id", "kind", "", "", "", "sink", b"", NOW)
    assert row.fault() is None
    assert replace(row, **columns).fault() is not None  # type: ignore[arg-type]


async def test_a_6_05_synthetic_ids_are_acknowledged_without_a_call_and_counted(delivery: Delivery) -> None:
    await delivery.queue("probe", outcome_id="s:1")
    await delivery.queue("a")
    await delivery.run()
    assert delivery.sinks.given == ["a"]
    assert delivery.sinks.told == [("synthetic", "probe"), ("delivered", "a")]
    assert (await delivery.left()).rows == 0


@pytest.mark.parametrize("error", [ConnectionError("down"), TimeoutError("late"), SinkRaised("no")], ids=repr)
async def test_a_6_06_a_failing_sink_stops_the_fire(delivery: Delivery, error: Exception) -> None:
    await delivery.queue("a", "b")
    delivery.sinks.reply = refuse("a", error=lambda: error)
    report = await delivery.run()
    assert (report.fired, report.failed) == (1, 0)
    assert delivery.sinks.given == ["a"]


async def test_a_6_07_the_rows_behind_a_poison_row_are_not_starved(delivery: Delivery) -> None:
    await delivery.queue("poison", *map(str, range(40)))
    delivery.sinks.reply = refuse("poison")
    now_ms = NOW
    while (await delivery.left()).rows > 1:
        await delivery.run(now_ms)
        now_ms = (await delivery.timer()).due_ms
    assert await delivery.rows() == ["poison"]
    assert delivery.sinks.given.count("poison") == 1
    assert delivery.sinks.given[1:] == [str(number) for number in range(40)]


async def test_a_6_08_a_fire_over_its_budget_goes_on_at_the_first_untried_row(delivery: Delivery) -> None:
    await delivery.queue("a", "b", "c")

    async def slow() -> None:
        delivery.clock.advance(FIRE_BUDGET_MS)

    delivery.sinks.meanwhile = slow
    await delivery.run()
    assert delivery.sinks.given == ["a"]
    assert (await delivery.progress()).cursor == 1
    await delivery.run(NOW + 1)
    assert delivery.sinks.given == ["a", "b", "c"]


async def test_a_6_08_without_a_clock_only_the_rows_bound_a_fire(delivery: Delivery) -> None:
    delivery.handler = OutcomeDelivery(delivery.sinks, delivery.sinks)
    await delivery.queue(*map(str, range(20)))
    await delivery.run()
    assert len(delivery.sinks.given) == 16


async def test_a_6_09_what_is_queued_during_the_calls_costs_no_acknowledgement(delivery: Delivery) -> None:
    await delivery.queue("a", "b")

    async def append() -> None:
        await delivery.queue("c")

    delivery.sinks.meanwhile = append
    report = await delivery.run()
    assert (report.fired, report.raced) == (1, 0)
    assert await delivery.rows() == ["c"]
    assert (await delivery.left()).rows == 1


async def test_a_6_09_what_is_queued_between_plan_and_commit_costs_none_either(delivery: Delivery) -> None:
    await delivery.queue("a")

    async def append() -> None:
        await delivery.queue("b")

    delivery.table.store.before_apply = append
    report = await delivery.run()
    assert (report.fired, report.raced) == (1, 0)
    assert await delivery.rows() == ["b"]


async def test_a_6_10_once_all_is_delivered_the_timer_ends_unless_something_was_queued(delivery: Delivery) -> None:
    await delivery.queue("a")
    await delivery.run()
    await delivery.queue("b")
    await delivery.run(NOW + 1)
    assert delivery.sinks.given == ["a", "b"]
    await delivery.run(NOW + 2)
    assert await delivery.table.timers() == []
    assert await delivery.backlog() is None


async def test_a_6_11_after_a_delivery_the_next_fire_comes_at_once_with_attempt_0(delivery: Delivery) -> None:
    await delivery.queue("a", "b")
    delivery.sinks.reply = refuse("a")
    await delivery.run()
    assert (await delivery.progress()).attempt == 1
    due_ms = (await delivery.timer()).due_ms
    await delivery.run(due_ms)  # delivers b
    assert (await delivery.progress()).attempt == 0
    assert (await delivery.timer()).due_ms == due_ms + 1


async def test_a_6_11_a_late_fire_goes_on_now_and_never_at_its_own_time(delivery: Delivery) -> None:
    await delivery.queue("a", "b")
    await delivery.run(NOW + 50)
    assert (await delivery.timer()).due_ms == NOW + 50


async def test_a_6_11_a_timer_on_the_engines_ladder_moves_on_too(delivery: Delivery) -> None:
    await delivery.queue("a", "b")
    timer = await delivery.timer()
    moved = replace(timer, due_ms=NOW + 5_000, attempt=1)
    await delivery.table.store.inner.apply([_replaced(timer, moved)])
    report = await delivery.run(NOW + 5_000)
    assert (report.fired, report.failed) == (1, 0)
    assert (await delivery.timer()).due_ms == NOW + 5_001


async def test_a_6_12_when_nothing_was_delivered_the_pause_is_the_longer_of_back_off_and_hint(
    delivery: Delivery,
) -> None:
    await delivery.queue("a")
    delivery.sinks.reply = refuse("a")
    await delivery.run()
    first = backoff_ms(owned_ref(OID), 0)
    assert (await delivery.timer()).due_ms == NOW + first
    delivery.sinks.reply = refuse("a", error=lambda: SinkRaised("later", 60_000))
    await delivery.run(NOW + first)
    assert (await delivery.timer()).due_ms == NOW + first + 60_000
    assert (await delivery.progress()).attempt == 2
    delivery.sinks.reply = refuse("a", error=lambda: SinkRaised("tomorrow", 86_400_000))
    await delivery.run(NOW + first + 60_000)
    assert (await delivery.timer()).due_ms == NOW + first + 60_000 + MAX_BACKOFF_MS


async def test_a_6_12_a_page_of_junk_pauses_without_counting_an_attempt(delivery: Delivery) -> None:
    await delivery.queue(*map(str, range(17)))
    for seq in range(1, 17):
        await delivery.damage(seq, payload="text")
    await delivery.run()
    assert (await delivery.timer()).due_ms == NOW + backoff_ms(owned_ref(OID), 0)
    assert await delivery.progress() == Progress(0, 16)
    await delivery.run((await delivery.timer()).due_ms)
    assert delivery.sinks.given == ["16"]


async def test_a_6_12_when_there_is_nothing_but_junk_the_pause_is_a_minute(delivery: Delivery) -> None:
    await delivery.queue("a")
    await delivery.damage(1, payload="text")
    for fire in range(3):
        now_ms = (await delivery.timer()).due_ms
        await delivery.run(now_ms)
        assert (await delivery.progress()).attempt == 0, fire
        assert (await delivery.timer()).due_ms == now_ms + JUNK_PAUSE_MS


@given(attempt=st.integers(0, 2**32 - 1), oid=st.integers(0, 2**63 - 1))
def test_a_6_13_back_off_doubles_to_its_cap_with_up_to_a_fifth_of_jitter(attempt: int, oid: int) -> None:
    ladder = min(1_000 * 2 ** min(attempt, 20), 900_000)
    pause = backoff_ms(owned_ref(oid), attempt)
    assert ladder <= pause <= min(ladder + ladder // 5, 900_000)
    assert pause == backoff_ms(owned_ref(oid), attempt)


def test_a_6_13_objects_that_failed_together_spread_out() -> None:
    assert len({backoff_ms(owned_ref(oid), 3) for oid in range(100)}) > 50


async def test_a_6_14_a_delivery_whose_acknowledgement_is_lost_comes_again_under_its_id(delivery: Delivery) -> None:
    await delivery.queue("a")
    ids: list[str] = []
    delivery.sinks.reply = lambda row: ids.append(row.outcome_id)  # type: ignore[func-returns-value]
    refused = iter([True, True])
    delivery.table.store.refuse = lambda batch: next(refused, False)  # the acknowledgement, and the retry move
    await delivery.run()
    assert await delivery.rows() == ["a"]
    await delivery.drain(NOW)
    assert ids == ["id-a", "id-a"]


async def test_a_6_14_a_run_of_the_sink_that_raised_is_counted_and_one_of_unknown_end_is_not(
    delivery: Delivery,
) -> None:
    await delivery.queue("a")
    for error, tries in ((SinkRaised("no"), 1), (ConnectionError("down"), 1), (SinkRaised("no"), 2)):
        delivery.sinks.reply = refuse("a", error=lambda error=error: error)
        await delivery.run((await delivery.timer()).due_ms)
        row = await delivery.table.store.get(OutcomeRow, (OID, 1))
        assert row is not None
        assert row.tries == tries


@pytest.mark.parametrize(
    "payload",
    [b"\0", b"\0" * 5, b"\0\0\0\1\0\1", b"\0\0\0\1\0\0\0", b"\0\0\0\1\0\1\0", b"\0" * 4 + b"\xff\xff" + b"\0" * 65_535],
    ids=len,
)
async def test_a_6_15_a_payload_that_can_not_be_read_is_corrupt_and_goes_on_the_retry_ladder(
    delivery: Delivery, payload: bytes
) -> None:
    with pytest.raises(CorruptRow):
        Progress.from_bytes(payload)
    await delivery.queue("a")
    timer = await delivery.timer()
    await delivery.table.put(replace(timer, payload=payload))
    report = await delivery.run()
    assert report.failed == 1
    assert (await delivery.timer()).payload == payload
    assert delivery.sinks.given == []


@given(attempt=st.integers(0, 2**32 - 1), cursor=st.integers(0, 2**63 - 1))
def test_a_6_15_progress_survives_its_payload(attempt: int, cursor: int) -> None:
    assert Progress.from_bytes(Progress(attempt, cursor).to_bytes()) == Progress(attempt, cursor)
    assert Progress.from_bytes(b"") == Progress()


@pytest.mark.parametrize("reference", [b"", b"short", owned_ref(OID, b"x")])
async def test_a_6_15_a_reference_that_names_no_object_is_corrupt(delivery: Delivery, reference: bytes) -> None:
    await delivery.table.put(TimerRow(KIND, NOW, KIND, reference, 0, NOW))
    assert (await delivery.run()).failed == 1


async def test_a_6_16_the_first_outcome_arms_the_timer_at_its_own_time_and_the_next_ones_do_not(
    delivery: Delivery,
) -> None:
    await delivery.queue("a", now_ms=NOW - 3)
    await delivery.queue("b", now_ms=NOW)
    assert await delivery.timer() == TimerRow(KIND, NOW - 3, KIND, owned_ref(OID), 0, NOW - 3)


async def test_a_6_16_after_the_end_of_a_backlog_the_next_outcome_arms_again(delivery: Delivery) -> None:
    await delivery.queue("a")
    now_ms = await delivery.drain(NOW)
    await delivery.queue("b", now_ms=now_ms + 5)
    assert (await delivery.timer()).due_ms == now_ms + 5
    await delivery.drain(now_ms + 5)
    assert delivery.sinks.given == ["a", "b"]


async def test_a_6_17_bytes_are_those_of_keys_and_values_and_add_up(delivery: Delivery) -> None:
    await delivery.queue("ä", "b")
    rows = await delivery.table.store.scan(OutcomeRow, (OID,), limit=10)
    assert rows[0].size == 16 + len("id-ä".encode()) + len("done") + len("ä".encode()) + len("sink") + 7 + 8
    assert (await delivery.left()).bytes == sum(row.size for row in rows)


@pytest.mark.parametrize("columns", [{"bytes": 2**63 - 1}, {"next_seq": 2**63 - 1}, {"bytes": -1}, {"next_seq": 0}])
async def test_a_6_17_a_count_that_would_overflow_is_corrupt(columns: dict[str, int]) -> None:
    backlog = replace(Backlog(OID, "Order", "a", 1, 0, NOW), **columns)  # type: ignore[arg-type]
    with pytest.raises(CorruptRow):
        queue_outcome(backlog, PLACE, NewOutcome("id", "done", "sink", b""), NOW)


@pytest.mark.parametrize("done", [Delivered(OID, 3, 0), Delivered(OID, 0, 10_000), Delivered(OID, -1, 0)])
async def test_a_6_17_counts_that_do_not_fit_together_are_corrupt_and_nothing_is_sent(
    delivery: Delivery, done: Delivered
) -> None:
    await delivery.queue("a", "b")
    await delivery.table.put(done)
    assert (await delivery.run()).failed == 1
    assert delivery.sinks.given == []


async def test_a_6_17_a_count_without_rows_is_corrupt(delivery: Delivery) -> None:
    await delivery.table.put(Backlog(OID, "Order", "a", 2, 10, NOW), TimerRow(KIND, NOW, KIND, owned_ref(OID), 0, NOW))
    assert (await delivery.run()).failed == 1


async def test_a_timer_without_a_backlog_ends(delivery: Delivery) -> None:
    await delivery.table.put(TimerRow(KIND, NOW, KIND, owned_ref(OID), 0, NOW))
    assert (await delivery.run()).fired == 1
    assert await delivery.table.timers() == []


@pytest.mark.parametrize(("asked", "given_rows"), [(0, 1), (1, 1), (1_000, MAX_ROWS_PER_FIRE)])
async def test_rows_per_fire_stay_between_1_and_23_so_that_a_batch_holds_them(
    delivery: Delivery, asked: int, given_rows: int
) -> None:
    delivery.handler = OutcomeDelivery(delivery.sinks, delivery.sinks, rows_per_fire=asked)
    await delivery.queue(*map(str, range(40)))
    report = await delivery.run()
    assert (report.fired, report.failed) == (1, 0)
    assert len(delivery.sinks.given) == given_rows


def test_a_full_batch_of_acknowledgements_leaves_room_for_the_engine() -> None:
    rows = [OutcomeRow(OID, seq, "id", "kind", "", "", "", "sink", b"", NOW) for seq in range(1, MAX_ROWS_PER_FIRE + 1)]
    assert len(acknowledge(OID, None, rows, None)) + 4 <= 100


def test_a_fire_has_the_time_of_two_sinks_at_their_limit() -> None:
    assert (SINK_TIMEOUT_MS, FIRE_BUDGET_MS) == (5_000, 10_000)


@given(data=st.data())
async def test_whatever_fails_in_between_each_outcome_is_taken_and_the_counts_end_at_nothing(
    data: st.DataObject,
) -> None:
    from tests.support.timer_store import make_timer_store

    clock = ManualClock(NOW)
    delivery = Delivery(Table(make_timer_store(clock), clock), clock)
    taken: list[str] = []
    queued = data.draw(st.integers(1, 40))
    await delivery.queue(*map(str, range(queued)))
    faults = data.draw(st.lists(st.sampled_from([None, ConnectionError("x"), SinkRaised("x"), "append"]), max_size=60))

    async def append() -> None:
        nonlocal queued
        await delivery.queue(str(queued))
        queued += 1

    def reply(row: OutcomeRow) -> Exception | None:
        fault = faults.pop() if faults else None
        if fault == "append":
            delivery.sinks.meanwhile = append
        elif fault is not None:
            return fault  # type: ignore[return-value]
        taken.append(row.subject)
        return None

    delivery.sinks.reply = reply
    await delivery.drain(NOW)
    assert sorted(taken, key=int) == [str(number) for number in range(queued)]
    assert await delivery.rows() == []
    assert await delivery.backlog() is None


def _replaced(old: TimerRow, new: TimerRow) -> Batch:
    from timers.batch import Delete, Put

    return Batch((), (Delete(old.table, old.key()), Put(new)))
