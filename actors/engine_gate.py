"""Keeps the timer engine's batches and the turns of objects apart.

A turn decides by the rows that it has read; the engine changes such rows between turns. While a batch of the engine is
on its way to disk, the objects that it changes start no turn. While an object is in a turn, a batch that would change
its rows waits; the object then lets the engine go first before its next turn, so that a busy object can't keep the
engine waiting for ever. The rows' tables say where this differs (`TurnRule`). Turns of interleaved classes run beside
each other at all times: for them a batch waits for no turn, and its guards alone decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from drivers.tables import INTENTS, OBJECTS, TABLES, TurnRule
from timers.batch import Batch, Put
from timers.rows import MalformedTimer, TimerRow, oid_of, slot_of_ref

if TYPE_CHECKING:
    from actors.object_host import ObjectHost
    from actors.partition import Partition

__all__ = ["EngineGate"]


class EngineGate:
    """Implements `drivers.timer_store.Gate` for one partition."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        #: objects with batches on their way to disk
        self._held: Counter[int] = Counter()
        #: objects in a turn that the engine waits for; True once the turn has ended
        self._wanted: dict[int, bool] = {}
        self._hosts: dict[int, ObjectHost] = {}

    # --- the engine's side ------------------------------------------------------------------------

    def is_away(self, timer: TimerRow | MalformedTimer) -> bool:
        if not self._partition.slot_table.moving or isinstance(timer, MalformedTimer):
            return False
        of_slot = slot_of_ref(timer.ref)
        if of_slot is not None:
            return not self._partition.runs_slot(of_slot[0])
        owner = oid_of(timer.ref)
        return owner is not None and self._is_elsewhere(owner[0])

    def admit(self, batch: Batch) -> Sequence[int] | None:
        if self._is_of_slot_elsewhere(batch) or not self._partition.numbers.in_order(batch):
            return None
        changed = _changed_objects(batch)
        for oid, rule in changed.items():
            if self._is_elsewhere(oid):
                return None
            if rule is not TurnRule.BESIDE_TURNS and self._in_turn(oid, rule is TurnRule.ENGINE_FIRST):
                return None
        held = [oid for oid, rule in changed.items() if rule is not TurnRule.BESIDE_TURNS]
        for oid in held:
            self._held[oid] += 1
            self._wanted.pop(oid, None)
        return held

    def let_go(self, oids: Sequence[int]) -> None:
        for oid in oids:
            self._held[oid] -= 1
            if not self._held[oid]:
                del self._held[oid]
                self._pump(oid)

    def tick_ended(self) -> None:
        """What the engine wanted of these objects is done, or is wanted no more."""
        for oid in [oid for oid, turn_ended in self._wanted.items() if turn_ended]:
            del self._wanted[oid]
            self._pump(oid)

    def _is_elsewhere(self, oid: int) -> bool:
        """Whether the object is here, but not run here: it is leaving, or has not quite come."""
        if not self._partition.slot_table.moving:
            return False
        place = self._partition.store.get(OBJECTS, (oid,))
        return place is not None and not self._partition.runs_slot(place[0])

    def _is_of_slot_elsewhere(self, batch: Batch) -> bool:
        """Whether the batch changes rows of a slot that is not run here (any more): its timer was due before the slot
        was frozen, and its rows are being copied, perhaps this very moment."""
        table = self._partition.slot_table
        return table.moving and any(not self._partition.runs_slot(slot) for slot in _changed_slots(batch))

    def _in_turn(self, oid: int, stands_back: bool) -> bool:
        """Whether the object runs a turn, or must run one again before anything else happens to it.

        If it does and `stands_back`, the engine goes before its next turn.
        """
        place = self._partition.store.get(OBJECTS, (oid,))
        if place is None:
            return False
        _slot, type_name, key = place
        host = self._partition.find_host(type_name, key)
        if host is not None and host.interleaved:
            return False
        if host is not None and (host.current is not None or host.rerun is not None or host.activation is not None):
            if stands_back:
                self._wanted[oid] = False
                self._hosts[oid] = host
            return True
        return self._partition.store.get(INTENTS, (type_name, key)) is not None

    # --- the objects' side ------------------------------------------------------------------------

    def may_start(self, host: ObjectHost, resumed: bool) -> bool:
        """Whether the object may start a turn now. One that is run again goes before the engine."""
        if not self._held and not self._wanted:
            return True
        oid = host.state.oid
        if oid is None or (oid not in self._held and (resumed or oid not in self._wanted)):
            return True
        self._hosts[oid] = host
        return False

    def turn_ended(self, host: ObjectHost) -> None:
        """The object is between two turns."""
        oid = host.state.oid if self._wanted else None
        if oid is not None and self._wanted.get(oid) is False:
            self._wanted[oid] = True
            self._partition.loop.call_soon(self._partition.tick)

    def _pump(self, oid: int) -> None:
        host = self._hosts.pop(oid, None)
        if host is not None and not self._partition.stopped:
            host.pump()


def _changed_slots(batch: Batch) -> set[int]:
    """The slots whose rows the batch changes. Timers alone are not looked at."""
    places = ((w.row.table, w.row.key()) if isinstance(w, Put) else (w.table, w.key) for w in batch.writes)
    return {key[0] for table, key in places if TABLES[table].per_slot}


def _changed_objects(batch: Batch) -> dict[int, TurnRule]:
    """The objects whose rows the batch changes, in order, and what holds between it and their turns.

    Timers alone are not looked at by turns.
    """
    changed: dict[int, TurnRule] = {}
    for write in batch.writes:
        table, key = (write.row.table, write.row.key()) if isinstance(write, Put) else (write.table, write.key)
        spec = TABLES[table]
        if spec.per_object:
            changed[key[0]] = max(changed.get(key[0], spec.turns), spec.turns)
    return dict(sorted(changed.items()))
