"""Bad input on a real Ray: its typed error at the caller, nothing of it applied, and the next good call works."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import pickle
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from actors.channel import Channel
from actors.codec import encode
from actors.durable_object import DurableObject
from actors.errors import (
    ClassNotImportable,
    InvalidArguments,
    InvalidClassOption,
    InvalidKey,
    MainspringError,
    MethodNotCallable,
    NoSuchMethod,
    PartitionBusy,
    ReservedName,
    SchemaTooNew,
    UnknownClass,
    UnstorableValue,
    ValueTooLarge,
)
from actors.messages import REFUSED, Replies, decode_from_partition, encode_calls
from actors.namespace import Stub
from actors.runtime import Runtime
from actors.wire_errors import decode_error
from drivers.files import partition_directory
from drivers.native import NativeDriver
from tests.cluster.apps import Ledger

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runtime(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with Runtime.start(tmp_path_factory.mktemp("bad-input"), 1, name="bad-input") as started:
        yield started


@pytest.fixture
def ledger(runtime: Runtime, request: pytest.FixtureRequest) -> Iterator[Stub]:
    """An object with something in it, that must be there unchanged afterwards, and able to take more."""
    stub = runtime.namespace(Ledger).get(request.node.name)
    stub.apply.sync("before")
    yield stub
    stub.apply.sync("after")
    assert stub.applied.sync() == {"before": 1, "after": 1}
    assert stub.total.sync() == 2


# --- keys ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["", "x" * 1_025, "é" * 513, "a\0b", "\ud800", 7, None, b"key"])
def test_a_key_that_is_none_is_refused(runtime: Runtime, ledger: Stub, key: Any) -> None:
    with pytest.raises(InvalidKey):
        runtime.namespace(Ledger).get(key)
    with pytest.raises(InvalidKey):
        runtime.namespace(Ledger).delete_sync(key)


def test_the_longest_key_works(runtime: Runtime) -> None:
    assert runtime.namespace(Ledger).get("x" * 1_024).apply.sync("t")[0] == 1


@pytest.mark.parametrize("key", ["", "x" * 2_049, 7])
def test_a_storage_key_that_is_none_is_refused(ledger: Stub, key: Any) -> None:
    with pytest.raises(InvalidKey):
        ledger.keep.sync(key, 1)


# --- values -------------------------------------------------------------------------------------------


def test_an_argument_that_nothing_can_carry_is_refused_with_its_place(ledger: Stub) -> None:
    with pytest.raises(UnstorableValue, match=r"\['list'\]\[1\]\['handle'\]"):
        ledger.keep.sync("key", {"list": [1, {"handle": threading.Lock()}]})


def test_a_value_that_can_not_be_stored_is_refused_with_its_place_and_the_turn_undone(ledger: Stub) -> None:
    with pytest.raises(UnstorableValue, match=r"\['list'\]\[1\]\['handle'\]"):
        ledger.keep_lock.sync()


def test_a_reply_that_can_not_travel_is_refused_and_the_turn_undone(ledger: Stub) -> None:
    with pytest.raises(UnstorableValue, match=r"\[0\]"):
        ledger.reply_with_lock.sync()


def test_a_value_that_is_too_large_is_refused_and_the_turn_undone(ledger: Stub) -> None:
    with pytest.raises(ValueTooLarge, match="blob"):
        ledger.keep_blob.sync(2 * 1024 * 1024 + 1)


def test_arguments_that_are_too_large_are_refused(ledger: Stub) -> None:
    with pytest.raises(ValueTooLarge, match="max_args_bytes"):
        ledger.keep.sync("key", b"x" * (8 * 1024 * 1024))


# --- methods ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("_private", MethodNotCallable),
        ("__hidden", MethodNotCallable),
        ("missing", NoSuchMethod),
        ("alarm", ReservedName),
        ("on_start", ReservedName),
        ("storage", ReservedName),
    ],
)
def test_a_name_that_can_not_be_called_is_refused_here_and_by_the_partition(
    runtime: Runtime, ledger: Stub, method: str, error: type[MainspringError]
) -> None:
    with pytest.raises(error):
        getattr(ledger, method)

    async def call() -> Any:  # past the stub, as a client of another version would
        return await runtime.client().call(ledger._target.ref, ledger.key, method, (), {})

    with pytest.raises(error):
        runtime.run_sync(call)


def test_a_stub_that_came_by_pickle_gets_the_same_errors(ledger: Stub) -> None:
    stub = pickle.loads(pickle.dumps(ledger))
    with pytest.raises(NoSuchMethod, match="apply"):  # the message lists what there is
        stub.missing.sync()
    with pytest.raises(ReservedName):
        stub.alarm.sync()


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), (("a", "b"), {}), (("a",), {"other": 1})])
def test_arguments_that_do_not_fit_are_refused(ledger: Stub, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidArguments, match="apply"):
        ledger.apply.sync(*args, **kwargs)


# --- classes ------------------------------------------------------------------------------------------


class _Answers:
    """Keeps what a partition sends."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()

    def opened(self, channel: Channel) -> None: ...

    def frame_received(self, frame: bytes) -> None:
        self.frames.put_nowait(frame)

    def closed(self, error: Exception | None) -> None: ...

    def writable(self, ok: bool) -> None: ...


def test_a_class_that_the_partition_was_never_told_of_is_refused(runtime: Runtime, ledger: Stub) -> None:
    async def call() -> Replies:
        answers = _Answers()
        channel = await runtime._directory.connect(0, os.urandom(16), 1, answers)
        args = encode([[], {}])
        channel.send(encode_calls([], [[1, "Nobody", "key", "method", args, 0, 0, None]]))
        reply = decode_from_partition(await answers.frames.get())
        channel.close()
        assert isinstance(reply, Replies)
        return reply

    ((seq, status, payload),) = runtime.run_sync(call).replies
    assert (seq, status) == (1, REFUSED)
    with pytest.raises(UnknownClass, match="Nobody"):
        raise decode_error(payload)


def test_a_class_that_the_workers_can_not_import_is_refused_with_the_reason(
    runtime: Runtime, ledger: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "from actors.durable_object import DurableObject\n"
        "class OnlyHere(DurableObject):\n"
        "    def call(self):\n"
        "        return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))  # after the workers got their import path
    module = importlib.import_module("only_here")
    with pytest.raises(ClassNotImportable, match="No module named 'only_here'"):
        runtime.namespace(module.OnlyHere).get("key").call.sync()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("turns", "parallel"),
        ("type_name", ""),
        ("type_name", "a\0b"),
        ("storage_engine", "floppy"),
        ("idle_timeout_ms", 0),
        ("idle_timeout_ms", True),
        ("max_queued_turns", -1),
        ("turn_timeout_ms", "1s"),
        ("alarm_retry", 3),
        ("harmless_errors", ValueError),
        ("validate", "yes"),
        ("key", "mine"),
        ("alarm", 5),
    ],
)
def test_a_class_with_a_bad_option_can_not_be_defined(ledger: Stub, option: str, value: Any) -> None:
    with pytest.raises(InvalidClassOption, match=option):
        type("Bad", (DurableObject,), {option: value})


@pytest.mark.parametrize("cls", [DurableObject, dict, "Ledger"])
def test_what_is_no_class_of_objects_has_no_namespace(runtime: Runtime, ledger: Stub, cls: Any) -> None:
    with pytest.raises(InvalidClassOption):
        runtime.namespace(cls)


# --- files --------------------------------------------------------------------------------------------


def test_a_second_opener_of_a_partition_is_refused_and_told_who_has_it(runtime: Runtime, ledger: Stub) -> None:
    driver = NativeDriver(lock_wait_ms=50)
    with pytest.raises(PartitionBusy, match=f"pid {runtime.partition_pids()[0]}"):
        driver.open_store(str(runtime.data_dir), runtime.cluster_id, 0, create=False, min_commit_seq=0)


@pytest.mark.soak
def test_data_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    with Runtime.start(tmp_path, 1, name="newer") as runtime:
        runtime.namespace(Ledger).get("a").apply.sync("before")
    file = partition_directory(tmp_path, 0) / "partition.sqlite"

    def set_version(version: int) -> int:
        with contextlib.closing(sqlite3.connect(file)) as db:
            (before,) = db.execute("PRAGMA user_version").fetchone()
            db.execute(f"PRAGMA user_version = {version}")
            return int(before)

    ours = set_version(999)
    with pytest.raises(SchemaTooNew, match="999"):
        Runtime.start(tmp_path, name="newer")
    assert set_version(ours) == 999
    with Runtime.start(tmp_path, name="newer") as runtime:
        assert runtime.namespace(Ledger).get("a").applied.sync() == {"before": 1}


def test_where_a_file_may_not_grow_the_process_ends_and_its_successor_applies_each_call_once(
    runtime: Runtime, ledger: Stub
) -> None:
    """Such an error leaves open whether a commit is durable, so nobody is told that it failed."""
    other = runtime.namespace(Ledger).get("limited")
    pid = ledger.pid.sync()
    ledger.limit_file_size.sync(4_096)

    async def run() -> list[tuple[int, int]]:
        return list(await asyncio.gather(*(other.apply(f"token-{number}") for number in range(50))))

    answers = runtime.run_sync(run)
    assert {count for count, _ in answers} == {1}
    assert pid not in {pid for _, pid in answers}
    assert other.applied.sync() == Counter(f"token-{number}" for number in range(50))


def test_on_a_full_disk_the_caller_gets_commit_failed_and_later_calls_work(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=16m none {tmp_path}"
    unshare = ["unshare", "--user", "--map-root-user", "--mount"] if os.getuid() else ["unshare", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*unshare, "sh", "-c", mount], check=False).returncode:
        pytest.skip("this machine lets nobody mount a small file system")
    script = f"{mount} && exec {sys.executable} -m tests.cluster.full_disk {tmp_path}"
    done = subprocess.run(
        [*unshare, "sh", "-c", script], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-3:] == ["before: applied", "full: CommitFailed", "after: applied"]
