"""How a partition finds the application's classes."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from pathlib import Path

import cloudpickle
import pytest

from actors.address import ClassRef
from actors.class_table import ClassTable
from actors.durable_object import ClassInfo, DurableObject
from actors.errors import MainspringError
from drivers.memory_store import MemoryData, MemoryStore

SLOW_MODULE = """
import sys
from actors import DurableObject

class First(DurableObject):
    pass

sys.slow_module_begun.set()
sys.slow_module_goes_on.wait(10)

class Second(DurableObject):
    pass
"""


async def loaded(table: ClassTable, type_name: str) -> object:
    """What the table says once it has an answer."""
    found = table.get(type_name)
    if found is None:
        answered = asyncio.Event()
        table.when_loaded(type_name, answered.set)
        await answered.wait()
        found = table.get(type_name)
    return found


async def test_a_class_whose_module_is_being_imported_for_another_class_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_module.py").write_text(SLOW_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    begun, goes_on = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "slow_module_begun", begun, raising=False)
    monkeypatch.setattr(sys, "slow_module_goes_on", goes_on, raising=False)
    table = ClassTable(MemoryStore(MemoryData("cluster", 0)), lambda _: None, None)
    for name in ("First", "Second"):
        table.tell(ClassRef(name, "slow_module", name))
    assert table.get("First") is None
    await asyncio.to_thread(begun.wait)
    assert table.get("Second") is None  # half of the module is there, and it is not in that half
    goes_on.set()
    for name in ("First", "Second"):
        info = await loaded(table, name)
        assert isinstance(info, ClassInfo), info
        assert info.type_name == name


# --- classes that are shipped by value ----------------------------------------------------------------


def shipped(step: int) -> bytes:
    """A class of the same place with other code."""

    class Tally(DurableObject):
        STEP = step

    Tally.__qualname__ = "Tally"  # as it is in a notebook
    return bytes(cloudpickle.dumps(Tally))


class Shipping:
    """A table whose fetches are answered by hand, and what a process would say of the class."""

    def __init__(self) -> None:
        self.newest = shipped(1)
        self.fetches = 0
        self.failure: MainspringError | None = None
        self.outdated: list[str] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.table = ClassTable(MemoryStore(MemoryData("cluster", 0)), lambda _: None, self.fetch)
        self.table.on_outdated = self.outdated.append

    async def fetch(self, type_name: str) -> bytes:
        self.fetches += 1
        found = self.newest
        await self.goes_on.wait()
        if self.failure is not None:
            raise self.failure
        return found

    def tell(self, digest: bytes | None) -> None:
        self.table.tell(ClassRef("Tally", __name__, "Tally", digest=digest))

    async def step(self) -> int:
        info = await loaded(self.table, "Tally")
        assert isinstance(info, ClassInfo), info
        found: int = info.cls.STEP  # type: ignore[attr-defined]
        return found


async def test_a_new_digest_makes_the_class_be_fetched_again() -> None:
    shipping = Shipping()
    shipping.tell(b"1")
    assert await shipping.step() == 1
    shipping.tell(b"1")
    assert await shipping.step() == 1
    assert (shipping.fetches, shipping.outdated) == (1, [])
    shipping.newest = shipped(2)
    shipping.tell(b"2")
    assert shipping.outdated == ["Tally"]
    assert await shipping.step() == 2


async def test_without_a_coordinator_objects_go_on_with_the_definition_that_they_have() -> None:
    shipping = Shipping()
    shipping.tell(b"1")
    assert await shipping.step() == 1
    shipping.failure = MainspringError("the coordinator does not answer")
    shipping.tell(b"2")
    assert await shipping.step() == 1


async def test_a_definition_that_comes_while_an_older_one_is_fetched_is_the_one_that_is_used() -> None:
    shipping = Shipping()
    shipping.goes_on.clear()
    shipping.tell(b"1")
    assert shipping.table.get("Tally") is None
    await asyncio.sleep(0)
    shipping.newest = shipped(2)
    shipping.tell(b"2")
    shipping.goes_on.set()
    assert await shipping.step() == 2


async def test_an_object_that_names_the_class_without_a_digest_changes_nothing() -> None:
    shipping = Shipping()
    shipping.tell(b"1")
    assert await shipping.step() == 1
    shipping.tell(None)
    shipping.tell(b"1")
    assert shipping.table.add(pickle.loads(shipped(3))).cls.STEP == 1  # type: ignore[attr-defined]
    assert (await shipping.step(), shipping.fetches, shipping.outdated) == (1, 1, [])
