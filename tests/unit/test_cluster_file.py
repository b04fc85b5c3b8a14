"""`cluster.json` is made once, whole, and never over data that is already there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.cluster_file import FILE_NAME, ClusterFile
from actors.errors import DataMissing, InvalidOption, RuntimeNotStarted, SchemaTooNew, WrongPartition
from actors.runtime import Runtime
from actors.testing import LocalRuntime

CLUSTER = ClusterFile("c1", 4)


def test_an_empty_directory_holds_no_cluster(tmp_path: Path) -> None:
    assert ClusterFile.read(tmp_path) is None


def test_what_was_created_is_read_back_and_is_not_ready_yet(tmp_path: Path) -> None:
    assert CLUSTER.create(tmp_path)
    assert ClusterFile.read(tmp_path) == ClusterFile("c1", 4, ready=False)


def test_only_the_first_creator_wins(tmp_path: Path) -> None:
    assert CLUSTER.create(tmp_path)
    assert not ClusterFile("c2", 8).create(tmp_path)
    assert ClusterFile.read(tmp_path) == CLUSTER
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_ready_is_recorded(tmp_path: Path) -> None:
    CLUSTER.create(tmp_path)
    CLUSTER.mark_ready(tmp_path)
    assert ClusterFile.read(tmp_path) == ClusterFile("c1", 4, ready=True)
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("left", ["partitions", "coordinator"])
def test_data_without_its_cluster_file_is_reported_and_not_made_anew(tmp_path: Path, left: str) -> None:
    (tmp_path / left).mkdir()
    with pytest.raises(DataMissing, match=left):
        ClusterFile.read(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": 1, "cluster_id": "c1"}'])
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(WrongPartition):
        ClusterFile.read(tmp_path)


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(json.dumps({"format": 2}))
    with pytest.raises(SchemaTooNew):
        ClusterFile.read(tmp_path)


def test_a_start_that_finds_no_ray_leaves_no_cluster_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeNotStarted("nobody there")

    monkeypatch.setattr("actors.runtime.ensure_ray", refuse)
    with pytest.raises(RuntimeNotStarted):
        Runtime.start(tmp_path, 2, address="10.0.0.1:6379")
    assert list(tmp_path.iterdir()) == []


async def test_a_directory_of_a_local_runtime_is_not_started_on_ray(tmp_path: Path) -> None:
    async with LocalRuntime(data_dir=tmp_path):
        pass
    with pytest.raises(WrongPartition, match="LocalRuntime"):
        Runtime.start(tmp_path)


def test_a_file_is_no_data_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidOption, match="not a directory"):
        Runtime.start(tmp_path / "file")
