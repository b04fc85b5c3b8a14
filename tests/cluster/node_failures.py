"""What is done to Rays of several nodes, each scenario in a process of its own, which is an application on one of them.

    python -m tests.cluster.node_failures SCENARIO DIRECTORY

Prints what was seen, in the end "done"; any exception ends it with a status other than 0. The tests are in
test_node_failures.py and test_head.py.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import ray

from actors.errors import CallExpired, CallOutcomeUnknown, PartitionAbsent
from actors.runtime import Runtime
from actors.settings import Settings
from tests.cluster.apps import Bell, Ledger
from tests.support.killing import is_alive, kill_9, wait_for
from tests.support.ledger_load import Load
from tests.support.ray_nodes import GCS_SERVER, RAYLET, RayNode, RayNodes, free_port, start_redis

NAME = "failures"
KEYS = [f"key-{number}" for number in range(40)]
#: A partition is found silent sooner than by default, so that this happens here too while its node is away.
SETTINGS = Settings(partition_lease_ms=6_000, partition_renew_ms=1_000)
#: How long processes may go on without Ray's control service, where the test waits for their end.
WITHOUT_HEAD_S = 15
BELLS = 10
#: When the first timer is due after it was armed: the processes are dead by then, or die at it.
BELL_LEAD_MS = 3_000


def join(nodes: RayNodes, node: RayNode) -> None:
    """Make this process an application on that node."""
    os.environ.update(nodes.driver_environment())
    ray.init(address=nodes.address, _node_ip_address=node.ip, logging_level="ERROR", log_to_driver=False)


def partition_on(runtime: Runtime, disk: str) -> int:
    records = runtime.status().coordinator.partitions
    return next(int(record["partition"]) for record in records if record["disk"] == disk)


def keys_of(runtime: Runtime, partition: int) -> list[str]:
    ledgers = runtime.namespace(Ledger)
    return [key for key in KEYS if runtime._directory.partition_of(ledgers.get(key).id.slot) == partition]


# --- a node is lost, and returns --------------------------------------------------------------------------


def raylet_killed(directory: Path) -> None:
    """The raylet of one node is killed, and its processes end. What it served waits; the rest goes on."""
    with RayNodes(directory / "ray") as nodes:
        head = nodes.start_head("d1")
        other = nodes.start_node("d2")
        join(nodes, head)
        with Runtime.start(directory / "data", 2, name=NAME, settings=SETTINGS) as runtime:
            asyncio.run(_raylet_killed(nodes, other, runtime))
        ray.shutdown()


async def _raylet_killed(nodes: RayNodes, other: RayNode, runtime: Runtime) -> None:
    lost = await asyncio.to_thread(partition_on, runtime, "d2")
    ledgers = runtime.namespace(Ledger)
    away = keys_of(runtime, lost)
    await asyncio.gather(*(ledgers.get(key).apply("before") for key in away))
    load = Load(runtime, keys_of(runtime, 1 - lost))
    load.start()
    other.kill(RAYLET)
    await asyncio.to_thread(wait_for, lambda: not other.pids(), "the end of the node's processes")
    waiting = asyncio.gather(*(ledgers.get(key).apply("during") for key in away))
    seen = await load.answered_more(load.count)
    error = await call_until_absent(runtime, away[0])
    assert "disk labelled d2" in str(error), error
    assert str(runtime.data_dir) in str(error), error
    print("named:", error)
    seen = await load.answered_more(seen)
    while True:  # so long that the coordinator wants to have the silent process started again
        status = await asyncio.to_thread(runtime.status)
        report = status.partitions[lost]
        if status.coordinator.silences:
            break
        await load.answered_more(load.count, 1)
    assert report.error is not None
    assert "disk labelled d2" in report.error, report
    assert not waiting.done()
    await asyncio.to_thread(nodes.start_node, "d2")
    await waiting
    await load.answered_more(load.count)
    await load.stop()
    await load.check()
    for key in away:
        applied = await ledgers.get(key).applied()
        given_up = {token for token in applied if token.startswith("given up")}
        assert applied == {"before": 1, "during": 1, **dict.fromkeys(given_up, 1)}, (key, applied)
    assert (await asyncio.to_thread(runtime.status)).partitions[lost].error is None
    print(f"{load.count} calls of the other partition, their longest pause {load.longest_s:.2f} s")


async def call_until_absent(runtime: Runtime, key: str) -> Exception:
    """What a caller gets at its deadline once Ray has noticed that the node is gone."""
    stub = runtime.namespace(Ledger).get(key).with_options(timeout="5s")
    for number in range(20):
        try:
            await stub.apply(f"given up {number}")
        except (CallExpired, CallOutcomeUnknown) as error:
            if isinstance(error.__cause__, PartitionAbsent):
                return error
            last = error
    raise AssertionError(f"no call said that the partition's node is gone: {last}")


# --- the application is a process of its own, since it dies -------------------------------------------------


def application(directory: Path, address: str, ip: str, start: str = "2") -> None:
    """Starts the runtime, or finds it when it runs; rings bells, and calls for ever. It notes what was answered."""
    ray.init(address=address, _node_ip_address=ip, logging_level="ERROR", log_to_driver=False)
    runtime = Runtime.start(directory / "data", int(start), name=NAME, settings=SETTINGS)
    asyncio.run(_application(directory, runtime))


async def _application(directory: Path, runtime: Runtime) -> None:
    due_ms = time.time_ns() // 1_000_000 + BELL_LEAD_MS
    for number in range(BELLS):
        await runtime.namespace(Bell).get(f"bell-{number}").arm({"once": due_ms + 10 * number})
    notes = os.open(directory / "answered", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ledgers = runtime.namespace(Ledger)

    async def caller(key: str) -> None:
        number = 0
        while True:
            await ledgers.get(key).apply(f"{os.getpid()}/{number}")
            os.write(notes, f"{key} {os.getpid()}/{number}\n".encode())
            number += 1
            await asyncio.sleep(0.01)

    await asyncio.gather(*(caller(key) for key in KEYS))


class Application:
    """The process of `application`, seen from outside."""

    def __init__(self, directory: Path, nodes: RayNodes, node: RayNode) -> None:
        self._notes = directory / "answered"
        command = [sys.executable, "-m", "tests.cluster.node_failures", "application", str(directory)]
        self._output = open(directory / "application.log", "wb")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            [*command, nodes.address, node.ip],
            env=nodes.driver_environment(),
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def count(self) -> int:
        """How many calls it has noted as answered."""
        return self._notes.read_bytes().count(b"\n") if self._notes.exists() else 0

    def answered_more(self, than: int, by: int = 200) -> int:
        wait_for(lambda: self.count() >= than + by, f"{by} calls to be answered", 120)
        return self.count()

    def end(self) -> None:
        """kill -9, unless it has ended."""
        self.process.kill()
        self.process.wait()
        self._output.close()

    def answered(self) -> dict[str, list[str]]:
        """The tokens that were answered, by key. A last line that was cut short was not noted."""
        found: dict[str, list[str]] = defaultdict(list)
        for line in self._notes.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                key, token = line.split()
                found[key].append(token)
        return found


def check_whole(runtime: Runtime, answered: dict[str, list[str]]) -> int:
    """All that was answered was applied, once; of each key at most the call that was under way besides. How many."""
    ledgers = runtime.namespace(Ledger)
    for key in KEYS:
        applied = ledgers.get(key).applied.sync()
        assert set(applied.values()) <= {1}, (key, Counter(applied.values()))
        lost = set(answered[key]) - set(applied)
        assert not lost, (key, lost)
        assert len(applied) <= len(answered[key]) + 1, key
    for number in range(BELLS):
        bell = runtime.namespace(Bell).get(f"bell-{number}")
        (fire,) = wait_for(bell.fires.sync, f"the timer of {bell}")
        assert fire[2] >= fire[1], "never early"
        assert bell.armed.sync() == []
    return sum(map(len, answered.values()))


def driver_killed(directory: Path) -> None:
    """kill -9 of the process that started the runtime: in a cluster everything else goes on, and is found by name."""
    with RayNodes(directory / "ray") as nodes:
        head = nodes.start_head("d1")
        app = Application(directory, nodes, head)
        app.answered_more(0)
        app.end()
        join(nodes, head)
        with Runtime.connect(NAME) as runtime:
            count = check_whole(runtime, app.answered())
            assert [report.epoch for report in runtime.status().partitions.values()] == [1, 1], "nothing restarted"
            runtime.stop()
        print(f"{count} calls were answered before the kill, and are there")
        ray.shutdown()


def everything_killed(directory: Path) -> None:
    """kill -9 of every process on all nodes and of the application at once, as in a power cut; then all start again."""
    with RayNodes(directory / "ray") as nodes:
        head = nodes.start_head("d1")
        nodes.start_node("d2")
        app = Application(directory, nodes, head)
        app.answered_more(0)
        nodes.kill_all()
        app.end()
        head = nodes.start_head("d1")
        nodes.start_node("d2")
        join(nodes, head)
        with Runtime.start(directory / "data", name=NAME, settings=SETTINGS) as runtime:
            count = check_whole(runtime, app.answered())
            assert [report.epoch for report in runtime.status().partitions.values()] == [2, 2]
        print(f"{count} calls were answered before the kill, and are there")
        ray.shutdown()


# --- the head is lost -----------------------------------------------------------------------------------


@contextmanager
def control_storage(kind: str, directory: Path) -> Iterator[dict[str, str]]:
    """What the head's environment must say for Ray to keep its tables there."""
    if kind == "rocksdb":
        yield {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(directory / "gcs")}
        return
    port = free_port()
    redis = start_redis(directory / "redis", port)
    try:
        yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
    finally:
        redis.kill()
        redis.wait()


def head_killed(directory: Path, storage: str) -> None:
    """The head's processes are killed while Ray's tables are kept elsewhere. No data is on the head."""
    with control_storage(storage, directory) as environment, RayNodes(directory / "ray") as nodes:
        head = nodes.start_head(**environment)
        here = nodes.start_node("d1")
        nodes.start_node("d2")
        join(nodes, here)
        with Runtime.start(directory / "data", 2, name=NAME, settings=SETTINGS) as runtime:
            asyncio.run(_head_killed(nodes, head, environment, runtime))
        ray.shutdown()


async def _head_killed(nodes: RayNodes, head: RayNode, environment: dict[str, str], runtime: Runtime) -> None:
    load = Load(runtime, KEYS)
    load.start()
    await load.answered_more(0)
    before = await asyncio.to_thread(runtime.partition_pids)
    head.kill(GCS_SERVER)
    head.kill()
    gone_s = time.monotonic()
    await load.answered_more(load.count, 1_000, KEYS)
    print(f"serving without the head, longest pause {load.longest_s:.2f} s")
    victim = await asyncio.to_thread(partition_on, runtime, "d2")
    kill_9(before[victim])  # which nobody can start again now
    await load.answered_more(load.count, 500, keys_of(runtime, 1 - victim))
    assert await asyncio.to_thread(runtime.partition_pids) == {1 - victim: before[1 - victim]}
    await asyncio.to_thread(nodes.start_head, **environment)
    print(f"the head was away for {time.monotonic() - gone_s:.1f} s")
    await load.answered_more(load.count, 100, KEYS)
    print(f"all keys are served again, longest pause {load.longest_s:.2f} s")
    after = await asyncio.to_thread(runtime.partition_pids)
    assert after[1 - victim] == before[1 - victim], "what lived was left alone"
    assert after[victim] != before[victim]
    coordinator = (await asyncio.to_thread(runtime.status)).coordinator.engine.pid
    assert coordinator is not None
    kill_9(coordinator)
    await asyncio.to_thread(wait_for, lambda: is_whole(runtime, not_pid=coordinator), "the coordinator")
    # a new process, on the head, which has no disk
    command = "from actors.runtime import Runtime; from tests.cluster.apps import Ledger; import ray, sys; "
    command += "ray.init(sys.argv[1], _node_ip_address=sys.argv[2], logging_level='ERROR'); "
    command += f"runtime = Runtime.connect({NAME!r}); runtime.scale(3); "
    command += f"print(runtime.namespace(Ledger).get({KEYS[0]!r}).total.sync())"
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", command, nodes.address, head.ip],
        env=nodes.driver_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    await load.answered_more(load.count, 100, KEYS)
    await load.stop()
    print(f"{await load.check()} calls")
    assert len((await asyncio.to_thread(runtime.status)).partitions) == 3


def is_whole(runtime: Runtime, not_pid: int) -> bool:
    """Whether everything answers, and the coordinator in a process other than that."""
    status = runtime.status()
    reports = (status.coordinator, status.moves, *status.partitions.values())
    return all(report.error is None for report in reports) and status.coordinator.engine.pid not in (None, not_pid)


def head_killed_without_storage(directory: Path) -> None:
    """Ray keeps its tables in memory, as it does unless told otherwise, and its control service is killed: after a time
    Ray ends its own processes. Up to then calls are answered; afterwards everything is there at the next start."""
    with RayNodes(directory / "ray", {"RAY_gcs_rpc_server_reconnect_timeout_s": str(WITHOUT_HEAD_S)}) as nodes:
        head = nodes.start_head()
        here, other = nodes.start_node("d1"), nodes.start_node("d2")
        app = Application(directory, nodes, here)
        app.answered_more(0)
        head.kill(GCS_SERVER)
        gone_s = time.monotonic()
        app.answered_more(app.count(), 1_000)
        print(f"1,000 calls were answered without the control service, in {time.monotonic() - gone_s:.1f} s")
        wait_for(lambda: not (here.pids(RAYLET) or other.pids(RAYLET)), "the end of the raylets", 180)
        print(f"the raylets had ended after {time.monotonic() - gone_s:.1f} s")
        wait_for(lambda: not (here.pids() + other.pids() + head.pids()), "the end of Ray's processes", 180)
        print(f"all of Ray's processes had ended after {time.monotonic() - gone_s:.1f} s")
        wait_for(lambda: not is_alive(app.process.pid), "the end of the application", 120)
        print(f"Ray had ended the application after {time.monotonic() - gone_s:.1f} s")
        app.end()
        nodes.start_head()
        here = nodes.start_node("d1")
        nodes.start_node("d2")
        join(nodes, here)
        with Runtime.start(directory / "data", name=NAME, settings=SETTINGS) as runtime:
            print(f"{check_whole(runtime, app.answered())} calls were answered, and are there")
        ray.shutdown()


SCENARIOS = {
    "application": application,
    "raylet-killed": raylet_killed,
    "driver-killed": driver_killed,
    "everything-killed": everything_killed,
    "head-killed-redis": partial(head_killed, storage="redis"),
    "head-killed-rocksdb": partial(head_killed, storage="rocksdb"),
    "head-killed": head_killed_without_storage,
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
    print("done")
