"""Calls that only pickle can carry, on a real Ray; and stubs that travel there by pickle themselves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest
import ray

from actors.durable_object import DurableObject
from actors.errors import RuntimeNotStarted, UnstorableValue
from actors.namespace import Namespace, Stub
from actors.runtime import Runtime
from tests.support.pickled_objects import Matrix, MatrixStore

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def runtime(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """One runtime of one partition."""
    with Runtime.start(tmp_path_factory.mktemp("pickled"), 1, name="pickled") as started:
        yield started


@pytest.fixture
def stores(runtime: Runtime) -> Namespace:
    return runtime.namespace(MatrixStore)


def test_a_class_that_the_codec_does_not_know_comes_and_goes(stores: Namespace) -> None:
    store = stores.get("a")
    assert store.add.sync(Matrix(1, 2)) == Matrix(1, 2)
    assert store.add.sync(Matrix(10, 20)) == Matrix(11, 22)
    assert store.cells.sync() == [11, 22]


def test_an_array_comes_and_goes(stores: Namespace) -> None:
    numpy = pytest.importorskip("numpy")
    doubled = stores.get("array").times.sync(numpy.arange(100_000), 2)
    assert (doubled == 2 * numpy.arange(100_000)).all()


def test_a_class_that_no_other_process_can_import_goes_by_value(stores: Namespace) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

        def __mul__(self, factor: int) -> Local:
            return Local(self.value * factor)

    assert stores.get("local").times.sync(Local(4), 3).value == 12


def test_calls_of_an_object_keep_their_order_whatever_carries_them(runtime: Runtime, stores: Namespace) -> None:
    items = [1, Matrix(), 2, 3, Matrix(), Matrix(), 4]
    store = stores.get("ordered")

    async def write_all() -> None:
        here = runtime.namespace(MatrixStore).get("ordered")
        await asyncio.gather(*(here.write(item) for item in items))

    runtime.run_sync(write_all)
    assert store.log.sync() == [item if isinstance(item, int) else "Matrix" for item in items]


def test_a_turn_calls_on_with_what_only_pickle_carries(stores: Namespace) -> None:
    assert stores.get("turn").add_elsewhere.sync("elsewhere", Matrix(1, 2)) == [1, 2]


def test_a_result_that_only_pickle_carries_does_not_travel_over_a_link(stores: Namespace) -> None:
    stores.get("b").add.sync(Matrix(1))
    with pytest.raises(UnstorableValue):
        stores.get("b").matrix.sync()


def test_where_calls_go_through_ray_alone_it_does(runtime: Runtime, stores: Namespace) -> None:
    stores.get("c").add.sync(Matrix(7))
    with Runtime.connect("pickled", transport="ray") as other:
        assert other.namespace(MatrixStore).get("c").matrix.sync() == Matrix(7)


def test_where_only_links_may_be_used_the_codecs_error_goes_to_the_caller(runtime: Runtime) -> None:
    with Runtime.connect("pickled", transport="link") as other, pytest.raises(UnstorableValue):
        other.namespace(MatrixStore).get("c").add.sync(Matrix(7))


def test_after_kill_9_of_the_partition_pickled_calls_go_on(stores: Namespace) -> None:
    store = stores.get("survivor")
    for total in (1, 2):
        assert store.add.sync(Matrix(1)) == Matrix(total)
        os.kill(store.pid.sync(), signal.SIGKILL)
    assert store.add.sync(Matrix(1)) == Matrix(3)


# --- stubs in other processes -------------------------------------------------------------------------


def test_a_stub_that_is_passed_to_a_ray_task_just_works(stores: Namespace) -> None:
    @ray.remote(num_cpus=0)
    def add(store: Stub, matrix: Matrix) -> Matrix:
        total: Matrix = store.add.sync(matrix)
        return total

    store = stores.get("task")
    assert ray.get(add.remote(store, Matrix(2))) == Matrix(2)
    assert ray.get(add.remote(store, Matrix(2))) == Matrix(4)


def test_a_stub_and_a_namespace_that_are_passed_to_a_ray_actor_just_work(stores: Namespace) -> None:
    @ray.remote(num_cpus=0)
    class User:
        async def add(self, store: Stub, amount: int) -> list[int]:
            return list((await store.add(Matrix(amount))).cells)

        async def keys(self, stores: Namespace) -> list[str]:
            return [entry.key for entry in await stores.list(prefix="actor")]

    user = User.remote()
    assert ray.get(user.add.remote(stores.get("actor"), 5)) == [5]
    assert ray.get(user.add.remote(stores.get("actor"), 5)) == [10]
    assert ray.get(user.keys.remote(stores)) == ["actor"]
    ray.kill(user)


def test_a_stub_whose_runtime_does_not_run_says_so_there(stores: Namespace) -> None:
    @ray.remote(num_cpus=0)
    def add(stores: Namespace) -> str:
        stores._runtime_name = "nobody"
        try:
            stores.list_sync()
        except RuntimeNotStarted as error:
            return str(error)
        return "it does"

    assert "no runtime named 'nobody' is connected" in ray.get(add.remote(stores))


# --- classes that are shipped by value ----------------------------------------------------------------


def define(step: int) -> type[DurableObject]:
    """What a notebook's cell does each time it is run: the same class, with other code."""

    class Tally(DurableObject):
        async def add(self, pause: float = 0) -> int:
            total: int = self.storage.get("total", 0) + step
            self.storage.put("total", total)
            await asyncio.sleep(pause)
            return total

    return Tally


def test_a_shipped_class_that_is_defined_again_takes_the_place_of_the_older_one(runtime: Runtime) -> None:
    first = runtime.namespace(define(1)).get("a")
    assert [first.add.sync(), first.add.sync()] == [1, 2]
    second = runtime.namespace(define(10)).get("a")
    assert [second.add.sync(), second.add.sync()] == [12, 22]
    assert first.add.sync() == 32  # the newest definition, whoever calls
    assert second.add.sync() == 42
