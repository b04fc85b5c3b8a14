"""kill -9 of partitions in the middle of durable functions: each ends, the state effects of each step happen once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from actors.address import slot_of
from actors.execution_handle import ExecutionHandle
from actors.namespace import Stub
from actors.runtime import Runtime
from tests.cluster.execution_apps import PRICE, STEPS, Bank, Fuse, Order
from tests.support.killing import kill_9, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]

OBJECTS = 3
PER_OBJECT = 4
#: Long enough for most executions to sleep when their process dies, short enough to wait for.
PAUSE = "300ms"


@pytest.fixture(scope="module")
def runtime(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    with Runtime.start(tmp_path_factory.mktemp("executions"), 2, name="executions") as started:
        yield started


def key_at(runtime: Runtime, cls: type[Any], partition: int, prefix: str) -> str:
    """A key of the class that lives in this partition."""
    numbered = (f"{prefix}-{number}" for number in range(10_000))
    return next(key for key in numbered if runtime._directory.partition_of(slot_of(cls.type_name, key)) == partition)


def kill_partition(runtime: Runtime, partition: int) -> None:
    pid = wait_for(lambda: runtime.partition_pids().get(partition, 0), f"partition {partition}")
    kill_9(pid)


def begin(runtime: Runtime, orders: list[Stub], bank: str, name: str) -> list[ExecutionHandle]:
    """Start the executions, all at once, by ids: a start that is repeated begins nothing new."""

    async def start() -> list[ExecutionHandle]:
        starts: list[Coroutine[Any, Any, ExecutionHandle]] = [
            order.fulfil.start(f"{name} {place} {number}", bank, PAUSE, execution_id=f"order {number}")
            for place, order in enumerate(orders)
            for number in range(PER_OBJECT)
        ]
        return list(await asyncio.gather(*starts))

    return runtime.run_sync(start)


def done_in(orders: list[Stub], step: str) -> int:
    return sum(key.startswith(f"{step} ") for order in orders for key in order.counts.sync())


def approve(runtime: Runtime, orders: list[Stub], expected: int) -> None:
    """Resolve every promise once; each token is the same however often the step that told it was run."""
    namespace = runtime.namespace(Order)
    resolved: dict[str, str] = {}
    while len(resolved) < expected:
        for order in orders:
            for name, token in order.tokens.sync().items():
                if resolved.setdefault(name, token) != token:
                    raise AssertionError(f"the token of {name} has changed")
        wait_for(lambda: len(resolved) == expected or done_in(orders, "ask") > len(resolved), "promises")

    async def resolve() -> list[bool]:
        return list(await asyncio.gather(*(namespace.resolve_promise(token, "yes") for token in resolved.values())))

    assert all(runtime.run_sync(resolve))


@pytest.mark.parametrize(
    ("step", "killed"),
    [("charge", [1, 0]), ("ask", [0]), ("ship", [0])],
    ids=["their bank and themselves", "asleep", "last steps"],
)
def test_every_execution_ends_and_each_steps_effect_happens_once_whatever_is_killed(
    runtime: Runtime, step: str, killed: list[int]
) -> None:
    """The orders live in partition 0, their bank in partition 1."""
    orders = [runtime.namespace(Order).get(key_at(runtime, Order, 0, f"{step} {number}")) for number in range(OBJECTS)]
    bank = runtime.namespace(Bank).get(key_at(runtime, Bank, 1, step))
    handles = begin(runtime, orders, bank.key, step)
    expected = OBJECTS * PER_OBJECT
    if step != "ship":
        wait_for(lambda: done_in(orders, step) >= 1, f"the first {step}")
        for partition in killed:
            kill_partition(runtime, partition)
    approve(runtime, orders, expected)
    if step == "ship":
        for number, partition in enumerate(killed, start=1):
            wait_for(lambda least=number * expected // 3: done_in(orders, step) >= least, f"the first {step}s")
            kill_partition(runtime, partition)

    async def results() -> list[Any]:
        return list(await asyncio.gather(*(handle.result() for handle in handles)))

    names = [f"{step} {place} {number}" for place in range(OBJECTS) for number in range(PER_OBJECT)]
    assert runtime.run_sync(results) == [[f"goods of {name}", PRICE, f"{name}: yes"] for name in names]
    counts = {key: value for order in orders for key, value in order.counts.sync().items()}
    assert counts == {f"{each} {name}": 1 for each in STEPS for name in names}
    charged = dict.fromkeys(names, PRICE) | {f"shipping {name}": 1 for name in names}
    assert bank.charged.sync() == charged
    assert runtime.run_sync(runtime.dead_letters) == []


def test_a_guarded_step_that_kills_its_process_runs_once_and_ends_as_declared(runtime: Runtime) -> None:
    fuse = runtime.namespace(Fuse).get(key_at(runtime, Fuse, 1, "guarded"))

    async def run() -> Any:
        handle = await fuse.burns_once.start()
        return await handle.result()

    assert runtime.run_sync(run) == "skipped"
