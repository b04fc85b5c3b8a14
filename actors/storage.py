"""An object's durable key-value state: synchronous, ordered by UTF-8 bytes, part of the running turn."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from actors import early_commit
from actors.codec import decode, encode
from actors.errors import InvalidKey, InvalidOption, Overloaded, TransactionClosed, ValueTooLarge
from actors.write_buffer import Layer
from timers.registry import TimerKind
from timers.schedule import parse_when_ms

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.turn import Turn

__all__ = ["Storage", "Transaction"]

_MISSING: Any = object()
#: More than any object can have; SQLite refuses numbers of more than 64 bits.
_MOST_ROWS = 2**60


class Transaction:
    """A part of a turn that can be rolled back on its own. Made by `storage.transaction()`."""

    __slots__ = ("_layer", "_turn")

    def __init__(self, turn: Turn, layer: Layer) -> None:
        self._turn = turn
        self._layer = layer

    @property
    def closed(self) -> bool:
        """Whether it was committed or rolled back."""
        return self._layer.closed

    def rollback(self) -> None:
        """Undo what was written since it began. Again does nothing after a roll-back.

        Raises `TransactionClosed` when it has been committed, or when a transaction inside it is still open.
        """
        if self._layer.closed:
            if self._layer.dirty:
                raise TransactionClosed("rollback() after the transaction was committed: call it inside the with block")
            return
        buffer = self._turn.buffer
        if buffer.top is not self._layer:
            raise TransactionClosed("rollback() while a transaction inside this one is still open: end that one first")
        buffer.roll_back_to(self._layer)
        _reset(self._layer)


def _check_bound(name: str, bound: Any) -> None:
    if not isinstance(bound, str):
        raise InvalidOption(f"list({name}=...) takes a text, not {type(bound).__name__}")
    try:
        bound.encode()
    except UnicodeEncodeError as error:
        raise InvalidOption(f"list({name}={bound!r}) is not valid text: {error.reason}") from error


def _reset(layer: Layer) -> None:
    layer.kv.clear()
    layer.timers.clear()
    layer.rows.clear()
    layer.cleared = False
    layer.size = 0
    layer.closed = True


class Storage:
    """The key-value state of one object.

    Keys are texts of 1 to 2,048 UTF-8 bytes; values are what `actors.codec` can carry, up to 2 MiB encoded. Reads
    give fresh values. Everything raises `TurnOver` outside the object's running turn and `WrongThread` off the
    partition's thread; writes raise `ReadOnlyTurn` in `@shared` methods.
    """

    __slots__ = ("_host", "_settings")

    def __init__(self, host: ObjectHost) -> None:
        self._host = host
        self._settings = host.partition.settings

    # --- single values --------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, or `default`. Raises `InvalidKey`."""
        turn = self._host.reading_turn()
        self._check_key(key)
        data = self._lookup(turn, key)
        return default if data is None else decode(data)

    def put(self, key: str, value: Any) -> None:
        """Set `key`. Raises `InvalidKey`, `UnstorableValue`, `ValueTooLarge`, `WriteSetTooLarge`."""
        turn = self._host.writing_turn()
        self._check_key(key)
        turn.buffer.put(key, self._encode(key, value))
        turn.wrote()

    def delete(self, key: str) -> bool:
        """Remove `key`; whether it was there."""
        turn = self._host.writing_turn()
        self._check_key(key)
        if self._lookup(turn, key) is None:
            return False
        turn.buffer.delete(key)
        turn.wrote()
        return True

    # --- many values ----------------------------------------------------------------------------

    def get_many(self, keys: Iterable[str]) -> dict[str, Any]:
        """The values of those keys that exist, in key order."""
        turn = self._host.reading_turn()
        wanted = sorted(set(self._checked_keys(keys)))  # code points sort like UTF-8 bytes
        found = ((key, self._lookup(turn, key)) for key in wanted)
        return {key: decode(data) for key, data in found if data is not None}

    def put_many(self, values: Mapping[str, Any]) -> None:
        """Set several keys: all of them, or none when one can't be stored."""
        turn = self._host.writing_turn()
        if not isinstance(values, Mapping):
            raise InvalidOption(f"put_many() takes a mapping of keys to values, not {type(values).__name__}")
        encoded = []
        for key, value in values.items():
            self._check_key(key)
            encoded.append((key, self._encode(key, value)))
        for key, data in encoded:
            turn.buffer.put(key, data)
        turn.wrote()

    def delete_many(self, keys: Iterable[str]) -> int:
        """Remove several keys; how many were there."""
        turn = self._host.writing_turn()
        there = [key for key in set(self._checked_keys(keys)) if self._lookup(turn, key) is not None]
        for key in there:
            turn.buffer.delete(key)
        if there:
            turn.wrote()
        return len(there)

    def delete_all(self) -> None:
        """Remove all keys, the alarm and the named timers. What the runtime keeps about calls stays, and so do
        executions of durable functions.

        Raises `TransactionClosed` inside a transaction.
        """
        turn = self._host.writing_turn()
        own_layers = 1 if turn.step is None else 2  # what a step of a durable function writes is a layer of its own
        if len(turn.buffer.layers) > own_layers:
            raise TransactionClosed("delete_all() can't be part of a transaction: call it outside")
        turn.buffer.clear()
        for row in self._host.timers.rows(turn):
            if row.kind != TimerKind.DURABLE_SLEEP:  # executions go on
                turn.buffer.put_timer(row.name, None)
        turn.wrote()

    def list(
        self,
        *,
        start: str | None = None,
        start_after: str | None = None,
        end: str | None = None,
        prefix: str | None = None,
        reverse: bool = False,
        limit: int | None = None,
    ) -> dict[str, Any]:
        """Keys and values in key order (UTF-8 bytes), as a fresh dictionary.

        `start` is included, `start_after` and `end` are not; `prefix` narrows the range further; `reverse` turns the
        order and leaves the bounds' meaning. Raises `InvalidOption` for `start` with `start_after`, for a `limit`
        below 1, and `Overloaded` when more than `max_list_rows` rows would come back without a limit.
        """
        turn = self._host.reading_turn()
        for name, bound in (("start", start), ("start_after", start_after), ("end", end), ("prefix", prefix)):
            if bound is not None:
                _check_bound(name, bound)
        if start is not None and start_after is not None:
            raise InvalidOption("list() takes start or start_after, not both")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise InvalidOption(f"list(limit={limit!r}): must be a whole number of at least 1")
        if limit is not None:
            limit = min(limit, _MOST_ROWS)
        rows = self._host.scan_kv(
            turn, start=start, start_after=start_after, end=end, prefix=prefix, reverse=reverse, limit=limit
        )
        most = self._settings.max_list_rows
        if limit is None and len(rows) > most:
            raise Overloaded(f"list() of {self._host.id} has more than {most} rows: page with limit and start_after")
        return {key: decode(data) for key, data in rows}

    # --- mapping syntax -------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        value = self.get(key, _MISSING)
        if value is _MISSING:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self.put(key, value)

    def __delitem__(self, key: str) -> None:
        if not self.delete(key):
            raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        if not isinstance(key, str):
            return False
        turn = self._host.reading_turn()
        self._check_key(key)
        return self._lookup(turn, key) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.list())

    def __len__(self) -> int:
        return len(self.list())

    # --- transactions and durability ------------------------------------------------------------

    @contextmanager
    def transaction(self) -> Generator[Transaction, None, None]:
        """`with storage.transaction() as txn:` what happens inside commits into the turn, or is undone by an
        exception or by `txn.rollback()`. Nests."""
        turn = self._host.writing_turn()
        outermost = early_commit.begin_transaction(self._host, turn)
        buffer = turn.buffer
        layer = buffer.begin()
        try:
            yield Transaction(turn, layer)
        except BaseException:
            if not layer.closed:
                buffer.roll_back_to(layer)
                _reset(layer)
            raise
        else:
            if layer.closed:
                return
            if buffer.top is not layer:
                raise TransactionClosed("transactions must end in the reverse order of their beginning")
            buffer.commit_top()
        finally:
            if outermost:
                early_commit.end_transaction(self._host, turn)

    async def sync(self) -> None:
        """Commit what the turn has written so far, and wait until it is durable.

        Raises `CommitFailed` when it was not applied. After it a crash runs the turn again from its start, with
        `self.turn.attempt` above 1: the one place where state effects can repeat.
        """
        turn = self._host.reading_turn()
        if len(turn.buffer.layers) > 1:
            raise TransactionClosed("sync() can't be part of a transaction: call it outside")
        await early_commit.sync(self._host, turn)

    # --- the alarm ------------------------------------------------------------------------------

    def set_alarm(self, when: Any) -> None:
        """Run `alarm(info)` once at `when`: epoch ms, an aware datetime, or a timedelta or "30m" from now.

        Replaces an alarm that is set. A past time means now. Raises `InvalidSchedule` for a time that makes no sense
        and `InvalidOption` when the class has no `alarm` method.
        """
        turn = self._host.writing_turn()
        now_ms = self._host.partition.clock.wall_ms()
        if not self._host.info.has_alarm:
            raise InvalidOption(f"{self._host.id.type_name} has no alarm() method, so an alarm could not run")
        self._host.timers.set_alarm(turn, max(parse_when_ms(when, now_ms), now_ms))

    def get_alarm(self) -> int | None:
        """When the alarm is due, in epoch ms; None when none is set, and while it runs."""
        row = self._host.timers.row(self._host.reading_turn(), "")
        return None if row is None else row.first_due_ms

    def delete_alarm(self) -> bool:
        """Call the alarm off, its retries too; whether one was set. A running handler goes on."""
        return self._host.timers.cancel_row(self._host.writing_turn(), "")

    # --- inside ---------------------------------------------------------------------------------

    def _lookup(self, turn: Turn, key: str) -> bytes | None:
        known, data = turn.buffer.lookup(key)
        return data if known else self._host.read_kv(key)

    def _encode(self, key: str, value: Any) -> bytes:
        data = encode(value)
        most = self._settings.max_value_bytes
        if len(data) > most:
            raise ValueTooLarge(
                f"the value of {key!r} in {self._host.id} takes {len(data):,} bytes, the limit is {most:,}: "
                "split it over several keys"
            )
        return data

    def _checked_keys(self, keys: Iterable[str]) -> Iterator[str]:
        if isinstance(keys, str):
            raise InvalidOption("a list of keys is wanted here, not one text")
        for key in keys:
            self._check_key(key)
            yield key

    def _check_key(self, key: Any) -> None:
        if type(key) is not str:
            raise InvalidKey(f"a storage key must be a text, not {type(key).__name__}")
        if not key:
            raise InvalidKey("a storage key can't be empty")
        # a text of n characters has n to 4n bytes: only the doubtful ones are encoded
        if len(key) * 4 > self._settings.max_storage_key_bytes or not key.isascii():
            try:
                size = len(key.encode())
            except UnicodeEncodeError as error:
                raise InvalidKey(f"the storage key {key!r} is not valid text: {error.reason}") from error
            if size > self._settings.max_storage_key_bytes:
                raise InvalidKey(
                    f"a storage key of {size:,} bytes (limit {self._settings.max_storage_key_bytes:,}): shorten it"
                )
