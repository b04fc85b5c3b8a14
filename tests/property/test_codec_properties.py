"""The codec on generated values and on arbitrary bytes."""

from __future__ import annotations

import datetime as dt
import random
import zoneinfo
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import extensions
from actors.codec import decode, encode
from actors.errors import CorruptValue, UnstorableValue
from tests.support.values import Access, Colour, Item, Point, Size, exactly

ZONES = st.one_of(
    st.none(),
    st.just(dt.timezone.utc),
    st.integers(-86_399, 86_399).map(lambda seconds: dt.timezone(dt.timedelta(seconds=seconds))),
    st.sampled_from(["Europe/Rome", "America/Havana", "Asia/Kolkata"]).map(zoneinfo.ZoneInfo),
)

TEXT = st.text()

HASHABLE_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.floats(allow_nan=False),
    TEXT,
    st.binary(),
    st.datetimes(timezones=ZONES),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.uuids(),
    st.sampled_from(list(Colour)),
    st.sampled_from(list(Size)),
    st.integers(0, 3).map(Access),
)

# Deferred, so that the strategies built of it have short names.
HASHABLE: st.SearchStrategy[Any] = st.deferred(lambda: HASHABLE_TREES)
HASHABLE_TREES = st.recursive(
    st.deferred(lambda: HASHABLE_LEAVES),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(tuple),
        st.frozensets(inner, max_size=4),
        st.builds(Point, inner, inner),
    ),
    max_leaves=8,
)

VALUES = st.recursive(
    HASHABLE,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(HASHABLE, inner, max_size=4),
        st.sets(HASHABLE, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Item, sku=TEXT, counts=st.tuples(st.integers())),
    ),
    max_leaves=20,
)


@given(VALUES)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert exactly(decode(encode(value)), value)


@given(VALUES)
def test_encoding_is_deterministic_also_after_a_round_trip(value: Any) -> None:
    assert encode(value) == encode(value) == encode(decode(encode(value)))


@given(st.sets(HASHABLE, max_size=8).map(list), st.randoms(use_true_random=False))
def test_sets_encode_alike_whatever_their_history(items: list[Any], shuffler: random.Random) -> None:
    shuffled = list(items)
    shuffler.shuffle(shuffled)
    assert encode(set(items)) == encode(set(shuffled))


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_a_value_or_a_corrupt_value(data: bytes) -> None:
    try:
        decode(data)
    except CorruptValue:
        pass


MSGPACK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from(["tests.support.values", "builtins", "Point", "Item", "Colour", "Access", "dict", "RED"]),
        st.binary(max_size=20),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=6),
        st.dictionaries(st.text(max_size=5), inner, max_size=3),
        st.builds(
            lambda code, content: msgpack.ExtType(code, msgpack.packb(content)),
            st.integers(1, extensions.MODEL + 1),
            st.one_of(
                inner,
                st.lists(inner, min_size=2, max_size=6),
                st.tuples(
                    st.just("tests.support.values"),
                    st.sampled_from(["Point", "Item", "Colour", "Access", "Slotted", "Outer"]),
                    inner,
                ).map(list),
            ),
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=500)
@given(MSGPACK)
def test_well_formed_msgpack_with_senseless_extensions_gives_a_value_or_a_corrupt_value(content: Any) -> None:
    try:
        decode(msgpack.packb(content))
    except CorruptValue:
        pass


@given(VALUES, st.data())
def test_one_flipped_byte_gives_a_value_or_a_corrupt_value(value: Any, data: st.DataObject) -> None:
    damaged = bytearray(encode(value))
    position = data.draw(st.integers(0, len(damaged) - 1))
    damaged[position] ^= data.draw(st.integers(1, 255))
    try:
        decode(bytes(damaged))
    except CorruptValue:
        pass


@given(VALUES, st.sampled_from([object(), 1j, "\udc00", range(3)]), st.randoms(use_true_random=False))
def test_one_bad_part_anywhere_is_an_unstorable_value_with_a_path(value: Any, bad: Any, chooser: random.Random) -> None:
    for _ in range(chooser.randrange(6)):
        value = chooser.choice([lambda v: [0, v], lambda v: {"k": v}, lambda v: (v, 1), lambda v: Point(1, v)])(value)
    for tainted in ([value, bad], {"a": value, "b": (bad,)}, Point(value, bad)):
        with pytest.raises(UnstorableValue, match=r"^value.*(\[1\]|\['b'\]\[0\]|\.y)"):
            encode(tainted)
