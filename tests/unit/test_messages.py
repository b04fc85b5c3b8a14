"""Frames mean what was put into them, and nothing that is malformed gets through."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.address import ClassRef
from actors.errors import MalformedFrame
from actors.messages import (
    Admin,
    Answer,
    Calls,
    Classes,
    Question,
    Release,
    Replies,
    decode_from_client,
    decode_from_partition,
    encode_admin,
    encode_answer,
    encode_calls,
    encode_classes,
    encode_question,
    encode_release,
    encode_replies,
    is_keyed,
    keyed_call_id,
    outside_call_id,
)
from actors.ranges import all_but, covers, merged, numbers

CALL = (7, "Cart", "alice", "add", b"args", 1, 5_000, None)
NESTED = (8, "Cart", "bob", "add", b"", 0, 1, (b"id", (("Cart", "alice"),), ("Cart", "alice", b"turn")))


def test_what_a_client_sends_arrives() -> None:
    ref = ClassRef("Cart", "shop", "Cart", b"shipped")
    assert decode_from_client(encode_calls([1, 5], [list(CALL), NESTED])) == Calls((1, 5), (CALL, NESTED))
    assert decode_from_client(encode_classes([ref])) == Classes((ref,))
    assert decode_from_client(encode_release([b"a", b"b"])) == Release((b"a", b"b"))
    assert decode_from_client(encode_question(3, [("Cart", "a", b"t")])) == Question(3, (("Cart", "a", b"t"),))
    assert decode_from_client(encode_admin(4, "status", b"args")) == Admin(4, "status", b"args")


def test_what_a_partition_sends_arrives() -> None:
    assert decode_from_partition(encode_replies([(1, 0, b"x"), [2, 3, b""]])) == Replies(((1, 0, b"x"), (2, 3, b"")))
    assert decode_from_partition(encode_answer(3, [True, False])) == Answer(3, (True, False))


@pytest.mark.parametrize(
    "message",
    [
        None,
        7,
        [],
        {},
        [99],
        [1],
        [1, []],
        [1, [1], []],
        [1, [2, 1], []],
        [1, [0, 1], []],
        [1, ["1", 2], []],
        [1, [], [[*CALL[:-1]]]],
        [1, [], [[0, *CALL[1:]]]],
        [1, [], [[True, *CALL[1:]]]],
        [1, [], [[*CALL[:4], "text", *CALL[5:]]]],
        [1, [], [[*CALL[:-1], ["id", [], None]]]],
        [1, [], [[*CALL[:-1], [b"id", [["Cart"]], None]]]],
        [1, [], [[*CALL[:-1], [b"id", [], ["Cart", "a"]]]]],
        [2, [["Cart", "shop"]]],
        [2, [["Cart", "shop", "Cart", "text"]]],
        [2, 5],
        [3, ["text"]],
        [3, b"bytes"],
        [4, 0, []],
        [4, 1, [["Cart", "a", "text"]]],
        [5, 1, b"op", b""],
        [5, 1, "op"],
        [101, []],
        msgpack.Timestamp(1, 2),
    ],
)
def test_a_malformed_message_of_a_client_is_refused(message: object) -> None:
    with pytest.raises(MalformedFrame):
        decode_from_client(msgpack.packb(message))


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        [1, [], []],
        [101],
        [101, 5],
        [101, [[1, 0]]],
        [101, [["1", 0, b""]]],
        [101, [[1, 9, b""]]],
        [101, [[1, [], b""]]],
        [101, [[1, 0, "text"]]],
        [104, 1],
        [104, 1, [1]],
        [104, -1, []],
    ],
)
def test_a_malformed_message_of_a_partition_is_refused(message: object) -> None:
    with pytest.raises(MalformedFrame):
        decode_from_partition(msgpack.packb(message))


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_decoded_or_refused(frame: bytes) -> None:
    for decode in (decode_from_client, decode_from_partition):
        try:
            decode(frame)
        except MalformedFrame:
            pass


def test_ids_of_outside_calls_differ_by_session_and_seq_and_never_change() -> None:
    assert outside_call_id(b"s" * 16, 258) == b"o" + b"s" * 16 + b"\0\0\0\0\0\0\x01\x02"


def test_ids_from_idempotency_keys_differ_by_all_that_they_name_and_never_change() -> None:
    call_id = keyed_call_id("Cart", "alice", "add", "order-1")
    assert call_id.hex() == "6b876073833da5d90716404dc8da20f11b"
    others = [
        ("Cart", "alice", "add", "order-2"),
        ("Cart", "bob", "add", "order-1"),
        ("Cart", "alice", "pay", "order-1"),
    ]
    assert len({call_id, *(keyed_call_id(*other) for other in others)}) == 4
    assert is_keyed(call_id)
    assert not is_keyed(outside_call_id(b"k" * 16, 1))


small_sets = st.sets(st.integers(1, 40))


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5))))
def test_merged_ranges_hold_the_same_numbers_and_neither_touch_nor_overlap(spans: list[tuple[int, int]]) -> None:
    flat = [bound for low, length in spans for bound in (low, low + length)]
    result = merged(flat)
    assert list(numbers(result)) == sorted(set(numbers(flat)))
    assert all(low - high > 1 for high, low in zip(result[1::2], result[2::2], strict=False))


@given(small_sets, st.integers(0, 40))
def test_all_but_some_numbers(excluded: set[int], last: int) -> None:
    result = all_but(excluded, last)
    assert set(numbers(result)) == set(range(1, last + 1)) - excluded
    assert all(covers(result, number) == (number not in excluded) for number in range(1, last + 1))
