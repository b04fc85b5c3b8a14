"""The codec: what it carries, what it refuses and with which words, what it will not do for bytes."""

from __future__ import annotations

import datetime as dt
import math
import sys
import threading
import uuid
import zoneinfo
from collections import OrderedDict, namedtuple
from decimal import Decimal
from typing import Any

import pytest

from actors import extensions
from actors.codec import MAX_EXTENSION_DEPTH, decode, encode, register_type
from actors.errors import UnstorableValue
from tests.support.values import (
    Access,
    Box,
    Colour,
    Item,
    Level,
    Listing,
    Open,
    Outer,
    Point,
    Size,
    Slotted,
    Text,
    exactly,
    make_local,
)

ROME = zoneinfo.ZoneInfo("Europe/Rome")
CET = dt.timezone(dt.timedelta(hours=1), "CET")


def name_of(value: object) -> str:
    """The same in each process, which a set's own order is not."""
    return f"{{{', '.join(sorted(map(repr, value)))}}}" if type(value) is set and value else repr(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        False,
        0,
        -1,
        2**63 - 1,
        -(2**63),
        2**64 - 1,
        2**64,
        -(2**63) - 1,
        2**71 - 1,
        -(2**71),
        10**400,
        -(10**400),
        0.1,
        -0.0,
        math.inf,
        "",
        "naïve ☃ \U0001f600 \0",
        b"",
        b"\xff\0",
        [],
        [1, [2.0, [True]]],
        (),
        (1, (2, [3])),
        {},
        {"b": 1, "a": 2},
        {1: "int", "1": "text", b"1": "bytes", (1, 2): "tuple", None: "none"},
        {frozenset({1}): {2: {3}}},
        set(),
        {1, "a", (2, 3)},
        frozenset({frozenset({1}), 2}),
        dt.date(1, 1, 1),
        dt.timedelta(days=-1, seconds=5, microseconds=7),
        Decimal("1.10"),
        Decimal("-0E+5"),
        Decimal("Infinity"),
        uuid.UUID(int=5),
        Colour.RED,
        Colour.BLUE,
        Size.SMALL,
        Level.LOW,
        Access.READ,
        Access.READ | Access.WRITE,
        Access(0),
        Point(1, Point((2,), {3})),
        Outer.Inner(5),
        Item(sku="apple", counts=(1, 2)),
        Open(name="x", colour=Colour.RED),  # type: ignore[call-arg]
        {Colour.RED: 1, Point(1): 2},
    ],
    ids=name_of,
)
def test_a_value_comes_back_equal_and_of_the_same_type(value: Any) -> None:
    assert exactly(decode(encode(value)), value)


def test_nan_and_negative_zero_survive() -> None:
    assert math.isnan(decode(encode(math.nan)))
    assert math.copysign(1, decode(encode(-0.0))) == -1
    assert decode(encode(Decimal("sNaN"))).is_snan()


@pytest.mark.parametrize("zone", [None, dt.timezone.utc, CET, dt.timezone(-dt.timedelta(minutes=90)), ROME], ids=str)
def test_times_keep_their_zone_and_naive_stays_naive(zone: dt.tzinfo | None) -> None:
    for value in (dt.datetime(2024, 10, 27, 2, 30, 0, 123456, zone), dt.time(23, 59, 59, 999999, zone)):
        for fold in (0, 1):
            back = decode(encode(value.replace(fold=fold)))
            assert type(back) is type(value)
            assert back.replace(tzinfo=None) == value.replace(tzinfo=None)
            assert back.fold == fold
            assert back.tzinfo == zone
            assert type(back.tzinfo) is type(zone)
            assert back.tzname() == value.tzname() or zone is ROME


def test_a_repeated_hour_is_the_same_instant_after_the_round_trip() -> None:
    second = dt.datetime(2024, 10, 27, 2, 30, tzinfo=ROME, fold=1)
    assert decode(encode(second)).timestamp() == second.timestamp()


def test_bytearray_and_memoryview_come_back_as_bytes() -> None:
    assert exactly(decode(encode([bytearray(b"a"), memoryview(b"b")])), [b"a", b"b"])


def test_dict_order_is_kept_and_set_order_does_not_matter() -> None:
    assert list(decode(encode({"z": 1, "a": 2}))) == ["z", "a"]
    numbers = [3, 300000, "x", (1,), -7, 2**70]
    backwards = numbers[::-1]
    assert encode(set(numbers)) == encode(set(backwards))
    assert encode({"z": 1, "a": 2}) != encode({"a": 2, "z": 1})


def test_a_large_set_decodes() -> None:
    assert decode(encode(set(range(70_000)))) == set(range(70_000))


def test_an_alias_of_an_enum_member_is_that_member() -> None:
    assert decode(encode(Colour.CRIMSON)) is Colour.RED


def test_dataclasses_are_rebuilt_without_running_their_code() -> None:
    value = Slotted(3)
    assert value.derived == 3
    assert decode(encode(value)) == value  # __post_init__ would have made it 6


def test_models_keep_private_attributes_extra_fields_and_what_was_set() -> None:
    item = Item(sku="a")
    item._seen = 4
    back = decode(encode(item))
    assert back._seen == 4
    assert back.model_fields_set == {"sku"}
    assert decode(encode(Open(colour=1))).model_extra == {"colour": 1}  # type: ignore[call-arg]


def test_the_numbers_of_extension_types_never_change() -> None:
    assert encode(2**64) == bytes.fromhex("c70901010000000000000000")
    assert encode((1, 2)) == bytes.fromhex("c70302920102")
    assert encode({2, 1}) == bytes.fromhex("c70303920102")
    assert encode(frozenset({1})) == bytes.fromhex("d5049101")
    assert encode(dt.date(2024, 1, 2)) == b"\xc7\x0a\x062024-01-02"
    assert encode(Decimal("1.5")) == b"\xc7\x03\x091.5"
    assert encode(uuid.UUID(int=1)) == b"\xd8\x0a" + bytes(15) + b"\x01"
    assert encode(dt.timedelta(1, 2, 3)) == bytes.fromhex("d60893010203")
    numbers = {name: number for name, number in vars(extensions).items() if name.isupper() and "MAX" not in name}
    assert numbers == {
        "BIG_INT": 1,
        "TUPLE": 2,
        "SET": 3,
        "FROZENSET": 4,
        "DATETIME": 5,
        "DATE": 6,
        "TIME": 7,
        "TIMEDELTA": 8,
        "DECIMAL": 9,
        "UUID": 10,
        "ENUM": 11,
        "DATACLASS": 12,
        "MODEL": 13,
    }


# --- what is refused ------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), r"^value: object can't be stored$"),
        ({"items": [1, 2, 3, Point(1, object())]}, r"^value\['items'\]\[3\]\.y: object can't be stored$"),
        ([(1, {object})], r"^value\[0\]\[1\]\{<type>\}: type can't be stored$"),
        ({(1, object): 2}, r"^value\.<key <tuple>>\[1\]: type can't be stored$"),
        ({"a": "\ud800"}, r"^value\['a'\]: .*lone surrogate"),
        ({"\ud800": 1}, r"^value\.<key '\\ud800'>: .*lone surrogate"),
        (Item.model_construct(sku="a", counts=lambda: 1), r"^value\.counts: function can't be stored$"),
        (Open(colour=1j), r"^value\.colour: complex can't be stored$"),  # type: ignore[call-arg]
        (Text("a"), r"^value: .*Text is a subclass of a built-in type"),
        ([OrderedDict(a=1)], r"^value\[0\]: collections\.OrderedDict is a subclass"),
        (Pair(1, 2), r"^value: .*Pair is a subclass"),
        (Listing(), r"^value: .*Listing is a subclass"),
        ([make_local()], r"^value\[0\]: .*made inside a function"),
        (Box[int](content=1), r"^value: .*parametrised generic"),
        (Item.model_construct(counts=()), r"^value: field 'sku' of .*Item has no value$"),
        (object.__new__(Slotted), r"^value: a field of .*Slotted has no value"),
        (dt.datetime(2024, 1, 1, tzinfo=type("Odd", (dt.tzinfo,), {})()), r"^value: time zone .*Odd can't be stored"),
        ((x for x in ()), r"^value: generator can't be stored$"),
        (ValueError("x"), r"^value: ValueError is a subclass"),
        (..., r"^value: ellipsis can't be stored$"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_can_not_be_carried_is_named_with_its_path(value: Any, words: str) -> None:
    with pytest.raises(UnstorableValue, match=words):
        encode(value)


def test_a_cycle_is_refused_through_any_container() -> None:
    plain: list[Any] = []
    plain.append({"again": plain})
    mixed: list[Any] = []
    mixed.append((Point(mixed),))
    for value, path in ((plain, "value[0]['again']"), (mixed, "value[0][0].x")):
        with pytest.raises(UnstorableValue) as caught:
            encode(value)
        assert str(caught.value) == f"{path}: it contains itself"


def test_a_cycle_of_long_chains_is_refused_without_using_up_the_stack() -> None:
    root: list[Any] = []
    place = root
    for _ in range(500):
        deeper: list[Any] = []
        place.append(deeper)
        place = deeper
    place.append((root,))
    with pytest.raises(UnstorableValue, match="it contains itself"):
        encode(root)


def nest(depth: int, wrap: Any) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {"k": v}], ids=["list", "dict"])
def test_lists_and_dicts_nest_500_deep_and_not_without_end(wrap: Any) -> None:
    assert encode(decode(encode(nest(500, wrap)))) == encode(nest(500, wrap))
    with pytest.raises(UnstorableValue, match=r"nested too deeply$"):
        encode(nest(100_000, wrap))


@pytest.mark.parametrize("wrap", [lambda v: (v,), Point, lambda v: frozenset({v})], ids=["tuple", "dataclass", "set"])
def test_other_containers_nest_64_deep(wrap: Any) -> None:
    deepest = nest(MAX_EXTENSION_DEPTH - 1, wrap)
    value = ([dt.datetime(2024, 1, 1, tzinfo=ROME), deepest],)
    assert decode(encode(value)) == value
    with pytest.raises(UnstorableValue, match=r"nested too deeply$"):
        encode((value,))


def test_a_failed_encode_leaves_nothing_behind_for_the_next() -> None:
    for _ in range(20):
        with pytest.raises(UnstorableValue):
            encode(["x" * 100, (1, object())])
        assert encode([1]) == b"\x91\x01"


def test_an_attribute_that_raises_is_an_unstorable_value() -> None:
    class Model(Item):
        pass

    register_type(Model)
    broken = Model.__new__(Model)  # no __init__: pydantic's own slots are not set
    with pytest.raises(UnstorableValue, match=r"^value: "):
        encode(broken)


# --- reentrancy -----------------------------------------------------------------------------------


def test_encoding_inside_an_encoding_hook_does_not_disturb_it() -> None:
    import dataclasses

    @dataclasses.dataclass
    class Nosy:
        a: int = 1

        def __getattribute__(self, name: str) -> Any:
            if name == "a":
                return decode(encode(["other", (1, 2)]))
            return object.__getattribute__(self, name)

    register_type(Nosy)
    back = decode(encode([0, Nosy(), 9]))
    assert back[0] == 0
    assert object.__getattribute__(back[1], "__dict__") == {"a": ["other", (1, 2)]}
    assert back[2] == 9


def test_threads_do_not_share_a_packer_at_work() -> None:
    failures: list[Any] = []

    def work(number: int) -> None:
        value = {"n": number, "items": [(number, {number, str(number)})] * 20}
        for _ in range(300):
            if decode(encode(value)) != value:
                failures.append(number)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert failures == []
