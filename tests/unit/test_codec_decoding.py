"""Decoding: what damaged or foreign bytes come to, and what is never done for bytes."""

from __future__ import annotations

import sys
import types
from typing import Any

import msgpack
import pytest

from actors import extensions
from actors.codec import decode, encode, register_type
from actors.errors import CorruptValue, MainspringError, ValueTypeUnavailable
from tests.support.values import Colour, Grown, Item, Point, Shrunk, Stricter, make_local


def extension(code: int, content: Any) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, msgpack.packb(content))))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x02",
        b"\x92\x01",
        b"\xa1\xff",
        b"\x81\x90\x01",
        extension(99, 1),
        extension(extensions.TUPLE, 5),
        extension(extensions.SET, [[1]]),
        extension(extensions.DATETIME, ["yesterday", 0, None]),
        extension(extensions.DATETIME, ["2024-01-01T00:00:00", 0, 10**15]),
        extension(extensions.TIMEDELTA, [10**12, 0, 0]),
        extension(extensions.ENUM, [1, 2, 3]),
        extension(extensions.DATACLASS, ["m", "q"]),
        bytes(msgpack.packb(msgpack.ExtType(extensions.DECIMAL, b"1e"))),
        bytes(msgpack.packb(msgpack.ExtType(extensions.UUID, b"short"))),
    ],
    ids=repr,
)
def test_damaged_bytes_are_a_corrupt_value(data: bytes) -> None:
    with pytest.raises(CorruptValue) as caught:
        decode(data)
    assert isinstance(caught.value, MainspringError)
    assert isinstance(caught.value, ValueError)


def test_bytes_nested_too_deeply_are_a_corrupt_value() -> None:
    data = b"\x01"
    for _ in range(5_000):
        data = bytes(msgpack.packb(msgpack.ExtType(extensions.TUPLE, b"\x91" + data)))
    with pytest.raises(CorruptValue, match="deep"):
        decode(data)
    with pytest.raises(CorruptValue):
        decode(b"\x91" * 100_000 + b"\x01")


def stored_as(module: str, qualname: str, state: Any) -> bytes:
    return extension(extensions.DATACLASS, [module, qualname, state])


def test_a_class_is_never_imported_because_bytes_name_it() -> None:
    assert "antigravity" not in sys.modules
    with pytest.raises(ValueTypeUnavailable, match="'antigravity' is not imported"):
        decode(stored_as("antigravity", "Anything", {}))
    assert "antigravity" not in sys.modules


def test_a_module_that_the_caller_names_may_be_imported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_module.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass Late:\n    a: int\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = stored_as("late_module", "Late", {"a": 1})
    with pytest.raises(ValueTypeUnavailable):
        decode(data)
    assert decode(data, modules=["late_module"]).a == 1
    assert decode(data).a == 1  # imported by now
    del sys.modules["late_module"]
    with pytest.raises(ValueTypeUnavailable, match="can't be imported"):
        decode(stored_as("no_such_module_at_all", "X", {}), modules=["no_such_module_at_all"])


def test_only_data_types_are_rebuilt_and_no_lazy_attribute_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy_module")
    lazy.__getattr__ = lambda name: pytest.fail(f"looked up {name}")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    for module, qualname in (("lazy_module", "Thing"), ("builtins", "dict"), ("os", "system"), ("subprocess", "Popen")):
        for code, rest in (
            (extensions.DATACLASS, [{}]),
            (extensions.ENUM, ["x"]),
            (extensions.MODEL, [{}, None, [], None]),
        ):
            with pytest.raises(ValueTypeUnavailable):
                decode(extension(code, [module, qualname, *rest]))


def test_fields_gained_take_defaults_and_fields_lost_are_dropped() -> None:
    module = Grown.__module__
    assert decode(stored_as(module, "Grown", {"kept": 1})) == Grown(1, 7, [1])
    assert decode(stored_as(module, "Shrunk", {"kept": 1, "gone": 2})) == Shrunk(1)
    with pytest.raises(ValueTypeUnavailable, match="'needed' of Stricter was not stored and has no default"):
        decode(stored_as(module, "Stricter", {"kept": 1}))
    model = extension(
        extensions.MODEL, [module, "Item", {"sku": "a", "gone": 1}, {"x": 1}, ["sku", "gone"], {"_old": 1}]
    )
    assert decode(model) == Item(sku="a")
    assert Stricter(1, 2) == decode(encode(Stricter(1, 2)))


def test_an_enum_member_that_is_gone_is_unavailable() -> None:
    with pytest.raises(ValueTypeUnavailable, match="no member 'GREEN'"):
        decode(extension(extensions.ENUM, [Colour.__module__, "Colour", "GREEN"]))


def test_an_unknown_time_zone_is_unavailable() -> None:
    for zone in ("Mars/Olympus", "../../etc/passwd", "", "Europe"):
        with pytest.raises(ValueTypeUnavailable, match="time zone"):
            decode(extension(extensions.DATETIME, ["2024-01-01T00:00:00", 0, zone]))


def test_a_moved_class_is_found_under_its_old_name() -> None:
    register_type(Point, module="shop.old", qualname="OldPoint")
    assert decode(stored_as("shop.old", "OldPoint", {"x": 1, "y": 2})) == Point(1, 2)
    assert decode(encode(Point(1, 2))) == Point(1, 2)
    assert b"OldPoint" not in encode(Point(1, 2))


def test_a_registered_local_class_can_be_stored() -> None:
    value = make_local()
    register_type(type(value))
    assert decode(encode(value)) == value
