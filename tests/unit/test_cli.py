"""The `mainspring` command on a data directory at rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.channel import Endpoint
from actors.cli import app
from actors.client import Client
from actors.coordinator import CoordinatorStatus
from actors.coordinator_store import PartitionRecord
from actors.durable_object import DurableObject
from actors.object_timers import TimerInfo
from actors.runtime import Runtime
from actors.status import RuntimeStatus
from actors.testing import LocalRuntime


class Failing(DurableObject):
    """Has a timer that never succeeds, and one far away."""

    def set(self) -> None:
        self.timers.set("boom", after="1s", method="on_boom")
        self.timers.set("later", after="300d", method="on_boom")
        self.timers.set("unfit", after="1s", method="on_unfit")

    def on_boom(self, timer: TimerInfo) -> None:
        raise TypeError("boom")

    def on_unfit(self) -> None:
        """Lacks the argument that a timer's method gets."""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


def rows(*arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(*arguments, "--json"))
    return found


async def test_objects_timers_and_dead_letters_are_shown(tmp_path: Path) -> None:
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        await runtime.namespace(Failing).get("f").set()
        await runtime.advance(days=2)
        (letter,) = [letter for letter in await runtime.dead_letters() if letter.name == "boom"]
    (entry,) = rows("objects", str(tmp_path))
    (timer,) = rows("timers", str(tmp_path))
    shown, unfit = sorted(rows("dead-letters", str(tmp_path)), key=lambda row: str(row["name"]))
    assert (entry["class"], entry["key"], timer["name"]) == ("Failing", "f", "later")
    assert entry["next_due"] == timer["next"]
    assert (shown["partition"], shown["id"], shown["name"]) == (letter.partition, letter.id, "boom")
    assert "in on_boom" in shown["error"]
    assert shown["error"].endswith("TypeError: boom\n")
    assert "Failing.on_unfit(self) -> 'None' can't be called like this" in unfit["error"]


async def test_a_narrow_table_cuts_nothing_off(tmp_path: Path) -> None:
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        await runtime.namespace(Failing).get("f" * 60).set()
    assert "…" not in run("timers", str(tmp_path))


def test_what_actors_answer_is_one_model_that_reads_back_from_json() -> None:
    endpoint = Endpoint(0, 3, "n", "/s", None, None, "a")
    known = CoordinatorStatus("c", 7, (PartitionRecord(0, True, 3, 70, "n", "/d"),), {0: endpoint})
    said = {"partition": 0, "pid": 5, "epoch": 3, "outbox": 2}
    status = RuntimeStatus.of("r", known, {"error": "gone"}, {0: said, 1: {"error": "silent"}}, {})
    again = RuntimeStatus.model_validate_json(status.model_dump_json())
    assert again.coordinator.partitions[0]["commit_seq"] == 70
    assert again.coordinator.endpoints[0]["unix_path"] == "/s"
    assert again.moves.error == "gone"
    assert "outbox" in again.partitions[0], "what a partition tells besides is kept"
    assert again.partitions[1].error == "silent"
    assert again.partitions[1].pid is None


async def test_a_snapshot_of_data_at_rest_is_a_runtime_of_its_own(tmp_path: Path) -> None:
    data, copy, again = tmp_path / "data", tmp_path / "copy", tmp_path / "again"
    async with LocalRuntime(data_dir=data, partitions=2) as runtime:
        for key in ("a", "b", "c"):
            await runtime.namespace(Failing).get(key).set()
        busy = CliRunner().invoke(app, ["snapshot", str(data), str(copy)])
        assert busy.exit_code == 1
        assert "PartitionBusy" in busy.output
        assert not copy.exists()
    run("snapshot", str(data), str(copy))
    run("restore", str(copy), str(again))
    refused = CliRunner().invoke(app, ["restore", str(copy), str(again)])
    assert "SnapshotRefused" in refused.output
    for directory in (data, again):
        assert [row["key"] for row in rows("objects", str(directory))] == ["a", "b", "c"]
        assert [row["integrity"] for row in rows("verify", str(directory))] == ["ok", "ok"]
    async with LocalRuntime(data_dir=again, partitions=2) as runtime:
        await runtime.advance(days=2)
        assert {letter.key for letter in await runtime.dead_letters()} == {"a", "b", "c"}


async def test_a_snapshot_that_was_cut_short_is_none(tmp_path: Path) -> None:
    async with LocalRuntime(data_dir=tmp_path / "data") as runtime:
        await runtime.namespace(Failing).get("a").set()
    run("snapshot", str(tmp_path / "data"), str(tmp_path / "copy"))
    (tmp_path / "copy" / "cluster.json").unlink()
    result = CliRunner().invoke(app, ["restore", str(tmp_path / "copy"), str(tmp_path / "again")])
    assert result.exit_code == 1
    assert "DataMissing" in result.output


async def test_a_query_reads_every_partition_and_can_not_write(tmp_path: Path) -> None:
    async with LocalRuntime(data_dir=tmp_path, partitions=2) as runtime:
        for key in ("a", "b", "c"):
            await runtime.namespace(Failing).get(key).set()
    found = rows("sql", str(tmp_path), "SELECT count(*) AS objects FROM objects")
    assert sum(row["objects"] for row in found) == 3
    refused = CliRunner().invoke(app, ["sql", str(tmp_path), "DELETE FROM objects"])
    assert refused.exit_code == 1
    assert "readonly" in refused.output
    assert len(rows("objects", str(tmp_path))) == 3


class Served:
    """A `LocalRuntime` where the command expects one on Ray: it is read the same way."""

    def __init__(self, runtime: LocalRuntime, loop: asyncio.AbstractEventLoop) -> None:
        self._runtime = runtime
        self._loop = loop

    def client(self) -> Client:
        return self._runtime.client()

    def run_sync(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run_coroutine_threadsafe(make(), self._loop).result(20)

    def close(self) -> None:
        """Nothing: the test ends it."""


async def test_without_a_directory_the_running_runtime_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with LocalRuntime(data_dir=tmp_path, partitions=2) as runtime:
        served = Served(runtime, asyncio.get_running_loop())
        monkeypatch.setattr(Runtime, "connect", lambda *_args, **_options: served)
        for key in ("a", "b", "c"):
            await runtime.namespace(Failing).get(key).set()
        await runtime.advance(days=2)
        for command in ("objects", "timers", "dead-letters", "verify"):
            live = await asyncio.to_thread(rows, command)
            assert live == rows(command, str(tmp_path)) != [], command
        counted = await asyncio.to_thread(rows, "sql", "SELECT count(*) AS objects FROM objects")
        assert sum(row["objects"] for row in counted) == 3
        for query in ("DELETE FROM objects", "no SQL", "SELECT 1; SELECT 2"):
            refused = await asyncio.to_thread(CliRunner().invoke, app, ["sql", query])
            assert refused.exit_code == 1
            assert "InvalidOption" in refused.output, query
        numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
        endless = await asyncio.to_thread(CliRunner().invoke, app, ["sql", numbers])
        assert "give a LIMIT" in endless.output
    assert len(rows("objects", str(tmp_path))) == 3


async def test_what_was_done_is_told_as_facts_too(tmp_path: Path) -> None:
    async with LocalRuntime(data_dir=tmp_path / "data") as runtime:
        await runtime.namespace(Failing).get("a").set()
    told = json.loads(run("snapshot", str(tmp_path / "data"), str(tmp_path / "copy"), "--json"))
    assert told["target"] == str(tmp_path / "copy")
    assert told["files"] > 0
