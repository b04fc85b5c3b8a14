"""The engine's side of publications, kind 12: the numbered statements of its case, on every timer store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.support.manual_clock import ManualClock
from tests.support.timer_table import NOW, PARTITION, Table
from timers.batch import Batch, Delete, Equals, NotAfter
from timers.errors import CorruptRow
from timers.firing import Done, DueTimer, Fired, PartitionName, PartitionRole, Reschedule, TimerCtx
from timers.publication_notice import NOTICE_RETRY_MS, PublicationNotice
from timers.publication_payload import MAX_POSITION, PAYLOAD_BYTES, RecheckPayload
from timers.publication_plans import change, clear, make, recheck_timer, release
from timers.publication_recheck import (
    COMMIT_WINDOW_MS,
    READS_PER_FIRE,
    READS_PER_TICK,
    RECHECK_MS,
    RECHECKS_PER_TICK,
    REMOTE_PAGE,
    PublicationRecheck,
)
from timers.publication_rows import (
    AdvanceRow,
    Clearance,
    Contents,
    ItemRow,
    LineRow,
    Need,
    StateRow,
    advance_ref,
    parse_advance_ref,
)
from timers.registry import TimerKind
from timers.rows import TimerRow, owned_ref

OID = 7
LINE = "main"
LATER = NOW + RECHECK_MS
FIELD_POSITION = slice(33, 37)


def own(item: str) -> Need:
    return Need("", "", item)


def far(number: int, key: str = "k") -> Need:
    return Need("Other", key, f"{number:05}")


@dataclass
class World:
    """What other objects have published, and what was asked."""

    published: set[Need] = field(default_factory=set)
    asked: list[list[Need]] = field(default_factory=list)
    waits_for: list[tuple[int, int, Need | None]] = field(default_factory=list)
    answer: Callable[[Sequence[Need]], Any] | None = None

    async def visible(self, type_name: str, key: str, items: Sequence[str], timer: DueTimer) -> Any:
        needs = [Need(type_name, key, item) for item in items]
        self.asked.append(needs)
        return [need in self.published for need in needs] if self.answer is None else self.answer(needs)

    def waits(self, timer: DueTimer, due_ms: int, position: int, missing: Need | None) -> None:
        self.waits_for.append((due_ms, position, missing))


class Shelf:
    """The publication lines of one object in a timer table."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.store = table.store
        self.world = World()
        self.handler = PublicationRecheck(self.world)

    async def line(self, name: str = LINE) -> LineRow:
        return await self.store.get(LineRow, (OID, name)) or LineRow(OID, name)

    async def state(self, sequence: int, name: str = LINE) -> StateRow:
        found = await self.store.get(StateRow, (OID, name, sequence))
        assert found is not None
        return found

    async def advance(self, sequence: int) -> AdvanceRow:
        found = await self.store.get(AdvanceRow, (OID, LINE, sequence))
        assert found is not None
        return found

    async def make(
        self, *items: str, needs: Sequence[Need] = (), external: Sequence[Need] = (), name: str = LINE
    ) -> int:
        """A pending advance with its timer, as a turn makes it."""
        line = await self.line(name)
        contents = Contents(name, line.next_sequence, items, tuple(needs), tuple(external))
        await self.apply(*make(line, contents, NOW, hooked=True))
        await self.arm(line.next_sequence, name)
        return line.next_sequence

    async def arm(self, sequence: int, name: str = LINE) -> None:
        line, state = await self.line(name), await self.state(sequence, name)
        advance = await self.store.get(AdvanceRow, (OID, name, sequence))
        assert advance is not None
        await self.store.put(recheck_timer(line, state, advance.contents, NOW))

    async def apply(self, *batches: Batch) -> None:
        outcomes = await self.store.inner.apply(list(batches))
        assert {outcome.value for outcome in outcomes} <= {"committed"}

    async def run(self, now_ms: int = NOW) -> Any:
        self.table.clock.set_wall(now_ms)
        return await self.table.run(self.handler, now_ms=now_ms)

    async def fire(self, sequence: int = 1, *, now_ms: int = NOW, **changes: Any) -> Fired:
        """One fire of the advance's timer, without the engine."""
        ctx = TimerCtx(self.store, changes.pop("partition", PARTITION), now_ms)
        return await self.handler.fire(ctx, replace(await self.timer(sequence), **changes))

    async def timer(self, sequence: int = 1) -> DueTimer:
        row = next(row for row in await self.rechecks() if parse_advance_ref(row.ref)[2] == sequence)
        return DueTimer(row.first_due_ms, row.kind, row.ref, row.payload, row.generation, row.attempt)

    async def rechecks(self) -> list[TimerRow]:
        return [row for row in await self.table.timers() if row.kind == TimerKind.PUBLICATION_RECHECK]

    async def notices(self) -> list[TimerRow]:
        return [row for row in await self.table.timers() if row.kind == TimerKind.PUBLICATION_NOTICE]

    async def position(self, sequence: int = 1) -> int:
        return RecheckPayload.from_bytes((await self.timer(sequence)).value).position

    async def published(self, name: str = LINE) -> int:
        return (await self.line(name)).published

    async def replace(self, row: Any, **changes: Any) -> None:
        await self.store.put(replace(row, **changes))

    async def drop(self, row: Any) -> None:
        await self.apply(Batch(writes=(Delete(row.table, row.key()),)))


@pytest.fixture
def shelf(table: Table) -> Shelf:
    return Shelf(table)


# --- references and rows ------------------------------------------------------------------------------


async def test_the_reference_is_the_blocked_advances_own_key(shelf: Shelf) -> None:
    """A.7.1"""
    await shelf.make("a", needs=[far(1)])
    await shelf.make("b", needs=[far(1)])
    refs = [row.ref for row in await shelf.rechecks()]
    assert [parse_advance_ref(ref) for ref in refs] == [(await shelf.advance(number)).key() for number in (1, 2)]


@pytest.mark.parametrize(
    "ref",
    [b"", b"short", owned_ref(OID), owned_ref(OID, b"main"), owned_ref(OID, b"main\0\0\0"), owned_ref(OID, b"x" * 30)]
    + [owned_ref(OID, line + b"\0" + bytes(8)) for line in (b"", b"\xff", b"a\0b")],
)
async def test_a_misrouted_reference_is_corrupt(shelf: Shelf, ref: bytes) -> None:
    """A.7.2"""
    await shelf.make("a", needs=[far(1)])
    with pytest.raises(CorruptRow):
        await shelf.fire(reference=ref)


@pytest.mark.parametrize("role", [PartitionRole.COORDINATOR, PartitionRole.OBJECT])
async def test_the_wrong_partition_is_corrupt(shelf: Shelf, role: PartitionRole) -> None:
    """A.7.2"""
    await shelf.make("a", needs=[far(1)])
    with pytest.raises(CorruptRow, match="no advances"):
        await shelf.fire(partition=PartitionName(role))


@pytest.mark.parametrize("missing", [LineRow, AdvanceRow, StateRow])
async def test_a_missing_line_advance_or_state_is_corrupt(shelf: Shelf, missing: Any) -> None:
    """A.7.2"""
    await shelf.make("a", needs=[far(1)])
    timer = await shelf.timer()
    key = (OID, LINE) if missing is LineRow else (OID, LINE, 1)
    await shelf.drop(await shelf.store.get(missing, key))
    with pytest.raises(CorruptRow, match="incomplete"):
        await shelf.handler.fire(TimerCtx(shelf.store, PARTITION, NOW), timer)


async def test_a_corrupt_advance_publishes_nothing_and_is_tried_again(shelf: Shelf) -> None:
    """A.7.2: fail closed, on the engine's retry ladder."""
    await shelf.make("a")
    await shelf.drop(await shelf.state(1))
    report = await shelf.run()
    assert (report.failed, await shelf.published()) == (1, 0)
    assert [(row.due_ms, row.attempt) for row in await shelf.rechecks()] == [(NOW + 5_000, 1)]


@pytest.mark.parametrize(
    "contents",
    [
        Contents(LINE, 2, ("a",), (), ()).to_bytes(),
        Contents("other", 1, ("a",), (), ()).to_bytes(),
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        Contents(LINE, 1, (1,), (), ()).to_bytes(),  # type: ignore[arg-type]
        Contents(LINE, 1, ("a",), ((1, 2),), ()).to_bytes(),  # type: ignore[arg-type]
        bytes([0x96, 9]) + Contents(LINE, 1, ("a",), (), ()).to_bytes()[2:],
    ],
    ids=["sequence", "line", "empty", "no msgpack", "too short", "a number as item", "half a need", "version"],
)
async def test_contents_that_are_not_this_advances_are_corrupt(shelf: Shelf, contents: bytes) -> None:
    """A.7.2: sequence mismatch, unreadable advance."""
    await shelf.make("a")
    await shelf.replace(await shelf.advance(1), contents=contents)
    with pytest.raises(CorruptRow):
        await shelf.fire()


async def test_an_advance_that_its_line_does_not_know_is_corrupt(shelf: Shelf) -> None:
    """A.7.2"""
    await shelf.make("a")
    await shelf.replace(await shelf.line(), next_sequence=1)
    with pytest.raises(CorruptRow, match="none of its line"):
        await shelf.fire()


async def test_an_unknown_clearance_is_corrupt(shelf: Shelf) -> None:
    """A.7.2"""
    await shelf.make("a")
    await shelf.replace(await shelf.state(1), clearance=9)
    with pytest.raises(CorruptRow, match="clearance"):
        await shelf.fire()


async def test_a_payload_is_exactly_37_bytes_version_1_digest_and_position(shelf: Shelf) -> None:
    """A.7, limits"""
    await shelf.make("a", needs=[far(1)])
    payload = (await shelf.timer()).value
    assert (len(payload), PAYLOAD_BYTES, payload[0], payload[FIELD_POSITION]) == (37, 37, 1, bytes(4))
    assert RecheckPayload(payload[1:33]).at(258).to_bytes()[FIELD_POSITION] == b"\x02\x01\0\0"
    assert RecheckPayload.from_bytes(RecheckPayload(payload[1:33], MAX_POSITION).to_bytes()).position == 8_192


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        bytes(36),
        bytes([1]) + bytes(37),
        bytes([2]) + bytes(36),
        RecheckPayload(bytes(32), MAX_POSITION + 1).to_bytes(),
    ],
    ids=["empty", "short", "long", "version", "position"],
)
async def test_a_bad_payload_is_corrupt(shelf: Shelf, payload: bytes) -> None:
    """A.7.2"""
    await shelf.make("a")
    with pytest.raises(CorruptRow, match="payload"):
        await shelf.fire(value=payload)


async def test_a_position_behind_the_last_witness_is_corrupt(shelf: Shelf) -> None:
    """A.7.2"""
    await shelf.make("a", needs=[far(1)])
    value = RecheckPayload.from_bytes((await shelf.timer()).value).at(2).to_bytes()
    with pytest.raises(CorruptRow, match="2 witnesses of 1"):
        await shelf.fire(value=value)


async def test_the_timer_of_a_deleted_object_ends(shelf: Shelf) -> None:
    """Besides A.7: nothing is left of the object, which is not the same as a damaged advance."""
    await shelf.make("a", needs=[far(1)])
    for row in (await shelf.line(), await shelf.advance(1), await shelf.state(1)):
        await shelf.drop(row)
    report = await shelf.run()
    assert (report.fired, report.failed, await shelf.rechecks()) == (1, 0, [])


# --- the binding --------------------------------------------------------------------------------------


async def seen_two(shelf: Shelf) -> None:
    """An advance whose first two witnesses of three are published."""
    shelf.world.published = {far(1), far(2)}
    await shelf.make("a", needs=[far(1), far(2), far(3)])
    await shelf.run()
    assert await shelf.position() == 2


async def test_progress_is_kept_while_nothing_changes(shelf: Shelf) -> None:
    """A.7.3, A.7.7"""
    await seen_two(shelf)
    shelf.world.asked.clear()
    await shelf.run(LATER)
    assert (shelf.world.asked, await shelf.position()) == ([[far(3)]], 2)


async def test_another_generation_resets_the_position(shelf: Shelf) -> None:
    """A.7.3"""
    await seen_two(shelf)
    value = (await shelf.timer()).value
    await shelf.apply(change(await shelf.line(), await shelf.state(1), Clearance.HELD))
    await shelf.apply(release(await shelf.line(), await shelf.state(1)))
    shelf.world.asked.clear()
    fired = await shelf.fire(generation=2, value=value)
    assert shelf.world.asked == [[far(1), far(2), far(3)]]
    assert isinstance(fired, Reschedule)


async def test_another_boundary_resets_the_position(shelf: Shelf) -> None:
    """A.7.3: the boundary is up to where the line is published."""
    first = await shelf.make("z", needs=[far(9)])
    shelf.world.published = {far(1), far(2)}
    second = await shelf.make("a", needs=[far(1), far(2), far(3)])
    await shelf.run()
    assert await shelf.position(second) == 2
    shelf.world.published = {far(9)}
    await shelf.run(LATER)
    assert await shelf.published() == first
    await shelf.run(LATER + RECHECK_MS)
    assert await shelf.position(second) == 0


async def test_other_advance_bytes_reset_the_position(shelf: Shelf) -> None:
    """A.7.3"""
    await seen_two(shelf)
    contents = Contents(LINE, 1, ("a",), (far(1), far(2), far(3), far(4)), ())
    await shelf.replace(await shelf.advance(1), contents=contents.to_bytes())
    shelf.world.published = set()
    await shelf.run(LATER)
    assert await shelf.position() == 0


# --- who is looked at ---------------------------------------------------------------------------------


@pytest.mark.parametrize("clearance", [Clearance.HELD, Clearance.HIT])
async def test_what_is_held_or_hit_is_rescheduled_at_position_0(shelf: Shelf, clearance: Clearance) -> None:
    """A.7.4, A.7.15: it is never cleared by the timer, although everything that it needs is there."""
    await seen_two(shelf)
    await shelf.apply(change(await shelf.line(), await shelf.state(1), clearance))
    shelf.world.published |= {far(3)}
    shelf.world.asked.clear()
    for round_number in range(3):
        await shelf.run(LATER + round_number * RECHECK_MS)
    assert (shelf.world.asked, await shelf.position(), await shelf.published()) == ([], 0, 0)
    assert [row.due_ms for row in await shelf.rechecks()] == [LATER + 3 * RECHECK_MS]
    assert (await shelf.state(1)).clearance == clearance


async def test_a_timer_of_an_older_generation_ends(shelf: Shelf) -> None:
    """A.7.4, A.7.16: a newer timer has taken its place, so that there is always one that counts."""
    await seen_two(shelf)
    await shelf.apply(change(await shelf.line(), await shelf.state(1), Clearance.HELD))
    await shelf.apply(release(await shelf.line(), await shelf.state(1)))
    await shelf.arm(1)
    assert len(await shelf.rechecks()) == 2
    await shelf.run(LATER)
    assert [row.generation for row in await shelf.rechecks()] == [2]


def test_needed_is_dependencies_without_own_additions_and_external_bases_sorted_and_once() -> None:
    """A.7.5"""
    needs = (far(2), own("mine"), own("b"), far(1), far(2))
    contents = Contents(LINE, 1, ("mine", "base"), needs, (far(1), own("base"), own("b")))
    assert contents.needed() == [own("b"), own("base"), far(1), far(2)]


async def test_own_additions_meet_dependencies(shelf: Shelf) -> None:
    """A.7.5"""
    await shelf.make("a", "b", needs=[own("a"), own("b")])
    await shelf.run()
    assert await shelf.published() == 1


async def test_own_additions_never_meet_external_bases(shelf: Shelf) -> None:
    """A.7.5"""
    await shelf.make("a", needs=[own("a")], external=[own("a")])
    await shelf.run()
    assert (await shelf.published(), shelf.world.waits_for) == (0, [(LATER, 0, own("a"))])


async def test_local_membership_is_looked_at_again_at_every_fire(shelf: Shelf) -> None:
    """A.7.6"""
    await shelf.make("base", name="other", needs=[far(5)])
    await shelf.make("a", needs=[own("base"), far(1)])
    shelf.world.published = {far(1)}
    await shelf.run()
    assert [far(1)] not in shelf.world.asked  # the cheap question first
    await shelf.replace(await shelf.line("other"), published=1)
    line = await shelf.line("other")
    shelf.world.published = set()
    await shelf.run(LATER)
    assert [far(1)] in shelf.world.asked
    await shelf.replace(line, published=0)  # it can't happen, and would be seen
    shelf.world.asked.clear()
    shelf.world.published = {far(1)}
    await shelf.run(LATER + RECHECK_MS)
    assert ([far(1)] in shelf.world.asked, await shelf.published()) == (False, 0)


# --- witnesses ----------------------------------------------------------------------------------------


async def test_the_position_grows_one_per_visible_witness(shelf: Shelf) -> None:
    """A.7.7"""
    needs = [far(number) for number in range(20)]
    await shelf.make("a", needs=needs)
    for count in (0, 3, 11, 19):
        shelf.world.published = set(needs[:count])
        await shelf.run(NOW + RECHECK_MS * count)
        assert await shelf.position() == count
    shelf.world.published = set(needs)
    shelf.world.asked.clear()
    await shelf.run(NOW + RECHECK_MS * 20)
    assert (shelf.world.asked, await shelf.published()) == ([[needs[19]]], 1)


async def test_an_invisible_witness_stops_the_fire_and_keeps_the_position_at_it(shelf: Shelf) -> None:
    """A.7.8"""
    needs = [far(1, "a"), far(1, "b"), far(1, "c")]
    shelf.world.published = {needs[0], needs[2]}
    await shelf.make("x", needs=needs)
    await shelf.run()
    assert shelf.world.asked == [[needs[0]], [needs[1]]]
    assert (await shelf.position(), [row.due_ms for row in await shelf.rechecks()]) == (1, [LATER])
    assert shelf.world.waits_for == [(LATER, 1, needs[1])]


async def test_when_nobody_answers_the_progress_is_kept(shelf: Shelf) -> None:
    """A.7.8, for a partition that is away."""
    needs = [far(1, "a"), far(1, "b")]
    await shelf.make("x", needs=needs)
    shelf.world.answer = lambda asked: [True] if asked == [needs[0]] else None
    await shelf.run()
    assert (await shelf.position(), shelf.world.waits_for) == (1, [(LATER, 1, None)])


async def test_a_remote_page_has_8_items_of_one_object(shelf: Shelf) -> None:
    """A.7, limits"""
    needs = [far(number) for number in range(10)] + [far(number, "l") for number in range(3)]
    shelf.world.published = set(needs)
    await shelf.make("a", needs=needs)
    await shelf.run()
    assert (REMOTE_PAGE, [len(page) for page in shelf.world.asked]) == (8, [8, 2, 3])


async def test_a_fire_makes_at_most_128_remote_reads_and_keeps_its_progress(shelf: Shelf) -> None:
    """A.7.9"""
    needs = [far(1, f"{number:04}") for number in range(300)]
    shelf.world.published = set(needs)
    await shelf.make("a", needs=needs)
    positions = []
    for round_number in range(2):
        await shelf.run(NOW + round_number * RECHECK_MS)
        positions.append(await shelf.position())
    assert (READS_PER_FIRE, positions) == (128, [128, 256])
    await shelf.run(NOW + 2 * RECHECK_MS)
    assert (len(shelf.world.asked), await shelf.published()) == (300, 1)


async def test_all_fires_of_a_tick_share_an_allowance(shelf: Shelf) -> None:
    """A.7.9"""
    for number in range(6):
        needs = [far(1, f"{number}:{each:04}") for each in range(READS_PER_FIRE)]
        shelf.world.published |= set(needs)
        await shelf.make(f"item{number}", needs=needs, name=f"line{number}")
    await shelf.run()
    assert len(shelf.world.asked) == READS_PER_TICK == 4 * READS_PER_FIRE
    assert sum([await shelf.published(f"line{number}") for number in range(6)]) == 4
    await shelf.run(LATER)
    assert [await shelf.published(f"line{number}") for number in range(6)] == [1] * 6


async def test_a_position_goes_up_to_8192_witnesses(shelf: Shelf) -> None:
    """A.7, limits: as many dependencies and as many external bases as an advance may have."""
    needs = [far(number) for number in range(8_192)]
    shelf.world.published = set(needs)
    await shelf.make("a", needs=needs[:4_096], external=needs[4_096:])
    rounds = 0
    while await shelf.published() == 0:
        await shelf.run(NOW + rounds * RECHECK_MS)
        rounds += 1
    assert rounds == 8_192 // (READS_PER_FIRE * REMOTE_PAGE)


@pytest.mark.parametrize("answer", [[], [True], [True, 1], [True, None], [True, True, True]])
async def test_a_short_read_or_an_undecodable_witness_is_corrupt(shelf: Shelf, answer: list[Any]) -> None:
    """A.7.10"""
    await shelf.make("a", needs=[far(1), far(2)])
    shelf.world.answer = lambda asked: answer
    with pytest.raises(CorruptRow, match="answered 2 questions"):
        await shelf.fire()
    report = await shelf.run()
    assert (report.failed, await shelf.published()) == (1, 0)


# --- the end of a fire --------------------------------------------------------------------------------


async def test_a_reschedule_is_guarded_on_advance_and_state(shelf: Shelf) -> None:
    """A.7.11, A.7.14"""
    await shelf.make("a", needs=[far(1)])
    fired = await shelf.fire()
    assert isinstance(fired, Reschedule)
    assert fired.due_at_ms == LATER
    assert set(fired.batch.preconditions) == {
        Equals(await shelf.advance(1)),
        Equals(await shelf.state(1)),
        NotAfter(NOW + COMMIT_WINDOW_MS),
    }
    assert fired.batch.writes == ()


async def test_a_change_between_plan_and_commit_races(shelf: Shelf) -> None:
    """A.7.11"""
    await shelf.make("a", needs=[far(1)])

    async def hold() -> None:
        await shelf.apply(change(await shelf.line(), await shelf.state(1), Clearance.HELD))

    shelf.store.before_apply = hold
    report = await shelf.run()
    assert (report.raced, [row.due_ms for row in await shelf.rechecks()]) == (1, [NOW])


@pytest.mark.parametrize("clearance", [Clearance.CLEARED, Clearance.RESOLVED])
@pytest.mark.parametrize("complete", [True, False])
async def test_what_is_publishable_already_ends_and_nothing_else(
    shelf: Shelf, clearance: Clearance, complete: bool
) -> None:
    """A.7.12; also when something is missing, since nobody would ask for the answer."""
    await shelf.make("z", needs=[far(9)])
    await shelf.make("a", needs=[far(1)])
    shelf.world.published = {far(1)} if complete else set()
    await shelf.apply(change(await shelf.line(), await shelf.state(2), clearance))
    fired = await shelf.fire(2)
    assert isinstance(fired, Done)
    assert fired.batch.writes == ()
    await shelf.run()
    assert [parse_advance_ref(row.ref)[2] for row in await shelf.rechecks()] == [1]


async def test_a_complete_advance_is_cleared_and_published_in_one_batch(shelf: Shelf) -> None:
    """A.7.13: state, line, notice and the timer's end."""
    shelf.world.published = {far(1)}
    await shelf.make("a", needs=[far(1)])
    await shelf.run()
    [batch] = shelf.store.applied[-1]
    assert [type(write).__name__ for write in batch.writes] == ["Put", "Put", "Put", "Delete"]
    assert ((await shelf.state(1)).clearance, await shelf.published()) == (Clearance.CLEARED, 1)
    assert [(row.due_ms, row.generation) for row in await shelf.notices()] == [(NOW, 1)]
    assert await shelf.rechecks() == []


async def test_the_longest_clear_prefix_is_published(shelf: Shelf) -> None:
    """A.7.13"""
    for number in range(5):
        await shelf.make(f"item{number}", needs=[far(number)])
    published = []
    for now_ms, visible in ((NOW, {1, 2}), (LATER, {4}), (LATER + RECHECK_MS, {0}), (LATER + 2 * RECHECK_MS, {3})):
        shelf.world.published = {far(number) for number in visible}
        await shelf.run(now_ms)
        published.append(await shelf.published())
    assert published == [0, 0, 3, 5]
    assert [row.generation for row in await shelf.notices()] == [3, 5]


async def test_64_advances_are_published_by_one_batch(shelf: Shelf) -> None:
    """A.7.13 and the limit: the batch of the first one holds a guard for each of the others."""
    for number in range(64):
        await shelf.make(f"item{number}", needs=[far(number)])
    shelf.world.published = {far(number) for number in range(1, 64)}
    for round_number in range(3):
        await shelf.run(NOW + round_number * RECHECK_MS)
    assert await shelf.published() == 0
    shelf.world.published = {far(0)}
    await shelf.run(NOW + 4 * RECHECK_MS)
    assert await shelf.published() == 64
    assert max(len(batch) for page in shelf.store.applied for batch in page) <= 100


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_two_that_clear_at_one_time_do_not_miss_each_other(shelf: Shelf, order: tuple[int, int]) -> None:
    """A.7.13: each would take the other for pending, and nobody would publish the second."""
    await shelf.make("a")
    await shelf.make("b")
    line = await shelf.line()
    first, second = [await shelf.state(number) for number in (1, 2)]
    batches = [clear(line, first, [first, second], NOW), clear(line, second, [first], NOW)]
    outcomes = await shelf.store.inner.apply([batches[number] for number in order])
    assert [outcome.value for outcome in outcomes] == ["committed", "precondition_failed"]
    await shelf.run()
    assert await shelf.published() == 2


async def test_an_advance_that_is_made_between_plan_and_commit_is_not_lost(shelf: Shelf) -> None:
    """A.7.13: the batch is guarded on the line."""
    await shelf.make("a")

    async def make_another() -> None:
        await shelf.make("b", needs=[far(1)])

    shelf.store.before_apply = make_another
    report = await shelf.run()
    assert (report.raced, (await shelf.line()).next_sequence, await shelf.published()) == (1, 3, 0)
    await shelf.run()
    assert ((await shelf.line()).next_sequence, await shelf.published()) == (3, 1)


async def test_what_was_published_between_plan_and_commit_is_not_held_or_released(shelf: Shelf) -> None:
    await shelf.make("a", needs=[far(1)])
    await shelf.make("b")
    await shelf.run()
    line, state = await shelf.line(), await shelf.state(2)
    assert state.clearance == Clearance.CLEARED
    shelf.world.published = {far(1)}
    await shelf.run(LATER)
    batches = [change(line, state, Clearance.HELD), release(line, state)]
    outcomes = await shelf.store.inner.apply(batches)
    assert [outcome.value for outcome in outcomes] == ["precondition_failed"] * 2


async def test_every_batch_carries_a_deadline_10_s_from_now(shelf: Shelf) -> None:
    """A.7.14"""
    await shelf.make("a", needs=[far(1)])
    shelf.world.published = {far(1)}
    deadline = NotAfter(NOW + 10_000)
    for changes in ({}, {"generation": 9}):
        fired = await shelf.fire(**changes)
        assert not isinstance(fired, type(None))
        assert deadline in fired.batch.preconditions  # type: ignore[union-attr]
    await shelf.apply(change(await shelf.line(), await shelf.state(1), Clearance.HELD))
    held = await shelf.fire()
    assert isinstance(held, Reschedule)
    assert deadline in held.batch.preconditions


async def test_what_was_seen_too_long_ago_is_not_committed(shelf: Shelf, clock: ManualClock) -> None:
    """A.7.14"""
    await shelf.make("a", needs=[far(1)])
    shelf.world.published = {far(1)}

    async def wait() -> None:
        clock.set_wall(NOW + COMMIT_WINDOW_MS + 1)

    shelf.store.before_apply = wait
    report = await shelf.run()
    assert (report.failed, await shelf.published()) == (1, 0)
    assert [row.attempt for row in await shelf.rechecks()] == [1]


async def test_there_is_one_timer_per_blocked_advance(shelf: Shelf) -> None:
    """A.7.16"""
    for number in range(10):
        await shelf.make(f"item{number}", needs=[far(number)])
    for round_number in range(3):
        await shelf.run(NOW + round_number * RECHECK_MS)
        assert [parse_advance_ref(row.ref)[2] for row in await shelf.rechecks()] == list(range(1, 11))


async def test_a_tick_takes_no_more_than_its_share(shelf: Shelf) -> None:
    """A.7, limits, where 1 per tick became more; the module says why."""
    for number in range(RECHECKS_PER_TICK + 1):
        await shelf.make(f"item{number}", needs=[far(number)])
    report = await shelf.run()
    assert (report.fired, report.deferred, report.next_wake_ms) == (RECHECKS_PER_TICK, 1, NOW)


async def test_an_advance_without_a_state_before_it_is_corrupt(shelf: Shelf) -> None:
    """A.7.2, for the line"""
    await shelf.make("a", needs=[far(1)])
    await shelf.make("b")
    await shelf.drop(await shelf.state(1))
    with pytest.raises(CorruptRow, match="advance 1 of line 'main' has no state"):
        await shelf.fire(2)


async def test_items_of_an_advance_are_refused_when_another_has_them(shelf: Shelf) -> None:
    await shelf.make("a", "b")
    line = await shelf.line()
    batches = make(line, Contents(LINE, 2, ("b",), (), ()), NOW, hooked=False)
    outcomes = await shelf.store.inner.apply(list(batches))
    assert outcomes[-1].value == "precondition_failed"
    assert await shelf.store.get(ItemRow, (OID, "b")) == ItemRow(OID, "b", LINE, 1)


# --- notices ------------------------------------------------------------------------------------------


class Told:
    """Hears of publications; can't be told while `deaf`."""

    def __init__(self, deaf: bool = False) -> None:
        self.deaf = deaf
        self.lines: list[LineRow] = []

    async def published(self, line: LineRow) -> bool:
        self.lines.append(line)
        return not self.deaf


async def test_a_notice_tells_of_the_publication_and_ends(shelf: Shelf) -> None:
    await shelf.make("a")
    await shelf.run()
    told = Told()
    await shelf.table.run(PublicationNotice(told))
    assert ([line.published for line in told.lines], await shelf.notices()) == ([1], [])


async def test_a_notice_that_could_not_be_told_comes_again(shelf: Shelf) -> None:
    await shelf.make("a")
    await shelf.run()
    await shelf.table.run(PublicationNotice(Told(deaf=True)))
    assert [row.due_ms for row in await shelf.notices()] == [NOW + NOTICE_RETRY_MS]


async def test_a_notice_of_a_deleted_object_ends(shelf: Shelf) -> None:
    await shelf.make("a")
    await shelf.run()
    await shelf.drop(await shelf.line())
    told = Told()
    await shelf.table.run(PublicationNotice(told))
    assert (told.lines, await shelf.notices()) == ([], [])


@pytest.mark.parametrize("ref", [b"", b"short", owned_ref(OID), owned_ref(OID, b"a\0b"), owned_ref(OID, b"\xff")])
async def test_a_notice_that_names_no_line_is_corrupt(shelf: Shelf, ref: bytes) -> None:
    timer = DueTimer(NOW, TimerKind.PUBLICATION_NOTICE, ref, b"")
    with pytest.raises(CorruptRow):
        await PublicationNotice(Told()).fire(TimerCtx(shelf.store, PARTITION, NOW), timer)


def test_references_are_told_apart_by_object_line_and_number() -> None:
    keys = [(1, "a", 1), (1, "a", 256), (1, "a\u00e9", 1), (2, "a", 1)]
    assert [parse_advance_ref(advance_ref(*key)) for key in keys] == keys
