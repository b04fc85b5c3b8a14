"""Publications as applications use them: on virtual time, with crashes, over several partitions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest

from actors import Advance, DurableObject, Rejected, shared
from actors.address import ClassRef
from actors.durable_object import class_info
from actors.errors import (
    AdvanceConflict,
    AdvanceTooLarge,
    CommitFailed,
    DuplicateItem,
    InvalidClassOption,
    InvalidKey,
    InvalidOption,
    MainspringError,
    ReadOnlyTurn,
    ReservedName,
    SerialTurnsNeeded,
    TooManyAdvances,
    UnknownAdvance,
)
from actors.namespace import Stub
from actors.partition import Partition
from actors.publication_hints import PublicationHints
from actors.settings import Settings
from actors.testing import LocalRuntime
from drivers.tables import PUBLICATION_LINES, TABLES
from tests.support.crash_points import CommitControl, crash_when_stopped, finish, key_in, runtime_with
from timers.batch import Batch
from timers.publication_recheck import RECHECK_MS
from timers.publication_rows import LineRow
from timers.registry import TimerKind

PARTITIONS = 3


class Release(DurableObject):
    """Publishes what it is told to, and counts what it hears of its publications."""

    def advance(self, items: list[str], depends_on: Any = (), external: Any = (), line: str = "default") -> Advance:
        return self.publications.advance(line, items=items, depends_on=depends_on, external=external)

    def advance_then_fail(self, items: list[str]) -> None:
        self.publications.advance(items=items)
        raise Rejected("no")

    async def advance_slowly(self, items: list[str], gate: str) -> Advance:
        known = self.publications.list()
        await GATES[gate].wait()
        assert self.publications.list() == known
        return self.publications.advance(items=items)

    def advance_twice(self) -> list[str]:
        first = self.publications.advance("a", items=["x"])
        second = self.publications.advance("b", items=["y"], depends_on=["x"])
        return [first.state, second.state]

    def advance_many(self, count: int) -> list[str]:
        return [self.publications.advance(items=[f"item{number}"]).state for number in range(count)]

    def needs(self, cls_items: list[tuple[str, str]]) -> Advance:
        return self.publications.advance(items=["own"], depends_on=[(Release, key, item) for key, item in cls_items])

    def hold(self, sequence: int) -> Advance:
        return self.publications.hold(sequence)

    def mark_hit(self, sequence: int) -> Advance:
        return self.publications.mark_hit(sequence)

    def release(self, sequence: int) -> Advance:
        return self.publications.release(sequence)

    def resolve(self, sequence: int) -> Advance:
        return self.publications.resolve(sequence)

    @shared
    def is_published(self, item: str) -> bool:
        return self.publications.is_published(item)

    @shared
    def get(self, sequence: int, line: str = "default") -> Advance:
        return self.publications.get(sequence, line)

    @shared
    def states(self, line: str = "default", after: int = 0, limit: int = 100) -> list[str]:
        return [advance.state for advance in self.publications.list(line, after=after, limit=limit)]

    @shared
    def state(self, sequence: int) -> str:
        return self.publications.state(sequence)

    @shared
    def up_to(self, line: str = "default") -> int:
        return self.publications.published_up_to(line)

    @shared
    def advance_read_only(self) -> None:
        self.publications.advance(items=["x"])


class Listener(Release):
    """A release that hears of its publications, sometimes badly."""

    deaf_to: ClassVar[set[int]] = set()
    slow: ClassVar[asyncio.Event | None] = None

    async def on_published(self, advance: Advance) -> None:
        heard = self.storage.get("heard", [])
        self.storage["heard"] = [*heard, (advance.line, advance.sequence)]
        assert advance.state == "published"
        assert self.publications.is_published(advance.items[0])
        if self.slow is not None:
            await self.slow.wait()
        if advance.sequence in self.deaf_to:
            raise RuntimeError("can't hear")

    def heard(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = self.storage.get("heard", [])
        return found


class Beside(DurableObject):
    turns = "interleaved"

    def advance(self) -> None:
        self.publications.advance(items=["x"])


GATES: dict[str, asyncio.Event] = {}


@pytest.fixture
async def runtime() -> AsyncIterator[LocalRuntime]:
    Listener.deaf_to, Listener.slow = set(), None
    GATES.clear()
    async with LocalRuntime(partitions=PARTITIONS, memory=True) as runtime:
        yield runtime


def release_in(runtime: LocalRuntime, partition: int, prefix: str = "k", cls: type[Release] = Release) -> Stub:
    """A release that lives in that partition."""
    return runtime.namespace(cls).get(key_in(cls.__name__, partition, PARTITIONS, prefix))


def partition_at(runtime: LocalRuntime, number: int) -> Partition:
    partition = runtime.partitions[number]
    assert partition is not None
    return partition


def engine_timers(runtime: LocalRuntime) -> list[tuple[int, int]]:
    """(kind, due) of every timer of the toolkit that is left."""
    kinds = (TimerKind.PUBLICATION_RECHECK, TimerKind.PUBLICATION_NOTICE)
    rows = [row for each in runtime.partitions if each is not None for row in each.store.scan("timers")]
    return [(row[2], row[1]) for row in rows if row[2] in kinds]


async def settle(runtime: LocalRuntime) -> None:
    """Until hints between partitions have led to nothing new; no time passes."""
    seen = -1
    while seen != (seen := sum(each.committer.commits for each in runtime.partitions if each is not None)):
        await runtime.run_until_idle()


# --- the fast path ------------------------------------------------------------------------------------


async def test_what_needs_nothing_is_published_in_the_commit_of_its_turn(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0)
    advance = await release.advance(["a", "b"])
    assert (advance.line, advance.sequence, advance.state, advance.items) == ("default", 1, "published", ("a", "b"))
    assert (advance.waiting_for, advance.behind, advance.created_ms) == ((), None, runtime.clock.wall_ms())
    await partition_at(runtime, 0).abandon()  # nothing but that commit was made
    await runtime.crash()
    assert [await release.is_published(item) for item in ("a", "b", "c")] == [True, True, False]


async def test_what_the_object_has_published_itself_counts_at_once(runtime: LocalRuntime) -> None:
    assert await release_in(runtime, 0).advance_twice() == ["published", "published"]


async def test_an_advance_may_need_nothing_and_add_nothing(runtime: LocalRuntime) -> None:
    assert (await release_in(runtime, 0).advance([])).state == "published"


async def test_what_a_turn_that_raises_has_advanced_never_was(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0)
    with pytest.raises(Rejected):
        await release.advance_then_fail(["a"])
    assert (await release.is_published("a"), await release.states()) == (False, [])
    assert (await release.advance(["a"])).sequence == 1


async def test_all_items_of_an_advance_become_visible_together(runtime: LocalRuntime) -> None:
    """4,096 of them: more than one batch could write."""
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    items = [f"file{number:04}" for number in range(4_096)]
    await release.advance(items, [("Release", base.key, "base")])
    assert not await release.is_published(items[-1])
    await base.advance(["base"])
    await settle(runtime)
    assert all([await release.is_published(item) for item in items[::500]])


# --- needing others -----------------------------------------------------------------------------------


async def test_an_advance_is_published_once_another_object_has_published_what_it_needs(runtime: LocalRuntime) -> None:
    """In another partition, without waiting for the next recheck."""
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    assert (await release.needs([(base.key, "base")])).state == "pending"
    await runtime.advance(minutes=1)
    assert await release.state(1) == "pending"
    before_ms = runtime.clock.wall_ms()
    await base.advance(["base"])
    await settle(runtime)
    assert (await release.state(1), runtime.clock.wall_ms()) == ("published", before_ms)
    assert engine_timers(runtime) == []


async def test_what_is_there_already_is_seen_at_once(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await base.advance(["base"])
    before_ms = runtime.clock.wall_ms()
    await release.needs([(base.key, "base")])
    await settle(runtime)
    assert (await release.state(1), runtime.clock.wall_ms()) == ("published", before_ms)


@pytest.mark.parametrize("partition", [0, 1], ids=["same partition", "another partition"])
async def test_without_hints_the_next_recheck_finds_it(
    runtime: LocalRuntime, partition: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A.7: rechecked each 5 s, whatever became of the hint."""
    monkeypatch.setattr(PublicationHints, "register", lambda *_: None)
    release, base = release_in(runtime, 0, "a"), release_in(runtime, partition, "b")
    await release.needs([(base.key, "base")])
    await settle(runtime)
    await base.advance(["base"])
    await runtime.advance(ms=RECHECK_MS - 1)
    assert await release.state(1) == "pending"
    await runtime.advance(ms=1)
    assert await release.state(1) == "published"


async def test_items_of_the_object_itself_are_waited_for_too(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0)
    assert (await release.advance(["a"], ["base"])).waiting_for == ("base",)
    await release.advance(["base"], line="other")
    await settle(runtime)
    assert await release.is_published("a")


async def test_an_object_that_is_named_as_another_may_be_the_object_itself(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0)
    advance = await release.needs([(release.key, "base")])
    assert advance.depends_on == ("base",)


async def test_a_chain_over_all_partitions_is_published_in_order_in_no_time(runtime: LocalRuntime) -> None:
    chain = [release_in(runtime, number % PARTITIONS, f"c{number}-") for number in range(12)]
    for earlier, later in pairwise(chain):
        await later.needs([(earlier.key, "own")])
    await settle(runtime)
    before_ms = runtime.clock.wall_ms()
    await chain[0].advance(["own"])
    await settle(runtime)
    assert [await release.up_to() for release in chain] == [1] * 12
    assert runtime.clock.wall_ms() == before_ms


async def test_a_diamond_waits_for_both_sides(runtime: LocalRuntime) -> None:
    bottom, left, right, top = [release_in(runtime, number % 3, f"d{number}-") for number in range(4)]
    await top.needs([(left.key, "own"), (right.key, "own")])
    await left.needs([(bottom.key, "own")])
    await right.needs([(bottom.key, "own"), (right.key, "own")])
    await left.hold(1)
    await bottom.advance(["own"])
    await settle(runtime)
    assert [await each.state(1) for each in (left, right, top)] == ["held", "published", "pending"]
    waiting_for = (await top.get(1)).waiting_for  # each look ends at the first that is missing
    assert waiting_for[0] == ("Release", left.key, "own")
    await left.release(1)
    await settle(runtime)
    assert [await each.state(1) for each in (left, right, top)] == ["published"] * 3


async def test_external_bases_are_not_met_by_own_additions(runtime: LocalRuntime) -> None:
    """A.7.5"""
    release = release_in(runtime, 0)
    advance = await release.advance(["a", "b"], ["a"], ["b"])
    assert (advance.state, advance.waiting_for, advance.external) == ("pending", ("b",), ("b",))
    await runtime.advance(minutes=1)
    assert await release.state(1) == "pending"


async def test_a_line_is_published_in_order(runtime: LocalRuntime) -> None:
    """A.7.13: the longest clear prefix first; lines do not wait for each other."""
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    advance = await release.advance(["later"])
    assert (advance.state, advance.behind, advance.waiting_for) == ("cleared", 1, ())
    await release.advance(["aside"], line="side")
    assert [await release.is_published(item) for item in ("own", "later", "aside")] == [False, False, True]
    await base.advance(["base"])
    await settle(runtime)
    assert await release.states() == ["published", "published"]


async def test_two_that_wait_for_each_other_stay_pending_and_show_it(runtime: LocalRuntime) -> None:
    left, right = release_in(runtime, 0), release_in(runtime, 1)
    await left.needs([(right.key, "own")])
    await right.needs([(left.key, "own")])
    await runtime.advance(hours=1)
    assert [(await each.get(1)).waiting_for for each in (left, right)] == [
        (("Release", right.key, "own"),),
        (("Release", left.key, "own"),),
    ]
    assert (await left.resolve(1)).state == "published"
    await settle(runtime)
    assert await right.state(1) == "published"


async def test_waiting_for_is_what_was_missing_at_the_last_look(runtime: LocalRuntime) -> None:
    bases = [release_in(runtime, 1, f"b{number}-") for number in range(3)]
    release = release_in(runtime, 0)
    advance = await release.needs([(base.key, "own") for base in bases])
    assert advance.waiting_for == tuple(("Release", base.key, "own") for base in bases)
    await bases[0].advance(["own"])
    await settle(runtime)
    assert (await release.get(1)).waiting_for == advance.waiting_for[1:]


# --- holding back -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_back", ["hold", "mark_hit"])
async def test_what_is_kept_back_waits_for_release_although_everything_is_there(
    runtime: LocalRuntime, keep_back: str
) -> None:
    """A.7.15"""
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    await getattr(release, keep_back)(1)
    await release.advance(["later"])
    await base.advance(["base"])
    await runtime.advance(minutes=1)
    assert (await release.states(), await release.up_to()) == (
        [{"hold": "held", "mark_hit": "hit"}[keep_back], "cleared"],
        0,
    )
    await release.release(1)
    await settle(runtime)
    assert await release.states() == ["published", "published"]
    await runtime.advance(minutes=1)
    assert engine_timers(runtime) == []


async def test_a_cleared_advance_can_be_held_and_released(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    await release.advance(["later"])
    await release.hold(2)
    await base.advance(["base"])
    await settle(runtime)
    assert await release.states() == ["published", "held"]
    assert (await release.release(2)).state == "published"


async def test_resolve_lets_a_hit_pass(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    await release.advance(["later"])
    await release.mark_hit(2)
    assert (await release.resolve(2)).state == "resolved"
    assert (await release.resolve(1)).state == "published"
    assert await release.states() == ["published", "published"]
    await runtime.advance(minutes=1)
    assert engine_timers(runtime) == []


async def test_what_can_not_be_done_with_an_advance_is_refused(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.advance(["first"])
    for method in (release.hold, release.mark_hit, release.release, release.resolve):
        with pytest.raises(AdvanceConflict, match="is published"):
            await method(1)
        for sequence in (0, 2, -1):
            with pytest.raises(UnknownAdvance):
                await method(sequence)
    await release.needs([(base.key, "base")])
    with pytest.raises(AdvanceConflict, match="is pending"):
        await release.release(2)
    await release.mark_hit(2)
    with pytest.raises(AdvanceConflict, match="is hit"):
        await release.hold(2)
    assert (await release.mark_hit(2)).state == "hit"
    for read in (release.state(3), release.get(1, "other")):
        with pytest.raises(UnknownAdvance):
            await read


# --- reads --------------------------------------------------------------------------------------------


async def test_advances_are_listed_in_pages(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0)
    assert (await release.states(), await release.up_to()) == ([], 0)
    assert await release.advance_many(5) == ["published"] * 5
    assert [len(await release.states("default", after, 2)) for after in (0, 3, 4, 5, 9)] == [2, 2, 1, 0, 0]


async def test_a_shared_method_reads_and_does_not_write(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0)
    with pytest.raises(ReadOnlyTurn):
        await release.advance_read_only()


# --- limits and refusals ------------------------------------------------------------------------------


async def test_a_line_has_at_most_64_unpublished_advances(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    assert await release.advance_many(63) == ["cleared"] * 63
    with pytest.raises(TooManyAdvances, match="64 unpublished"):
        await release.advance(["more"])
    assert (await release.advance(["more"], line="other")).state == "published"
    await base.advance(["base"])
    await settle(runtime)
    assert await release.up_to() == 64
    assert (await release.advance(["at last"])).sequence == 65


async def test_an_advance_has_at_most_4096_items_dependencies_and_bases(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0)
    names = [f"{number}" for number in range(4_097)]
    for arguments in ((names,), ([], names), ([], [], names)):
        with pytest.raises(AdvanceTooLarge, match="4,097"):
            await release.advance(*arguments)
    with pytest.raises(AdvanceTooLarge, match="bytes"):
        await release.advance([f"{number:0500}" for number in range(1_100)])
    assert await release.states() == []


async def test_an_item_is_added_once(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    for line in ("default", "other"):
        with pytest.raises(DuplicateItem, match="'own' was added by advance 1"):
            await release.advance(["own"], line=line)
    assert (await release.advance(["b", "b", "a"])).items == ("a", "b")


@pytest.mark.parametrize(
    "arguments",
    [
        {"items": "text"},
        {"items": [""]},
        {"items": ["a\0b"]},
        {"items": ["x" * 513]},
        {"items": [1]},
        {"items": [], "depends_on": "text"},
        {"items": [], "depends_on": [("Release", "k")]},
        {"items": [], "depends_on": [("", "k", "x")]},
        {"items": [], "external": [("Release", "k", "")]},
        {"items": [], "external": [3]},
        {"items": [], "line": ""},
        {"items": [], "line": "a\0b"},
        {"items": [], "line": "x" * 201},
    ],
)
async def test_what_makes_no_sense_is_refused(runtime: LocalRuntime, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        await release_in(runtime, 0).advance(**arguments)


async def test_a_needed_items_key_is_checked(runtime: LocalRuntime) -> None:
    with pytest.raises(InvalidKey):
        await release_in(runtime, 0).advance([], [("Release", "", "x")])


async def test_interleaved_classes_have_no_publications(runtime: LocalRuntime) -> None:
    with pytest.raises(SerialTurnsNeeded, match="publications"):
        await runtime.namespace(Beside).get("a").advance()


async def test_the_names_belong_to_the_runtime(runtime: LocalRuntime) -> None:
    with pytest.raises(InvalidClassOption, match="publications"):
        type("Shadow", (DurableObject,), {"publications": 1})
    with pytest.raises(ReservedName):
        await release_in(runtime, 0, cls=Listener).on_published(None)


# --- what an object lives through ---------------------------------------------------------------------


async def test_a_blocked_advance_survives_eviction_and_crash(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    await runtime.evict(release)
    await runtime.crash()
    assert (await release.get(1)).waiting_for == (("Release", base.key, "base"),)
    await base.advance(["base"])
    await runtime.crash()
    await runtime.advance(ms=RECHECK_MS)
    assert await release.state(1) == "published"


async def test_a_deleted_object_leaves_nothing(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    await release.advance(["later"])
    await runtime.run_until_idle()
    assert await runtime.namespace(Release).delete(release.key)
    await runtime.advance(ms=RECHECK_MS)
    store = partition_at(runtime, 0).store
    assert [store.scan(spec) for spec in TABLES if spec.startswith("publication")] == [[]] * 4
    assert engine_timers(runtime) == []
    assert (await release.advance(["own"])).sequence == 1


async def test_what_a_deleted_object_had_published_is_not_there_for_others_any_more(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await base.advance(["base"])
    await runtime.run_until_idle()
    await runtime.namespace(Release).delete(base.key)
    await release.needs([(base.key, "base")])
    await runtime.advance(minutes=1)
    assert await release.state(1) == "pending"


async def test_nothing_is_published_under_a_turn_that_has_looked(runtime: LocalRuntime) -> None:
    """The turn of a serial object sees one state of things, and does not undo what the engine did."""
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    GATES["g"] = asyncio.Event()
    turn = asyncio.ensure_future(release.advance_slowly(["later"], "g"))
    await runtime.run_until_idle()
    await base.advance(["base"])
    await runtime.advance(seconds=20)
    GATES["g"].set()
    assert (await turn).state == "cleared"
    await settle(runtime)
    assert await release.states() == ["published", "published"]


# --- on_published -------------------------------------------------------------------------------------


async def test_on_published_runs_once_for_each_advance_in_order(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0, cls=Listener), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    await release.advance_many(5)
    await release.advance(["aside"], line="side")
    await settle(runtime)
    assert await release.heard() == [("side", 1)]
    await base.advance(["base"])
    await settle(runtime)
    assert await release.heard() == [("side", 1), *(("default", number) for number in range(1, 7))]
    await release.advance(["last"])
    await runtime.crash()
    await runtime.advance(hours=1)
    assert await release.heard() == [("side", 1), *(("default", number) for number in range(1, 8))]
    assert engine_timers(runtime) == []


async def test_what_is_published_while_on_published_runs_is_told_after_it(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0, cls=Listener)
    await release.advance(["a"])
    Listener.slow = asyncio.Event()
    await runtime.run_until_idle()
    second = asyncio.ensure_future(release.advance(["b"]))
    await runtime.advance(seconds=10)
    Listener.slow.set()
    assert (await second).state == "published"
    await settle(runtime)
    assert await release.heard() == [("default", 1), ("default", 2)]


async def test_an_on_published_that_fails_is_tried_again_before_any_later_one(runtime: LocalRuntime) -> None:
    Listener.deaf_to = {2}
    release = release_in(runtime, 0, cls=Listener)
    await release.advance_many(3)
    await settle(runtime)
    assert await release.heard() == [("default", 1)]
    Listener.deaf_to = set()
    await runtime.advance(minutes=1)
    assert await release.heard() == [("default", number) for number in (1, 2, 3)]


async def test_an_on_published_that_always_fails_is_a_dead_letter_and_the_line_goes_on(runtime: LocalRuntime) -> None:
    Listener.deaf_to = {2}
    release = release_in(runtime, 0, cls=Listener)
    await release.advance_many(3)
    await runtime.advance(hours=2)
    assert await release.heard() == [("default", 1), ("default", 3)]
    [letter] = await runtime.dead_letters()
    Listener.deaf_to = set()
    assert await runtime.redrive(letter)
    await settle(runtime)
    assert await release.heard() == [("default", number) for number in (1, 3, 2)]
    await release.advance(["more"])
    await runtime.advance(hours=2)
    assert (await release.heard())[3:] == [("default", 4)]
    assert await runtime.dead_letters() == []


async def line_row(runtime: LocalRuntime) -> LineRow:
    """The one publication line in partition 0."""
    [row] = partition_at(runtime, 0).store.scan(PUBLICATION_LINES)
    return LineRow(*row)


async def test_a_notice_while_on_published_runs_changes_nothing(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0, cls=Listener)
    Listener.slow = asyncio.Event()
    await release.advance_many(2)
    await runtime.run_until_idle()
    assert await partition_at(runtime, 0).publications.published(await line_row(runtime))
    Listener.slow.set()
    await settle(runtime)
    assert await release.heard() == [("default", 1), ("default", 2)]
    assert sum(status["resets"] for status in runtime.status()) == 0


@pytest.mark.parametrize("number", range(1, 9))
async def test_a_commit_that_fails_delays_on_published_and_loses_nothing(number: int) -> None:
    Listener.deaf_to, Listener.slow = set(), None
    control = CommitControl()
    async with runtime_with(control) as runtime:
        release = runtime.namespace(Listener).get("k")
        await release.needs([("base", "base")])
        await runtime.run_until_idle()
        control.fail_at(control.commits + number)
        base = runtime.namespace(Release).get("base")
        try:
            await base.advance(["base"])
        except CommitFailed:
            await base.advance(["base"])
        await runtime.advance(minutes=1)
        control.calm()
        assert (await release.up_to(), await release.heard()) == (1, [("default", 1)])
        assert engine_timers(runtime) == []


async def test_a_notice_is_told_only_once_the_timer_of_on_published_is_durable() -> None:
    Listener.deaf_to, Listener.slow = set(), None
    control = CommitControl()
    async with runtime_with(control) as runtime:
        release = runtime.namespace(Listener).get("k")
        await release.advance(["a"])
        await runtime.run_until_idle()
        await runtime.evict(release)
        row = await line_row(runtime)
        port = partition_at(runtime, 0).publications
        control.fail_next()
        assert not await port.published(replace(row, announced=0))
        assert await port.published(replace(row, announced=0))
        await runtime.advance(minutes=1)
        assert await release.heard() == [("default", 1)]  # it was counted before


async def test_a_class_that_does_not_want_to_know_is_not_asked(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0)
    await release.advance_many(3)
    await settle(runtime)
    [(_oid, _line, following, published, announced, _hooked)] = partition_at(runtime, 0).store.scan(PUBLICATION_LINES)
    assert (following, published, announced) == (4, 3, 3)
    assert engine_timers(runtime) == []


async def test_a_deleted_object_is_not_told(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 0, cls=Listener)
    Listener.slow = asyncio.Event()
    Listener.slow.set()
    await release.advance(["a"])
    await runtime.namespace(Listener).delete(release.key)
    await runtime.advance(minutes=1)
    assert engine_timers(runtime) == []
    assert [entry.key for entry in await runtime.namespace(Listener).list()] == []


async def test_an_object_that_is_being_deleted_is_not_told() -> None:
    Listener.deaf_to, Listener.slow = set(), None
    control = CommitControl()
    async with runtime_with(control) as runtime:
        listeners = runtime.namespace(Listener)
        await listeners.get("k").advance(["a"])
        await runtime.run_until_idle()
        await runtime.evict(listeners.get("k"))
        row = await line_row(runtime)
        partition = partition_at(runtime, 0)
        with control.hold():
            deletion = asyncio.ensure_future(listeners.delete("k"))
            for _ in range(20):
                await asyncio.sleep(0)
            assert partition.deletions
            assert await partition.publications.published(replace(row, announced=0))
        assert await deletion
        await runtime.advance(minutes=1)
        assert await listeners.list() == []


@pytest.mark.parametrize("applied", [True, False], ids=["after_the_commit", "before_the_commit"])
async def test_a_crash_at_any_commit_neither_loses_nor_repeats_a_publication(applied: bool) -> None:
    """Two partitions, a chain from one to the other and back, `on_published` at both ends."""
    Listener.deaf_to, Listener.slow = set(), None
    number = 0
    while True:
        number += 1
        control = CommitControl(number, applied=applied)
        async with runtime_with(control, partitions=2) as runtime:
            first, middle, last = [
                runtime.namespace(Listener).get(key_in("Listener", partition, 2, f"{index}-"))
                for index, partition in enumerate((0, 1, 0))
            ]
            async with crash_when_stopped(runtime, control, all_partitions=number % 2 == 0):
                await finish(runtime, last.advance(["c"], [("Listener", middle.key, "b")]))
                await finish(runtime, last.advance(["d"]))
                await finish(runtime, middle.advance(["b"], [("Listener", first.key, "a")]))
                await finish(runtime, first.advance(["a"]))
                await runtime.advance(seconds=20)
            await runtime.advance(minutes=2)
            assert [await finish(runtime, each.up_to()) for each in (first, middle, last)] == [1, 1, 2], number
            heard = [await finish(runtime, each.heard()) for each in (first, middle, last)]
            assert heard == [[("default", 1)], [("default", 1)], [("default", 1), ("default", 2)]], number
            assert engine_timers(runtime) == []
        if not control.stopped:
            break
    assert number > 15


# --- moving -------------------------------------------------------------------------------------------


async def test_what_is_blocked_is_published_wherever_its_object_has_moved_to(runtime: LocalRuntime) -> None:
    chain = [release_in(runtime, number % PARTITIONS, f"m{number}-", Listener) for number in range(12)]
    for earlier, later in pairwise(chain):
        await later.advance(["own"], [("Listener", earlier.key, "own")])
    await runtime.run_until_idle()
    await runtime.scale(5)
    await chain[0].advance(["own"])
    await runtime.scale(2)
    await runtime.advance(ms=RECHECK_MS * len(chain))
    assert [await release.up_to() for release in chain] == [1] * 12
    assert [await release.heard() for release in chain] == [[("default", 1)]] * 12
    assert engine_timers(runtime) == []


async def test_an_advance_that_moves_while_its_timer_waits_for_an_answer_is_published_once(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the fire decides at the old place, where the rows are being copied, does not count."""
    release, base = release_in(runtime, 0, cls=Listener), release_in(runtime, 1)
    await base.advance(["base"])
    answered, asked = asyncio.Event(), asyncio.Event()
    port = partition_at(runtime, 0).publications
    visible = port.visible

    async def slow(*arguments: Any) -> Any:
        answer = await visible(*arguments)
        asked.set()
        await answered.wait()
        return answer

    monkeypatch.setattr(port, "visible", slow)
    await release.advance(["a"], [("Release", base.key, "base")])
    await runtime.run_until_idle()
    assert asked.is_set()
    departures = partition_at(runtime, 0).departures
    send = departures._transfer
    published: list[int] = []

    async def transfer(*arguments: Any) -> int:
        answered.set()
        for _ in range(50):
            await asyncio.sleep(0)
        published.append((await line_row(runtime)).published)
        return await send(*arguments)

    monkeypatch.setattr(departures, "_transfer", transfer)
    await runtime.moves.mover().move([release.id.slot], 2)
    assert published == [0]
    assert partition_at(runtime, 0).store.scan(PUBLICATION_LINES) == []
    await runtime.advance(ms=RECHECK_MS)
    assert (await release.up_to(), await release.heard()) == (1, [("default", 1)])
    assert runtime.moves.partition_of(release.id.slot) == 2
    assert engine_timers(runtime) == []


# --- between partitions -------------------------------------------------------------------------------


async def test_a_partition_that_does_not_answer_delays_only_what_needs_it(
    runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A.7.8"""
    release, away, near = release_in(runtime, 0), release_in(runtime, 1), release_in(runtime, 2)
    client = partition_at(runtime, 0).client
    asked: list[str] = []
    admin_object = client.admin_object

    async def broken(ref: ClassRef, key: str, op: str, args: Any, **options: Any) -> Any:
        asked.append(key)
        if key == away.key:
            raise MainspringError("nobody there")
        return await admin_object(ref, key, op, args, **options)

    monkeypatch.setattr(client, "admin_object", broken)
    await away.advance(["base"])
    await near.advance(["base"])
    await release.advance(["a"], [("Release", away.key, "base")], line="away")
    await release.advance(["b"], [("Release", away.key, "base")], line="away too")
    await release.advance(["c"], [("Release", near.key, "base")], line="near")
    await settle(runtime)
    assert [await release.is_published(item) for item in "abc"] == [False, False, True]
    assert asked.count(away.key) == 1  # it costs its time once
    monkeypatch.undo()
    await runtime.advance(ms=RECHECK_MS)
    assert [await release.is_published(item) for item in "abc"] == [True, True, True]


async def test_witnesses_answer_from_durable_rows_and_only_at_the_owner(runtime: LocalRuntime) -> None:
    release = release_in(runtime, 1)
    await release.advance(["a"])
    client, ref = runtime.client(), class_info(Release).ref
    question = ["Release", release.key, ["a", "b"], None]
    assert await client.admin_object(ref, release.key, "witnesses", question) == [True, False]
    assert await client.admin_object(ref, "nobody", "witnesses", ["Release", "nobody", ["a"], None]) == [False]
    with pytest.raises(MainspringError, match="status"):
        await client.admin(0, "witnesses", question)  # a stale map would be refreshed and the owner asked


async def test_a_stale_map_is_refreshed_and_the_owner_asked(runtime: LocalRuntime) -> None:
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await base.advance(["base"])
    directory = partition_at(runtime, 0).client.directory
    wrong = {partition_at(runtime, 1).slots[0][0] + offset for offset in range(4_096 // PARTITIONS)}
    owner = directory.partition_of
    moved = {"version": 1}

    class Stale:
        """Thinks that partition 2 has the slots of partition 1, until it is asked for a newer map."""

        @property
        def map_version(self) -> int:
            return moved["version"]

        def partition_of(self, slot: int) -> int:
            return 2 if slot in wrong and moved["version"] == 1 else owner(slot)

        async def refresh(self, seen_version: int) -> None:
            moved["version"] = 2

        def __getattr__(self, name: str) -> Any:
            return getattr(directory, name)

    client = partition_at(runtime, 0).client
    stale: Any = Stale()
    client.directory = stale
    for routes in (client.routes, client._pickled_routes):
        assert routes is not None
        routes._directory = stale
    await release.needs([(base.key, "base")])
    for _ in range(200):
        await settle(runtime)
        if await release.state(1) == "published":
            break
        await asyncio.sleep(0.005)
    assert (await release.state(1), moved["version"]) == ("published", 2)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("witnesses", ["Release", "k", [1], None]),
        ("witnesses", ["Release", "k", ["a"] * 1_001, None]),
        ("witnesses", ["Release", "k", ["a"], ["Release", "k", "default"]]),
        ("witnesses", ["Release", "k", ["a"], ["Release", "k", "default", "1"]]),
        ("wake_publication", ["Release", "k", "default", 0]),
        ("wake_publication", ["Release", "k", 1, 1]),
        ("witnesses", ["Release"]),
    ],
)
async def test_questions_that_make_no_sense_are_refused(runtime: LocalRuntime, op: str, arguments: list[Any]) -> None:
    ref = class_info(Release).ref
    with pytest.raises(InvalidOption):
        await runtime.client().admin_object(ref, "k", op, arguments)


async def test_waking_what_is_not_there_changes_nothing(runtime: LocalRuntime) -> None:
    client, ref = runtime.client(), class_info(Release).ref
    assert await client.admin_object(ref, "k", "wake_publication", ["Release", "k", "default", 1]) is False
    release = release_in(runtime, 0)
    await release.advance(["a"])
    wake = ["Release", release.key, "default", 1]
    assert await client.admin_object(ref, release.key, "wake_publication", wake) is True
    await settle(runtime)
    assert await release.states() == ["published"]


async def test_a_wake_that_comes_before_its_timer_is_kept_for_it(runtime: LocalRuntime) -> None:
    """The reply that made the timer wait and the wake travel on different connections."""
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    await release.needs([(base.key, "base")])
    await settle(runtime)
    hints = partition_at(runtime, 0).publications.hints
    [row] = partition_at(runtime, 0).store.scan("timers")
    ref, due_ms = row[3], row[1]
    armed, hints._armed = hints._armed, type(hints._armed)()
    hints.wanted(ref)
    assert hints.moves() == []
    hints._armed = armed
    [move] = hints.moves()
    assert isinstance(move, Batch)
    assert (due_ms, hints.moves()) == (row[5], [])
    hints._armed = type(hints._armed)()
    hints.wanted(ref)
    await runtime.advance(seconds=60)
    assert list(hints._wanted) == []  # not for ever


async def test_what_is_remembered_of_waiters_is_bounded(runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.publication_hints._MAX_ENTRIES", 3)
    release, base = release_in(runtime, 0), release_in(runtime, 1)
    for number in range(6):
        await release.advance([f"{number}"], [("Release", base.key, "base")], line=f"line{number}")
    await settle(runtime)
    assert len(partition_at(runtime, 1).publications.hints.waiting_for("Release", base.key)) == 3
    await base.advance(["base"])
    await settle(runtime)
    published = [await release.up_to(f"line{number}") for number in range(6)]
    assert sum(published) == 3
    await runtime.advance(ms=RECHECK_MS)
    assert [await release.up_to(f"line{number}") for number in range(6)] == [1] * 6


async def test_settings_limit_what_they_say() -> None:
    settings = Settings(durability="off", max_unpublished_advances=1, max_advance_items=1, max_advance_bytes=1_024)
    async with LocalRuntime(memory=True, settings=settings) as runtime:
        release = runtime.namespace(Release).get("k")
        with pytest.raises(AdvanceTooLarge):
            await release.advance(["a", "b"])
        with pytest.raises(AdvanceTooLarge):
            await release.advance([], [("Release", "k" * 1_000, "x" * 400)])
        await release.advance(["a"], ["never"])
        with pytest.raises(TooManyAdvances):
            await release.advance(["b"])
