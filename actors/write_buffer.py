"""What a turn has changed so far, in layers, so that a transaction can be rolled back on its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from drivers.tables import DIRECTORY, TIMERS, Key, Op
from timers.rows import USER_LANE

__all__ = ["DirectoryRow", "Layer", "WriteBuffer", "timer_ref"]


@dataclass(frozen=True)
class DirectoryRow:
    """One timer of an object, the truth about it: `due_ms` is when it is looked at next, `first_due_ms` the
    occurrence it stands for, `attempt` and `crashes` how often that occurrence failed, `missed` how many earlier
    ones it stands for as well."""

    oid: int
    name: str
    kind: int
    due_ms: int
    generation: int
    first_due_ms: int
    attempt: int
    crashes: int
    missed: int
    spec: bytes

    def values(self) -> tuple[Any, ...]:
        return (
            self.kind,
            self.due_ms,
            self.generation,
            self.first_due_ms,
            self.attempt,
            self.crashes,
            self.missed,
            self.spec,
        )

    def timer_key(self) -> Key:
        """Key of the row in the timer table that points here."""
        return (USER_LANE, self.due_ms, self.kind, timer_ref(self.oid, self.name), self.generation)

    def put_ops(self, old: DirectoryRow | None) -> list[Op]:
        """Operations that put this row and its pointer in the place of `old`."""
        ops: list[Op] = [] if old is None or old.timer_key() == self.timer_key() else [(TIMERS, old.timer_key(), None)]
        ops.append((DIRECTORY, (self.oid, self.name), self.values()))
        ops.append((TIMERS, self.timer_key(), (self.first_due_ms, self.attempt, b"")))
        return ops

    def delete_ops(self) -> list[Op]:
        """Operations that remove this row and its pointer."""
        return [(TIMERS, self.timer_key(), None), (DIRECTORY, (self.oid, self.name), None)]

    def with_oid(self, oid: int) -> DirectoryRow:
        return self if self.oid == oid else replace(self, oid=oid)


def timer_ref(oid: int, name: str) -> bytes:
    """How the timer table refers to a timer of an object: 8 bytes of object number, then the timer's name."""
    return oid.to_bytes(8, "big") + name.encode()


class Layer:
    """Changes since the turn or the transaction began. None marks what was deleted."""

    __slots__ = ("cleared", "closed", "kv", "timers")

    def __init__(self) -> None:
        self.kv: dict[str, bytes | None] = {}
        self.timers: dict[str, DirectoryRow | None] = {}
        self.cleared = False
        self.closed = False


class WriteBuffer:
    """The layers of one turn, the innermost transaction on top, with running totals for the limits."""

    __slots__ = ("layers", "size")

    def __init__(self) -> None:
        self.layers: list[Layer] = [Layer()]
        self.size = 0

    @property
    def top(self) -> Layer:
        return self.layers[-1]

    @property
    def dirty(self) -> bool:
        if len(self.layers) == 1:
            top = self.layers[0]
            return bool(top.kv or top.timers or top.cleared)
        return any(layer.kv or layer.timers or layer.cleared for layer in self.layers)

    def operations(self) -> int:
        """How many operations the buffer stands for, at most."""
        return sum(len(layer.kv) + 2 * len(layer.timers) + layer.cleared for layer in self.layers)

    def put(self, key: str, value: bytes) -> None:
        self.layers[-1].kv[key] = value
        self.size += len(key) + len(value)

    def delete(self, key: str) -> None:
        self.layers[-1].kv[key] = None
        self.size += len(key)

    def clear(self) -> None:
        """Everything under this layer, and what it holds itself, is gone."""
        top = self.layers[-1]
        top.kv.clear()
        top.cleared = True

    def lookup(self, key: str) -> tuple[bool, bytes | None]:
        """(known here?, value or None when deleted)."""
        for layer in reversed(self.layers):
            if key in layer.kv:
                return True, layer.kv[key]
            if layer.cleared:
                return True, None
        return False, None

    def lookup_timer(self, name: str) -> tuple[bool, DirectoryRow | None]:
        for layer in reversed(self.layers):
            if name in layer.timers:
                return True, layer.timers[name]
        return False, None

    def merged(self) -> Layer:
        """All layers seen as one."""
        if len(self.layers) == 1:
            return self.layers[0]
        merged = Layer()
        for layer in self.layers:
            _merge(merged, layer)
        return merged

    def begin(self) -> Layer:
        layer = Layer()
        self.layers.append(layer)
        return layer

    def commit_top(self) -> None:
        layer = self.layers.pop()
        layer.closed = True
        _merge(self.layers[-1], layer)

    def roll_back_to(self, layer: Layer) -> None:
        """Drop `layer` and every transaction begun inside it."""
        while self.layers[-1] is not layer:
            self.layers.pop().closed = True
        self.layers.pop().closed = True


def _merge(into: Layer, layer: Layer) -> None:
    if layer.cleared:
        into.kv.clear()
        into.cleared = True
    into.kv.update(layer.kv)
    into.timers.update(layer.timers)
