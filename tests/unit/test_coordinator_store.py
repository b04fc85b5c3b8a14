"""What the coordinator must not forget, and what it must never make up."""

from __future__ import annotations

import sqlite3
import stat
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.address import SLOTS
from actors.coordinator_store import ClassDefinition, CoordinatorStore, balanced_ranges
from actors.errors import DataMissing, DuplicateTypeName, InvalidOption, SchemaTooNew, WrongPartition

SECRET = bytes(range(32))
CART = ClassDefinition("Cart", "shop", "Cart", None)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator" / "coordinator.sqlite"


def made(path: Path, partitions: int = 4) -> CoordinatorStore:
    CoordinatorStore.create(path, "c1", partitions, SECRET)
    return CoordinatorStore.open(path, "c1")


@given(st.integers(1, SLOTS))
def test_slots_are_dealt_out_in_contiguous_ranges_whose_sizes_differ_by_at_most_one(partitions: int) -> None:
    ranges = balanced_ranges(partitions)
    assert [slot for first, last in ranges for slot in range(first, last + 1)] == list(range(SLOTS))
    sizes = {last - first + 1 for first, last in ranges}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("partitions", [0, -1, SLOTS + 1])
def test_a_number_of_partitions_that_cannot_share_the_slots_is_refused(partitions: int) -> None:
    with pytest.raises(InvalidOption):
        balanced_ranges(partitions)


def test_a_new_cluster_has_a_map_of_version_1_and_partitions_that_have_had_no_data(path: Path) -> None:
    store = made(path)
    slot_map = store.slot_map()
    assert slot_map.version == 1
    assert Counter(slot_map.owners()) == {0: 1024, 1: 1024, 2: 1024, 3: 1024}
    assert slot_map.slots_of(1) == [(1024, 2047)]
    assert [record.initialised for record in store.partitions()] == [False] * 4
    assert (store.cluster_id, store.secret) == ("c1", SECRET)


def test_everything_is_there_after_opening_the_file_again(path: Path) -> None:
    store = made(path, 3)
    store.mark_initialised(2)
    store.raise_partition(2, epoch=7, commit_seq=100)
    store.place_partition(2, epoch=7, node="n1", directory="/data")
    store.register_class(CART, "run1")
    slot_map = store.slot_map()
    store.close()

    again = CoordinatorStore.open(path, "c1")
    record = again.partition(2)
    assert (record.initialised, record.epoch, record.commit_seq, record.node, record.directory) == (
        (True, 7, 100, "n1", "/data")
    )
    assert again.slot_map() == slot_map
    assert again.class_definition("Cart") == CART


def test_the_secret_can_be_read_by_its_owner_only(path: Path) -> None:
    store = made(path)
    store.mark_initialised(0)
    files = list(path.parent.iterdir())
    assert path in files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_file_that_is_there_is_never_made_again(path: Path) -> None:
    made(path).close()
    with pytest.raises(FileExistsError):
        CoordinatorStore.create(path, "c2", 4, SECRET)
    assert CoordinatorStore.open(path, "c1").cluster_id == "c1"


def test_what_a_creation_that_was_cut_short_left_behind_does_no_harm(path: Path) -> None:
    path.parent.mkdir()
    path.with_name(path.name + ".new").write_bytes(b"half")
    assert made(path).slot_map().version == 1


def test_a_missing_file_is_reported_and_no_map_is_made_up(path: Path) -> None:
    with pytest.raises(DataMissing):
        CoordinatorStore.open(path, "c1")
    assert not path.exists()


def test_a_file_of_another_cluster_is_refused(path: Path) -> None:
    made(path).close()
    with pytest.raises(WrongPartition):
        CoordinatorStore.open(path, "c2")


def test_a_file_of_a_newer_version_is_refused_unchanged(path: Path) -> None:
    made(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(SchemaTooNew):
        CoordinatorStore.open(path, "c1")
    assert path.read_bytes() == before


def test_epochs_and_commits_only_grow(path: Path) -> None:
    store = made(path)
    store.raise_partition(0, epoch=3, commit_seq=50)
    store.raise_partition(0, epoch=3, commit_seq=40)  # late
    store.raise_partition(0, epoch=2, commit_seq=90)  # of a fenced owner
    record = store.partition(0)
    assert (record.epoch, record.commit_seq) == (3, 50)


def test_a_partition_that_does_not_exist_is_refused(path: Path) -> None:
    store = made(path)
    with pytest.raises(WrongPartition):
        store.partition(4)
    with pytest.raises(WrongPartition):
        store.mark_initialised(4)


def test_two_classes_with_one_type_name_in_one_run_are_refused(path: Path) -> None:
    store = made(path)
    store.register_class(CART, "run1")
    with pytest.raises(DuplicateTypeName, match=r"shop\.Cart and other\.Cart"):
        store.register_class(ClassDefinition("Cart", "other", "Cart", None), "run1")
    assert store.class_definition("Cart") == CART


def test_a_class_that_has_moved_since_the_last_run_is_accepted(path: Path) -> None:
    store = made(path)
    store.register_class(CART, "run1")
    moved = ClassDefinition("Cart", "shop.cart", "Cart", None)
    store.register_class(moved, "run2")
    assert store.class_definition("Cart") == moved


def test_a_class_defined_again_in_a_notebook_replaces_its_pickle(path: Path) -> None:
    store = made(path)
    store.register_class(ClassDefinition("Cart", "__main__", "Cart", b"1"), "run1")
    store.register_class(ClassDefinition("Cart", "__main__", "Cart", b"2"), "run1")
    found = store.class_definition("Cart")
    assert found is not None
    assert found.shipped == b"2"


def test_an_unknown_class_has_no_definition(path: Path) -> None:
    assert made(path).class_definition("Nobody") is None


def test_a_deployed_environment_holds_for_its_run_and_across_openings(tmp_path: Path) -> None:
    path = tmp_path / "coordinator" / "coordinator.sqlite"
    CoordinatorStore.create(path, "c", 1, bytes(32))
    store = CoordinatorStore.open(path, "c")
    assert store.deployed_environment("run-1") is None
    store.deploy_environment("run-1", {"env_vars": {"A": "1"}})
    store.deploy_environment("run-1", {"env_vars": {"A": "2"}})
    store.close()
    store = CoordinatorStore.open(path, "c")
    assert store.deployed_environment("run-1") == {"env_vars": {"A": "2"}}
    assert store.deployed_environment("run-2") is None  # Ray keeps packages only for as long as the run goes on
    store.close()
