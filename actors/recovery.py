"""What a partition finds in its file when it opens: claims of turns that ran, intents, and what to do about them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgpack

from actors.claims import TIMER_CLAIM, Claim, claim_op
from actors.errors import PoisonCall
from actors.execution_rows import ExecutionRow, buried, execution_id_of
from actors.messages import REFUSED
from actors.timer_work import dead_letter_op
from actors.wire_errors import encode_error
from actors.write_buffer import DirectoryRow
from drivers.store import Store
from drivers.tables import CLAIMS, DIRECTORY, EXECUTIONS, INBOX, INTENTS, Op
from drivers.write_set import InboxEntry
from timers.registry import TimerKind
from timers.schedule import TimerSpec, advance

__all__ = ["Intent", "Recovery", "read_intents", "recover"]


@dataclass(frozen=True)
class Intent:
    """A turn that had called out or synced when its process died, and must be run again before any other."""

    class_name: str
    key: str
    turn_id: bytes
    fields: list[Any]

    @property
    def depth(self) -> int:
        """How many objects wait for this turn."""
        return len(self.fields[6]) if self.fields[0] == "call" else 0


@dataclass(frozen=True)
class Recovery:
    """What recovery found. `suspects` are (class, key, timer name) of timers that ran; `crashes` and `let_go` are by
    turn id."""

    intents: list[Intent]
    suspects: list[tuple[str, str, str]]
    crashes: dict[bytes, int]
    let_go: dict[bytes, int]
    poisoned: list[str]


def recover(store: Store, *, unclean: bool, crash_limit: int, misfire_limit: int, now_ms: int) -> Recovery:
    """Count the crashes of what ran alone, bury what reached the limit, and list what must be run again.

    Everything is one commit, made before the partition serves.
    """
    work = _Recovery(store, crash_limit, misfire_limit, now_ms)
    store.begin()
    try:
        for row in store.scan(CLAIMS):
            work.claim(Claim.of_row(row), unclean)
        store.write(work.ops)
        store.flush()
        store.commit()
    except BaseException:
        store.rollback()
        raise
    return Recovery(read_intents(store), work.suspects, work.crashes, work.let_go, work.poisoned)


def read_intents(store: Store) -> list[Intent]:
    """The turns that must be run again."""
    return [
        Intent(class_name, key, turn_id, msgpack.unpackb(packed, strict_map_key=False))
        for class_name, key, turn_id, packed in store.scan(INTENTS)
    ]


class _Recovery:
    def __init__(self, store: Store, crash_limit: int, misfire_limit: int, now_ms: int) -> None:
        self._store = store
        self._crash_limit = crash_limit
        self._misfire_limit = misfire_limit
        self._now_ms = now_ms
        self.ops: list[Op] = []
        self.suspects: list[tuple[str, str, str]] = []
        self.crashes: dict[bytes, int] = {}
        self.let_go: dict[bytes, int] = {}
        self.poisoned: list[str] = []

    def claim(self, claim: Claim, unclean: bool) -> None:
        crashed = claim.alone and unclean
        crashes = claim.crashes + crashed
        if claim.let_go:
            self.let_go[claim.turn_id] = claim.let_go
        if claim.kind == TIMER_CLAIM:
            self._timer(claim, crashed)
            self.ops.append((CLAIMS, (claim.turn_id,), None))
        elif crashes >= self._crash_limit:
            self._poison_call(claim, crashes)
        else:
            self.crashes[claim.turn_id] = crashes
            if crashed:
                self.ops.append(claim_op(replace(claim, alone=False, crashes=crashes)))

    def _timer(self, claim: Claim, crashed: bool) -> None:
        oid = self._store.find_object(claim.class_name, claim.key)
        values = None if oid is None else self._store.get(DIRECTORY, (oid, claim.name))
        if oid is None or values is None:
            return
        row = DirectoryRow(oid, claim.name, *values)
        if row.generation != claim.generation:
            return
        if not crashed:
            self.suspects.append((claim.class_name, claim.key, claim.name))
            return
        row = replace(row, crashes=row.crashes + 1)
        if row.crashes < self._crash_limit:
            self.ops.append((DIRECTORY, (oid, row.name), row.values()))
            self.suspects.append((claim.class_name, claim.key, claim.name))
            return
        self._bury_timer(claim, row)

    def _bury_timer(self, claim: Claim, row: DirectoryRow) -> None:
        text = (
            f"the process died {row.crashes} times while this timer ran alone; it is not run again by itself. "
            "Redrive it once the cause is found."
        )
        number = self._store.counters.take_id()
        self.ops.append(dead_letter_op(number, claim.class_name, claim.key, row, text, self._now_ms, row.attempt))
        self._drop_intent(claim)
        if row.kind == TimerKind.DURABLE_SLEEP:
            self._bury_execution(row)
        self.poisoned.append(f"{claim.class_name}/{claim.key} timer {claim.name!r}")
        spec = TimerSpec.from_bytes(row.spec)
        following = advance(spec, row.first_due_ms, max(self._now_ms, row.first_due_ms), self._misfire_limit)
        if following.next_due_ms is None:
            self.ops.extend(row.delete_ops())
            return
        seed = f"{claim.class_name}\0{claim.key}\0{claim.name}".encode()
        due_ms = spec.wake_ms(following.next_due_ms, seed)
        moved = replace(row, due_ms=due_ms, first_due_ms=following.next_due_ms, attempt=0, crashes=0, missed=0)
        self.ops.extend(moved.put_ops(row))

    def _bury_execution(self, timer: DirectoryRow) -> None:
        key = (timer.oid, execution_id_of(timer.name))
        values = self._store.get(EXECUTIONS, key)
        row = None if values is None else buried(ExecutionRow.from_columns(key, values))
        if row is not None:
            self.ops.append((EXECUTIONS, key, row.values()))

    def _poison_call(self, claim: Claim, crashes: int) -> None:
        error = PoisonCall(
            f"{claim.class_name}/{claim.key}.{claim.name} ended its process {crashes} times while it ran alone; "
            "it is not run again. Look at the logs of those processes; a call with a new id would run."
        )
        entry = InboxEntry(claim.turn_id, claim.class_name, claim.key, b"", REFUSED, encode_error(error))
        # a row of its own, under the number of the commit that this becomes
        number = self._store.commit_seq + 1
        packed = [*self._packed_so_far(number), entry]
        self.ops.append((INBOX, (number,), (msgpack.packb(packed),)))
        self._drop_intent(claim)
        self.ops.append((CLAIMS, (claim.turn_id,), None))
        self.poisoned.append(f"{claim.class_name}/{claim.key}.{claim.name}")

    def _drop_intent(self, claim: Claim) -> None:
        intent = self._store.get(INTENTS, (claim.class_name, claim.key))
        if intent is not None and intent[0] == claim.turn_id:  # not that of another turn, which must still be run
            self.ops.append((INTENTS, (claim.class_name, claim.key), None))

    def _packed_so_far(self, number: int) -> list[object]:
        for table, key, values in reversed(self.ops):
            if table == INBOX and key == (number,) and isinstance(values, tuple):
                packed: list[object] = msgpack.unpackb(values[0])
                return packed
        return []
