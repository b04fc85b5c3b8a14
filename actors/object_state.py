"""What one object has on disk and on its way there: durable rows, under the write sets handed over since."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Protocol

from actors.address import ObjectId
from actors.outbox import number_messages
from actors.write_buffer import DirectoryRow, Layer, Place, WriteBuffer
from drivers.sqlite_store import prefix_end
from drivers.store import Counters, Store
from drivers.tables import (
    CLEAR,
    DELAYED,
    DIRECTORY,
    EXECUTIONS,
    KV,
    OBJECTS,
    OUTBOX,
    TABLES,
    TIMERS,
    VERSIONS,
    Key,
    Op,
    Values,
)
from drivers.write_set import FieldEquals, InboxEntry, Lineage, WriteSet
from timers.message_rows import OutboxRow

if TYPE_CHECKING:
    from actors.message_numbers import MessageNumbers
    from actors.message_turns import Applied

__all__ = ["ObjectState", "StatePort"]

#: Durable values kept beside an active object: saves the read in read-modify-write turns, bounded in count and size.
_CACHED_KEYS = 128
_CACHED_VALUE_BYTES = 4_096


class StatePort(Protocol):
    """What an object's state needs of its partition."""

    @property
    def store(self) -> Store: ...

    @property
    def counters(self) -> Counters: ...

    @property
    def numbers(self) -> MessageNumbers: ...

    @property
    def max_outbox_messages(self) -> int: ...

    def submit(self, write_set: WriteSet) -> None: ...

    def timer_armed(self, due_ms: int) -> None: ...

    def executions_changed(self, object_id: ObjectId) -> None:
        """Executions of durable functions have changed, durably."""
        ...

    def messages_left(self, rows: Sequence[OutboxRow]) -> None:
        """These messages are durable and may leave."""
        ...


class ObjectState:
    """Reads see what is durable and what was handed over, in that the last wins. `on_lost` is called once when a
    write set of the current lineage was not applied: the state is then back at what is durable."""

    def __init__(
        self, port: StatePort, object_id: ObjectId, on_lost: Callable[[BaseException], None], version: int = 1
    ) -> None:
        """`version` is that of the state which a new object will have."""
        self._port = port
        self._version = version
        self._id = object_id
        self._on_lost = on_lost
        self._oid: int | None = None
        self._oid_known = False
        #: a number that is given to the object with its first write
        self._reserved_oid: int | None = None
        #: key -> (value or None when deleted, the write set that says so)
        self._overlay: dict[str, tuple[bytes | None, WriteSet]] = {}
        self._row_overlay: dict[Place, tuple[Values | None, WriteSet]] = {}
        self._clearing: WriteSet | None = None
        self._cache: dict[str, bytes | None] = {}
        self._directory: dict[str, DirectoryRow] | None = None
        #: messages sent and not delivered, once somebody has asked
        self._messages: int | None = None
        self.lineage = Lineage(str(object_id))
        self._position = 0
        #: the youngest write set handed over; replies wait for it
        self.last: WriteSet | None = None

    # --- reads ----------------------------------------------------------------------------------

    @property
    def oid(self) -> int | None:
        """The object's number in this partition, or None when it has never written."""
        if not self._oid_known:
            self._oid = self._port.store.find_object(self._id.type_name, self._id.key)
            self._oid_known = True
        return self._oid

    def reserve_oid(self) -> int:
        """The object's number, or the one that it will have once it has written something."""
        if self.oid is not None:
            return self.oid
        if self._reserved_oid is None:
            self._reserved_oid = self._port.counters.take_id()
        return self._reserved_oid

    @property
    def settled(self) -> bool:
        """Whether everything handed over is durable."""
        return self.last is None or self.last.done

    def read(self, key: str) -> bytes | None:
        """The encoded value of `key`, or None."""
        pending = self._overlay.get(key)
        if pending is not None:
            return pending[0]
        if self._clearing is not None:
            return None
        cache = self._cache
        if key in cache:
            return cache[key]
        oid = self.oid
        if oid is None:
            return None
        row = self._port.store.get(KV, (oid, key))
        value: bytes | None = None if row is None else row[0]
        self._remember(key, value)
        return value

    def _remember(self, key: str, value: bytes | None) -> None:
        if value is not None and len(value) > _CACHED_VALUE_BYTES:
            self._cache.pop(key, None)
            return
        if len(self._cache) >= _CACHED_KEYS:
            self._cache.clear()
        self._cache[key] = value

    def scan(
        self,
        buffer: WriteBuffer,
        *,
        start: str | None,
        start_after: str | None,
        end: str | None,
        prefix: str | None,
        reverse: bool,
        limit: int | None,
        most: int,
    ) -> list[tuple[str, bytes]]:
        """Keys and encoded values in range as a turn with `buffer` sees them; at most `most` + 1 without a limit."""
        low, high = start, end
        if prefix:
            low = prefix if low is None else max(low, prefix)
            above = prefix_end(prefix)
            high = high if above is None else above if high is None else min(high, above)
        if start_after is not None and low is not None and low > start_after:
            start_after = None
        changes = self._changes(buffer)
        inside = {
            key: value
            for key, value in changes.items()
            if (low is None or key >= low)
            and (start_after is None or key > start_after)
            and (high is None or key < high)
        }
        rows: dict[str, bytes] = {}
        hidden = buffer.merged().cleared or self._clearing is not None
        if not hidden and self.oid is not None and not (low is not None and high is not None and low >= high):
            # every change may hide one durable row, so that many more are fetched
            fetch = (most + 1 if limit is None else limit) + len(inside)
            rows = {
                key: value
                for _oid, key, value in self._port.store.scan(
                    KV,
                    (self.oid,),
                    start=None if low is None or start_after is not None else (low,),
                    start_after=None if start_after is None else (start_after,),
                    end=None if high is None else (high,),
                    reverse=reverse,
                    limit=fetch,
                )
            }
        merged = {**rows, **inside}
        found = [(key, value) for key in sorted(merged, reverse=reverse) if (value := merged[key]) is not None]
        return found if limit is None else found[:limit]

    def _changes(self, buffer: WriteBuffer) -> dict[str, bytes | None]:
        merged = buffer.merged()
        changes: dict[str, bytes | None] = {}
        if not merged.cleared:
            changes.update((key, value) for key, (value, _) in self._overlay.items())
        changes.update(merged.kv)
        return changes

    def directory(self) -> dict[str, DirectoryRow]:
        """The object's timers by name, as handed over. Read from disk at first use, kept up to date from then on."""
        if self._directory is None:
            oid = self.oid
            rows = [] if oid is None else self._port.store.scan(DIRECTORY, (oid,))
            self._directory = {row[1]: DirectoryRow(*row) for row in rows}
        return self._directory

    def read_row(self, place: Place) -> Values | None:
        """The row of one of the runtime's own tables, or None."""
        pending = self._row_overlay.get(place)
        return pending[0] if pending is not None else self._port.store.get(*place)

    def scan_rows(
        self, buffer: WriteBuffer, table: str, prefix: Key, *, after: Key | None, limit: int
    ) -> list[tuple[Key, Values]]:
        """(key, values) of at most `limit` rows whose key begins with `prefix` and comes after `prefix + after`, as a
        turn with `buffer` sees them, in key order."""
        first = prefix if after is None else prefix + after
        changes: dict[Key, Values | None] = {}
        for (name, key), values in (
            *((place, entry[0]) for place, entry in self._row_overlay.items()),
            *buffer.merged().rows.items(),
        ):
            if name == table and key[: len(prefix)] == prefix and (after is None or key[: len(first)] > first):
                changes[key] = values
        size = len(TABLES[table].key)
        # every change may hide one durable row, so that many more are fetched
        stored = self._port.store.scan(table, prefix, start_after=after, limit=limit + len(changes))
        merged = {**{columns[:size]: columns[size:] for columns in stored}, **changes}
        found = [(key, values) for key in sorted(merged) if (values := merged[key]) is not None]
        return found[:limit]

    def messages(self) -> int:
        """How many messages the object has sent that are not delivered; it may stop counting at the limit."""
        if self._messages is None:
            most, own = self._port.max_outbox_messages, (self._id.type_name, self._id.key)
            tables = (self._port.store.scan(table, (self._id.slot,), limit=most) for table in (OUTBOX, DELAYED))
            self._messages = sum(row[2:4] == own for row in chain.from_iterable(tables))
        return self._messages

    def message_ended(self) -> None:
        """One of them was delivered, or has become a dead letter."""
        if self._messages is not None:
            self._messages = max(0, self._messages - 1)

    # --- handing over ---------------------------------------------------------------------------

    def hand_over(
        self,
        layer: Layer,
        *,
        extra: list[Op] | None = None,
        guards: list[FieldEquals] | None = None,
        inbox: InboxEntry | None = None,
        applied: Applied | None = None,
    ) -> WriteSet:
        """Queue the layer's changes as one write set; from now on every turn of the object sees them.

        `applied`: the turn was run for a message, whose number is recorded with it.
        """
        self._position += 1
        ops: list[Op] = []
        write_set = WriteSet(ops, guards=guards, lineage=self.lineage, position=self._position, inbox=inbox)
        # read before anything is handed over: what is durable afterwards would hide what is on its way
        directory = self.directory() if layer.timers else {}
        if layer.dirty and (self.oid is not None or _keeps_something(layer)):
            oid = self._ensure_oid(ops)
            if layer.cleared:
                ops.append((KV, (oid,), CLEAR))
                self._overlay.clear()
                self._cache.clear()
                self._clearing = write_set
            for key, value in layer.kv.items():
                ops.append((KV, (oid, key), None if value is None else (value,)))
                self._overlay[key] = (value, write_set)
            earliest = self._timer_ops(layer, directory, oid, ops)
            for place, values in layer.rows.items():
                table, row_key = place
                ops.append((table, row_key, values))
                self._row_overlay[place] = (values, write_set)
                if table == TIMERS and values is not None:
                    earliest = row_key[1] if earliest is None else min(earliest, row_key[1])
        else:
            earliest = None
        if extra:
            ops.extend(extra)
        keys, places = list(layer.kv), list(layer.rows)
        if layer.messages:
            earliest = _earlier(earliest, self._send(layer, ops, write_set))
        if applied is not None:
            place, values = (applied.row.table, applied.row.key()), applied.row.values()
            self._row_overlay[place] = (values, write_set)
            places.append(place)
            ops += [(*place, values), *applied.timer]
            write_set.guards = [*(guards or ()), *applied.guards]
            for _table, timer_key, _values in applied.timer:
                earliest = _earlier(earliest, timer_key[1])
        write_set.waiters.append(lambda error: self._ended(write_set, keys, places, earliest, error))
        self.last = write_set
        self._port.submit(write_set)
        return write_set

    def _send(self, layer: Layer, ops: list[Op], write_set: WriteSet) -> int | None:
        """Number the layer's messages: this is the order of commits. When the earliest delayed one is due, or None."""
        message_ops, leaving, due_ms = number_messages(self._id, layer.messages, self._port.numbers)
        ops += message_ops
        if self._messages is not None:
            self._messages += len(layer.messages)
        if leaving:
            write_set.waiters.append(lambda error: None if error else self._port.messages_left(leaving))
        return due_ms

    def hand_over_deletion(self, ops: list[Op], inbox: InboxEntry) -> WriteSet:
        """Queue the deletion of everything: from now on it is as if the object had never written."""
        self._position += 1
        write_set = WriteSet(ops, lineage=self.lineage, position=self._position, inbox=inbox)
        self._overlay.clear()
        self._row_overlay.clear()
        self._cache.clear()
        self._clearing = None
        self._directory = {}
        self._oid, self._oid_known, self._reserved_oid = None, True, None
        write_set.waiters.append(lambda error: self._ended(write_set, [], [], None, error))
        self.last = write_set
        self._port.submit(write_set)
        return write_set

    def _ensure_oid(self, ops: list[Op]) -> int:
        oid = self.oid
        if oid is None:
            oid = self._oid = self.reserve_oid()
            self._reserved_oid = None
            ops.append((OBJECTS, (oid,), (self._id.slot, self._id.type_name, self._id.key)))
            if self._version > 1:  # no row means version 1, so that classes which have no other pay nothing
                ops.append((VERSIONS, (oid,), (self._version,)))
        return oid

    @staticmethod
    def _timer_ops(layer: Layer, directory: dict[str, DirectoryRow], oid: int, ops: list[Op]) -> int | None:
        earliest: int | None = None
        for name, row in layer.timers.items():
            old = directory.get(name)
            if row is None:
                if old is not None:
                    ops.extend(old.delete_ops())
                    del directory[name]
                continue
            row = row.with_oid(oid)
            ops.extend(row.put_ops(old))
            directory[name] = row
            earliest = row.due_ms if earliest is None else min(earliest, row.due_ms)
        return earliest

    def _ended(
        self,
        write_set: WriteSet,
        keys: list[str],
        places: list[Place],
        earliest_ms: int | None,
        error: BaseException | None,
    ) -> None:
        if write_set.lineage is not self.lineage:
            return  # of an earlier life: that reset has dealt with it
        if error is not None:
            self.reset()
            self._on_lost(error)
            return
        overlay = self._overlay
        for key in keys:
            entry = overlay.get(key)
            if entry is not None and entry[1] is write_set:
                del overlay[key]
                self._remember(key, entry[0])
        for place in places:
            pending = self._row_overlay.get(place)
            if pending is not None and pending[1] is write_set:
                del self._row_overlay[place]
        if self._clearing is write_set:
            self._clearing = None
        if any(table == EXECUTIONS for table, _key in places):
            self._port.executions_changed(self._id)
        if earliest_ms is not None:
            self._port.timer_armed(earliest_ms)

    def reset(self) -> None:
        """Back to what is durable: nothing handed over in the old lineage counts any more."""
        self.lineage = Lineage(str(self._id))
        self._position = 0
        self._overlay.clear()
        self._row_overlay.clear()
        self._cache.clear()
        self._clearing = None
        self._directory = None
        self._oid, self._oid_known = None, False
        self._messages = None
        self.last = None


def _earlier(one_ms: int | None, other_ms: int | None) -> int | None:
    if one_ms is None or other_ms is None:
        return other_ms if one_ms is None else one_ms
    return min(one_ms, other_ms)


def _keeps_something(layer: Layer) -> bool:
    """Whether an object that does not exist would exist after these changes."""
    changes = (layer.kv, layer.timers, layer.rows)
    return any(value is not None for changed in changes for value in changed.values())
