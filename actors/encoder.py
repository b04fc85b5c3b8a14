"""Values to bytes: one call of the C packer for plain values, a hook for the codec's extension types."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import uuid
import zoneinfo
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

from msgpack import ExtType, Packer
from pydantic import BaseModel

from actors import extensions as ext
from actors.errors import UnstorableValue
from actors.typenames import NamelessType, name_of

__all__ = ["encode"]

_MAX_PLAIN_DEPTH = 511
#: From this extension depth on a value is walked before it is packed, so that a cycle ends as an error long before
#: the packer's recursion (up to 511 C frames a level) could use up the C stack.
_WALK_DEPTH = 16
#: A packer keeps its buffer. One that has grown past this is given up after use.
_LARGEST_KEPT_BYTES = 1024 * 1024

_UNSTORABLE_BASES = (int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset, BaseException)


def encode(value: Any) -> bytes:
    """Encode `value`. Raises `UnstorableValue`, naming the path, e.g. `value['items'][3].price`, if it can't be."""
    try:
        return _pack(value, 0)
    except MemoryError:
        raise
    except Exception as error:
        fault = _find_fault(value) or f"value: {type(error).__name__}: {error}"
        raise UnstorableValue(fault) from (None if isinstance(error, _Refused) else error)


class _Refused(Exception):
    """This value, by itself, can't be carried; the message is the reason. `encode` adds the path."""


class _Encoder:
    """A packer and the extension depth at which it works. Used by one call at a time."""

    __slots__ = ("depth", "pack")

    def __init__(self) -> None:
        self.depth = 0
        self.pack: Callable[[Any], bytes] = Packer(default=self._extend, strict_types=True).pack

    def _extend(self, value: Any) -> ExtType:
        kind = _KINDS.get(type(value)) or _learn(type(value))
        depth = self.depth + 1
        if depth >= _WALK_DEPTH and kind.parts is not None:
            if depth > ext.MAX_EXTENSION_DEPTH:
                raise _Refused("nested too deeply")
            if depth == _WALK_DEPTH and _find_fault(value) is not None:
                raise _Refused("nested too deeply")
        return _extension((kind.code, kind.body(value, depth)))


#: Makes the packer's extension object; the plain constructor checks its arguments again, at a third of the cost of
#: encoding a small tuple.
_extension: Callable[[tuple[int, bytes]], ExtType] = ExtType._make

#: Encoders that nobody uses now. Taking one out is atomic, so neither another thread nor an encode that a hook or a
#: finaliser starts in the middle of this one can meet a packer at work.
_idle: list[_Encoder] = []


def _pack(value: Any, depth: int) -> bytes:
    try:
        encoder = _idle.pop()
    except IndexError:
        encoder = _Encoder()
    encoder.depth = depth
    data = encoder.pack(value)  # if it raises, the encoder is given up with its half-written buffer
    if len(data) <= _LARGEST_KEPT_BYTES:
        _idle.append(encoder)
    return data


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How the values of one exact type are carried. `parts` yields what is inside, for errors; None: a leaf."""

    code: int
    body: Callable[[Any, int], bytes]
    parts: Callable[[Any], Iterator[tuple[str, Any]]] | None = None


def _set_body(value: Any, depth: int) -> bytes:
    items = sorted(_pack(item, depth) for item in value)
    # An array header and the items one after the other are what packing the sorted list would give.
    header: bytes = Packer().pack_array_header(len(items))
    return header + b"".join(items)


def _zone_to_plain(zone: dt.tzinfo | None) -> Any:
    """None: naive. int: fixed offset in microseconds. [int, name]: the same with a name. str: a zoneinfo key."""
    if zone is None:
        return None
    if type(zone) is dt.timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        micros = offset // dt.timedelta(microseconds=1)
        return [micros, *name] if name else micros
    if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        return zone.key
    raise _Refused(f"time zone {type(zone).__module__}.{type(zone).__qualname__} can't be stored; use zoneinfo")


def _clock_body(value: Any, depth: int) -> bytes:
    return _pack([value.replace(tzinfo=None).isoformat(), value.fold, _zone_to_plain(value.tzinfo)], depth)


def _big_int_body(value: int, depth: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


def _indexed(value: Any) -> Iterator[tuple[str, Any]]:
    return ((f"[{index}]", item) for index, item in enumerate(value))


def _unordered(value: Any) -> Iterator[tuple[str, Any]]:
    return ((f"{{{_short(item)}}}", item) for item in value)


_KINDS: dict[type, _Kind] = {
    int: _Kind(ext.BIG_INT, _big_int_body),  # the packer asks only for those that it can't carry itself
    tuple: _Kind(ext.TUPLE, lambda value, depth: _pack(list(value), depth), _indexed),
    set: _Kind(ext.SET, _set_body, _unordered),
    frozenset: _Kind(ext.FROZENSET, _set_body, _unordered),
    dt.datetime: _Kind(ext.DATETIME, _clock_body),
    dt.date: _Kind(ext.DATE, lambda value, _: value.isoformat().encode()),
    dt.time: _Kind(ext.TIME, _clock_body),
    dt.timedelta: _Kind(ext.TIMEDELTA, lambda v, depth: _pack([v.days, v.seconds, v.microseconds], depth)),
    Decimal: _Kind(ext.DECIMAL, lambda value, _: str(value).encode()),
    uuid.UUID: _Kind(ext.UUID, lambda value, _: value.bytes),
}


def _learn(cls: type) -> _Kind:
    """Find out how values of a class are carried and remember it. Raises `_Refused` if they are not."""
    try:
        if issubclass(cls, enum.Enum):
            kind = _enum_kind(cls)
        elif issubclass(cls, _UNSTORABLE_BASES):
            raise _Refused(f"{_name(cls)} is a subclass of a built-in type and would not come back as itself")
        elif dataclasses.is_dataclass(cls):
            kind = _dataclass_kind(cls)
        elif issubclass(cls, BaseModel):
            kind = _model_kind(cls)
        else:
            raise _Refused(f"{_name(cls)} can't be stored")
    except NamelessType as error:
        raise _Refused(str(error)) from None
    _KINDS[cls] = kind
    return kind


def _enum_kind(cls: type) -> _Kind:
    module, qualname = name_of(cls)
    if issubclass(cls, enum.Flag):  # a combination of flags has no stable name
        return _Kind(ext.ENUM, lambda value, depth: _pack([module, qualname, value.value], depth))
    return _Kind(ext.ENUM, lambda value, depth: _pack([module, qualname, value.name], depth))


def _dataclass_kind(cls: Any) -> _Kind:
    module, qualname = name_of(cls)
    names = [field.name for field in dataclasses.fields(cls)]

    def state(value: Any) -> dict[str, Any]:
        try:
            return {name: getattr(value, name) for name in names}
        except AttributeError as error:
            raise _Refused(f"a field of {_name(cls)} has no value: {error}") from None

    return _Kind(
        ext.DATACLASS,
        lambda value, depth: _pack([module, qualname, state(value)], depth),
        lambda value: ((f".{name}", item) for name, item in state(value).items()),
    )


def _model_kind(cls: type[BaseModel]) -> _Kind:
    module, qualname = name_of(cls)
    names = list(cls.model_fields)

    def state(value: BaseModel) -> dict[str, Any]:
        values = vars(value)
        missing = [name for name in names if name not in values]
        if missing:
            raise _Refused(f"field {missing[0]!r} of {_name(cls)} has no value")
        return {name: values[name] for name in names}

    def body(value: BaseModel, depth: int) -> bytes:
        extra, private = value.__pydantic_extra__, value.__pydantic_private__
        chosen = sorted(value.__pydantic_fields_set__)
        return _pack([module, qualname, state(value), extra or None, chosen, private or None], depth)

    def parts(value: BaseModel) -> Iterator[tuple[str, Any]]:
        for group in (state(value), value.__pydantic_extra__, value.__pydantic_private__):
            yield from ((f".{name}", item) for name, item in (group or {}).items())

    return _Kind(ext.MODEL, body, parts)


# --- finding what is wrong with a value -----------------------------------------------------------

_PLAIN_LEAVES = frozenset({type(None), bool, int, float, bytes, bytearray, memoryview})


def _find_fault(root: Any) -> str | None:
    """Path and reason of the first thing in `root` that can't be carried, in the order in which it is packed."""
    # The containers from the root down to here: path step, identity, kind of nesting, what is left to look at.
    trail: list[tuple[str, int, bool, Iterator[tuple[str, Any]]]] = [("", 0, False, iter([("value", root)]))]
    while trail:
        step = ""
        try:
            item = next(trail[-1][3], None)
            if item is None:
                trail.pop()
                continue
            step, value = item
            parts = _look_inside(value)
            if parts is None:
                continue
            if any(identity == id(value) for _, identity, _, _ in trail):
                raise _Refused("it contains itself")
            extension = type(value) not in (list, dict)
            depth = sum(1 for _, _, flag, _ in trail if flag) + extension
            if depth > ext.MAX_EXTENSION_DEPTH or len(trail) >= _MAX_PLAIN_DEPTH:
                raise _Refused("nested too deeply")
            trail.append((step, id(value), extension, parts))
        except Exception as error:  # a property of the value may raise anything
            path = "".join(place[0] for place in trail) + step
            if len(path) > 1000:
                path = f"{path[:400]} ... {path[-400:]}"
            reason = str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"
            return f"{path}: {reason}"
    return None


def _look_inside(value: Any) -> Iterator[tuple[str, Any]] | None:
    """What a container holds, with path steps; None for a leaf. Raises `_Refused` for what can't be carried."""
    cls = type(value)
    if cls in _PLAIN_LEAVES:
        return None
    if cls is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Refused("text with a lone surrogate has no UTF-8 form") from None
        return None
    if cls is list:
        return _indexed(value)
    if cls is dict:
        return _entries(value)
    kind = _KINDS.get(cls) or _learn(cls)
    if kind.parts is None:
        kind.body(value, 0)
        return None
    return kind.parts(value)


def _entries(value: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        yield f".<key {_short(key)}>", key
        yield f"[{_short(key)}]", item


def _short(key: Any) -> str:
    cls = type(key)
    if cls in (str, bytes, float, bool, type(None)) or (cls is int and key.bit_length() <= 200):
        text = repr(key[:60] if cls in (str, bytes) else key)
        return text if len(text) <= 60 else text[:57] + "..."
    return f"<{type(key).__qualname__}>"


def _name(cls: type) -> str:
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
