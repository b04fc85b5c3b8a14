"""Types at the top level of a module, as the codec needs them, for the tests of values and errors; strict equality."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, PrivateAttr

T = TypeVar("T")


def exactly(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way down (1 == 1.0 == True otherwise)."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(exactly, left, right))
    if isinstance(left, dict):
        return exactly(list(left.items()), list(right.items()))
    return bool(left == right)


class Colour(enum.Enum):
    RED = 1
    CRIMSON = 1  # an alias
    BLUE = "blue"


class Size(str, enum.Enum):
    SMALL = "s"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = enum.auto()
    WRITE = enum.auto()


@dataclasses.dataclass(frozen=True)
class Point:
    x: Any
    y: Any = 0


@dataclasses.dataclass
class Grown:
    """Stands for a class whose fields have changed since a value was stored."""

    kept: int
    with_default: int = 7
    with_factory: list[int] = dataclasses.field(default_factory=lambda: [1])


@dataclasses.dataclass
class Shrunk:
    kept: int


@dataclasses.dataclass
class Stricter:
    kept: int
    needed: int


@dataclasses.dataclass(slots=True)
class Slotted:
    a: int
    derived: int = dataclasses.field(init=False, default=0)

    def __post_init__(self) -> None:
        self.derived += self.a


class Outer:
    @dataclasses.dataclass
    class Inner:
        value: int


class Item(BaseModel):
    sku: str
    counts: tuple[int, ...] = ()
    _seen: int = PrivateAttr(default=0)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str = "n"


class Box(BaseModel, Generic[T]):
    content: T


class Text(str):
    pass


@dataclasses.dataclass
class Listing(list[int]):
    name: str = ""


class OutOfStock(Exception):
    """An exception whose constructor does not take what ends up in `args`."""

    def __init__(self, sku: str, *, left: int) -> None:
        super().__init__(f"{sku}: {left} left")
        self.sku = sku
        self.left = left


class NeedsAttribute(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def __str__(self) -> str:
        return f"value {self.value}"


class Silent(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def make_local() -> Any:
    """A value of a class that no module has."""

    @dataclasses.dataclass
    class Local:
        a: int = 1

    return Local()
