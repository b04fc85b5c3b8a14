"""Sets of whole numbers as flat lists of inclusive ranges: [1, 5, 8, 8] is 1 to 5, and 8."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

__all__ = ["all_but", "covers", "merged", "numbers"]


def merged(flat: Sequence[int]) -> list[int]:
    """The same numbers in ascending ranges that neither touch nor overlap."""
    if len(flat) <= 2:
        return list(flat)
    pairs = sorted(zip(flat[::2], flat[1::2], strict=True))
    result = list(pairs[0])
    for low, high in pairs[1:]:
        if low <= result[-1] + 1:
            if high > result[-1]:
                result[-1] = high
        else:
            result += (low, high)
    return result


def all_but(excluded: Iterable[int], last: int) -> list[int]:
    """The numbers 1 to `last` without the excluded ones, which may come in any order and more than once."""
    result: list[int] = []
    low = 1
    for number in sorted(excluded):
        if number > last:
            break
        if low < number:
            result += (low, number - 1)
        low = max(low, number + 1)
    if low <= last:
        result += (low, last)
    return result


def covers(flat: Sequence[int], number: int) -> bool:
    """Whether the number is in one of the ranges."""
    return any(low <= number <= high for low, high in zip(flat[::2], flat[1::2], strict=True))


def numbers(flat: Sequence[int]) -> Iterator[int]:
    """Each number of the ranges."""
    for low, high in zip(flat[::2], flat[1::2], strict=True):
        yield from range(low, high + 1)
