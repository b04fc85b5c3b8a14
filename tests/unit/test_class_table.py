"""How a partition finds the application's classes."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path

import pytest

from actors.address import ClassRef
from actors.class_table import ClassTable
from actors.durable_object import ClassInfo
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
