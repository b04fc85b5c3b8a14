"""The runtime as an application sees it: start it, find it, use it, stop it."""

from __future__ import annotations

import asyncio
import atexit
import re
import sys
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import cloudpickle
import ray

from actors.address import SLOTS, ClassRef
from actors.client import Client
from actors.coordinator import RuntimeDescription
from actors.coordinator_store import ClassDefinition
from actors.coordinator_views import CoordinatorViews
from actors.current import CURRENT
from actors.data_directory import (
    DEFAULT_PARTITIONS,
    delete_data,
    find_cluster,
    open_cluster,
    prepare_directory,
    require_cluster,
)
from actors.dead_letters import DeadLetters
from actors.demands import Demands, ship
from actors.durable_object import DurableObject, class_info
from actors.errors import InvalidOption, RuntimeNotStarted
from actors.io_loop import ClientPool, IoLoop, ensure_no_loop
from actors.launch import (
    choose_placement,
    find_partitions,
    find_runtime,
    find_runtimes,
    find_wheels,
    start_actors,
    stop_actors,
)
from actors.local_ray import Connection, connect_ray_cluster, ensure_ray
from actors.logs import tell
from actors.namespace import Namespace, Stub, runtime_registry
from actors.ray_calls import COORDINATOR, ActorUnreachable, RayCalls, partition_actor, ray_namespace
from actors.ray_directory import RayDirectory, Transport
from actors.ray_services import RayServices
from actors.scaling import ScaleProgress, Scaling
from actors.settings import Settings
from actors.status import RuntimeStatus

__all__ = ["DEFAULT_PARTITIONS", "Runtime"]

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
#: How long a change of the number of partitions may take before `scale` stops waiting for it.
SCALE_TIMEOUT_S = 600.0
#: How long registering a class waits for the coordinator.
_REGISTER_TIMEOUT_S = 5.0


class Runtime(DeadLetters, CoordinatorViews):
    """A running set of partitions, and this process's access to them.

    `Runtime.start` starts one (or joins it when it runs already), `Runtime.connect` finds one by name. Used as a
    context manager (`with` in plain code, `async with` in async code) it is stopped at the end by the process that
    started it, and merely closed by the others. It can be pickled: what arrives uses the runtime of the same name.
    """

    def __init__(
        self, name: str, description: RuntimeDescription, *, transport: Transport, connection: Connection, created: bool
    ) -> None:
        """Applications use `start` and `connect`."""
        self.name = name
        self.settings = description.settings
        self.data_dir = Path(description.data_dir)
        self.cluster_id = description.cluster_id
        self._description = description
        self._transport = transport
        self._connection = connection
        self._created = created
        self._calls = RayCalls(ray_namespace(name))
        self._directory = RayDirectory(
            self._calls, description.slot_map, description.secret or None, description.settings, transport=transport
        )
        self._io = IoLoop()
        self._pool = ClientPool(lambda: Client(self._directory, self.settings))
        self._registered: dict[str, tuple[type[DurableObject], ClassRef]] = {}
        self._closed = False
        runtime_registry.register(self)
        _live.add(self)

    # --- starting and finding -----------------------------------------------------------------------

    @classmethod
    def start(
        cls,
        data_dir: str | Path,
        partitions: int | None = None,
        *,
        name: str = "default",
        address: str | None = None,
        settings: Settings | None = None,
        transport: Transport = "auto",
        num_cpus: float = 0,
        memory_bytes: int = 0,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        ray_options: Mapping[str, Any] | None = None,
    ) -> Runtime:
        """Start the runtime of a data directory and wait until it serves; blocks for some seconds.

        `partitions`: how many a new cluster gets (4), or what an existing one must have. Without `address` it runs
        in the Ray that this process is connected to, else in a new local one on loopback, which ends with this
        process; the data goes on at the next start. `address` names a Ray cluster ("auto": the one of this machine);
        there the runtime goes on without this process. `num_cpus`, `memory_bytes` and `resources` are what each
        partition reserves in Ray. `runtime_env` is what their processes need to run the application: Ray's
        `working_dir` or `py_modules` (directories are uploaded), `env_vars`, `pip`. Partitions that `scale` adds get
        the same. `ray_options` go to `ray.init`. If the runtime runs already, it is joined as it is.

        Raises `InvalidOption`, `UnsupportedFilesystem`, `PartitionBusy` when another process serves the directory,
        `DataMissing`, `DataRolledBack`, `WrongPartition`, `SchemaTooNew`, and `RuntimeNotStarted` when Ray can't do it.
        """
        _check_place("Runtime.start")
        _check_name(name)
        _check_transport(transport)
        directory = prepare_directory(data_dir)
        demands = Demands.checked(num_cpus, memory_bytes, resources)
        find_cluster(directory, partitions)  # what is wrong with it is said before Ray is started
        connection = ensure_ray(address, ray_options)
        try:
            placement = choose_placement()
            demands = demands.with_environment(ship(runtime_env))
            cluster, is_new = open_cluster(directory, partitions)
            calls = RayCalls(ray_namespace(name))
            launch = start_actors(
                calls, name, directory, cluster, settings or _defaults(), transport, placement, demands
            )
        except BaseException:
            if connection is not Connection.FOUND:
                _leave_ray()
            raise
        if is_new:
            tell("cluster_created", f"created a new cluster in {directory} ({cluster.partitions} partitions)")
        if connection is Connection.OWN:
            tell("local_ray", "this local Ray ends with this process; the data goes on at the next start")
        return cls(name, launch.description, transport=transport, connection=connection, created=launch.created)

    @classmethod
    def connect(cls, name: str = "default", *, address: str | None = None, transport: Transport = "auto") -> Runtime:
        """Find a running runtime by its name; inside Ray tasks and actors, the one of their cluster.

        A process that is in no Ray yet joins the one at `address`, or the one that runs on this machine. Raises
        `RuntimeNotStarted`.
        """
        _check_place("Runtime.connect")
        _check_name(name)
        _check_transport(transport)
        connection = connect_ray_cluster(address)
        try:
            description = find_runtime(RayCalls(ray_namespace(name)), name)
        except BaseException:
            if connection is Connection.JOINED:
                _leave_ray()
            raise
        return cls(name, description, transport=transport, connection=connection, created=False)

    @classmethod
    def current(cls) -> Runtime:
        """The runtime that this process started or connected to; inside Ray tasks and actors, the only one there is.

        Raises `RuntimeNotStarted` when there is none, or several.
        """
        _check_place("Runtime.current")
        names = sorted({runtime.name for runtime in _live})
        if names and ray.is_initialized() and not all(runtime._created for runtime in _live):
            running = find_runtimes()  # Ray uses worker processes again: what they were connected to may be gone
            names = [name for name in names if name in running]
        if len(names) == 1:
            return cast(Runtime, runtime_registry.find(names[0]))
        if not names and ray.is_initialized():
            names = find_runtimes()
            if len(names) == 1:
                return cls.connect(names[0])
        if not names:
            raise RuntimeNotStarted("no runtime runs here: call Runtime.start or Runtime.connect first")
        raise RuntimeNotStarted(f"several runtimes run here ({', '.join(names)}): say which with Runtime.connect(name)")

    # --- use --------------------------------------------------------------------------------------------

    def namespace(self, cls: type[DurableObject]) -> Namespace:
        """The objects of a class. Raises `InvalidClassOption`, and `DuplicateTypeName` for a second class of a name.

        A class that other processes can't import (from `__main__`, a notebook, or inside a function) is sent to the
        partitions by value, once. Defined and used again, it takes the place of its older definition: at once in
        objects that are idle, in others when their turns have ended. The first use of a class waits some milliseconds
        for the coordinator.
        """
        self._check_open()
        info = class_info(cls)
        known, ref = self._registered.get(info.type_name, (None, info.ref))
        if known is not cls:
            ref = self._register(cls)
            self._registered[info.type_name] = cls, ref
        return Namespace(self, info, ref=ref)

    def client(self) -> Client:
        """The client of the running event loop."""
        return self._pool.get()

    def _services(self) -> RayServices:
        return RayServices(self._calls)

    def run_sync(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on this runtime's background loop and wait for it."""
        self._check_open()
        return self._io.run(make)

    def status(self) -> RuntimeStatus:
        """What the coordinator, every partition and every release wheel are doing; what does not answer has an
        `error`. A partition's `alarm` says what wakes it now."""
        self._check_open()
        return RuntimeStatus.of(
            self.name,
            self._ask(COORDINATOR),
            self._ask(COORDINATOR, "move_progress"),
            self._ask_partitions(),
            self._ask_wheels(),
        )

    def scale(
        self,
        partitions: int,
        *,
        timeout_s: float = SCALE_TIMEOUT_S,
        progress: Callable[[ScaleProgress], None] | None = None,
    ) -> None:
        """Have so many partitions from now on, more or fewer; blocks until every slot is where it belongs.

        Everything goes on meanwhile: calls of slots that move wait some milliseconds, and nobody sees an error. New
        partitions ask of Ray what those before them did. `progress` is told now and then how far it is. Raises
        `InvalidOption`, `ScaleSuperseded` when somebody else asks for another number meanwhile, and `ScaleTimeout`
        after `timeout_s`: what was begun then goes on, and the same call waits for it again.
        """
        self._check_open()
        ensure_no_loop("Runtime.scale()")
        scaling = Scaling(self._calls, self.name, self._transport, timeout_s=timeout_s, progress=progress)
        self._description = replace(self._description, partitions=scaling.to(partitions))

    async def ascale(self, partitions: int, **options: Any) -> None:
        """`scale` for async code."""
        await asyncio.to_thread(self.scale, partitions, **options)

    def drain(self, node: str, *, timeout_s: float = SCALE_TIMEOUT_S) -> None:
        """Move every slot away from the partitions of a node (as `status` names it); blocks until that is done.

        The partitions stay, empty, until the next `scale`. Raises `InvalidOption`, `ScaleTimeout` and
        `ScaleSuperseded`.
        """
        self._check_open()
        ensure_no_loop("Runtime.drain()")
        Scaling(self._calls, self.name, self._transport, timeout_s=timeout_s).away_from(node)

    def deploy(self, *, runtime_env: Mapping[str, Any] | None = None, timeout_s: float = SCALE_TIMEOUT_S) -> None:
        """Start every partition's process again, one at a time, so that all of them import the code as it is now.

        Code that came through a `runtime_env` comes as it was packed then; give a new one to bring newer code. Turns
        that run get some seconds to end, calls wait and go on in the next process: nobody sees an error. Classes of
        this process that are sent by value (of a notebook, say) need no deployment. Raises `InvalidOption`, and
        `ScaleTimeout`: some partitions then have the new code, and the same call does the rest.
        """
        self._check_open()
        ensure_no_loop("Runtime.deploy()")
        shipped = None if runtime_env is None else ship(runtime_env) or {}
        Scaling(self._calls, self.name, self._transport, timeout_s=timeout_s).roll(shipped)

    def move(self, where: Stub | int, partition: int, *, timeout_s: float = SCALE_TIMEOUT_S) -> None:
        """Move one slot, given by its number or by an object in it, to a partition; blocks until it is there.

        The next `scale` may move it elsewhere. Raises `InvalidOption`, `WrongPartition` for one that does not exist,
        and `ActorUnreachable` when it was not done in time.
        """
        self._check_open()
        ensure_no_loop("Runtime.move()")
        slot = where if isinstance(where, int) else where.id.slot
        if not 0 <= slot < SLOTS:
            raise InvalidOption(f"slot = {slot}: slots are 0 to {SLOTS - 1}")
        self._calls.call(COORDINATOR, "move_slots", [slot], partition, timeout_s=timeout_s)

    def partition_pids(self) -> dict[int, int]:
        """The process that serves each partition right now; a partition that does not answer is left out."""
        self._check_open()
        return {number: status["pid"] for number, status in self._ask_partitions().items() if "pid" in status}

    def _ask_partitions(self) -> dict[int, Any]:
        absences = self._ask(COORDINATOR, "absences")  # those have nobody who could answer
        return {
            number: {"error": f"PartitionAbsent: {absences[number]}"}
            if number in absences
            else self._ask(partition_actor(number))
            for number in self._partitions()
        }

    def _ask_wheels(self) -> dict[str, Any]:
        try:
            names = self._calls.ask_ray(lambda: find_wheels(self._calls), _REGISTER_TIMEOUT_S)
            return {name: self._ask(name) for name in names}
        except Exception as error:  # as in `_ask`: Ray itself may be what is not well
            return {"error": f"{type(error).__name__}: {error}"}

    def _partitions(self) -> tuple[int, ...]:
        """The partitions there are now: another process may have changed their number."""
        try:
            description = self._calls.call(COORDINATOR, "describe", timeout_s=_REGISTER_TIMEOUT_S)
        except ActorUnreachable:
            return self._description.partitions
        return tuple(description.partitions)

    def _ask(self, actor: str, method: str = "status") -> Any:
        try:
            return self._calls.call(actor, method, timeout_s=_REGISTER_TIMEOUT_S)
        except Exception as error:  # shown in its place: status is asked when things are not well
            return {"error": f"{type(error).__name__}: {error}"}

    def _register(self, cls: type[DurableObject]) -> ClassRef:
        ref = class_info(cls).ref
        shipped = cloudpickle.dumps(cls) if _must_be_shipped(cls) else None
        definition = ClassDefinition(ref.type_name, ref.module, ref.qualname, shipped)
        try:
            self._calls.call(COORDINATOR, "register_class", definition, timeout_s=_REGISTER_TIMEOUT_S)
        except ActorUnreachable:
            if shipped is not None:
                raise
        return ref if shipped is None else replace(ref, digest=blake2b(shipped, digest_size=16).digest())

    # --- ending -----------------------------------------------------------------------------------------

    def close(self) -> None:
        """End this process's access; the runtime goes on. Idempotent. Raises `SyncCallInLoop` on a loop's thread."""
        self._close_clients("Runtime.close()")
        if self._connection is Connection.JOINED:
            _leave_ray()

    async def aclose(self) -> None:
        """`close` for async code."""
        await asyncio.to_thread(self.close)

    def stop(self) -> None:
        """Stop the runtime for everybody: running turns end, files are closed, the actors are gone.

        Ends the local Ray that `start` started. Idempotent. Raises `SyncCallInLoop` on a loop's thread.
        """
        if self._close_clients("Runtime.stop()") and ray.is_initialized():
            calls = RayCalls(self._calls.namespace)
            stop_actors(calls, sorted({*self._description.partitions, *find_partitions(calls)}))
        if self._connection is not Connection.FOUND:
            _leave_ray()

    async def astop(self) -> None:
        """`stop` for async code."""
        await asyncio.to_thread(self.stop)

    def destroy(self) -> None:
        """Stop the runtime and delete its data for good.

        Raises `WrongPartition` when the directory does not hold this cluster, `PartitionBusy` when a process still
        uses it; nothing is deleted then.
        """
        directory = self.data_dir
        require_cluster(directory, self.cluster_id)
        self.stop()
        delete_data(directory)

    def _close_clients(self, what: str) -> bool:
        """Close everything in this process; False when that has been done before."""
        if self._closed:
            return False
        ensure_no_loop(what)
        self._closed = True
        self._io.run(self._pool.close)
        self._io.stop()
        self._calls.close()
        runtime_registry.unregister(self)
        _live.discard(self)
        for other in _live:  # connected twice: pickled stubs go on with the one that is left
            if other.name == self.name:
                runtime_registry.register(other)
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeNotStarted(f"the runtime {self.name!r} was stopped; start or connect it again")

    def __enter__(self) -> Runtime:
        ensure_no_loop("`with` on a runtime (use `async with`)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop() if self._created else self.close()

    async def __aenter__(self) -> Runtime:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await (self.astop() if self._created else self.aclose())

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the secret: pickles get stored and sent around. The other process asks Ray for it.
        return _restore, (self.name, replace(self._description, secret=b""), self._transport)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self._description.partitions)} partitions"
        return f"<Runtime {self.name!r} {self.data_dir} {state}>"


_live: weakref.WeakSet[Runtime] = weakref.WeakSet()


@atexit.register
def _stop_own_at_exit() -> None:
    """A local Ray dies with this process, so its partitions stop cleanly; what runs in a cluster goes on."""
    for runtime in list(_live):
        if runtime._connection is Connection.OWN and runtime._created:
            runtime.stop()


def _restore(name: str, description: RuntimeDescription, transport: Transport) -> Runtime:
    known = runtime_registry.get(name)
    if known is not None:
        return cast(Runtime, known)
    return Runtime(name, description, transport=transport, connection=Connection.FOUND, created=False)


def _defaults() -> Settings:
    return Settings.model_validate({})


def _check_place(what: str) -> None:
    if CURRENT.get() is not None:
        raise InvalidOption(f"{what} would block the partition: inside an object, self.runtime is the runtime")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidOption(f"name = {name!r}: letters, digits, '_', '.' and '-', 1 to 63 of them")


def _check_transport(transport: str) -> None:
    if transport not in ("auto", "link", "ray"):
        raise InvalidOption(f"transport = {transport!r}: must be 'auto', 'link' or 'ray'")


def _must_be_shipped(cls: type[DurableObject]) -> bool:
    """Whether no other process finds the class by its module and name."""
    module = sys.modules.get(cls.__module__)
    has_file = getattr(module, "__file__", None) is not None
    return cls.__module__ == "__main__" or "<locals>" in cls.__qualname__ or not has_file


def _leave_ray() -> None:
    """Disconnect this process from Ray, which ends a Ray that it started; not while another runtime here uses it."""
    if ray.is_initialized() and not _live:
        ray.shutdown()
