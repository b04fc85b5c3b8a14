"""State of objects that older code has written is brought to the class's version, step by step and once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

from actors import DurableObject, TimerInfo, migration
from actors.errors import InvalidClassOption, InvalidOption, MethodNotCallable, ObjectTooNew
from actors.testing import LocalRuntime


class V1(DurableObject):
    """The first code: a name in one text."""

    type_name = "Person"

    def put(self, name: str) -> None:
        self.storage["name"] = name

    def wait(self) -> None:
        self.timers.set("t", after="1h", method="on_time")

    def on_time(self, timer: TimerInfo) -> None:
        self.storage["rung"] = self.storage.get("name")


class V2(V1):
    """The name is two texts."""

    type_name = "Person"
    schema_version = 2

    @migration(2)
    def split_name(self) -> None:
        first, _, last = self.storage["name"].partition(" ")
        self.storage.put_many({"first": first, "last": last})
        del self.storage["name"]

    def get(self) -> dict[str, Any]:
        return self.storage.list()


class V3(V2):
    """And counts how often it was brought here."""

    type_name = "Person"
    schema_version = 3
    failing: ClassVar[bool] = False

    @migration(3)
    async def count(self) -> None:
        self.storage["migrated"] = self.storage.get("migrated", 0) + 1
        await asyncio.sleep(0)
        if V3.failing:
            raise ValueError("not today")

    def on_start(self) -> None:
        self.storage["started_with"] = len(self.storage.list())

    def on_time(self, timer: TimerInfo) -> None:
        self.storage["rung"] = self.storage.get("first")


async def written_by_v1(tmp_path: Path) -> None:
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        ann = runtime.namespace(V1).get("ann")
        await ann.put("Ann Lee")
        await ann.wait()


async def test_an_object_runs_the_migrations_it_lacks_in_order_before_on_start_and_once(tmp_path: Path) -> None:
    await written_by_v1(tmp_path)
    expected = {"first": "Ann", "last": "Lee", "migrated": 1, "started_with": 3}
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        ann = runtime.namespace(V3).get("ann")
        assert await ann.get() == expected
        await runtime.evict(ann)
        await runtime.crash()
        assert (await ann.get())["migrated"] == 1


async def test_it_may_come_from_any_version(tmp_path: Path) -> None:
    await written_by_v1(tmp_path)
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        assert await runtime.namespace(V2).get("ann").get() == {"first": "Ann", "last": "Lee"}
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        assert (await runtime.namespace(V3).get("ann").get())["migrated"] == 1


async def test_a_new_object_has_the_class_s_version_and_runs_none(tmp_path: Path) -> None:
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        bob = runtime.namespace(V2).get("bob")
        await bob.put("Bob")
        await runtime.crash()
        assert await bob.get() == {"name": "Bob"}, "the migration would have split it"
        await runtime.namespace(V2).delete("bob")
        await bob.put("Bob again")
        await runtime.crash()
        assert await bob.get() == {"name": "Bob again"}


async def test_a_migration_that_raises_fails_the_call_and_keeps_nothing(tmp_path: Path) -> None:
    await written_by_v1(tmp_path)
    V3.failing = True
    try:
        async with LocalRuntime(data_dir=tmp_path) as runtime:
            ann = runtime.namespace(V3).get("ann")
            for _ in range(2):
                with pytest.raises(ValueError, match="not today"):
                    await ann.get()
            V3.failing = False
            assert (await ann.get())["migrated"] == 1
    finally:
        V3.failing = False


async def test_a_timer_of_an_older_object_meets_the_migrated_state(tmp_path: Path) -> None:
    await written_by_v1(tmp_path)
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        people = runtime.namespace(V3)
        await runtime.advance(hours=2)
        assert (await people.get("ann").get())["rung"] == "Ann"


async def test_a_crash_at_any_time_leaves_an_object_migrated_once(tmp_path: Path) -> None:
    await written_by_v1(tmp_path)
    for _ in range(3):
        async with LocalRuntime(data_dir=tmp_path) as runtime:
            asked = asyncio.ensure_future(runtime.namespace(V3).get("ann").get())
            await asyncio.sleep(0)
            await runtime.crash()
            assert (await asked)["migrated"] == 1


async def test_the_version_moves_with_the_object() -> None:
    async with LocalRuntime(partitions=1) as runtime:
        people = runtime.namespace(V2)
        for number in range(20):
            await people.get(f"p{number}").put("No Split")
        await runtime.scale(3)
        await runtime.crash()
        assert [await people.get(f"p{number}").get() for number in range(20)] == [{"name": "No Split"}] * 20


async def test_older_code_does_not_touch_what_newer_code_wrote(tmp_path: Path) -> None:
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        await runtime.namespace(V3).get("ann").put("Ann Lee")
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        with pytest.raises(ObjectTooNew, match=r"version 3 of Person.*has version 2"):
            await runtime.namespace(V2).get("ann").get()
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        assert (await runtime.namespace(V3).get("ann").get())["name"] == "Ann Lee"


async def test_a_migration_is_no_method_for_callers() -> None:
    async with LocalRuntime(memory=True) as runtime:
        with pytest.raises(MethodNotCallable, match="is a migration"):
            await runtime.namespace(V2).get("ann").split_name()


def test_every_version_has_one_migration() -> None:
    with pytest.raises(InvalidClassOption, match="no migration to 2"):
        type("A", (DurableObject,), {"schema_version": 2})
    with pytest.raises(InvalidClassOption, match=r"leads to version 3, and schema_version is 2"):
        type("B", (V2,), {"three": migration(3)(lambda self: None)})
    with pytest.raises(InvalidClassOption, match="is the migration to 2"):
        type("C", (V2,), {"again": migration(2)(lambda self: None)})
    for wrong in (1, 0, "2", True):
        with pytest.raises(InvalidOption):
            migration(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidClassOption, match="schema_version"):
        type("D", (DurableObject,), {"schema_version": 0})
