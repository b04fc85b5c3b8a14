"""The process that watches owners finds two of a slot, and is content with one."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from actors.testing import LocalRuntime
from drivers.files import partition_directory
from tests.support.owner_checker import owners_watched


async def test_it_is_content_while_slots_move_and_finds_a_slot_that_two_partitions_own(tmp_path: Path) -> None:
    with owners_watched(tmp_path) as seen:
        async with LocalRuntime(partitions=1, data_dir=tmp_path) as runtime:
            await runtime.scale(2)
    assert seen["partitions"] == 2
    with sqlite3.connect(partition_directory(tmp_path, 1) / "partition.sqlite") as db:
        db.execute("INSERT OR REPLACE INTO slots (slot, state, version) VALUES (0, 'owned', 7)")
    db.close()
    with pytest.raises(AssertionError, match="slot 0: 0000 and 0001"):
        with owners_watched(tmp_path):
            pass
