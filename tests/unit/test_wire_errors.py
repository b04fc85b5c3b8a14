"""Exceptions across the link: what arrives as itself, what arrives in words, and how much of it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from actors import errors
from actors.codec import encode
from actors.errors import CorruptValue, MainspringError, RemoteError
from actors.wire_errors import decode_error, encode_error
from tests.support.values import Item, NeedsAttribute, OutOfStock, Point, Silent


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def over_the_link(error: BaseException) -> Any:
    return decode_error(encode_error(raised(error)))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        ValueError(),
        KeyError("a"),
        ZeroDivisionError(1, (2, {3}), Point(1)),
        OSError(2, "No such file", "a.txt"),
        FileNotFoundError(2, "No such file"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        TimeoutError("late"),
    ],
    ids=repr,
)
def test_an_exception_arrives_as_itself(error: BaseException) -> None:
    arrived = over_the_link(error)
    assert type(arrived) is type(error)
    assert arrived.args == error.args
    assert str(arrived) == str(error)


def test_an_oserror_keeps_its_number_and_its_file() -> None:
    arrived = over_the_link(OSError(2, "No such file", "a.txt"))
    assert type(arrived) is FileNotFoundError
    assert (arrived.errno, arrived.filename) == (2, "a.txt")


def test_a_constructor_of_the_application_is_not_run_again() -> None:
    arrived = over_the_link(OutOfStock("apple", left=2))
    assert type(arrived) is OutOfStock
    assert str(arrived) == "apple: 2 left"
    assert (arrived.sku, arrived.left) == ("apple", 2)
    assert over_the_link(json.JSONDecodeError("bad", "{", 1)).pos == 1


@pytest.mark.parametrize("name", sorted(set(errors.__all__) - {"RemoteError"}))
def test_every_mainspring_error_arrives_as_itself(name: str) -> None:
    cls = getattr(errors, name)
    arrived = over_the_link(cls("why"))
    assert type(arrived) is cls
    assert isinstance(arrived, MainspringError)
    assert str(arrived) == "why"


def test_what_this_process_does_not_know_arrives_in_words() -> None:
    class Local(Exception):
        pass

    arrived = over_the_link(Local("why"))
    assert type(arrived) is RemoteError
    assert arrived.type_name == f"{__name__}.{Local.__qualname__}"
    assert str(arrived) == f"{arrived.type_name}: why"
    assert "raise error" in arrived.remote_traceback


def test_no_module_is_imported_for_an_exception() -> None:
    data = encode([1, "antigravity", "Error", "why", [], {}, [], ""])
    assert type(decode_error(data)) is RemoteError
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), GeneratorExit(), StopIteration(1)], ids=repr)
def test_what_would_end_the_receiver_arrives_as_a_remote_error(error: BaseException) -> None:
    arrived = over_the_link(error)
    assert type(arrived) is RemoteError
    assert arrived.type_name == type(error).__name__


@pytest.mark.parametrize("qualname", ["dict", "object", "print", "type"])
def test_a_name_that_is_no_exception_is_not_built(qualname: str) -> None:
    arrived = decode_error(encode([1, "builtins", qualname, "why", [], {}, [], ""]))
    assert type(arrived) is RemoteError
    assert str(arrived) == f"{qualname}: why"


def test_an_exception_of_a_c_extension_arrives_in_words() -> None:
    with pytest.raises(ValidationError) as caught:
        Item(sku=None)  # type: ignore[arg-type]
    arrived = over_the_link(caught.value)
    assert type(arrived) is RemoteError
    assert "sku" in str(arrived)


def test_arguments_that_can_not_be_carried_arrive_as_text() -> None:
    arrived = over_the_link(ValueError("a", object, "\ud800"))
    assert arrived.args == ("a", "<class 'object'>", "\\ud800")


def test_attributes_that_can_not_be_carried_are_left_out() -> None:
    error = ValueError("a")
    error.good, error.bad = {1: 2}, object()  # type: ignore[attr-defined]
    arrived = over_the_link(error)
    assert arrived.good == {1: 2}
    assert not hasattr(arrived, "bad")


def test_an_exception_whose_text_needs_what_was_left_out_arrives_in_words() -> None:
    assert type(over_the_link(NeedsAttribute(5))) is NeedsAttribute
    arrived = over_the_link(NeedsAttribute([object]))
    assert type(arrived) is RemoteError
    assert str(arrived).endswith("NeedsAttribute: value [<class 'object'>]")


def test_an_exception_without_text_is_still_carried() -> None:
    arrived = over_the_link(Silent())
    assert type(arrived) is RemoteError
    assert "its str() raised RuntimeError" in str(arrived)


def test_the_remote_traceback_is_attached_as_attribute_and_note() -> None:
    arrived = over_the_link(ValueError("no"))
    assert "raise error" in arrived.remote_traceback
    assert arrived.remote_traceback.endswith("ValueError: no\n")
    if sys.version_info >= (3, 11):
        assert arrived.remote_traceback in arrived.__notes__[-1]


def test_an_exception_that_was_never_raised_has_no_traceback() -> None:
    arrived = decode_error(encode_error(ValueError("no")))
    assert arrived.remote_traceback == ""  # type: ignore[attr-defined]
    assert not hasattr(arrived, "__notes__")


def test_over_two_links_both_tracebacks_arrive_once() -> None:
    first = over_the_link(ValueError("no"))
    second = over_the_link(first)
    assert type(second) is ValueError
    assert second.remote_traceback.count("ValueError: no") == 2
    assert first.remote_traceback.strip() in second.remote_traceback
    assert len(getattr(second, "__notes__", [None])) == 1
    remote = RemoteError("text", "shop.Error", "Traceback of shop")
    again = over_the_link(remote)
    assert (type(again), str(again), again.type_name) == (RemoteError, "text", "shop.Error")
    assert "Traceback of shop" in again.remote_traceback


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have notes since 3.11")
def test_notes_of_the_application_travel() -> None:
    error = ValueError("no")
    error.add_note("while packing")
    assert over_the_link(error).__notes__[0] == "while packing"


def test_a_huge_exception_stays_small() -> None:
    error = ValueError("x" * 10**6, *([b"y" * 30_000] * 100))
    for number in range(200):
        setattr(error, f"a{number}", "z" * 10_000)
    data = encode_error(raised(error))
    assert len(data) < 500_000
    arrived: Any = decode_error(data)
    assert type(arrived) is ValueError
    assert len(arrived.remote_traceback) <= 16 * 1024
    assert "characters left out" in arrived.remote_traceback


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        encode(5),
        encode([]),
        encode([2, "m", "q", "t", [], {}, [], ""]),
        encode([1, "m", "q", "t", 5, {}, 7, ""]),
    ],
    ids=repr,
)
def test_bytes_that_are_no_error_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptValue):
        decode_error(data)
