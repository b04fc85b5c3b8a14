"""How a message's turn begins and ends at its receiver: in order, once, its number recorded with what it did."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from actors.codec import encode
from actors.errors import OutOfOrder
from actors.messages import OK
from drivers.tables import RECEIVED, TIMERS, Op
from drivers.write_set import FieldEquals
from timers.inbox_sweep import received_timer
from timers.message_rows import ReceivedRow, pair_id

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.work import CallWork

__all__ = ["NOTHING", "Applied", "applied", "begin"]

#: The reply: nobody wants a message's result.
NOTHING: Final = (OK, encode(None))
_SOURCE_CLASS_COLUMN: Final = 1


@dataclass(frozen=True)
class Applied:
    """What the end of a message's turn adds to its write set."""

    row: ReceivedRow
    timer: list[Op]
    guards: list[FieldEquals]


def begin(host: ObjectHost, work: CallWork) -> bool:
    """Whether the message is the next one of its pair; answers it when it is not."""
    assert work.message is not None
    last = _received(host, work)
    number = 0 if last is None else last.number
    if work.message.number <= number:
        _answer_again(host, work)
        return False
    if work.message.predecessor > number:
        work.refuse(
            OutOfOrder(
                f"{host.id}: message {work.message.number} waits for message {work.message.predecessor} of the same "
                "sender; nothing was run"
            )
        )
        host.partition.admission.work_ended(work)
        return False
    return True


def _answer_again(host: ObjectHost, work: CallWork) -> None:
    """It has been applied: say so once that is durable."""

    def durable(error: BaseException | None) -> None:
        if error is None:
            work.answer(*NOTHING)
        else:
            work.refuse(error)
        host.partition.admission.work_ended(work)

    last = host.state.last
    if last is None:
        durable(None)
    else:
        last.when_done(durable)


def applied(host: ObjectHost, work: CallWork) -> Applied:
    """The message's number takes the place of the last one. The first of a pair brings the timer that ends both."""
    assert work.message is not None
    assert work.caller is not None
    now_ms = host.partition.clock.wall_ms()
    last = _received(host, work)
    if last is not None:
        # whoever removes the row removes its timer too: this turn counts on both
        guard = FieldEquals(RECEIVED, last.key(), _SOURCE_CLASS_COLUMN, last.source_class)
        return Applied(replace(last, number=work.message.number, applied_ms=now_ms), [], [guard])
    slot, pair = _place(host, work)
    row = ReceivedRow(slot, pair, work.message.number, work.caller[0], work.caller[1], now_ms)
    timer = received_timer(row)
    return Applied(row, [(TIMERS, timer.key(), timer.values())], [])


def _received(host: ObjectHost, work: CallWork) -> ReceivedRow | None:
    key = _place(host, work)
    values = host.state.read_row((RECEIVED, key))
    return None if values is None else ReceivedRow.from_columns(key, values)


def _place(host: ObjectHost, work: CallWork) -> tuple[int, bytes]:
    assert work.caller is not None
    source_class, source_key, _ = work.caller
    return host.id.slot, pair_id(source_class, source_key, host.id.type_name, host.id.key)
