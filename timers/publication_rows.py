"""Rows of publications: lines, their numbered advances, what state these are in, and which advance adds which item.

An item is published when its advance's number is at most the line's `published`: publishing any number of items is a
change of one row, and nobody ever sees half of it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar, Final, NamedTuple

import msgpack

from timers.errors import CorruptRow
from timers.registry import TimerKind, lane_of
from timers.rows import TimerRow, oid_of, owned_ref

__all__ = [
    "AdvanceRow",
    "Clearance",
    "Contents",
    "ItemRow",
    "LineRow",
    "Need",
    "StateRow",
    "advance_ref",
    "notice_timer",
    "parse_advance_ref",
    "parse_notice_ref",
]

_CONTENTS_VERSION: Final = 1
_SEQUENCE_BYTES: Final = 8


class Clearance(enum.IntEnum):
    """What has been decided about an advance. The numbers are stored."""

    #: waits for what it needs
    PENDING = 0
    #: everything that it needs was published
    CLEARED = 1
    #: the application holds it back
    HELD = 2
    #: a check of the application found something against it
    HIT = 3
    #: the application lets it pass whatever it needs
    RESOLVED = 4


_PUBLISHABLE: Final = frozenset({Clearance.CLEARED, Clearance.RESOLVED})


class Need(NamedTuple):
    """An item that an advance needs. `type_name` and `key` name the object that publishes it; "": the advance's own."""

    type_name: str
    key: str
    item: str

    @property
    def is_local(self) -> bool:
        return not self.type_name


@dataclass(frozen=True)
class Contents:
    """What an advance is, fixed when it is made. `line` and `sequence` say again whose row this must be."""

    line: str
    sequence: int
    items: tuple[str, ...]
    depends_on: tuple[Need, ...]
    external: tuple[Need, ...]

    def needed(self) -> list[Need]:
        """What must be published before: sorted, each once, the object's own items first.

        An advance meets its own dependencies with what it adds itself; an external base must be there without it.
        """
        own = frozenset(self.items)
        needs = {need for need in self.depends_on if not (need.is_local and need.item in own)}
        return sorted(needs | set(self.external))

    def to_bytes(self) -> bytes:
        needs = [[list(need) for need in group] for group in (self.depends_on, self.external)]
        packed: bytes = msgpack.packb([_CONTENTS_VERSION, self.line, self.sequence, list(self.items), *needs])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> Contents:
        """Raises `CorruptRow`."""
        try:
            version, line, sequence, items, depends_on, external = msgpack.unpackb(data)
            contents = cls(line, sequence, tuple(items), _needs(depends_on), _needs(external))
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise CorruptRow(f"the contents of an advance can't be read ({error}); it is not published") from error
        texts = (line, *items, *(part for need in (*contents.depends_on, *contents.external) for part in need))
        if version != _CONTENTS_VERSION or type(sequence) is not int or any(type(text) is not str for text in texts):
            raise CorruptRow("the contents of an advance are not of a form that is known here; it is not published")
        return contents


def _needs(packed: Any) -> tuple[Need, ...]:
    return tuple(Need(*need) for need in packed)


@dataclass(frozen=True)
class LineRow:
    """One publication line of an object. Its advances are numbered from 1 without gaps.

    `published`: all advances up to this number are. `announced`: `on_published` has run for all up to this one.
    `hooked`: 1 when the object's class has `on_published`.
    """

    table: ClassVar[str] = "publication_lines"

    oid: int
    line: str
    next_sequence: int = 1
    published: int = 0
    announced: int = 0
    hooked: int = 0

    def key(self) -> tuple[int, str]:
        return (self.oid, self.line)

    def values(self) -> tuple[int, int, int, int]:
        return (self.next_sequence, self.published, self.announced, self.hooked)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> LineRow:
        return cls(*key, *values)


@dataclass(frozen=True)
class AdvanceRow:
    """One advance as it was made; never changed."""

    table: ClassVar[str] = "publication_advances"

    oid: int
    line: str
    sequence: int
    contents: bytes
    created_ms: int

    def key(self) -> tuple[int, str, int]:
        return (self.oid, self.line, self.sequence)

    def values(self) -> tuple[bytes, int]:
        return (self.contents, self.created_ms)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> AdvanceRow:
        return cls(*key, *values)


@dataclass(frozen=True)
class StateRow:
    """What has been decided about an advance. Only the timer of its `generation` counts: one of an older generation
    ends without a word."""

    table: ClassVar[str] = "publication_states"

    oid: int
    line: str
    sequence: int
    clearance: int = Clearance.PENDING
    generation: int = 1

    @property
    def publishable(self) -> bool:
        return self.clearance in _PUBLISHABLE

    def key(self) -> tuple[int, str, int]:
        return (self.oid, self.line, self.sequence)

    def values(self) -> tuple[int, int]:
        return (int(self.clearance), self.generation)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> StateRow:
        return cls(*key, *values)


@dataclass(frozen=True)
class ItemRow:
    """Which advance of the object adds an item."""

    table: ClassVar[str] = "publication_items"

    oid: int
    item: str
    line: str
    sequence: int

    def key(self) -> tuple[int, str]:
        return (self.oid, self.item)

    def values(self) -> tuple[str, int]:
        return (self.line, self.sequence)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> ItemRow:
        return cls(*key, *values)


# --- how timers refer to them -------------------------------------------------------------------------


def advance_ref(oid: int, line: str, sequence: int) -> bytes:
    """How its recheck timer names an advance: the key of its row."""
    return owned_ref(oid, line.encode() + b"\0" + sequence.to_bytes(_SEQUENCE_BYTES, "big"))


def parse_advance_ref(ref: bytes) -> tuple[int, str, int]:
    """(object number, line, sequence). Raises `CorruptRow`."""
    owner = oid_of(ref)
    if owner is not None:
        oid, name = owner
        line, separator = name[: -_SEQUENCE_BYTES - 1], name[-_SEQUENCE_BYTES - 1 : -_SEQUENCE_BYTES]
        if separator == b"\0" and b"\0" not in line:
            return oid, _text(line, ref), int.from_bytes(name[-_SEQUENCE_BYTES:], "big")
    raise CorruptRow(f"a timer refers to {ref!r}, which is the key of no advance")


def parse_notice_ref(ref: bytes) -> tuple[int, str]:
    """(object number, line). Raises `CorruptRow`."""
    owner = oid_of(ref)
    if owner is None or b"\0" in owner[1]:
        raise CorruptRow(f"a timer refers to {ref!r}, which is the key of no publication line")
    return owner[0], _text(owner[1], ref)


def notice_timer(line: LineRow, due_ms: int) -> TimerRow:
    """Tells of a publication, once it is durable. Its generation keeps two notices of one millisecond apart."""
    kind = TimerKind.PUBLICATION_NOTICE
    return TimerRow(lane_of(kind), due_ms, kind, owned_ref(line.oid, line.line.encode()), line.published, due_ms)


def _text(data: bytes, ref: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise CorruptRow(f"a timer refers to {ref!r}, which names no publication line")
    return text
