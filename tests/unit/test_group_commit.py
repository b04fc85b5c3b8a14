"""The group commit: many write sets, one transaction, gates that open together and in order, honest failures."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from drivers import sql
from drivers.errors import CommitFailed, CommitOutcomeUnknown, Fenced, StoreClosed, WriteSetRejected
from drivers.executor import Done, Executor, InlineExecutor
from drivers.group_commit import GroupCommitter
from drivers.store import Store
from drivers.tables import INBOX, KV, SLOTS, TIMERS, Op
from drivers.write_set import FieldEquals, InboxEntry, Lineage, WriteSet
from tests.support.stores import PLACES, FaultyConnection, FilePlace, Place, sqlite_error
from timers.batch import Absent, Batch, Delete, Equals, NotAfter, Outcome, Present, Put
from timers.rows import TimerRow

NOW = 1_000_000
FULL = sqlite_error(13, "database or disk is full")
IO_ERROR = sqlite_error(10, "disk I/O error")


class HeldExecutor:
    """Runs a job when the test says so, as a disk that takes its time."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], Any], Done]] = []

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        self.jobs.append((job, done))

    def close(self) -> None:
        return None

    def run(self) -> None:
        job, done = self.jobs.pop(0)
        InlineExecutor().submit(job, done)


class Bench:
    """A committer on an open store, and what its units were told."""

    def __init__(self, place: Place, executor: Executor | None = None, **options: Any) -> None:
        self.place = place
        self.store: Store = place.open()
        self.told: list[tuple[str, BaseException | None]] = []
        self.fatal: list[BaseException] = []
        self.now_ms = NOW
        self.committer = GroupCommitter(
            self.store,
            executor or InlineExecutor(),
            wall_ms=lambda: self.now_ms,
            monotonic_ms=lambda: self.now_ms,
            on_fatal=self.fatal.append,
            **options,
        )
        self.committer.start()

    def submit(self, name: str, ops: list[Op], **more: Any) -> WriteSet:
        write_set = WriteSet(ops, **more)
        write_set.waiters.append(lambda error: self.told.append((name, error)))
        self.committer.submit(write_set)
        return write_set

    async def drain(self) -> None:
        await asyncio.wait_for(self.committer.drain(), 5)

    @property
    def outcomes(self) -> dict[str, type[BaseException] | None]:
        return {name: None if error is None else type(error) for name, error in self.told}

    def close(self) -> None:
        self.committer.abandon()
        self.store.close()
        self.place.remove()


def kv(oid: int, value: bytes = b"v", key: str = "k") -> Op:
    return (KV, (oid, key), (value,))


def timer(due_ms: int, **more: Any) -> TimerRow:
    return TimerRow(5, due_ms, 5, b"r", 0, due_ms, **more)


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest) -> Place:
    return PLACES[request.param]()


@pytest.fixture
def bench(place: Place) -> Iterator[Bench]:
    bench = Bench(place)
    yield bench
    bench.close()


@pytest.fixture
def held(place: Place) -> Iterator[tuple[Bench, HeldExecutor]]:
    executor = HeldExecutor()
    bench = Bench(place, executor)
    yield bench, executor
    bench.close()


@pytest.fixture
def faulty() -> Iterator[tuple[Bench, type[FaultyConnection]]]:
    class Connection(FaultyConnection):
        pass

    bench = Bench(FilePlace(Connection))
    yield bench, Connection
    Connection.fault = None
    bench.close()


def fail_once(connection: type[FaultyConnection], statement: str, error: Exception) -> None:
    def fault(given: str) -> Exception | None:
        if given != statement:
            return None
        connection.fault = None
        return error

    connection.fault = fault


# --- order and groups -------------------------------------------------------------------------------


async def test_write_sets_are_applied_in_the_order_of_their_submission(bench: Bench) -> None:
    for number in range(5):
        bench.submit(f"{number}", [kv(1, b"%d" % number)])
    await bench.drain()
    assert bench.store.get(KV, (1, "k")) == (b"4",)
    assert [name for name, _ in bench.told] == ["0", "1", "2", "3", "4"]


async def test_what_ends_in_one_loop_turn_shares_a_commit(bench: Bench) -> None:
    for oid in range(1, 11):
        bench.submit("set", [kv(oid)])
    await bench.drain()
    assert bench.committer.commits == 1
    assert bench.committer.units == 10


async def test_nothing_is_told_from_inside_submit(bench: Bench) -> None:
    bench.submit("set", [kv(1)])
    assert bench.told == []
    await bench.drain()
    assert bench.told == [("set", None)]


async def test_a_group_forms_by_itself_while_the_one_before_it_is_being_committed(
    held: tuple[Bench, HeldExecutor],
) -> None:
    bench, disk = held
    bench.submit("first", [kv(1)])
    await asyncio.sleep(0)
    for name in ("second", "third"):
        bench.submit(name, [kv(2, name.encode())])
        await asyncio.sleep(0)
    assert len(disk.jobs) == 1, "one commit at a time"
    assert bench.told == []
    disk.run()
    assert bench.told == [("first", None)]
    await asyncio.sleep(0)
    disk.run()
    assert [name for name, _ in bench.told] == ["first", "second", "third"]
    assert bench.committer.commits == 2


async def test_no_gate_opens_before_its_group_is_durable_and_then_all_open_at_once(
    held: tuple[Bench, HeldExecutor],
) -> None:
    bench, disk = held
    seen: list[object] = []
    for oid in (1, 2, 3):
        write_set = bench.submit(f"{oid}", [kv(oid)])
        write_set.waiters.append(lambda error: seen.append([bench.store.get(KV, (oid, "k")) for oid in (1, 2, 3)]))
    await asyncio.sleep(0)
    assert bench.told == []
    assert bench.store.get(KV, (1, "k")) is None
    disk.run()
    assert seen == [[(b"v",)] * 3] * 3, "the first to be told sees the whole group"


async def test_a_waiter_that_raises_keeps_no_other_gate_shut(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def broken(error: BaseException | None) -> None:
        raise RuntimeError("a mistake of the waiter")

    first = WriteSet([kv(1)])
    first.waiters.append(broken)
    first.waiters.append(lambda error: bench.told.append(("same set", error)))
    bench.committer.submit(first)
    bench.submit("other set", [kv(2)])
    await bench.drain()
    assert bench.told == [("same set", None), ("other set", None)]
    assert "what waited for a commit failed" in caplog.text


async def test_a_waiter_that_comes_late_is_told_at_once(bench: Bench) -> None:
    write_set = bench.submit("set", [kv(1)])
    await bench.drain()
    write_set.when_done(lambda error: bench.told.append(("late", error)))
    assert bench.told == [("set", None), ("late", None)]


async def test_drain_waits_for_what_is_submitted_and_idle_says_so(held: tuple[Bench, HeldExecutor]) -> None:
    bench, disk = held
    assert bench.committer.idle
    await bench.drain()
    bench.submit("set", [kv(1)])
    drained = asyncio.ensure_future(bench.drain())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not bench.committer.idle
    assert not drained.done()
    disk.run()
    await drained
    assert bench.committer.idle


# --- slices -----------------------------------------------------------------------------------------


async def test_a_long_group_is_written_in_slices_with_the_loop_free_in_between(place: Place) -> None:
    bench = Bench(place, slice_rows=10, max_group_rows=1_000)
    flushed: list[int | None] = []
    flush = bench.store.flush

    def watched(max_rows: int | None = None) -> bool:
        flushed.append(max_rows)
        return flush(max_rows)

    bench.store.flush = watched  # type: ignore[method-assign]
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        if not bench.told:
            asyncio.get_running_loop().call_soon(turn)

    for oid in range(1, 36):
        bench.submit(f"{oid}", [kv(oid)])
    asyncio.get_running_loop().call_soon(turn)
    await bench.drain()
    assert set(flushed) == {10}
    assert len(flushed) >= 4
    assert turns >= 4, "other callbacks ran between the slices"
    assert bench.committer.commits == 1
    bench.close()


async def test_one_write_set_longer_than_a_slice_is_flushed_in_slices(place: Place) -> None:
    bench = Bench(place, slice_rows=10)
    bench.submit("long", [kv(oid) for oid in range(1, 36)])
    await bench.drain()
    assert len(bench.store.scan(KV)) == 35
    assert bench.committer.commits == 1
    bench.close()


async def test_a_group_takes_no_more_rows_than_its_limit(place: Place) -> None:
    bench = Bench(place, slice_rows=4, max_group_rows=10)
    for oid in range(1, 31):
        bench.submit(f"{oid}", [kv(oid)])
    await bench.drain()
    assert bench.committer.commits == 3
    assert [name for name, _ in bench.told] == [f"{oid}" for oid in range(1, 31)]
    bench.close()


async def test_guards_see_rows_of_the_same_group_flushed_or_not(place: Place) -> None:
    bench = Bench(place, slice_rows=1)
    bench.submit("put", [(SLOTS, (1,), ("owned", 1, None)), kv(9)])
    bench.submit("move", [(SLOTS, (1,), ("owned", 2, None))], guards=[FieldEquals(SLOTS, (1,), 1, 1)])
    bench.submit("again", [kv(8)], guards=[FieldEquals(SLOTS, (1,), 1, 2)])
    await bench.drain()
    assert bench.outcomes == {"put": None, "move": None, "again": None}
    assert bench.committer.commits == 1
    bench.close()


# --- one bad write set ------------------------------------------------------------------------------

UNWRITABLE: dict[str, Op] = {
    "an integer of more than 64 bits": (SLOTS, (2**70,), ("owned", 1, None)),
    "a type that no column holds": (KV, (1, "k"), (object(),)),
    "text that is no Unicode": (KV, (1, "\ud800"), (b"v",)),
    "too few values": (SLOTS, (1,), ("owned",)),
    "nothing where something must be": (SLOTS, (1,), (None, 1, None)),
    "an unknown table": ("nowhere", (1,), (b"v",)),
    "a key that can't be one": (KV, ([1], "k"), (b"v",)),
}


@pytest.mark.parametrize("what", UNWRITABLE)
async def test_a_write_set_that_cant_be_written_never_harms_its_group(what: str) -> None:
    bench = Bench(FilePlace())
    bench.submit("before", [kv(1, b"before")])
    bench.submit("bad", [kv(2, b"of the bad one"), UNWRITABLE[what]])
    bench.submit("after", [kv(3, b"after")])
    await bench.drain()
    assert bench.outcomes == {"before": None, "bad": WriteSetRejected, "after": None}
    assert [name for name, _ in bench.told] == ["before", "bad", "after"]
    assert bench.store.scan(KV) == [(1, "k", b"before"), (3, "k", b"after")]
    assert bench.fatal == []
    bench.close()


async def test_a_guard_that_no_longer_holds_rejects_its_write_set_only(bench: Bench) -> None:
    bench.submit("row", [(SLOTS, (1,), ("owned", 5, None))])
    await bench.drain()
    bench.submit("before", [kv(1)])
    bench.submit("guarded", [kv(2)], guards=[FieldEquals(SLOTS, (1,), 1, 4)])
    bench.submit("missing row", [kv(3)], guards=[FieldEquals(SLOTS, (2,), 1, 5)])
    bench.submit("after", [kv(4)], guards=[FieldEquals(SLOTS, (1,), 1, 5)])
    await bench.drain()
    assert bench.outcomes == {
        "row": None,
        "before": None,
        "guarded": WriteSetRejected,
        "missing row": WriteSetRejected,
        "after": None,
    }
    assert [oid for oid, *_ in bench.store.scan(KV)] == [1, 4]


async def test_a_guard_that_cant_be_judged_rejects_its_write_set_only() -> None:
    bench = Bench(FilePlace())
    bench.submit("row", [(SLOTS, (1,), ("owned", 5, None))])
    await bench.drain()
    bench.submit("bad", [kv(2)], guards=[FieldEquals(SLOTS, (1,), 99, 4)])
    bench.submit("after", [kv(3)])
    await bench.drain()
    assert bench.outcomes == {"row": None, "bad": WriteSetRejected, "after": None}
    bench.close()


async def test_who_hears_of_a_rejection_finds_on_disk_all_that_came_before_it(
    held: tuple[Bench, HeldExecutor],
) -> None:
    bench, disk = held
    lineage = Lineage("Cart/a")
    found: list[object] = []
    bench.submit("good", [kv(1, b"1")], lineage=lineage, position=1)
    bad = bench.submit("bad", [kv(1, b"2")], lineage=lineage, position=2, guards=[FieldEquals(SLOTS, (1,), 0, "x")])
    bad.waiters.append(lambda error: found.append(bench.store.get(KV, (1, "k"))))
    await asyncio.sleep(0)
    assert bench.told == [], "the object would start over from a state without its last good write"
    disk.run()
    assert bench.outcomes == {"good": None, "bad": WriteSetRejected}
    assert found == [(b"1",)]


GUARD_THAT_FAILS = {"guards": [FieldEquals(SLOTS, (1,), 0, "x")]}
BAD = {
    "guard": (kv(1, b"of the bad one"), GUARD_THAT_FAILS),
    "value": ((KV, (1, "bad"), (object(),)), {}),
}


@pytest.mark.parametrize("how", BAD)
async def test_all_of_a_broken_lineage_in_one_group_are_told_after_its_good_ones(how: str) -> None:
    disk = HeldExecutor()
    bench = Bench(FilePlace(), disk)
    lineage = Lineage("Cart/a")
    op, more = BAD[how]
    bench.submit("good", [kv(1, b"1")], lineage=lineage, position=1)
    bench.submit("bad", [op], lineage=lineage, position=2, **more)
    behind = bench.submit("behind", [kv(1, b"3")], lineage=lineage, position=3)
    found: list[object] = []
    behind.waiters.append(lambda error: found.append(bench.store.get(KV, (1, "k"))))
    for _ in range(3):
        await asyncio.sleep(0)
    assert bench.told == []
    disk.run()
    assert bench.told[0] == ("good", None)
    assert [name for name, _ in bench.told] == ["good", "bad", "behind"]
    assert bench.outcomes == {"good": None, "bad": WriteSetRejected, "behind": WriteSetRejected}
    assert found == [(b"1",)]
    bench.close()


async def test_a_failing_guard_and_an_unwritable_value_in_one_group_harm_nothing_else() -> None:
    bench = Bench(FilePlace())
    first, second = Lineage("Cart/a"), Lineage("Cart/b")
    for name, lineage, oid in (("first", first, 1), ("second", second, 2)):
        op, more = BAD["guard" if oid == 1 else "value"]
        bench.submit(f"{name} good", [kv(oid)], lineage=lineage, position=1)
        bench.submit(f"{name} bad", [op], lineage=lineage, position=2, **more)
        bench.submit(f"{name} behind", [kv(oid, b"behind")], lineage=lineage, position=3)
    await bench.drain()
    assert [name for name, error in bench.told if error is None] == ["first good", "second good"]
    assert [name.split()[1] for name, _ in bench.told] == ["good", "bad", "behind"] * 2
    assert bench.store.scan(KV) == [(1, "k", b"v"), (2, "k", b"v")]
    bench.close()


@pytest.mark.parametrize("how", BAD)
async def test_what_is_queued_behind_a_rejected_write_set_of_its_lineage_is_never_applied(how: str) -> None:
    disk = HeldExecutor()
    bench = Bench(FilePlace(), disk, max_group_rows=2)
    cart, other = Lineage("Cart/a"), Lineage("Cart/b")
    op, more = BAD[how]
    bench.submit("running", [kv(9)])
    await asyncio.sleep(0)
    bench.submit("good", [kv(1, b"1")], lineage=cart, position=1)
    bench.submit("bad", [op], lineage=cart, position=2, **more)
    bench.submit("other", [kv(2)], lineage=other, position=1)
    bench.submit("behind", [kv(1, b"3")], lineage=cart, position=4)
    bench.submit("far behind", [kv(5)], lineage=cart, position=5)
    bench.submit("of the next life", [kv(6)], lineage=Lineage("Cart/a"), position=1)
    for _ in range(12):
        if disk.jobs:
            disk.run()
        await asyncio.sleep(0)
    assert bench.outcomes["good"] is bench.outcomes["other"] is bench.outcomes["of the next life"] is None
    assert bench.outcomes["bad"] is bench.outcomes["behind"] is bench.outcomes["far behind"] is WriteSetRejected
    assert {oid for oid, *_ in bench.store.scan(KV)} == {1, 2, 6, 9}
    assert bench.store.get(KV, (1, "k")) == (b"1",)
    bench.close()


async def test_a_write_set_submitted_after_its_lineage_broke_is_rejected(bench: Bench) -> None:
    lineage = Lineage("Cart/a")
    bench.submit("bad", [kv(1)], lineage=lineage, guards=[FieldEquals(SLOTS, (1,), 0, "x")])
    await bench.drain()
    bench.submit("late", [kv(1)], lineage=lineage, position=1)
    await bench.drain()
    assert bench.outcomes == {"bad": WriteSetRejected, "late": WriteSetRejected}
    assert bench.store.scan(KV) == []


# --- batches of the engine --------------------------------------------------------------------------


async def test_batches_are_judged_each_alone_and_in_order(bench: Bench) -> None:
    row = timer(5)
    outcomes = await bench.committer.apply(
        [
            Batch((Absent(TIMERS, row.key()),), (Put(row),)),
            Batch((Absent(TIMERS, row.key()),), (Put(timer(6)),)),
            Batch((Present(TIMERS, row.key()),), (Put(timer(7)),)),
            Batch((Present(TIMERS, timer(8).key()),), (Put(timer(8)),)),
            Batch((Equals(row),), (Put(timer(9)),)),
            Batch((Equals(timer(5, attempt=1)),), (Put(timer(10)),)),
            Batch((NotAfter(NOW),), (Put(timer(11)),)),
            Batch((NotAfter(NOW - 1),), (Put(timer(12)),)),
            Batch((), (Delete(TIMERS, row.key()), Delete(TIMERS, timer(99).key()))),
            Batch(),
        ]
    )
    committed, failed, late = Outcome.COMMITTED, Outcome.PRECONDITION_FAILED, Outcome.DEADLINE_PASSED
    assert outcomes == [committed, failed, committed, failed, committed, failed, committed, late, committed, committed]
    assert [key[1] for key in bench.store.scan(TIMERS)] == [7, 9, 11]
    assert bench.committer.commits == 1


async def test_the_first_precondition_that_fails_names_the_outcome(bench: Bench) -> None:
    missing = Present(TIMERS, timer(1).key())
    outcomes = await bench.committer.apply([Batch((NotAfter(0), missing)), Batch((missing, NotAfter(0)))])
    assert outcomes == [Outcome.DEADLINE_PASSED, Outcome.PRECONDITION_FAILED]


async def test_batches_see_write_sets_of_their_group_and_the_other_way_round(bench: Bench) -> None:
    bench.submit("slot", [(SLOTS, (1,), ("owned", 1, None))])
    page = asyncio.ensure_future(bench.committer.apply([Batch((Present(SLOTS, (1,)),), (Put(timer(5)),))]))
    await asyncio.sleep(0)
    bench.submit("after", [kv(1)], guards=[FieldEquals(TIMERS, timer(5).key(), 1, 0)])
    assert await page == [Outcome.COMMITTED]
    await bench.drain()
    assert bench.outcomes == {"slot": None, "after": None}


async def test_a_page_that_cant_be_written_harms_nobody_else() -> None:
    bench = Bench(FilePlace())
    bench.submit("before", [kv(1)])
    bad = asyncio.ensure_future(bench.committer.apply([Batch((), (Put(timer(2**70)),))]))
    good = asyncio.ensure_future(bench.committer.apply([Batch((), (Put(timer(5)),))]))
    with pytest.raises(WriteSetRejected):
        await bad
    assert await good == [Outcome.COMMITTED]
    assert bench.outcomes == {"before": None}
    bench.close()


# --- riders -----------------------------------------------------------------------------------------


class Passenger:
    def __init__(self, op: Op | None = None) -> None:
        self.op = op
        self.log: list[tuple[Any, ...]] = []

    def ride(self, commit_seq: int, entries: Sequence[InboxEntry]) -> Iterable[Op]:
        self.log.append(("ride", commit_seq, [entry.call_id for entry in entries]))
        return [(INBOX, (commit_seq,), (b"row",)) if self.op is None else self.op]

    def landed(self, commit_seq: int, now_ms: int) -> None:
        self.log.append(("landed", commit_seq, now_ms))

    def lost(self, commit_seq: int) -> None:
        self.log.append(("lost", commit_seq))


def entry(call_id: bytes) -> InboxEntry:
    return InboxEntry(call_id, "Cart", "a", b"f", 0, b"reply")


async def test_riders_get_the_outcomes_of_the_group_that_was_not_rejected(place: Place) -> None:
    rider = Passenger()
    bench = Bench(place, riders=[rider])
    bench.submit("one", [kv(1)], inbox=entry(b"1"))
    bench.submit("bad", [kv(2)], inbox=entry(b"2"), guards=[FieldEquals(SLOTS, (1,), 0, "x")])
    bench.submit("three", [kv(3)], inbox=entry(b"3"))
    await bench.drain()
    assert rider.log == [("ride", 1, [b"1", b"3"]), ("landed", 1, NOW)]
    assert bench.store.scan(INBOX) == [(1, b"row")]
    bench.close()


async def test_riders_have_landed_before_the_gates_open(place: Place) -> None:
    rider = Passenger()
    bench = Bench(place, riders=[rider])
    write_set = bench.submit("set", [kv(1)])
    write_set.waiters.append(lambda error: rider.log.append(("gate",)))
    await bench.drain()
    assert [name for name, *_ in rider.log] == ["ride", "landed", "gate"]
    bench.close()


async def test_a_poke_commits_what_the_riders_have_without_any_unit(place: Place) -> None:
    rider = Passenger()
    bench = Bench(place, riders=[rider])
    bench.committer.poke()
    await bench.drain()
    assert rider.log == [("ride", 1, []), ("landed", 1, NOW)]
    bench.close()


async def test_a_poke_during_a_commit_is_not_lost(place: Place) -> None:
    rider, disk = Passenger(), HeldExecutor()
    bench = Bench(place, disk, riders=[rider])
    bench.submit("set", [kv(1)])
    await asyncio.sleep(0)
    bench.committer.poke()
    disk.run()
    await asyncio.sleep(0)
    disk.run()
    assert [name for name, *_ in rider.log] == ["ride", "landed", "ride", "landed"]
    bench.close()


async def test_riders_are_told_of_a_lost_group_and_ride_again() -> None:
    rider = Passenger()
    bench = Bench(FilePlace(), riders=[rider])
    bench.submit("good", [kv(1)], inbox=entry(b"1"))
    bench.submit("bad", [(KV, (2, "k"), (object(),))], inbox=entry(b"2"))
    await bench.drain()
    assert rider.log == [("ride", 1, [b"1", b"2"]), ("lost", 1), ("ride", 1, [b"1"]), ("landed", 1, NOW)]
    bench.close()


async def test_a_rider_that_cant_be_written_fails_the_group_and_does_not_spin() -> None:
    rider = Passenger((KV, (1, "k"), (object(),)))
    bench = Bench(FilePlace(), riders=[rider])
    bench.submit("set", [kv(2)])
    await bench.drain()
    assert bench.outcomes == {"set": CommitFailed}
    rider.op = kv(3)
    bench.submit("later", [kv(4)])
    await bench.drain()
    assert bench.outcomes == {"set": CommitFailed, "later": None}
    assert [oid for oid, *_ in bench.store.scan(KV)] == [3, 4]
    bench.close()


# --- failures that are certain ----------------------------------------------------------------------


async def test_a_full_disk_at_commit_applies_nothing_and_later_commits_work(
    faulty: tuple[Bench, type[FaultyConnection]],
) -> None:
    bench, connection = faulty
    lineage = Lineage("Cart/a")
    fail_once(connection, sql.COMMIT, FULL)
    bench.submit("one", [kv(1)], lineage=lineage, position=1)
    bench.submit("two", [kv(2)])
    await asyncio.sleep(0)
    bench.submit("queued on the same object", [kv(1)], lineage=lineage, position=2)
    bench.submit("queued", [kv(3)])
    await bench.drain()
    assert bench.outcomes == {
        "one": CommitFailed,
        "two": CommitFailed,
        "queued on the same object": WriteSetRejected,
        "queued": None,
    }
    assert [oid for oid, *_ in bench.store.scan(KV)] == [3]
    assert bench.fatal == []


async def test_a_full_file_in_a_statement_applies_nothing_and_later_commits_work() -> None:
    class Connection(FaultyConnection):
        made: list[sqlite3.Connection] = []

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.made.append(self)

    bench = Bench(FilePlace(Connection))
    writer = Connection.made[-1]
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count = {pages + 4}")
    bench.submit("small", [kv(1)])
    await bench.drain()
    bench.submit("too large", [kv(2, bytes(1_000_000))])
    bench.submit("in its group", [kv(3)])
    await bench.drain()
    bench.submit("later", [kv(4)])
    await bench.drain()
    assert bench.outcomes == {"small": None, "too large": CommitFailed, "in its group": CommitFailed, "later": None}
    assert [oid for oid, *_ in bench.store.scan(KV)] == [1, 4]
    assert bench.fatal == []
    bench.close()


async def test_any_error_before_commit_is_certain(faulty: tuple[Bench, type[FaultyConnection]]) -> None:
    bench, connection = faulty
    guard = FieldEquals(SLOTS, (1,), 0, "x")
    fail_once(connection, sql.GET_SQL[SLOTS], IO_ERROR)
    bench.submit("before", [kv(1)])
    bench.submit("its guard can't be read", [kv(2)], guards=[guard])
    await bench.drain()
    bench.submit("later", [kv(3)])
    await bench.drain()
    assert bench.outcomes == {"before": CommitFailed, "its guard can't be read": CommitFailed, "later": None}


# --- failures that are not --------------------------------------------------------------------------


@pytest.mark.parametrize("error", [IO_ERROR, sqlite_error(11, "malformed"), OSError("gone"), MemoryError()], ids=repr)
async def test_another_error_from_commit_leaves_the_outcome_unknown_and_answers_nobody(
    faulty: tuple[Bench, type[FaultyConnection]], error: Exception
) -> None:
    bench, connection = faulty
    fail_once(connection, sql.COMMIT, error)
    page = asyncio.ensure_future(bench.committer.apply([Batch((), (Put(timer(5)),))]))
    await asyncio.sleep(0)
    bench.submit("one", [kv(1)])
    await asyncio.sleep(0)
    bench.submit("queued", [kv(2)])
    await bench.drain()
    bench.submit("later", [kv(3)])
    for _ in range(5):
        await asyncio.sleep(0)
    assert bench.told == []
    assert [type(each) for each in bench.fatal] == [CommitOutcomeUnknown]
    assert bench.fatal[0].__cause__ is error
    with pytest.raises(asyncio.CancelledError):
        await page
    with pytest.raises(StoreClosed):
        await bench.committer.apply([])


async def test_a_newer_owner_ends_the_committer(place: Place) -> None:
    bench = Bench(place)
    bench.store.rollback()  # lets the newer owner in, as the moment between two groups does
    newer = place.open()
    bench.store.begin()
    bench.submit("late", [kv(1)])
    await bench.drain()
    assert bench.told == []
    assert [type(each) for each in bench.fatal] == [Fenced]
    assert newer.get(KV, (1, "k")) is None
    newer.close()
    bench.close()


async def test_when_the_next_transaction_cant_begin_the_committed_group_is_answered_first(
    faulty: tuple[Bench, type[FaultyConnection]],
) -> None:
    bench, connection = faulty
    fail_once(connection, sql.BEGIN, sqlite_error(5, "database is locked"))
    bench.submit("durable", [kv(1)])
    await asyncio.sleep(0)
    bench.submit("queued", [kv(2)])
    await bench.drain()
    assert bench.told == [("durable", None)]
    assert len(bench.fatal) == 1
    assert [oid for oid, *_ in bench.store.scan(KV)] == [1]


async def test_when_a_failed_group_cant_be_undone_nobody_is_answered(
    faulty: tuple[Bench, type[FaultyConnection]],
) -> None:
    bench, connection = faulty
    connection.fault = {sql.COMMIT: FULL, sql.BEGIN: IO_ERROR}.get
    bench.submit("set", [kv(1)])
    await bench.drain()
    assert bench.told == []
    assert bench.fatal == [IO_ERROR]


async def test_a_rider_that_fails_after_the_commit_ends_the_partition_instead_of_stalling_it(place: Place) -> None:
    class Clumsy(Passenger):
        def landed(self, commit_seq: int, now_ms: int) -> None:
            raise RuntimeError("its table in memory is not what the disk says")

    bench = Bench(place, riders=[Clumsy()])
    bench.submit("set", [kv(1)])
    await bench.drain()
    assert bench.told == []
    assert [type(each) for each in bench.fatal] == [RuntimeError]
    bench.close()


async def test_an_abandoned_committer_commits_nothing_more_and_tells_nobody(
    held: tuple[Bench, HeldExecutor],
) -> None:
    bench, disk = held
    bench.submit("in commit", [kv(1)])
    await asyncio.sleep(0)
    bench.submit("queued", [kv(2)])
    bench.committer.abandon()
    disk.run()  # a commit that was under way may still land, as before a kill
    await bench.drain()
    bench.submit("later", [kv(3)])
    for _ in range(5):
        await asyncio.sleep(0)
    assert bench.told == []
    assert bench.fatal == []
    assert disk.jobs == []
    assert [oid for oid, *_ in bench.store.scan(KV)] == [1]
