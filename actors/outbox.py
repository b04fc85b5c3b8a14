"""Messages as the sending object's code sees them: `self.send(Class, key).method(...)`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.address import ObjectId, check_key
from actors.codec import encode
from actors.durable_object import DurableObject, MethodInfo
from actors.errors import InvalidOption, MethodNotCallable, OutboxFull, ValueTooLarge
from drivers.tables import DELAYED, OUTBOX, SLOT_NUMBERS, TIMERS, Op
from timers.backoff import MESSAGE_RETRY, RetryPolicy
from timers.message_rows import DelayedRow, OutboxRow, pack_policy
from timers.outbox_relay import delayed_timer
from timers.schedule import parse_duration_ms, parse_when_ms

if TYPE_CHECKING:
    from actors.durable_object import ClassInfo
    from actors.message_numbers import MessageNumbers
    from actors.object_host import ObjectHost

__all__ = ["Outgoing", "Sender", "number_messages"]


@dataclass(frozen=True)
class Outgoing:
    """A message in a turn's write set. It gets its number when that is handed over. `due_ms` 0: at once."""

    target_class: str
    target_key: str
    method: str
    args: bytes
    retry: bytes
    created_ms: int
    due_ms: int = 0


def number_messages(
    sender: ObjectId, messages: list[Outgoing], numbers: MessageNumbers
) -> tuple[list[Op], list[OutboxRow], int | None]:
    """(operations that put the messages, those that go at once, when the earliest of the others is due)."""
    ops: list[Op] = []
    leaving: list[OutboxRow] = []
    due_ms: list[int] = []
    number = 0
    for message in messages:
        number = numbers.take(sender.slot)
        to = (message.target_class, message.target_key, message.method, message.args, message.retry)
        if message.due_ms:
            delayed = DelayedRow(sender.slot, number, sender.type_name, sender.key, *to, message.due_ms)
            timer = delayed_timer(delayed)
            ops += [(DELAYED, delayed.key(), delayed.values()), (TIMERS, timer.key(), timer.values())]
            due_ms.append(message.due_ms)
        else:
            row = OutboxRow(sender.slot, number, sender.type_name, sender.key, *to, message.created_ms)
            ops.append((OUTBOX, row.key(), row.values()))
            leaving.append(row)
    ops.append((SLOT_NUMBERS, (sender.slot,), (number,)))
    return ops, leaving, min(due_ms, default=None)


class Sender:
    """Where a message goes, and when. Its methods are those of the class; each puts one message into the turn."""

    __slots__ = ("_due_ms", "_host", "_info", "_key", "_retry")

    def __init__(self, host: ObjectHost, cls: type[DurableObject], key: str, retry: RetryPolicy | None = None) -> None:
        host.writing_turn()
        if retry is not None and not isinstance(retry, RetryPolicy):
            raise InvalidOption(f"retry = {retry!r}: must be a RetryPolicy")
        self._host = host
        self._info: ClassInfo = host.partition.classes.add(cls)
        self._key = check_key(key)
        self._due_ms = 0
        self._retry: RetryPolicy = MESSAGE_RETRY if retry is None else retry

    def after(self, delay: Any) -> Sender:
        """Later: a timedelta or a text like "5m", counted from now. Raises `InvalidSchedule`."""
        return self._due(self._host.partition.clock.wall_ms() + parse_duration_ms(delay))

    def at(self, when: Any) -> Sender:
        """At an instant: epoch ms (int) or an aware datetime. Raises `InvalidSchedule`."""
        return self._due(parse_when_ms(when, self._host.partition.clock.wall_ms()))

    def _due(self, due_ms: int) -> Sender:
        later = Sender(self._host, self._info.cls, self._key, self._retry)
        later._due_ms = due_ms
        return later

    def __getattr__(self, name: str) -> _Message:
        if name.startswith("_"):
            raise MethodNotCallable(f"{name}: names that begin with '_' are private to the object")
        method = self._info.method(name)
        if method.is_shared:
            raise InvalidOption(
                f"{self._info.type_name}.{name} only reads, and nobody gets its result: call it through a stub"
            )
        return _Message(self, method)

    def __repr__(self) -> str:
        return f"<send to {self._info.type_name}({self._key!r})>"

    def _put(self, method: MethodInfo, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        host = self._host
        turn = host.writing_turn()
        settings = host.partition.settings
        what = f"{self._info.type_name}/{self._key}.{method.name}"
        payload = encode([list(args), kwargs])
        if len(payload) > settings.max_message_bytes:
            raise ValueTooLarge(
                f"the arguments of a message to {what} take {len(payload):,} bytes (`max_message_bytes` is "
                f"{settings.max_message_bytes:,}): keep them in storage and send the key"
            )
        buffered = sum(len(layer.messages) for layer in turn.buffer.layers)
        if buffered >= settings.max_messages_per_turn:
            raise OutboxFull(
                f"the turn of {host.id} has sent {buffered:,} messages, its `max_messages_per_turn`: send the rest in "
                "another turn (a timer), or commit in parts with `await self.storage.sync()`"
            )
        waiting = host.state.messages() + buffered
        if waiting >= settings.max_outbox_messages:
            raise OutboxFull(
                f"{host.id} has {waiting:,} messages that are not delivered, its `max_outbox_messages`; nothing was "
                f"sent to {what}: send again later, or look at what keeps the receivers"
            )
        now_ms = host.partition.clock.wall_ms()
        due_ms = self._due_ms if self._due_ms > now_ms else 0
        retry = pack_policy(self._retry)
        turn.buffer.top.send(Outgoing(self._info.type_name, self._key, method.name, payload, retry, now_ms, due_ms))
        turn.wrote()


class _Message:
    """One method of the receiver: calling it sends."""

    __slots__ = ("_method", "_sender")

    def __init__(self, sender: Sender, method: MethodInfo) -> None:
        self._sender = sender
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Put the message into the running turn: it leaves once that is durable, and never if it is rolled back.

        Raises `UnstorableValue`, `ValueTooLarge`, `OutboxFull`, and what any write of a turn raises.
        """
        self._sender._put(self._method, args, kwargs)

    def __repr__(self) -> str:
        return f"{self._sender!r}.{self._method.name}"
