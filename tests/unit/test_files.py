"""Files first: one owner per partition, the right file or none at all, and nothing changed before that is certain."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from drivers.errors import (
    DataMissing,
    DataRolledBack,
    Fenced,
    PartitionBusy,
    SchemaTooNew,
    UnsupportedFilesystem,
    WrongPartition,
)
from drivers.files import FileLock, check_filesystem, make_directory, partition_directory
from drivers.native import NativeDriver, has_partition_file
from drivers.schema import SCHEMA_VERSION
from drivers.sqlite_store import SqliteStore, prefix_end
from drivers.tables import KV, TABLES

ROOT = str(Path(__file__).parents[2])
HOLDER = """
import os, sys, time
from drivers.files import FileLock
lock = FileLock(sys.argv[1])
lock.acquire()
if "fork" in sys.argv:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(child, flush=True)
print("held", flush=True)
time.sleep(60)
"""


def hold(path: Path, *options: str) -> tuple[subprocess.Popen[str], list[str]]:
    """Another process that holds the lock, and what it said before it had it."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path), *options],
        env={**os.environ, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    said: list[str] = []
    for line in holder.stdout:
        if line.strip() == "held":
            return holder, said
        said.append(line.strip())
    raise AssertionError("the other process never had the lock")


def kill(holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert holder.stdout is not None
    holder.stdout.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "partition.sqlite"
    SqliteStore.create(path, "here", 3)
    return path


def open_store(path: Path, **changed: object) -> SqliteStore:
    given: dict[str, object] = {"cluster_id": "here", "partition_id": 3, "busy_timeout_ms": 0, **changed}
    return SqliteStore.open(path, **given)  # type: ignore[arg-type]


def commit(store: SqliteStore, value: bytes) -> None:
    store.begin()
    store.write([(KV, (1, "k"), (value,))])
    store.flush()
    store.commit()


# --- the lock ---------------------------------------------------------------------------------------


def test_a_lock_held_by_another_process_is_refused_with_its_pid_and_free_after_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "partition.lock"
    holder, _ = hold(path)
    lock = FileLock(path)
    with pytest.raises(PartitionBusy, match=rf"pid {holder.pid}\b"):
        lock.acquire()
    kill(holder)
    lock.acquire()
    assert path.read_text() == str(os.getpid())
    lock.release()


def test_a_waiting_opener_gets_the_lock_when_the_holder_ends(tmp_path: Path) -> None:
    path = tmp_path / "partition.lock"
    holder, _ = hold(path)
    killer = threading.Timer(0.1, kill, [holder])
    killer.start()
    lock = FileLock(path)
    lock.acquire(wait_ms=30_000)
    killer.join()
    lock.release()


def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    path = tmp_path / "partition.lock"
    holder, said = hold(path, "fork")
    child = int(said[0])
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    try:
        os.kill(child, 0)  # it is there
        lock = FileLock(path)
        lock.acquire()
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)
        assert holder.stdout is not None
        holder.stdout.close()


def test_a_second_lock_in_the_same_process_is_refused_and_does_not_drop_the_first(tmp_path: Path) -> None:
    path = tmp_path / "partition.lock"
    first, second = FileLock(path), FileLock(tmp_path / "x" / ".." / "partition.lock")
    first.acquire()
    for lock in (second, first):
        with pytest.raises(PartitionBusy, match="already open in this process"):
            lock.acquire()
    second.release()  # holds nothing, gives nothing up
    probe = [sys.executable, "-c", f"from drivers.files import FileLock; FileLock({str(path)!r}).acquire()"]
    other = subprocess.run(probe, env={**os.environ, "PYTHONPATH": ROOT}, capture_output=True, text=True)
    assert "PartitionBusy" in other.stderr
    first.release()
    second.acquire()
    second.release()


def test_of_many_threads_that_open_at_once_one_wins(tmp_path: Path) -> None:
    path = tmp_path / "partition.lock"
    barrier = threading.Barrier(8)
    locks = [FileLock(path) for _ in range(8)]
    won: list[FileLock] = []

    def race(lock: FileLock) -> None:
        barrier.wait()
        try:
            lock.acquire()
        except PartitionBusy:
            return
        won.append(lock)

    threads = [threading.Thread(target=race, args=[lock]) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    won[0].release()


def test_a_lock_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    lock = FileLock(blocked / "partition.lock")
    for _ in range(2):
        with pytest.raises(OSError):
            lock.acquire()
    blocked.unlink()
    lock.acquire()
    lock.release()


# --- the directory ----------------------------------------------------------------------------------


@pytest.fixture
def mounts(tmp_path: Path) -> str:
    table = tmp_path / "mounts"
    table.write_text(
        "/dev/sda1 / ext4 rw 0 0\n"
        f"server:/export {tmp_path}/share nfs4 rw 0 0\n"
        f"//server/disk {tmp_path}/with\\040space cifs rw 0 0\n"
        f"/dev/sdb1 {tmp_path}/share/local xfs rw 0 0\n"
        "broken line\n"
    )
    return str(table)


@pytest.mark.parametrize("inside", ["share", "share/data/partitions/0001", "with space/data"])
def test_a_directory_shared_between_machines_is_refused(tmp_path: Path, mounts: str, inside: str) -> None:
    with pytest.raises(UnsupportedFilesystem, match=r"nfs4|cifs"):
        check_filesystem(tmp_path / inside, mounts)


@pytest.mark.parametrize("inside", ["", "shared", "share/local", "share/local/data", "elsewhere"])
def test_a_disk_of_this_machine_is_taken(tmp_path: Path, mounts: str, inside: str) -> None:
    check_filesystem(tmp_path / inside, mounts)


def test_a_link_into_a_share_is_refused(tmp_path: Path, mounts: str) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "share")
    with pytest.raises(UnsupportedFilesystem):
        check_filesystem(tmp_path / "link" / "data", mounts)


def test_where_the_system_does_not_tell_its_mounts_nothing_is_refused(tmp_path: Path) -> None:
    check_filesystem(tmp_path, str(tmp_path / "no such table"))


def test_new_directories_are_synced_in_those_that_hold_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("drivers.files.fsync_directory", synced.append)
    make_directory(tmp_path / "partitions" / "0001")
    assert synced == [tmp_path, tmp_path / "partitions"]
    make_directory(tmp_path / "partitions" / "0001")
    assert len(synced) == 2


# --- creating ---------------------------------------------------------------------------------------


def test_creating_never_overwrites(path: Path) -> None:
    store = open_store(path)
    commit(store, b"precious")
    store.close()
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        SqliteStore.create(path, "other", 9)
    assert path.read_bytes() == before


def test_a_half_made_draft_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "partition.sqlite"
    draft = tmp_path / "partition.sqlite.new"
    draft.write_bytes(b"SQLite format 3\0 and then nothing")
    for end in ("-journal", "-wal", "-shm"):
        draft.with_name(draft.name + end).write_bytes(b"of a creator that died")
    SqliteStore.create(path, "here", 3)
    assert [each.name for each in tmp_path.iterdir()] == ["partition.sqlite"]
    open_store(path).close()


def test_a_new_file_is_a_clean_partition_at_commit_zero(path: Path) -> None:
    store = open_store(path)
    assert (store.was_clean, store.commit_seq, store.header.epoch) == (True, 0, 1)
    store.close()


# --- opening ----------------------------------------------------------------------------------------


def test_a_missing_file_is_data_missing_and_stays_missing(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="never starts empty"):
        open_store(tmp_path / "partition.sqlite")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory_is_data_missing_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(DataMissing):
        NativeDriver(lock_wait_ms=0).open_store(str(tmp_path), "here", 3, create=False, min_commit_seq=0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"cluster_id": "there"}, WrongPartition, "belongs to cluster here"),
        ({"partition_id": 4}, WrongPartition, "belongs to partition 3, not to 4"),
        ({"min_commit_seq": 3}, DataRolledBack, "is at commit 2, the coordinator has seen 3"),
    ],
)
def test_the_wrong_file_is_refused_unchanged(
    path: Path, changed: dict[str, object], error: type[Exception], says: str
) -> None:
    store = open_store(path)
    commit(store, b"1")
    commit(store, b"2")
    store.close()
    before = path.read_bytes()
    with pytest.raises(error, match=says):
        open_store(path, **changed)
    assert path.read_bytes() == before
    store = open_store(path, min_commit_seq=2)
    assert store.header.epoch == 2, "a refused opener takes no epoch"
    store.close()


def newer_version(connection: sqlite3.Connection) -> None:
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")


def unknown_migration(connection: sqlite3.Connection) -> None:
    connection.execute(
        "INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES (?, 'm999_from_the_future', '')",
        ("mainspring_partition",),
    )


@pytest.mark.parametrize("change", [newer_version, unknown_migration])
@pytest.mark.parametrize("crashed", [False, True], ids=["closed", "with a log left by a crash"])
def test_a_newer_schema_is_refused_and_nothing_is_changed(path: Path, change: object, crashed: bool) -> None:
    assert callable(change)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    change(connection)
    if crashed:
        copy = path.parent / "crashed"
        copy.mkdir()
        for each in path.parent.glob("partition.sqlite*"):
            if not each.name.endswith("-shm"):
                shutil.copy(each, copy)
        connection.close()
        path = copy / path.name
        assert (copy / "partition.sqlite-wal").stat().st_size > 0
    else:
        connection.close()
    wal = path.with_name("partition.sqlite-wal")
    before = (path.read_bytes(), wal.read_bytes() if crashed else b"")
    with pytest.raises(SchemaTooNew, match=rf"m999_from_the_future|knows up to {SCHEMA_VERSION}"):
        open_store(path)
    assert (path.read_bytes(), wal.read_bytes() if crashed else b"") == before


def test_a_file_that_is_no_database_is_refused_unchanged(tmp_path: Path) -> None:
    for content in (b"", b"hello", b"x" * 8192):
        path = tmp_path / "partition.sqlite"
        path.write_bytes(content)
        with pytest.raises(WrongPartition, match="not a partition file"):
            open_store(path)
        assert path.read_bytes() == content


def test_an_ordinary_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "partition.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE stories (id)")
    connection.close()
    with pytest.raises(WrongPartition, match="not a partition file"):
        open_store(path)


def test_a_partition_file_without_its_header_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM partition")
    connection.close()
    with pytest.raises(WrongPartition, match="no partition header"):
        open_store(path)


def test_what_was_committed_before_a_crash_is_there_and_the_partition_knows_that_it_was_unclean(path: Path) -> None:
    store = open_store(path)
    commit(store, b"1")
    copy = path.parent / "crashed"
    copy.mkdir()
    for each in path.parent.glob("partition.sqlite*"):
        if each.is_file() and not each.name.endswith("-shm"):
            shutil.copy(each, copy)
    store.close()
    after = open_store(copy / path.name)
    assert after.get(KV, (1, "k")) == (b"1",)
    assert after.was_clean is False
    assert (after.header.epoch, after.commit_seq) == (2, 1)
    after.close()


# --- two openers ------------------------------------------------------------------------------------


def test_an_owner_between_two_commits_keeps_every_other_opener_out(path: Path) -> None:
    owner = open_store(path)
    owner.begin()
    with pytest.raises(PartitionBusy, match="locked by another"):
        open_store(path)
    assert owner.header.epoch == 1
    commit_in_open_transaction(owner)
    owner.close()


def commit_in_open_transaction(store: SqliteStore) -> None:
    store.write([(KV, (1, "k"), (b"still mine",))])
    store.flush()
    store.commit()


def test_the_last_opener_owns_and_the_others_are_fenced_whatever_they_do(path: Path) -> None:
    stores = [open_store(path) for _ in range(3)]
    for late in stores[:-1]:
        with pytest.raises(Fenced):
            commit(late, b"late")
        late.rollback()
    commit(stores[-1], b"of the owner")
    for store in stores:
        store.close()
    last = open_store(path)
    assert last.get(KV, (1, "k")) == (b"of the owner",)
    last.close()


RACER = """
import sys
from pathlib import Path
from drivers.errors import Fenced, PartitionBusy
from drivers.sqlite_store import SqliteStore
print("ready", flush=True)
sys.stdin.readline()
committed = 0
for number in range(20):
    try:
        store = SqliteStore.open(Path(sys.argv[1]), cluster_id="here", partition_id=3, durability="off")
    except (Fenced, PartitionBusy):
        continue
    try:
        for _ in range(3):
            store.begin()
            store.write([("kv", (1, "k"), (b"v",))])
            store.flush()
            store.commit()
            committed += 1
    except (Fenced, PartitionBusy):
        pass
    store.close()
print(committed, flush=True)
"""


def test_openers_that_race_without_the_lock_never_both_commit_and_never_damage_the_file(path: Path) -> None:
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(path)],
            env={**os.environ, "PYTHONPATH": ROOT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline().strip() == "ready"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    committed = 0
    for racer in racers:
        said, _ = racer.communicate(timeout=60)
        assert racer.returncode == 0
        committed += int(said)
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    store = open_store(path)
    assert store.commit_seq == committed > 0, "each commit was made by the owner of its epoch"
    store.close()


# --- the driver -------------------------------------------------------------------------------------


@pytest.fixture
def driver() -> NativeDriver:
    return NativeDriver(inline=True, durability="off", lock_wait_ms=0, busy_timeout_ms=0)


@pytest.fixture
def data_dir(tmp_path: Path, driver: NativeDriver) -> str:
    driver.open_store(str(tmp_path), "here", 1, create=True, min_commit_seq=0).close()
    return str(tmp_path)


def test_a_partition_is_created_once_and_opened_from_then_on(data_dir: str, driver: NativeDriver) -> None:
    assert has_partition_file(data_dir, 1)
    assert not has_partition_file(data_dir, 2)
    opened = driver.open_store(data_dir, "here", 1, create=False, min_commit_seq=0)
    assert opened.store.header.epoch == 2
    opened.close()
    opened = driver.open_store(data_dir, "here", 1, create=True, min_commit_seq=0)
    assert opened.store.header.epoch == 3, "what is there is never made anew"
    opened.close()


def test_two_drivers_of_one_process_exclude_each_other(data_dir: str, driver: NativeDriver) -> None:
    opened = driver.open_store(data_dir, "here", 1, create=False, min_commit_seq=0)
    with pytest.raises(PartitionBusy):
        NativeDriver(lock_wait_ms=0).open_store(data_dir, "here", 1, create=False, min_commit_seq=0)
    opened.close()
    driver.open_store(data_dir, "here", 1, create=False, min_commit_seq=0).close()


def test_an_opening_that_fails_gives_the_lock_back(data_dir: str, driver: NativeDriver) -> None:
    with pytest.raises(WrongPartition):
        driver.open_store(data_dir, "there", 1, create=False, min_commit_seq=0)
    driver.open_store(data_dir, "here", 1, create=False, min_commit_seq=0).close()


def test_a_file_that_was_taken_away_is_data_missing_and_not_made_anew(data_dir: str, driver: NativeDriver) -> None:
    directory = partition_directory(data_dir, 1)
    (directory / "partition.sqlite").rename(directory / "elsewhere")
    with pytest.raises(DataMissing):
        driver.open_store(data_dir, "here", 1, create=False, min_commit_seq=0)
    assert not (directory / "partition.sqlite").exists()
    (directory / "elsewhere").rename(directory / "partition.sqlite")
    driver.open_store(data_dir, "here", 1, create=False, min_commit_seq=0).close()


# --- text ranges ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefix", "end"),
    [("a", "b"), ("az", "a{"), ("a\U0010ffff", "b"), ("\ud7ff", "\ue000"), ("", None), ("\U0010ffff", None)],
)
def test_the_end_of_a_prefix_is_the_first_text_behind_it(prefix: str, end: str | None) -> None:
    assert prefix_end(prefix) == end


FIRST_TABLES = frozenset(
    ["objects", "kv", "directory", "timers", "inbox", "intents", "claims", "dead_letters", "slots", "classes"],
)


def test_a_file_of_the_first_schema_is_migrated_with_its_data(tmp_path: Path) -> None:
    path = tmp_path / "partition.sqlite"
    SqliteStore.create(path, "c", 0)
    connection = sqlite3.connect(path)
    for table in TABLES.keys() - FIRST_TABLES:
        connection.execute(f"DROP TABLE {table}")
    connection.execute("DROP INDEX timers_by_owner")
    connection.execute("DELETE FROM _sqlite_migrations WHERE name > 'm002'")
    connection.execute("PRAGMA user_version = 1")
    connection.execute("INSERT INTO kv VALUES (1, 'k', x'01')")
    connection.commit()
    connection.close()
    store = SqliteStore.open(path, cluster_id="c", partition_id=0)
    assert store.get("kv", (1, "k")) == (b"\x01",)
    for table in TABLES:
        store.scan(table)  # every table is there
    store.close()
