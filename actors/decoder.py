"""Bytes to values. Whatever the bytes are, the outcome is a value or a `CorruptValue`; nothing is imported for them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import functools
import uuid
import zoneinfo
from collections.abc import Callable, Collection
from decimal import Decimal
from typing import Any

from msgpack import unpackb
from pydantic import BaseModel

from actors import extensions as ext
from actors.errors import CorruptValue, ValueTypeUnavailable
from actors.typenames import resolve_type

__all__ = ["decode"]


def decode(data: bytes | bytearray | memoryview, *, modules: Collection[str] = ()) -> Any:
    """Decode what `encode` made.

    Enums, dataclasses and models are rebuilt only if they are registered (`register_type`) or their module is
    imported already; `modules` names others that may be imported for it. Raises `ValueTypeUnavailable` for a class
    that can't be had, and its base `CorruptValue` for anything else that is wrong with the bytes.
    """
    hook = _Decoder(modules).extension if modules else _first_extension
    try:
        return unpackb(data, ext_hook=hook, strict_map_key=False)
    except (CorruptValue, MemoryError):
        raise
    except Exception as error:  # whatever msgpack, or a class that is rebuilt, makes of damaged bytes
        raise CorruptValue(f"not a value: {type(error).__name__}: {error}") from error


def _first_extension(code: int, data: bytes) -> Any:
    return _Decoder(()).extension(code, data)


class _Decoder:
    """Rebuilds extension values; knows how deep it is and which modules may be imported."""

    def __init__(self, modules: Collection[str]) -> None:
        self._modules = modules
        self._depth = 0

    def extension(self, code: int, data: bytes) -> Any:
        build = _BUILDERS.get(code)
        if build is None:
            raise CorruptValue(f"not a value: unknown extension type {code}")
        return build(self, data)

    def nested(self, data: bytes) -> Any:
        # One more than encode allows: a leaf such as a datetime may sit inside the deepest container.
        if self._depth > ext.MAX_EXTENSION_DEPTH:
            raise CorruptValue("not a value: nested too deeply")
        self._depth += 1
        try:
            return unpackb(data, ext_hook=self.extension, strict_map_key=False)
        finally:
            self._depth -= 1

    def array(self, data: bytes) -> list[Any]:
        items = self.nested(data)
        if type(items) is not list:
            raise CorruptValue("not a value: an array is missing")
        return items

    def type_of(self, module: Any, qualname: Any) -> type:
        if type(module) is not str or type(qualname) is not str:
            raise CorruptValue("not a value: a class name is missing")
        return resolve_type(module, qualname, self._modules)


def _zone_from_plain(plain: Any) -> dt.tzinfo | None:
    if plain is None:
        return None
    if type(plain) is str:
        try:
            return zoneinfo.ZoneInfo(plain)
        except Exception as error:  # a missing zone is a KeyError; odd names give OSError, ValueError and others
            raise ValueTypeUnavailable(f"time zone {plain!r} is not known on this machine") from error
    micros, *name = plain if type(plain) is list else [plain]
    return dt.timezone(dt.timedelta(microseconds=micros), *name)


def _build_datetime(decoder: _Decoder, data: bytes) -> dt.datetime:
    text, fold, zone = decoder.array(data)
    return dt.datetime.fromisoformat(text).replace(fold=fold, tzinfo=_zone_from_plain(zone))


def _build_time(decoder: _Decoder, data: bytes) -> dt.time:
    text, fold, zone = decoder.array(data)
    return dt.time.fromisoformat(text).replace(fold=fold, tzinfo=_zone_from_plain(zone))


def _build_timedelta(decoder: _Decoder, data: bytes) -> dt.timedelta:
    days, seconds, micros = decoder.array(data)
    return dt.timedelta(days, seconds, micros)


def _build_enum(decoder: _Decoder, data: bytes) -> enum.Enum:
    module, qualname, which = decoder.array(data)
    cls = decoder.type_of(module, qualname)
    if issubclass(cls, enum.Flag) and type(which) is int:
        return cls(which)
    if not issubclass(cls, enum.Enum) or which not in cls.__members__:
        raise ValueTypeUnavailable(f"{module}.{qualname} has no member {which!r}")
    return cls.__members__[which]


@functools.lru_cache(maxsize=1024)
def _field_defaults(cls: Any) -> dict[str, Callable[[], Any] | None]:
    """For each field of a dataclass or model, what makes its default; None if it has none."""
    if issubclass(cls, BaseModel):
        return {
            name: None if field.is_required() else functools.partial(_model_default, field)
            for name, field in cls.model_fields.items()
        }
    return {field.name: _dataclass_default(field) for field in dataclasses.fields(cls)}


def _model_default(field: Any) -> Any:
    return field.get_default(call_default_factory=True)


def _dataclass_default(field: dataclasses.Field[Any]) -> Callable[[], Any] | None:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory
    return None if field.default is dataclasses.MISSING else lambda: field.default


def _complete(cls: type, state: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for name, default in _field_defaults(cls).items():
        if name in state:
            values[name] = state[name]
        elif default is not None:
            values[name] = default()
        else:
            raise ValueTypeUnavailable(f"field {name!r} of {cls.__qualname__} was not stored and has no default")
    return values


def _build_dataclass(decoder: _Decoder, data: bytes) -> Any:
    module, qualname, state = decoder.array(data)
    cls = decoder.type_of(module, qualname)
    if not dataclasses.is_dataclass(cls):
        raise ValueTypeUnavailable(f"{module}.{qualname} is not a dataclass")
    value = object.__new__(cls)
    for name, item in _complete(cls, state).items():
        object.__setattr__(value, name, item)  # frozen dataclasses too
    return value


def _build_model(decoder: _Decoder, data: bytes) -> BaseModel:
    module, qualname, state, extra, chosen, private = decoder.array(data)
    cls = decoder.type_of(module, qualname)
    if not issubclass(cls, BaseModel):
        raise ValueTypeUnavailable(f"{module}.{qualname} is not a pydantic model")
    values = _complete(cls, state)
    hidden = {name: spec.get_default() for name, spec in cls.__private_attributes__.items()}
    hidden |= {name: item for name, item in (private or {}).items() if name in hidden}
    keeps_extra = cls.model_config.get("extra") == "allow"
    value = cls.__new__(cls)
    value.__setstate__(
        {
            "__dict__": values,
            "__pydantic_extra__": (extra or {}) if keeps_extra else None,
            "__pydantic_fields_set__": set(chosen) & (values.keys() | set(extra or ())),
            "__pydantic_private__": hidden or None,
        }
    )
    return value


_BUILDERS: dict[int, Callable[[_Decoder, bytes], Any]] = {
    ext.BIG_INT: lambda _, data: int.from_bytes(data, "big", signed=True),
    ext.TUPLE: lambda decoder, data: tuple(decoder.array(data)),
    ext.SET: lambda decoder, data: set(decoder.array(data)),
    ext.FROZENSET: lambda decoder, data: frozenset(decoder.array(data)),
    ext.DATETIME: _build_datetime,
    ext.DATE: lambda _, data: dt.date.fromisoformat(data.decode()),
    ext.TIME: _build_time,
    ext.TIMEDELTA: _build_timedelta,
    ext.DECIMAL: lambda _, data: Decimal(data.decode()),
    ext.UUID: lambda _, data: uuid.UUID(bytes=data),
    ext.ENUM: _build_enum,
    ext.DATACLASS: _build_dataclass,
    ext.MODEL: _build_model,
}
