"""The runtime on a real Ray: started, found, killed, stopped, and started again with its data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.errors import (
    DataMissing,
    DuplicateTypeName,
    InvalidOption,
    PartitionBusy,
    PoisonCall,
    RuntimeNotStarted,
    SyncCallInLoop,
    WrongPartition,
)
from actors.ray_calls import COORDINATOR, RayCalls, partition_actor, ray_namespace
from actors.runtime import Runtime
from actors.settings import Settings
from actors.status import RuntimeStatus
from drivers.files import partition_directory
from tests.support.durable_classes import Counter, SecondCounter

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runtime(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """One runtime of two partitions for the tests that leave it running."""
    with Runtime.start(tmp_path_factory.mktemp("shared"), 2, name="shared") as started:
        yield started


def keys_by_partition(runtime: Runtime) -> dict[int, str]:
    """One key of a counter for each partition."""
    found: dict[int, str] = {}
    number = 0
    counters = runtime.namespace(Counter)
    while len(found) < len(runtime._directory.partitions()):
        key = f"key-{number}"
        found.setdefault(runtime._directory.partition_of(counters.get(key).id.slot), key)
        number += 1
    return found


def calls_of(runtime: Runtime) -> RayCalls:
    return RayCalls(ray_namespace(runtime.name))


def epoch_of(runtime: Runtime, partition: int) -> int:
    status = calls_of(runtime).call(partition_actor(partition), "status", timeout_s=30)
    epoch: int = status["epoch"]
    return epoch


def was_left_clean(data_dir: Path, partition: int) -> bool:
    """Whether the partition was closed on purpose, so that its next opening has nothing to be careful about."""
    with contextlib.closing(sqlite3.connect(partition_directory(data_dir, partition) / "partition.sqlite")) as db:
        (clean,) = db.execute("SELECT clean FROM partition").fetchone()
    return bool(clean)


def run_script(directory: Path, text: str, *, code: int = 0, **environment: str) -> str:
    """Run a driver script in its own folder and process, which must exit with `code`; gives what it printed."""
    script = directory / "driver.py"
    script.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


# --- starting and stopping ----------------------------------------------------------------------------


def test_data_is_kept_from_one_start_to_the_next(tmp_path: Path) -> None:
    with Runtime.start(tmp_path / "data", 1, name="kept") as first:
        assert first.namespace(Counter).get("a").add.sync(5) == 5
        assert epoch_of(first, 0) == 1
    assert was_left_clean(tmp_path / "data", 0)
    with Runtime.start(tmp_path / "data", name="kept") as second:
        assert second.namespace(Counter).get("a").value.sync() == 5
        assert epoch_of(second, 0) == 2
        assert second.cluster_id == first.cluster_id


def test_stopping_twice_is_harmless_and_a_stopped_runtime_says_so(tmp_path: Path) -> None:
    runtime = Runtime.start(tmp_path, 1, name="stopped")
    counter = runtime.namespace(Counter).get("a")
    runtime.stop()
    runtime.stop()
    with pytest.raises(RuntimeNotStarted):
        counter.add.sync()
    with pytest.raises(RuntimeNotStarted):
        runtime.namespace(Counter)
    with pytest.raises(RuntimeNotStarted):
        Runtime.connect("stopped")
    assert ray.is_initialized()  # it was here before, so it stays


async def test_in_async_code_a_runtime_is_an_async_context_manager(tmp_path: Path) -> None:
    async with await asyncio.to_thread(Runtime.start, tmp_path, 1, name="async") as runtime:
        counters = runtime.namespace(Counter)
        assert await asyncio.gather(*(counters.get("a").add() for _ in range(10))) == list(range(1, 11))
        with pytest.raises(SyncCallInLoop):
            runtime.stop()
        with pytest.raises(SyncCallInLoop):
            runtime.__enter__()
    with pytest.raises(RuntimeNotStarted):
        await counters.get("a").add()


def test_another_number_of_partitions_than_there_are_is_refused(runtime: Runtime) -> None:
    with pytest.raises(InvalidOption, match=r"has 2 partitions, not 3.*scale"):
        Runtime.start(runtime.data_dir, 3, name="shared")


@pytest.mark.parametrize("options", [{"partitions": 0}, {"partitions": 4_097}, {"name": "a b"}, {"transport": "smoke"}])
def test_impossible_options_are_refused_before_anything_is_created(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Runtime.start(tmp_path / "data", **options)
    assert not (tmp_path / "data" / "cluster.json").exists()


def test_starting_what_runs_already_joins_it_and_leaving_it_stops_nothing(runtime: Runtime) -> None:
    before = runtime.namespace(Counter).get("joined").add.sync()
    with Runtime.start(runtime.data_dir, name="shared") as joined:
        assert joined.namespace(Counter).get("joined").add.sync() == before + 1
    assert runtime.namespace(Counter).get("joined").add.sync() == before + 2


def test_a_second_owner_of_the_same_data_is_refused(runtime: Runtime) -> None:
    with pytest.raises(PartitionBusy):
        Runtime.start(runtime.data_dir, name="intruder", settings=Settings(lock_wait_ms=100))
    with pytest.raises(RuntimeNotStarted):  # and nothing of it is left
        Runtime.connect("intruder")
    assert runtime.namespace(Counter).get("owned").add.sync() >= 1


def test_a_name_that_serves_another_directory_is_refused(runtime: Runtime, tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="already runs in this Ray"):
        Runtime.start(tmp_path / "other", 1, name="shared")
    assert runtime.namespace(Counter).get("owned").add.sync() >= 1


def test_a_partition_whose_file_is_gone_never_starts_empty(tmp_path: Path) -> None:
    with Runtime.start(tmp_path, 1, name="missing") as runtime:
        runtime.namespace(Counter).get("a").add.sync(5)
    file = tmp_path / "partitions" / "0000" / "partition.sqlite"
    file.rename(tmp_path / "aside")
    with pytest.raises(DataMissing):
        Runtime.start(tmp_path, name="missing")
    assert not file.exists()
    (tmp_path / "aside").rename(file)
    with Runtime.start(tmp_path, name="missing") as runtime:
        assert runtime.namespace(Counter).get("a").value.sync() == 5


def test_destroying_deletes_what_is_ours_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    runtime = Runtime.start(tmp_path, 1, name="destroyed")
    runtime.namespace(Counter).get("a").add.sync()
    runtime.destroy()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_directory_that_has_become_another_cluster_is_not_destroyed(tmp_path: Path) -> None:
    with Runtime.start(tmp_path, 1, name="foreign") as runtime:
        ours = (tmp_path / "cluster.json").read_text()
        (tmp_path / "cluster.json").write_text(ours.replace(runtime.cluster_id, "another"))
        with pytest.raises(WrongPartition):
            runtime.destroy()
        (tmp_path / "cluster.json").write_text(ours)
        assert runtime.namespace(Counter).get("a").add.sync() == 1


# --- use from everywhere ------------------------------------------------------------------------------


def test_objects_call_each_other_across_partitions(runtime: Runtime) -> None:
    keys = keys_by_partition(runtime)
    counters = runtime.namespace(Counter)
    before = counters.get(keys[1]).value.sync()
    assert counters.get(keys[0]).add_to.sync(keys[1], 3) == before + 3
    assert counters.get(keys[0]).pid.sync() != counters.get(keys[1]).pid.sync()


def test_a_ray_task_connects_by_name_and_by_there_being_only_one(runtime: Runtime) -> None:
    @ray.remote(num_cpus=0)
    def by_name() -> int:
        with Runtime.connect("shared") as here:
            total: int = here.namespace(Counter).get("task").add.sync()
            return total

    @ray.remote(num_cpus=0)
    def by_being_there() -> int:
        total: int = Runtime.current().namespace(Counter).get("task").add.sync()
        return total

    assert ray.get(by_name.remote()) == 1
    assert ray.get(by_being_there.remote()) == 2


def test_a_runtime_can_be_passed_to_a_ray_actor_and_used_in_its_async_methods(runtime: Runtime) -> None:
    @ray.remote(num_cpus=0)
    class User:
        def __init__(self, runtime: Runtime) -> None:
            self.counter = runtime.namespace(Counter).get("actor")

        async def add(self) -> int:
            total: int = await self.counter.add()
            return total

        async def add_by_name(self) -> int:
            async with Runtime.connect("shared") as here:
                total: int = await here.namespace(Counter).get("actor").add()
            return total

    user = User.remote(runtime)
    assert sorted(ray.get([user.add.remote() for _ in range(5)])) == [1, 2, 3, 4, 5]
    assert ray.get(user.add_by_name.remote()) == 6
    assert ray.get(user.add.remote()) == 7
    ray.kill(user)


def test_a_pickled_runtime_is_the_one_of_its_name_and_carries_no_secret(runtime: Runtime) -> None:
    pickled = pickle.dumps(runtime)
    assert pickle.loads(pickled) is runtime
    assert runtime._description.secret not in pickled


def test_calls_can_go_through_ray_alone(runtime: Runtime) -> None:
    with Runtime.connect("shared", transport="ray") as other:
        counter = other.namespace(Counter).get("through-ray")
        assert [counter.add.sync() for _ in range(3)] == [1, 2, 3]


def test_two_classes_of_one_name_are_refused(runtime: Runtime) -> None:
    runtime.namespace(Counter)
    with pytest.raises(DuplicateTypeName):
        runtime.namespace(SecondCounter)


def test_a_runtime_that_does_not_run_can_not_be_connected_to(runtime: Runtime) -> None:
    with pytest.raises(RuntimeNotStarted, match=r"running: .*shared"):
        Runtime.connect("nobody")


def test_status_shows_every_partition_and_the_coordinator(runtime: Runtime) -> None:
    status = runtime.status()
    assert sorted(status.partitions) == [0, 1]
    assert [record["initialised"] for record in status.coordinator.partitions] == [True, True]
    assert not status.moves.running
    assert RuntimeStatus.model_validate_json(status.model_dump_json()).partitions[0].pid == status.partitions[0].pid


# --- deaths -------------------------------------------------------------------------------------------


def test_after_kill_9_of_a_partition_the_next_call_works_on_what_was_acknowledged(runtime: Runtime) -> None:
    counter = runtime.namespace(Counter).get("survivor")
    for expected in range(1, 4):
        assert counter.add.sync() == expected
        pid = counter.pid.sync()
        os.kill(pid, signal.SIGKILL)
        assert counter.value.sync() == expected
        assert counter.pid.sync() != pid


def test_without_a_coordinator_calls_go_on_and_it_comes_back(runtime: Runtime) -> None:
    counter = runtime.namespace(Counter).get("on-its-own")
    counter.add.sync()
    calls = calls_of(runtime)
    version = calls.call(COORDINATOR, "slot_map", timeout_s=30).version
    ray.kill(calls.handle(COORDINATOR), no_restart=False)
    assert [counter.add.sync() for _ in range(10)] == list(range(2, 12))
    assert calls.call(COORDINATOR, "slot_map", timeout_s=60).version == version


def test_an_object_that_hangs_its_process_each_time_is_taken_out_and_the_others_go_on(tmp_path: Path) -> None:
    settings = Settings(loop_blocked_ms=100, loop_hang_ms=400)
    with Runtime.start(tmp_path, 1, name="hanging", settings=settings) as runtime:
        counters = runtime.namespace(Counter)
        assert counters.get("good").add.sync() == 1
        with pytest.raises(PoisonCall):
            counters.get("bad").block.sync(3_600)
        assert counters.get("good").add.sync() == 2


# --- processes of their own ---------------------------------------------------------------------------


def test_a_ray_that_happens_to_run_is_never_joined_and_the_new_one_listens_on_loopback_only(tmp_path: Path) -> None:
    theirs = ray.get_runtime_context().gcs_address
    printed = run_script(
        tmp_path,
        """
        import ray
        from actors.runtime import Runtime

        with Runtime.start("data", 1) as runtime:
            print(ray.get_runtime_context().gcs_address, len(ray.nodes()), ray.util.get_node_ip_address())
        print(ray.is_initialized())
        """,
        RAY_ADDRESS=theirs,
    )
    address, nodes, node_ip, initialised = printed.split()
    assert address != theirs
    assert address.startswith("127.0.0.1:")
    assert (nodes, node_ip, initialised) == ("1", "127.0.0.1", "False")


def test_data_that_another_process_serves_is_refused_to_a_ray_of_its_own(runtime: Runtime, tmp_path: Path) -> None:
    printed = run_script(
        tmp_path,
        """
        import ray
        from actors.errors import PartitionBusy
        from actors.runtime import Runtime
        from actors.settings import Settings

        try:
            Runtime.start(DATA, settings=Settings(lock_wait_ms=100))
        except PartitionBusy:
            print("busy", ray.is_initialized())
        """.replace("DATA", repr(str(runtime.data_dir))),
    )
    assert printed.split() == ["busy", "False"]
    assert runtime.namespace(Counter).get("owned").add.sync() >= 1


def test_after_kill_9_of_the_driver_the_next_start_serves_what_was_acknowledged(tmp_path: Path) -> None:
    script = """
        import os
        import signal
        from actors.runtime import Runtime
        from tests.support.durable_classes import Counter

        runtime = Runtime.start("data", 1)
        print(runtime.namespace(Counter).get("a").add.sync(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    assert run_script(tmp_path, script, code=-signal.SIGKILL).split() == ["1"]
    assert run_script(tmp_path, script, code=-signal.SIGKILL).split() == ["2"]


def test_a_class_of_the_main_script_is_shipped_and_its_data_is_there_at_the_next_run(tmp_path: Path) -> None:
    script = """
        from actors.durable_object import DurableObject
        from actors.runtime import Runtime

        STEP = 7

        class Tally(DurableObject):
            def add(self):
                total = self.storage.get("total", 0) + STEP
                self.storage.put("total", total)
                return total

        if __name__ == "__main__":
            runtime = Runtime.start("data", 1)
            print(runtime.namespace(Tally).get("a").add.sync())
        """
    assert run_script(tmp_path, script).split() == ["7"]
    assert run_script(tmp_path, script).split() == ["14"]


def test_a_module_beside_the_main_script_is_imported_by_the_partitions(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "beside.py").write_text(
        "from actors.durable_object import DurableObject\n"
        "class Beside(DurableObject):\n"
        "    def where(self):\n"
        "        return __name__\n"
    )
    (tmp_path / "elsewhere" / "added.py").write_text((tmp_path / "beside.py").read_text().replace("Beside", "Added"))
    printed = run_script(
        tmp_path,
        """
        import os
        import sys

        os.chdir("/")
        sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "elsewhere"))
        from actors.runtime import Runtime
        from added import Added
        from beside import Beside

        with Runtime.start(os.path.join(os.path.dirname(os.path.abspath(__file__)), "data"), 1) as runtime:
            print(runtime.namespace(Beside).get("a").where.sync())
            print(runtime.namespace(Added).get("a").where.sync())
        """,
    )
    assert printed.split() == ["beside", "added"]


def test_another_process_finds_the_runtime_of_this_machine(tmp_path: Path) -> None:
    printed = run_script(
        tmp_path,
        """
        import subprocess
        import sys
        import ray
        from actors.runtime import Runtime

        OTHER = '''
        import sys
        from actors.runtime import Runtime
        from tests.support.durable_classes import Counter
        with Runtime.connect("found", address=sys.argv[1]) as runtime:
            print(runtime.namespace(Counter).get("a").add.sync())
        '''

        with Runtime.start("data", 1, name="found"):
            address = ray.get_runtime_context().gcs_address
            source = "\\n".join(line.strip() if "print" not in line else "    " + line.strip()
                                for line in OTHER.splitlines())
            done = subprocess.run([sys.executable, "-c", source, address], capture_output=True, text=True)
            print(done.stdout, done.stderr if done.returncode else "")
        """,
    )
    assert printed.split() == ["1"]
