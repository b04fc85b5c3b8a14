"""Write sets: what one turn changed, as data that can be encoded, applied twice with the same result, and read back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack

from drivers.tables import CLEAR, Clear, Key, Op, Values

__all__ = ["FieldEquals", "InboxEntry", "Lineage", "WriteSet"]

logger = logging.getLogger("mainspring.commit")

Waiter = Callable[[BaseException | None], None]
_CLEAR_MARK = 0


@dataclass(frozen=True)
class FieldEquals:
    """A guard: the row exists and one of its value columns has this value."""

    table: str
    key: Key
    column: int
    value: Any

    def holds(self, values: Values | None) -> bool:
        return values is not None and bool(values[self.column] == self.value)


class Lineage:
    """One life of an object between two resets. Once a write set of it fails, no later one may be applied."""

    __slots__ = ("broken", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.broken: BaseException | None = None


class InboxEntry(NamedTuple):
    """The recorded outcome of a call: what a repeat of it is answered with. Packed as it is: an array of its fields."""

    call_id: bytes
    class_name: str
    key: str
    fingerprint: bytes
    status: int
    reply: bytes
    caller: tuple[str, str, bytes] | None = None

    @classmethod
    def unpack(cls, fields: list[Any]) -> InboxEntry:
        call_id, class_name, key, fingerprint, status, reply, caller = fields
        return cls(call_id, class_name, key, fingerprint, status, reply, tuple(caller) if caller else None)


class WriteSet:
    """Everything one turn changes, with the guards that must hold and those who wait until it is durable.

    `position` counts the write sets of one lineage. `waiters` are called once, in order, with None when it is
    durable, or with the error that says why it was not applied. `error` is set as soon as that is known, `done` when
    the waiters are told.
    """

    __slots__ = ("done", "error", "guards", "inbox", "lineage", "ops", "position", "waiters")

    def __init__(
        self,
        ops: list[Op],
        *,
        guards: list[FieldEquals] | None = None,
        lineage: Lineage | None = None,
        position: int = 0,
        inbox: InboxEntry | None = None,
    ) -> None:
        self.ops = ops
        self.guards = guards
        self.lineage = lineage
        self.position = position
        self.inbox = inbox
        self.waiters: list[Waiter] = []
        self.done = False
        self.error: BaseException | None = None

    def finish(self, error: BaseException | None) -> None:
        """Tell everyone who waits; only the committer calls this."""
        self.done = True
        self.error = error
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            try:
                waiter(error)
            except Exception:  # its mistake must not keep the others waiting for ever
                logger.exception("what waited for a commit failed", extra={"event": "waiter_failed"})

    def when_done(self, waiter: Waiter) -> None:
        """Call `waiter` when this is durable or has failed; at once when it already has."""
        if self.done:
            waiter(self.error)
        else:
            self.waiters.append(waiter)

    def to_bytes(self) -> bytes:
        """The write set as data (guards, operations and the recorded outcome; not who waits)."""
        ops = [[t, list(k), _CLEAR_MARK if isinstance(v, Clear) else v] for t, k, v in self.ops]
        guards = [[g.table, list(g.key), g.column, g.value] for g in self.guards or ()]
        name = self.lineage.name if self.lineage else ""
        packed: bytes = msgpack.packb([name, self.position, guards, ops, self.inbox])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> WriteSet:
        """Read back what `to_bytes` wrote."""
        name, position, guards, ops, inbox = msgpack.unpackb(data)
        return cls(
            [(t, tuple(k), CLEAR if v == _CLEAR_MARK else None if v is None else tuple(v)) for t, k, v in ops],
            guards=[FieldEquals(t, tuple(k), c, v) for t, k, c, v in guards] or None,
            lineage=Lineage(name) if name else None,
            position=position,
            inbox=InboxEntry.unpack(inbox) if inbox else None,
        )
