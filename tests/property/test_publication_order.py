"""In whatever order advances arrive, and whatever crashes: nothing is published before what it needs.

The rule is checked on the durable rows of all partitions at every single commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from actors import Advance, DurableObject
from actors.testing import LocalRuntime
from drivers.tables import OBJECTS
from tests.support.crash_points import CommitControl, ControlledExecutor, Done, finish, runtime_with
from timers.publication_rows import AdvanceRow, Contents, ItemRow, LineRow

PARTITIONS = 3
OBJECTS_MADE = 4
#: (object, item)
Item = tuple[int, str]


class Publisher(DurableObject):
    type_name = "OrderedPublisher"

    def advance(self, line: str, item: str, needs: list[tuple[str, str, str]]) -> int:
        return self.publications.advance(line, items=[item], depends_on=needs).sequence

    def hold(self, line: str, sequence: int) -> None:
        self.publications.hold(sequence, line)

    def release(self, line: str, sequence: int) -> None:
        self.publications.release(sequence, line)

    def is_published(self, item: str) -> bool:
        return self.publications.is_published(item)

    def on_published(self, advance: Advance) -> None:
        self.storage["heard"] = [*self.heard(), (advance.line, advance.sequence)]

    def heard(self) -> list[Any]:
        heard: list[Any] = self.storage.get("heard", [])
        return heard


@dataclass(frozen=True)
class Planned:
    """One advance to be made: its object, line and item, and what it needs."""

    owner: int
    line: str
    item: str
    needs: tuple[Item, ...]
    is_held: bool


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Planned], list[int], list[int]]:
    """Advances without cycles, an order of arrival for each line at random, and where partitions crash.

    An advance needs only earlier ones, and lines take theirs in that order, so that none waits for itself.
    """
    planned: list[Planned] = []
    for number in range(draw(st.integers(2, 12))):
        known = [(each.owner, each.item) for each in planned]
        needs = draw(st.lists(st.sampled_from(known), max_size=3, unique=True)) if known else []
        owner = draw(st.integers(0, OBJECTS_MADE - 1))
        line = draw(st.sampled_from(["a", "b"]))
        planned.append(Planned(owner, line, f"item{number}", tuple(needs), draw(st.integers(0, 9)) == 0))
    order = draw(st.permutations(range(len(planned))))
    crashes = draw(st.lists(st.integers(1, 60), max_size=3))
    return planned, _keep_lines(planned, list(order)), sorted(set(crashes))


def _keep_lines(planned: list[Planned], order: list[int]) -> list[int]:
    """The order, with the advances of each line among themselves as they were planned."""
    by_line: dict[tuple[int, str], list[int]] = {}
    for number in sorted(order):
        by_line.setdefault((planned[number].owner, planned[number].line), []).append(number)
    return [by_line[planned[number].owner, planned[number].line].pop(0) for number in order]


class Watch(CommitControl):
    """Looks at all partitions after every commit, and crashes at some."""

    def __init__(self, crashes: list[int]) -> None:
        super().__init__()
        self.crashes = crashes
        self.look: Callable[[], None] = lambda: None
        self.lost: set[int] = set()

    def submit(self, executor: ControlledExecutor, job: Callable[[], Any], done: Done) -> None:
        if executor.stopped:
            return
        if self.commits + 1 in self.crashes:
            self.commits += 1
            executor.stopped = True
            if self.commits % 2:
                job()
            self.lost.add(executor.partition)
            self.look()
            return
        super().submit(executor, job, done)
        self.look()


class World:
    """What the partitions hold, read from their durable rows."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self._runtime = runtime
        self.published: set[tuple[str, str]] = set()
        self.errors: list[str] = []

    def look(self) -> None:
        """Every published advance has all that it needs, and nothing that was published is gone."""
        published: set[tuple[str, str]] = set()
        needs: dict[tuple[str, str], set[tuple[str, str]]] = {}
        for partition in self._runtime.partitions:
            if partition is None:
                return  # one is being opened again
            store = partition.store
            keys = {row[0]: row[3] for row in store.scan(OBJECTS)}
            lines = {row[:2]: LineRow(*row) for row in store.scan(LineRow.table)}
            for row in store.scan(ItemRow.table):
                item = ItemRow(*row)
                place = (keys[item.oid], item.item)
                if item.sequence <= lines[item.oid, item.line].published:
                    published.add(place)
                values = store.get(AdvanceRow.table, (item.oid, item.line, item.sequence))
                assert values is not None
                contents = Contents.from_bytes(values[0])
                needs[place] = {(need.key or keys[item.oid], need.item) for need in contents.needed()}
        self.errors += [
            f"{place} without {needs[place] - published}" for place in published if needs[place] - published
        ]
        self.errors += [f"{place} is gone" for place in self.published - published]
        self.published |= published


async def publish(planned: list[Planned], order: list[int], crashes: list[int]) -> None:
    control = Watch(crashes)
    async with runtime_with(control, partitions=PARTITIONS) as runtime:
        world = World(runtime)
        control.look = world.look
        publishers = [runtime.namespace(Publisher).get(f"k{number}") for number in range(OBJECTS_MADE)]

        async def call(method: Any, *arguments: Any) -> Any:
            future = asyncio.ensure_future(method(*arguments))
            while not future.done():
                for number in list(control.lost):
                    control.lost.discard(number)
                    await runtime.crash(number)
                await asyncio.wait([future], timeout=0.002)
                await runtime.run_until_idle()
            return await future

        held: list[tuple[Any, str, int]] = []
        for number in order:
            each = planned[number]
            needs = [("OrderedPublisher", f"k{owner}", item) for owner, item in each.needs]
            sequence = await call(publishers[each.owner].advance, each.line, each.item, needs)
            if each.is_held and not await call(publishers[each.owner].is_published, each.item):
                await call(publishers[each.owner].hold, each.line, sequence)
                held.append((publishers[each.owner], each.line, sequence))
        for publisher, line, sequence in held:
            await call(publisher.release, line, sequence)
        for _ in range(2 * len(planned)):
            for number in list(control.lost):
                control.lost.discard(number)
                await runtime.crash(number)
            await runtime.advance(seconds=5)
        control.crashes = []
        world.look()
        assert world.errors == []
        assert world.published == {(f"k{each.owner}", each.item) for each in planned}
        for number, publisher in enumerate(publishers):
            heard = [tuple(entry) for entry in await finish(runtime, publisher.heard())]
            for line in ("a", "b"):
                made = sum(each.owner == number and each.line == line for each in planned)
                assert [entry for entry in heard if entry[0] == line] == [(line, n) for n in range(1, made + 1)]


@settings(max_examples=25, deadline=None)
@given(plans())
def test_publication_respects_every_need_under_any_order_of_arrival_and_crashes(
    plan: tuple[list[Planned], list[int], list[int]],
) -> None:
    """A.7.5, A.7.6, A.7.13, A.7.15; and `on_published` runs once for each advance, in order."""
    asyncio.run(publish(*plan))
