"""What an application subclasses, and what the runtime knows of such a class."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, validate_call

from actors.address import ClassRef, ObjectId
from actors.errors import (
    InvalidArguments,
    InvalidClassOption,
    MethodNotCallable,
    NoSuchMethod,
    Rejected,
    ReservedName,
)
from actors.executions import BUILT_IN
from actors.migrations import FIRST_VERSION, is_migration, migrations_of
from actors.toolkit.leases import Leases
from actors.toolkit.outcomes import Outcomes
from actors.toolkit.publications import Publications
from actors.toolkit.quotas import Quotas
from actors.toolkit.reservations import Reservations
from actors.toolkit.sinks import is_sink
from actors.toolkit.tickets import Tickets
from actors.workflow import is_durable
from timers.backoff import ALARM_RETRY, RetryPolicy

if TYPE_CHECKING:
    from actors.namespace import Namespace
    from actors.object_host import ObjectHost
    from actors.object_timers import ObjectTimers
    from actors.storage import Storage
    from actors.turn_info import TurnInfo

__all__ = ["ClassInfo", "DurableObject", "MethodInfo", "class_info", "shared"]

F = TypeVar("F", bound=Callable[..., Any])
_SHARED_MARK = "_ms_shared"
#: Called by the runtime itself; nobody outside may pretend to be it.
HOOKS = frozenset({"alarm", "on_start", "on_stop", "on_alarm_exhausted", "on_published"})


def shared(method: F) -> F:
    """Mark a method that only reads: it may run while a serial turn of the object is awaiting.

    It sees durable and handed-over state, never the running turn's; attributes of the instance are live. Any write
    raises `ReadOnlyTurn`.
    """
    setattr(method, _SHARED_MARK, True)
    return method


class DurableObject:
    """Base class of an application's objects. One live instance per key; one turn at a time.

    Class options (checked when the class is defined; a wrong one raises `InvalidClassOption`):

    - `type_name`: the stable name that keys are hashed with; default the class's `__name__`.
    - `turns`: "serial" (default) or "interleaved".
    - `idle_timeout_ms`, `max_queued_turns`, `turn_timeout_ms`: override the runtime's settings.
    - `alarm_retry`: the `RetryPolicy` of `alarm`.
    - `harmless_errors`: exception types after which the instance is kept (the turn rolls back all the same).
    - `validate`: check arguments against the type hints with pydantic.
    - `schema_version`: the version of the state that the class writes; see `migration`. Default 1.
    - `outcome_sink`: where the object's outcomes go (see `self.outcomes`); a property gives each object its own.
    """

    type_name: ClassVar[str]
    turns: ClassVar[Literal["serial", "interleaved"]] = "serial"
    storage_engine: ClassVar[Literal["shared"]] = "shared"
    idle_timeout_ms: ClassVar[int | None] = None
    max_queued_turns: ClassVar[int | None] = None
    turn_timeout_ms: ClassVar[int | None] = None
    alarm_retry: ClassVar[RetryPolicy] = ALARM_RETRY
    harmless_errors: ClassVar[tuple[type[BaseException], ...]] = (Rejected,)
    validate: ClassVar[bool] = False
    schema_version: ClassVar[int] = FIRST_VERSION
    outcome_sink: Any = None

    _ms_host: ObjectHost

    def __init_subclass__(cls, **keywords: Any) -> None:
        for name in keywords.keys() & _OPTIONS.keys():
            raise InvalidClassOption(f"{cls.__qualname__}: write `{name} = ...` in the body of the class")
        super().__init_subclass__(**keywords)
        if "type_name" not in cls.__dict__:
            cls.type_name = cls.__name__
        _check_options(cls)
        migrations_of(cls)

    @property
    def key(self) -> str:
        """The key of this object."""
        return self._ms_host.id.key

    @property
    def id(self) -> ObjectId:
        """Class, key and slot of this object."""
        return self._ms_host.id

    @property
    def storage(self) -> Storage:
        """The object's durable key-value state."""
        return self._ms_host.storage

    @property
    def timers(self) -> ObjectTimers:
        """The object's named timers."""
        return self._ms_host.timers

    @property
    def outcomes(self) -> Outcomes:
        """What has happened to the object and others are told of. Raises `SerialTurnsNeeded`."""
        return Outcomes(self)

    @property
    def tickets(self) -> Tickets:
        """Permissions that end by themselves. Raises `SerialTurnsNeeded`."""
        return Tickets(self)

    @property
    def reservations(self) -> Reservations:
        """What is held until it is committed or aborted, or abandoned. Raises `SerialTurnsNeeded`."""
        return Reservations(self)

    @property
    def leases(self) -> Leases:
        """Names that one object at a time holds, in the whole runtime. Raises `SerialTurnsNeeded`."""
        return Leases(self)

    @property
    def publications(self) -> Publications:
        """What the object publishes: items that become visible once everything that they need is.

        Raises `SerialTurnsNeeded`.
        """
        return Publications(self)

    @property
    def quotas(self) -> Quotas:
        """How much may be charged to a name in a window of time. Raises `SerialTurnsNeeded`."""
        return Quotas(self)

    @property
    def turn(self) -> TurnInfo:
        """The running turn: its attempt, and time and randomness that are the same when it is run again."""
        return self._ms_host.turn_info()

    @property
    def runtime(self) -> Any:
        """The runtime that this object lives in; `runtime.namespace(Other)` addresses other objects."""
        return self._ms_host.partition.runtime

    def send(
        self, cls: type[DurableObject], key: str, *, after: Any = None, at: Any = None, retry: RetryPolicy | None = None
    ) -> Any:
        """`self.send(Mailer, "k").remind(x)` sends a message: it is part of the turn, leaves when that is durable, and
        is applied once, in order for each pair of objects. Nobody waits for it.

        `after` (a timedelta or "5m") and `at` (epoch ms or an aware datetime) delay it, as do
        `self.send(...).after("5m")` and `.at(...)`. A run that raises is retried by `retry` (10 runs by default) and in
        the end shown as a dead letter of this object. Raises `InvalidKey`, `InvalidOption`, `InvalidSchedule`,
        `ReadOnlyTurn`, `TurnOver`, and `NoSuchMethod` and its like; sending raises `UnstorableValue`, `ValueTooLarge`
        and `OutboxFull`.
        """
        return self._ms_host.send(cls, key, after, at, retry)

    def namespace(self, cls: type[DurableObject]) -> Namespace:
        """The objects of another class (or of this one)."""
        namespace: Namespace = self._ms_host.partition.runtime.namespace(cls)
        return namespace

    def block_concurrency(self) -> Any:
        """`async with`: no other turn of this object starts meanwhile. For interleaved classes."""
        return self._ms_host.block_concurrency()


#: `with_options` is a stub's own.
RESERVED = frozenset(name for name in dir(DurableObject) if not name.startswith("_")) | HOOKS | {"with_options"}


def _positive(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _is_exception_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(t, type) and issubclass(t, BaseException) for t in value)


_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type_name": (
        lambda v: isinstance(v, str) and 0 < len(v) <= 200 and "\0" not in v,
        "a text of 1 to 200 characters",
    ),
    "turns": (lambda v: v in ("serial", "interleaved"), "'serial' or 'interleaved'"),
    "storage_engine": (lambda v: v == "shared", "'shared' (objects with their own SQL file are not available yet)"),
    "idle_timeout_ms": (_positive, "a whole number of milliseconds of at least 1, or None"),
    "max_queued_turns": (_positive, "a whole number of at least 1, or None"),
    "turn_timeout_ms": (_positive, "a whole number of milliseconds of at least 1, or None"),
    "alarm_retry": (lambda v: isinstance(v, RetryPolicy), "a RetryPolicy"),
    "harmless_errors": (_is_exception_tuple, "a tuple of exception types"),
    "validate": (lambda v: isinstance(v, bool), "True or False"),
    "schema_version": (
        lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= FIRST_VERSION,
        "a whole number of at least 1",
    ),
    "outcome_sink": (
        is_sink,
        "(Class, key, method), the name of a method, 'module:function', an http or https URL, or None; or a property",
    ),
}
#: How much an attribute looks like an option (1: the same) to be taken for a misspelled one.
_ALIKE = 0.85
_PROPERTIES = frozenset(
    {"key", "id", "storage", "timers", "turn", "runtime", "send", "namespace", "block_concurrency"}
    | {"outcomes", "tickets", "reservations", "leases", "publications", "quotas"}
)


def _check_options(cls: type[DurableObject]) -> None:
    for name, (accepts, wanted) in _OPTIONS.items():
        value = getattr(cls, name)
        if not accepts(value):
            raise InvalidClassOption(f"{cls.__qualname__}.{name} = {value!r}: must be {wanted}")
    for name, value in cls.__dict__.items():
        if name.startswith("_") or name in _OPTIONS or name in HOOKS or callable(value) or hasattr(value, "__get__"):
            continue
        if meant := difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=_ALIKE):
            raise InvalidClassOption(
                f"{cls.__qualname__}.{name}: there is no such option; did you mean {meant[0]!r}? "
                "An attribute of your own needs a name that is less like an option's"
            )
    for name in _PROPERTIES & set(cls.__dict__):
        raise InvalidClassOption(
            f"{cls.__qualname__}.{name}: this name belongs to the runtime; choose another one for your attribute"
        )
    for name in HOOKS & set(cls.__dict__):
        if not callable(getattr(cls, name)):
            raise InvalidClassOption(f"{cls.__qualname__}.{name}: must be a method, the runtime calls it")


@dataclass(frozen=True)
class MethodInfo:
    """One callable method of a class. `call` takes the instance first."""

    name: str
    call: Callable[..., Any]
    function: Callable[..., Any]
    is_shared: bool

    def misfit(self, error: BaseException) -> InvalidArguments | None:
        """The error as `InvalidArguments` when the body was never entered, else None."""
        return misfit(self.function, error)


def misfit(function: Callable[..., Any], error: BaseException) -> InvalidArguments | None:
    """`MethodInfo.misfit` for a function whose `MethodInfo` is not at hand."""
    if not isinstance(error, TypeError | ValidationError) or _entered(error.__traceback__, function):
        return None
    function = inspect.unwrap(function)
    return InvalidArguments(f"{function.__qualname__}{inspect.signature(function)} can't be called like this: {error}")


def _entered(traceback: TracebackType | None, function: Callable[..., Any]) -> bool:
    code = getattr(inspect.unwrap(function), "__code__", None)
    while traceback is not None:
        if traceback.tb_frame.f_code is code:
            return True
        traceback = traceback.tb_next
    return False


@dataclass(frozen=True)
class ClassInfo:
    """What the runtime needs to know of a durable object class."""

    cls: type[DurableObject]
    ref: ClassRef
    methods: dict[str, MethodInfo]
    has_on_start: bool
    has_alarm: bool
    #: functions marked with `@durable`, by name
    durable: dict[str, Callable[..., Any]] = field(default_factory=dict)
    #: those of its state, by the version that they lead to
    migrations: dict[int, Callable[..., Any]] = field(default_factory=dict)

    @property
    def type_name(self) -> str:
        return self.ref.type_name

    def method(self, name: str) -> MethodInfo:
        """The method, or the error that says why it can't be called from outside."""
        found = self.methods.get(name)
        if found is None:
            raise self._refusal(name)
        return found

    def method_or_refusal(self, name: str) -> MethodInfo:
        """The method, or one in its place that raises why there is none: for turns that began under older code."""

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise self._refusal(name)

        return self.methods.get(name) or MethodInfo(name, refuse, refuse, False)

    def _refusal(self, name: str) -> Exception:
        where = f"{self.type_name}.{name}"
        if name.startswith("_"):
            return MethodNotCallable(f"{where}: names that begin with '_' are private to the object")
        if name in RESERVED:
            return ReservedName(f"{where}: this name belongs to the runtime and can't be called from outside")
        if name in self.durable:
            return MethodNotCallable(f"{where} is a durable function: start it with `await stub.{name}.start(...)`")
        if is_migration(inspect.getattr_static(self.cls, name, None)):
            return MethodNotCallable(f"{where} is a migration, which the runtime runs")
        if hasattr(self.cls, name):
            return MethodNotCallable(f"{where} is not a method")
        known = ", ".join(sorted(name for name in self.methods if name.isidentifier())) or "none"
        return NoSuchMethod(f"{where}: the class has no such method (it has: {known})")


def _wants_validation(cls: type[DurableObject], function: Callable[..., Any]) -> bool:
    if cls.validate:
        return True
    try:
        hints = inspect.get_annotations(function, eval_str=True)
    except (NameError, TypeError, AttributeError):  # a hint that only type checkers can see
        return False
    return any(isinstance(hint, type) and issubclass(hint, BaseModel) for n, hint in hints.items() if n != "return")


def _method_info(cls: type[DurableObject], name: str, function: Callable[..., Any]) -> MethodInfo:
    call = function
    if _wants_validation(cls, function):
        call = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)
    return MethodInfo(name, call, function, bool(getattr(function, _SHARED_MARK, False)))


def _check_durables(cls: type[DurableObject], durables: Mapping[str, Any]) -> None:
    if cls.turns != "serial":
        raise InvalidClassOption(
            f"{cls.__qualname__}.{next(iter(durables))}: durable functions need turns = 'serial'; a step is a turn"
        )


_INFOS: dict[type[DurableObject], ClassInfo] = {}


def class_info(cls: type[DurableObject]) -> ClassInfo:
    """The class's description, made once. Raises `InvalidClassOption` for what is no durable object class."""
    info = _INFOS.get(cls)
    if info is not None:
        return info
    if not (isinstance(cls, type) and issubclass(cls, DurableObject)) or cls is DurableObject:
        raise InvalidClassOption(f"{cls!r} is not a subclass of DurableObject")
    methods: dict[str, MethodInfo] = {}
    durables: dict[str, Callable[..., Any]] = {}
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if name.startswith("_") or name in RESERVED or not inspect.isfunction(member) or is_migration(member):
            continue
        if is_durable(member):
            durables[name] = member
        else:
            methods[name] = _method_info(cls, name, member)
    if durables:
        _check_durables(cls, durables)
        methods.update((name, MethodInfo(name, call, call, reads)) for name, (call, reads) in BUILT_IN.items())
    ref = ClassRef(
        cls.type_name,
        cls.__module__,
        cls.__qualname__,
        shared_methods=frozenset(name for name, method in methods.items() if method.is_shared),
    )
    info = ClassInfo(cls, ref, methods, hasattr(cls, "on_start"), hasattr(cls, "alarm"), durables, migrations_of(cls))
    _INFOS[cls] = info
    return info


def find_class(module: str, qualname: str) -> type[DurableObject]:
    """The class that an already imported module holds under this name. Raises AttributeError or InvalidClassOption."""
    found: Any = sys.modules[module]
    for part in qualname.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, DurableObject)):
        raise InvalidClassOption(f"{module}.{qualname} is not a subclass of DurableObject")
    return found
