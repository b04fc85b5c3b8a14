"""What a turn has changed so far, in layers, so that a transaction can be rolled back on its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from drivers.tables import DIRECTORY, TIMERS, Key, Op, Values
from timers.rows import USER_LANE

if TYPE_CHECKING:
    from actors.outbox import Outgoing

__all__ = ["DirectoryRow", "Layer", "Place", "WriteBuffer", "timer_ref"]

#: A message is a row, its number and, when it is delayed, its timer.
_OPS_PER_MESSAGE = 3

#: A row of one of the runtime's own tables: (table, key).
Place = tuple[str, Key]


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
    """Changes since the turn or the transaction began. None marks what was deleted. `size` is about their bytes.

    `rows` are rows of the runtime's own tables that belong to the object: by table and whole key. `messages` are those
    that were sent, in their order.
    """

    __slots__ = ("cleared", "closed", "kv", "messages", "rows", "size", "timers")

    def __init__(self) -> None:
        self.kv: dict[str, bytes | None] = {}
        self.timers: dict[str, DirectoryRow | None] = {}
        self.rows: dict[Place, Values | None] = {}
        self.messages: list[Outgoing] = []
        self.cleared = False
        self.closed = False
        self.size = 0

    def put(self, key: str, value: bytes | None) -> None:
        kv = self.kv
        if key in kv:
            self.size -= len(key) + len(kv[key] or b"")
        kv[key] = value
        self.size += len(key) + len(value or b"")

    def put_timer(self, name: str, row: DirectoryRow | None) -> None:
        old = self.timers.get(name)
        self.timers[name] = row
        self.size += (0 if row is None else len(row.spec)) - (0 if old is None else len(old.spec))

    def put_row(self, place: Place, values: Values | None) -> None:
        self.size += _row_size(values) - _row_size(self.rows.get(place))
        self.rows[place] = values

    def send(self, message: Outgoing) -> None:
        self.messages.append(message)
        self.size += len(message.args)

    @property
    def dirty(self) -> bool:
        return bool(self.kv or self.timers or self.rows or self.messages or self.cleared)

    def clear(self) -> None:
        """Every key is gone: those under this layer, and those that it holds itself."""
        self.size -= sum(len(key) + len(value or b"") for key, value in self.kv.items())
        self.kv.clear()
        self.cleared = True

    def merge(self, layer: Layer) -> None:
        """Take over the changes of a layer above this one."""
        if layer.cleared:
            self.clear()
        for key, value in layer.kv.items():
            self.put(key, value)
        for name, row in layer.timers.items():
            self.put_timer(name, row)
        for place, values in layer.rows.items():
            self.put_row(place, values)
        for message in layer.messages:
            self.send(message)


def _row_size(values: Values | None) -> int:
    return sum(len(value) if isinstance(value, str | bytes) else 8 for value in values or ())


class WriteBuffer:
    """The layers of one turn, the innermost transaction on top."""

    __slots__ = ("layers",)

    def __init__(self) -> None:
        self.layers: list[Layer] = [Layer()]

    @property
    def top(self) -> Layer:
        return self.layers[-1]

    @property
    def dirty(self) -> bool:
        layers = self.layers
        return layers[0].dirty if len(layers) == 1 else any(layer.dirty for layer in layers)

    @property
    def size(self) -> int:
        """About how many bytes the changes take."""
        layers = self.layers
        return layers[0].size if len(layers) == 1 else sum(layer.size for layer in layers)

    def operations(self) -> int:
        """How many operations the buffer stands for, at most."""
        return sum(
            len(layer.kv)
            + 2 * len(layer.timers)
            + len(layer.rows)
            + _OPS_PER_MESSAGE * len(layer.messages)
            + layer.cleared
            for layer in self.layers
        )

    def put(self, key: str, value: bytes) -> None:
        self.layers[-1].put(key, value)

    def delete(self, key: str) -> None:
        self.layers[-1].put(key, None)

    def clear(self) -> None:
        """Every key is gone."""
        self.layers[-1].clear()

    def put_timer(self, name: str, row: DirectoryRow | None) -> None:
        self.layers[-1].put_timer(name, row)

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

    def lookup_row(self, place: Place) -> tuple[bool, Values | None]:
        for layer in reversed(self.layers):
            if place in layer.rows:
                return True, layer.rows[place]
        return False, None

    def merged(self) -> Layer:
        """All layers seen as one."""
        if len(self.layers) == 1:
            return self.layers[0]
        merged = Layer()
        for layer in self.layers:
            merged.merge(layer)
        return merged

    def begin(self) -> Layer:
        layer = Layer()
        self.layers.append(layer)
        return layer

    def commit_top(self) -> None:
        layer = self.layers.pop()
        layer.closed = True
        self.layers[-1].merge(layer)

    def roll_back_to(self, layer: Layer) -> None:
        """Drop `layer` and every transaction begun inside it."""
        while self.layers[-1] is not layer:
            self.layers.pop().closed = True
        self.layers.pop().closed = True

    def reset(self) -> None:
        """Nothing is in it any more."""
        self.layers[:] = [Layer()]
