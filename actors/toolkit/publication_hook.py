"""Runs `on_published` once for each published advance of a line, in order.

It runs as a timer of the runtime's own, one per line: its turn counts the advance as announced, and sets the timer for
the next one, in the commit of what `on_published` does. A run that fails is tried again before any later advance;
when its tries are used up it is a dead letter, and the line goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from actors.codec import decode, encode
from actors.write_buffer import DirectoryRow, WriteBuffer
from timers.publication_rows import LineRow
from timers.registry import TimerKind
from timers.schedule import TimerSpec

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.timer_work import TimerWork

__all__ = ["HOOK", "announcing", "hook_name", "hook_spec", "pass_over"]

#: The method of the class.
HOOK: Final = "on_published"
#: Begins the timer's name: the NUL keeps it apart from what applications may name.
_PREFIX: Final = "\0published\0"


def hook_name(line: str) -> str:
    """Name of the timer that runs `on_published` for the line."""
    return _PREFIX + line


def hook_spec(line: str, sequence: int, now_ms: int) -> TimerSpec:
    """That timer for one advance, due now."""
    return TimerSpec(mode="at", start_ms=now_ms, method=HOOK, payload=encode([line, sequence]))


def announcing(host: ObjectHost, work: TimerWork, hook: Callable[..., Any]) -> Callable[..., Any]:
    """`on_published` as the handler of this timer."""
    line, sequence = decode(work.spec.payload)

    def run(instance: Any, _info: Any) -> Any:
        if work.row.name == hook_name(line) and not _count(host, line, sequence):
            return None
        return hook(instance, instance.publications.get(sequence, line))  # a dead letter that runs again counts nothing

    return run


def _count(host: ObjectHost, name: str, sequence: int) -> bool:
    """Count the advance as announced and set the timer for the next; False when it was counted before."""
    turn = host.writing_turn()
    line = host.rows.get(LineRow, name)
    if line is None:
        return False
    is_next = sequence == line.announced + 1 <= line.published
    if is_next:
        line = replace(line, announced=sequence)
        turn.buffer.top.put_row((line.table, line.key()), line.values())
    following = _following(host, line)
    if following is not None:
        turn.buffer.put_timer(following.name, following)
    turn.wrote()
    return is_next


def pass_over(host: ObjectHost, work: TimerWork, buffer: WriteBuffer) -> None:
    """The tries for this advance are used up: the line goes on with the next."""
    name, sequence = decode(work.spec.payload)
    oid = host.state.oid
    values = host.state.read_row((LineRow.table, (oid, name)))
    if work.row.name != hook_name(name) or values is None:
        return
    line = LineRow.from_columns((oid, name), values)
    if sequence == line.announced + 1:
        line = replace(line, announced=sequence)
        buffer.top.put_row((line.table, line.key()), line.values())
    buffer.top.timers[work.row.name] = _following(host, line)


def _following(host: ObjectHost, line: LineRow) -> DirectoryRow | None:
    """The timer for the first advance that is not announced, if there is one."""
    if line.announced >= line.published:
        return None
    now_ms = host.partition.clock.wall_ms()
    return DirectoryRow(
        oid=0,  # given when the changes are handed over
        name=hook_name(line.line),
        kind=int(TimerKind.NAMED_TIMER),
        due_ms=now_ms,
        generation=host.partition.counters.take_generation(),
        first_due_ms=now_ms,
        attempt=0,
        crashes=0,
        missed=0,
        spec=hook_spec(line.line, line.announced + 1, now_ms).to_bytes(),
    )
