"""Slots are stable for ever; keys have limits."""

from __future__ import annotations

import pytest

from actors.address import SLOTS, check_key, slot_of
from actors.errors import InvalidKey

# Computed once. A change here means that no stored object would be found again.
VECTORS = [
    ("Cart", "alice", 2237),
    ("Cart", "bob", 4001),
    ("Cart", "", 1326),
    ("Mailer", "alice", 4),
    ("Order", "2024-01-01/000001", 1414),
    ("Zähler", "schlüssel", 1258),
    ("Cart", "\N{GRINNING FACE}", 4036),
    ("Cart", "k" * 1024, 2283),
]


@pytest.mark.parametrize(("type_name", "key", "slot"), VECTORS)
def test_the_slot_of_an_object_never_changes(type_name: str, key: str, slot: int) -> None:
    assert slot_of(type_name, key) == slot


def test_there_are_4096_slots() -> None:
    assert SLOTS == 4096


def test_class_and_key_are_kept_apart() -> None:
    assert slot_of("ab", "c") != slot_of("a", "bc")


def test_every_slot_is_used_about_equally() -> None:
    counts = [0] * SLOTS
    for number in range(40 * SLOTS):
        counts[slot_of("Cart", f"key-{number}")] += 1
    assert min(counts) > 10
    assert max(counts) < 90


@pytest.mark.parametrize("key", ["a", "k" * 1024, "ü" * 512, "a/b c\n", "\N{GRINNING FACE}" * 256])
def test_a_key_is_text_of_1_to_1024_utf8_bytes(key: str) -> None:
    assert check_key(key) == key


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("", "empty"),
        ("k" * 1025, "1025"),
        ("ü" * 513, "1026"),
        ("a\0b", "NUL"),
        ("a\ud800", "surrogate"),
        (b"alice", "bytes"),
        (7, "int"),
        (None, "NoneType"),
    ],
)
def test_anything_else_is_refused_with_the_reason(key: str, reason: str) -> None:
    with pytest.raises(InvalidKey, match=reason):
        check_key(key)


def test_the_message_does_not_repeat_a_huge_key() -> None:
    with pytest.raises(InvalidKey) as caught:
        check_key("k" * 100_000)
    assert len(str(caught.value)) < 300


def test_a_slot_of_a_key_that_utf8_can_not_write_is_refused() -> None:
    with pytest.raises(InvalidKey, match="surrogate"):
        slot_of("Cart", "\udfff")
