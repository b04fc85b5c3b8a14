"""Where outcomes go: a method of an object, a function of the partition's process, a URL. Stored as text."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from actors.address import ClassRef, check_key
from actors.errors import InvalidOption
from actors.namespace import Method
from timers.errors import UndeliverableOutcome

if TYPE_CHECKING:
    from actors.durable_object import DurableObject
    from actors.object_host import ObjectHost

__all__ = [
    "FunctionSink",
    "HttpSink",
    "ObjectSink",
    "Sink",
    "SinkFunction",
    "StoredSink",
    "is_sink",
    "read_sink",
    "register_sink",
    "registered",
    "sink_of",
]

#: What applications may give: `(Class, key, method)`, a stub's method, the name of a method of the object itself,
#: "module:function", or an http or https URL. None: nobody is told.
Sink: TypeAlias = "tuple[type[DurableObject], str, str] | Method | str | None"
SinkFunction = Callable[[Any], Awaitable[None] | None]

#: Characters of a stored sink: a URL that is longer carries data, which belongs into the payload.
MAX_SINK_CHARS = 4_096
_OBJECT_PREFIX = "object:"
_URL_PREFIXES = ("http://", "https://")

_functions: dict[str, SinkFunction] = {}


@dataclass(frozen=True)
class ObjectSink:
    """A method of one object. It is called with the outcome, once in effect."""

    type_name: str
    module: str
    qualname: str
    key: str
    method: str

    @property
    def ref(self) -> ClassRef:
        return ClassRef(self.type_name, self.module, self.qualname)

    def to_text(self) -> str:
        fields = [self.type_name, self.module, self.qualname, self.key, self.method]
        return _OBJECT_PREFIX + json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True)
class FunctionSink:
    """A function, by "module:function": one that was registered under this name, else it is imported."""

    name: str

    def to_text(self) -> str:
        return self.name


@dataclass(frozen=True)
class HttpSink:
    """A URL that outcomes are posted to as JSON."""

    url: str

    def to_text(self) -> str:
        return self.url


StoredSink = ObjectSink | FunctionSink | HttpSink


def register_sink(name: str, function: SinkFunction) -> None:
    """Let `function(outcome)` take the outcomes of the sink `name` in this process; it need not be importable then.

    `name` reads "module:function". Registering a name again replaces its function. Raises `InvalidOption`.
    """
    if not _is_function_name(name):
        raise InvalidOption(f"sink {name!r}: the name of a function reads 'module:function'")
    if not callable(function):
        raise InvalidOption(f"sink {name!r}: {function!r} can't be called")
    _functions[name] = function


def registered(name: str) -> SinkFunction | None:
    """The function that was registered under this name."""
    return _functions.get(name)


def is_sink(value: object) -> bool:
    """Whether the value has the form of a sink; a property or a cached one gives it for each object."""
    if value is None or isinstance(value, Method | property):
        return True
    if isinstance(value, tuple):
        return len(value) == 3 and isinstance(value[0], type) and all(isinstance(part, str) for part in value[1:])
    return isinstance(value, str) and (value.isidentifier() or _is_function_name(value) or _is_url(value))


def sink_of(value: Any, host: ObjectHost) -> StoredSink | None:
    """The sink that an object's code gave. Raises `InvalidOption`, and what an unknown class or method raises."""
    sink = _sink_of(value, host)
    if sink is not None and len(sink.to_text()) > MAX_SINK_CHARS:
        raise InvalidOption(f"{host.id}: a sink of {len(sink.to_text()):,} characters (limit {MAX_SINK_CHARS:,})")
    return sink


def _sink_of(value: Any, host: ObjectHost) -> StoredSink | None:
    if value is None:
        return None
    if isinstance(value, Method):
        return _object_sink(*value.address())
    if isinstance(value, tuple) and is_sink(value):
        cls, key, method = value
        info = host.partition.classes.add(cls)
        info.method(method)
        return _object_sink(info.ref, check_key(key), method)
    if isinstance(value, str) and is_sink(value):
        if value.isidentifier():
            host.info.method(value)
            return _object_sink(host.info.ref, host.id.key, value)
        return HttpSink(value) if value.startswith(_URL_PREFIXES) else FunctionSink(value)
    raise InvalidOption(
        f"{host.id}: {value!r} is no sink: give (Class, key, method), a stub's method, the name of a method, "
        "'module:function', or an http or https URL"
    )


def read_sink(text: str) -> StoredSink:
    """The sink that was stored. Raises `UndeliverableOutcome` for text that is none."""
    if text.startswith(_OBJECT_PREFIX):
        try:
            fields = json.loads(text.removeprefix(_OBJECT_PREFIX))
        except ValueError as error:
            raise UndeliverableOutcome(f"the sink {text!r} can't be read: {error}") from None
        if not isinstance(fields, list) or len(fields) != 5 or not all(isinstance(field, str) for field in fields):
            raise UndeliverableOutcome(f"the sink {text!r} names no method of an object")
        return ObjectSink(*fields)
    if text.startswith(_URL_PREFIXES) and _is_url(text):
        return HttpSink(text)
    if _is_function_name(text):
        return FunctionSink(text)
    raise UndeliverableOutcome(f"{text!r} is no sink")


def check_json(payload: Any, host: ObjectHost) -> None:
    """Whether the payload can be posted. Raises `InvalidOption`."""
    try:
        json.dumps(payload, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"{host.id}: the payload of an outcome for a URL must be plain JSON: {error}") from None


def _object_sink(ref: ClassRef, key: str, method: str) -> ObjectSink:
    return ObjectSink(ref.type_name, ref.module, ref.qualname, key, method)


def _is_function_name(text: object) -> bool:
    if not isinstance(text, str):
        return False
    module, colon, function = text.partition(":")
    return bool(colon) and all(part.isidentifier() for part in (*module.split("."), *function.split(".")))


def _is_url(text: str) -> bool:
    if not text.startswith(_URL_PREFIXES) or not text.isprintable() or " " in text:
        return False
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


async def call_function(function: SinkFunction, outcome: Any) -> None:
    """Call a function sink, synchronous or not."""
    result = function(outcome)
    if inspect.isawaitable(result):
        await result
