"""Tokens of promises: one text for each, and no other text is taken for it."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import InvalidPromiseToken
from actors.promise_token import SECRET_BYTES, PromiseAddress

SECRET = bytes(range(SECRET_BYTES))
ADDRESS = PromiseAddress("Order", "o-1", "first", 3)


@given(st.text(max_size=20), st.text(max_size=20), st.integers(0, 2**32 - 1), st.binary(min_size=32, max_size=32))
def test_a_token_carries_the_address_and_the_secret(key: str, execution_id: str, step: int, secret: bytes) -> None:
    address = PromiseAddress("Order", key, execution_id, step)
    token = address.token(secret)
    assert PromiseAddress.parse(token) == (address, secret)
    assert set(token) <= set(string.ascii_letters + string.digits + "-_.")


def test_no_change_of_any_one_character_is_taken_for_the_same_token() -> None:
    token = ADDRESS.token(SECRET)
    for place in range(len(token)):
        for other in "AB-_=!. é":
            changed = token[:place] + other + token[place + 1 :]
            if changed == token:
                continue
            try:
                parsed = PromiseAddress.parse(changed)
            except InvalidPromiseToken:
                continue
            assert parsed != (ADDRESS, SECRET)


@pytest.mark.parametrize("more", ["=", " ", "\n", "A", ".", "!"])
def test_what_is_added_to_a_token_makes_it_another(more: str) -> None:
    token = ADDRESS.token(SECRET)
    for changed in (token + more, more + token, token.replace(".", "." + more)):
        try:
            parsed = PromiseAddress.parse(changed)
        except InvalidPromiseToken:
            continue
        assert parsed != (ADDRESS, SECRET)
