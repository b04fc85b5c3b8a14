"""What an application holds of its objects: namespaces, stubs, and the methods of stubs."""

from __future__ import annotations

import asyncio
import datetime as dt
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from actors.address import ClassRef, ObjectId, check_key, slot_of
from actors.client import Client
from actors.codec import encode
from actors.current import CURRENT
from actors.errors import InvalidOption, InvalidPromiseToken, MethodNotCallable, SyncCallInLoop
from actors.execution_handle import ExecutionHandle
from actors.io_loop import ensure_no_loop
from actors.messages import DELETE, keyed_call_id
from actors.promise_token import PromiseAddress
from actors.runtime_registry import RuntimePort, runtime_registry
from timers.schedule import parse_duration_ms

__all__ = ["ClassInfoPort", "Method", "Namespace", "ObjectEntry", "RuntimePort", "Stub", "runtime_registry"]

T = TypeVar("T")
_Entries: TypeAlias = "list[ObjectEntry]"  # in Namespace, `list` is its method

#: Results of executions that one process waits for in partitions at a time; beyond that it asks now and then.
MAX_HELD_WAITS = 512
CROWDED_PAUSE_S = 1.0
#: Keys that `list` gives unless told otherwise: a screenful for people, one frame for partitions.
DEFAULT_LIST_LIMIT = 1_000


class ClassInfoPort(Protocol):
    """What a namespace needs to know of a class."""

    @property
    def ref(self) -> ClassRef: ...

    @property
    def durable(self) -> Mapping[str, object]:
        """Durable functions by name."""
        ...

    def method(self, name: str) -> object:
        """Returns for a callable method; raises the error that says why it can't be called for any other name."""
        ...


@dataclass(frozen=True)
class ObjectEntry:
    """One line of `Namespace.list`. `next_wake_ms`: its earliest timer, epoch milliseconds, or None."""

    key: str
    next_wake_ms: int | None


class _Target:
    """Where the methods of one stub go. Shared by a stub and its methods, so that these do not refer to each other."""

    __slots__ = ("idempotency_key", "info", "key", "port", "ref", "runtime_name", "slot", "timeout_ms")

    def __init__(
        self,
        port: RuntimePort | None,
        runtime_name: str,
        info: ClassInfoPort | None,
        ref: ClassRef,
        key: str,
        slot: int,
        timeout_ms: int | None = None,
        idempotency_key: str | None = None,
    ) -> None:
        self.port = port
        self.runtime_name = runtime_name
        self.info = info
        self.ref = ref
        self.key = key
        self.slot = slot
        self.timeout_ms = timeout_ms
        self.idempotency_key = idempotency_key

    def runtime(self) -> RuntimePort:
        """The runtime; looked up at each use after unpickling, as it may be stopped and connected again."""
        return self.port if self.port is not None else runtime_registry.find(self.runtime_name)


class Method:
    """One method of one object: `method(...)` starts a call, `method.sync(...)` makes one and waits."""

    __slots__ = ("_name", "_target")

    def __init__(self, target: _Target, name: str) -> None:
        self._target = target
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Start the call now and return its future; calls made one after the other run in that order.

        Inside a turn the call belongs to the turn. Raises `UnstorableValue`, `ValueTooLarge` or `Overloaded` at
        once, and `NoRunningLoop` on a thread without an event loop.
        """
        target = self._target
        turn = CURRENT.get()
        if turn is not None:
            if target.idempotency_key is not None:
                raise InvalidOption(
                    "idempotency_key can't be used inside a turn: its calls have ids that stay the same when the turn"
                    " is run again"
                )
            return turn.outgoing_call(target.ref, target.key, self._name, args, kwargs, target.timeout_ms)
        return self._start(target.runtime().client(), args, kwargs)

    def sync(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call and wait for its result. Raises `SyncCallInLoop` on a thread with an event loop."""
        _ensure_plain_code(f"{self!r}.sync()")
        port = self._target.runtime()

        async def call() -> Any:
            return await self._start(port.client(), args, kwargs)

        return port.run_sync(call)

    async def start(self, *args: Any, execution_id: str | None = None, **kwargs: Any) -> ExecutionHandle:
        """Start a durable function. With an `execution_id` that was used before, and the same arguments, nothing new is
        started: the handle is that of the execution there is. Without one it gets a random id.

        Raises `ExecutionExists`, `TooManyExecutions`, `InvalidArguments`, `NoSuchMethod`, and what a call raises.
        """
        if execution_id is None:
            turn = CURRENT.get()  # one that is run again must start the same execution
            execution_id = uuid.uuid4().hex if turn is None else turn.unique_id("execution")
        return await ExecutionHandle.start(self, execution_id, args, kwargs)

    def execution(self, execution_id: str) -> ExecutionHandle:
        """An execution that was started before, by its id. Asks nobody."""
        return ExecutionHandle(self, execution_id)

    def ask(self, name: str, *args: Any) -> Awaitable[Any]:
        """Call another method of the object, by its name."""
        return Method(self._target, name)(*args)

    async def wait(self, execution_id: str, wait_ms: int) -> Any:
        """Wait in the object's partition until an execution has ended; None when that takes longer."""
        target, turn = self._target, CURRENT.get()
        if turn is not None:
            turn.check_may_wait(target.ref.type_name, target.key)
        client = target.runtime().client()
        request = [target.ref.type_name, target.key, execution_id, wait_ms]
        if client.waits_held >= MAX_HELD_WAITS:  # they would be in the way of calls
            await client.sleep(CROWDED_PAUSE_S)
            request[-1] = 0
        client.waits_held += 1
        try:
            return await client.admin_object(target.ref, target.key, "await_execution", request)
        finally:
            client.waits_held -= 1

    def address(self) -> tuple[ClassRef, str, str]:
        """Class, key and method name of what is called."""
        return self._target.ref, self._target.key, self._name

    def _start(self, client: Client, args: tuple[Any, ...], kwargs: dict[str, Any]) -> asyncio.Future[Any]:
        target = self._target
        call_id = None
        if target.idempotency_key is not None:
            call_id = keyed_call_id(target.ref.type_name, target.key, self._name, target.idempotency_key)
        return client.call(
            target.ref,
            target.key,
            self._name,
            args,
            kwargs,
            timeout_ms=target.timeout_ms,
            call_id=call_id,
            slot=target.slot,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Stub(self._target), self._name)

    def __repr__(self) -> str:
        return f"{self._target.ref.type_name}({self._target.key!r}).{self._name}"


class Stub:
    """One object, wherever it lives. Making a stub starts nothing; its methods are those of the class.

    Stubs of the same object are equal. They can be pickled; what arrives uses the runtime of the same name in its
    process, to which a Ray task or actor connects by itself.
    """

    def __init__(self, target: _Target) -> None:
        self._target = target

    @property
    def key(self) -> str:
        """The key of the object."""
        return self._target.key

    @property
    def id(self) -> ObjectId:
        """Class, key and slot of the object."""
        return ObjectId(self._target.ref.type_name, self._target.key, self._target.slot)

    def with_options(
        self, *, timeout: int | dt.timedelta | str | None = None, idempotency_key: str | None = None
    ) -> Stub:
        """A stub of the same object whose calls differ; what is not given stays as it is.

        `timeout`: milliseconds, a timedelta or a text like "5s". `idempotency_key`: calls of one method with the
        same key and arguments run once, whoever repeats them, for as long as `call_memory_ms`; with other arguments
        they raise `CallDiverged`. Raises `InvalidOption`.
        """
        old = self._target
        timeout_ms = old.timeout_ms if timeout is None else _timeout_ms(timeout)
        if idempotency_key is None:
            idempotency_key = old.idempotency_key
        else:
            _check_idempotency_key(idempotency_key)
        target = _Target(old.port, old.runtime_name, old.info, old.ref, old.key, old.slot, timeout_ms, idempotency_key)
        return Stub(target)

    def __getattr__(self, name: str) -> Method:
        if name.startswith("_"):
            raise MethodNotCallable(f"{name}: names that begin with '_' are private to the object")
        target = self._target
        if target.info is not None:
            if name not in target.info.durable:
                target.info.method(name)
        elif not name.isidentifier():
            raise MethodNotCallable(f"{name!r} is not the name of a method")
        method = self.__dict__[name] = Method(target, name)
        return method

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stub):
            return NotImplemented
        mine, its = self._target, other._target
        return mine.key == its.key and mine.ref.type_name == its.ref.type_name

    def __hash__(self) -> int:
        return hash((self._target.ref.type_name, self._target.key))

    def __repr__(self) -> str:
        return f"<Stub {self._target.ref.type_name}({self._target.key!r})>"

    def __reduce__(self) -> tuple[Any, ...]:
        target = self._target
        return _restore_stub, (
            target.runtime_name,
            target.ref,
            target.key,
            target.timeout_ms,
            target.idempotency_key,
        )


def _restore_stub(
    runtime_name: str, ref: ClassRef, key: str, timeout_ms: int | None, idempotency_key: str | None
) -> Stub:
    slot = slot_of(ref.type_name, key)
    return Stub(_Target(None, runtime_name, None, ref, key, slot, timeout_ms, idempotency_key))


class Namespace:
    """All objects of one class."""

    def __init__(
        self,
        port: RuntimePort | None,
        info: ClassInfoPort | None,
        *,
        ids: Callable[[], str] | None = None,
        ref: ClassRef | None = None,
        runtime_name: str | None = None,
    ) -> None:
        """`ids` makes the keys of `unique()`; `ref` takes the place of the one in `info`. Without `port` and `info`, as
        after unpickling, the runtime is looked up by name at each use and method names are checked by the partition
        alone."""
        self._port = port
        self._info = info
        self._ref = info.ref if info is not None and ref is None else _given(ref, "ref")
        self._runtime_name = port.name if port is not None else _given(runtime_name, "runtime_name")
        self._ids = ids if ids is not None else _random_key

    def get(self, key: str) -> Stub:
        """The object of that key. Starts nothing. Raises `InvalidKey`."""
        ref = self._ref
        return Stub(
            _Target(self._port, self._runtime_name, self._info, ref, check_key(key), slot_of(ref.type_name, key))
        )

    def unique(self) -> Stub:
        """An object of a new key that nobody else has."""
        return self.get(self._ids())

    async def list(
        self, *, prefix: str | None = None, limit: int = DEFAULT_LIST_LIMIT, after: str | None = None
    ) -> _Entries:
        """Keys of the objects that exist, in the order of their UTF-8 bytes.

        `after` is the last key of the page before. Not a snapshot: an object that is being moved meanwhile may be
        missing. Raises `InvalidOption`.
        """
        port = self._runtime()
        if isinstance(limit, bool) or not 1 <= limit <= port.settings.max_list_rows:
            raise InvalidOption(f"limit = {limit!r}: must be 1 to {port.settings.max_list_rows} (`max_list_rows`)")
        client = port.client()
        request = [self._ref.type_name, prefix, after, limit]
        pages = await asyncio.gather(
            *(client.admin(partition, "list_objects", request) for partition in client.directory.partitions())
        )
        # By key: during a move two partitions may know the object for a moment.
        wakes = {key: next_wake_ms for page in pages for key, next_wake_ms in page}
        # Python orders text by code points, which is the order of the UTF-8 bytes.
        return [ObjectEntry(key, wakes[key]) for key in sorted(wakes)[:limit]]

    def list_sync(
        self, *, prefix: str | None = None, limit: int = DEFAULT_LIST_LIMIT, after: str | None = None
    ) -> _Entries:
        """`list` for plain code."""
        _ensure_plain_code("list_sync()")
        return self._runtime().run_sync(lambda: self.list(prefix=prefix, limit=limit, after=after))

    async def resolve_promise(self, token: str, value: Any = None) -> bool:
        """Resolve a promise of a durable function of this class; False when that was done before, or it timed out.

        Whoever has the token may do it. Raises `InvalidPromiseToken`.
        """
        address, secret = PromiseAddress.parse(token)
        if address.type_name != self._ref.type_name:
            raise InvalidPromiseToken(f"this is a token of {address.type_name}, not of {self._ref.type_name}")
        target = self.get(address.key)._target
        resolve = Method(target, "execution:resolve")
        resolved: bool = await resolve(address.execution_id, address.step, secret, encode(value))
        return resolved

    async def delete(self, key: str) -> bool:
        """Remove an object whole: state, timers, executions. Returns whether there was one.

        It takes its place behind the calls that were made before it, and waits for turns that run. Calls after it meet
        an object that has never written. Like a call it happens once, and raises what a call raises: `InvalidKey`,
        `Overloaded`, `CallOutcomeUnknown`; also `InvalidOption` inside a turn, with which it could not be rolled back.
        """
        if CURRENT.get() is not None:
            raise InvalidOption(
                "delete() can't be part of a turn; call a method of the object that does self.storage.delete_all()"
            )
        check_key(key)
        client = self._runtime().client()
        existed: bool = await client.call(self._ref, key, DELETE, (), {})
        return existed

    def delete_sync(self, key: str) -> bool:
        """`delete` for plain code."""
        _ensure_plain_code("delete_sync()")
        return self._runtime().run_sync(lambda: self.delete(key))

    def _runtime(self) -> RuntimePort:
        return self._port if self._port is not None else runtime_registry.find(self._runtime_name)

    def __repr__(self) -> str:
        return f"<Namespace {self._ref.type_name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_namespace, (self._runtime_name, self._ref)


def _restore_namespace(runtime_name: str, ref: ClassRef) -> Namespace:
    return Namespace(None, None, ref=ref, runtime_name=runtime_name)


def _random_key() -> str:
    return uuid.uuid4().hex


def _given(value: T | None, name: str) -> T:
    if value is None:
        raise TypeError(f"a namespace without a runtime and a class needs `{name}`")
    return value


def _ensure_plain_code(what: str) -> None:
    if CURRENT.get() is not None:
        raise SyncCallInLoop(f"{what} was used inside a turn, which it would block: await the call instead")
    ensure_no_loop(what)


def _timeout_ms(timeout: int | dt.timedelta | str) -> int:
    if isinstance(timeout, bool) or not isinstance(timeout, int | dt.timedelta | str):
        raise InvalidOption(f'timeout = {timeout!r}: give milliseconds (int), a timedelta or a text like "5s"')
    milliseconds = timeout if isinstance(timeout, int) else parse_duration_ms(timeout)
    if milliseconds < 1:
        raise InvalidOption(f"timeout = {timeout!r}: must be longer than zero")
    return milliseconds


def _check_idempotency_key(value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidOption(f"idempotency_key = {value!r}: must be a text that is not empty")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidOption(f"idempotency_key = {value!r}: must be text that UTF-8 can write: {error}") from None
