"""Which slots a partition has, and in which state: what it may run, and what waits for the end of a move."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drivers.store import Store
from drivers.tables import SLOTS, Op

__all__ = ["FROZEN", "INCOMING", "OWNED", "SlotTable", "as_ranges", "owned_ops", "slots_of"]

#: The partition runs the slot's objects.
OWNED = "owned"
#: The slot was given away, or will be: it runs nothing here until the coordinator's decision has been read.
FROZEN = "frozen"
#: The slot's rows are arriving: it runs nothing here before it is owned.
INCOMING = "incoming"


def owned_ops(slots: Iterable[int], version: int) -> list[Op]:
    """The rows that say that these slots are owned since this version of theirs."""
    return [(SLOTS, (slot,), (OWNED, version, None)) for slot in slots]


class SlotTable:
    """The durable rows of the slots, and beside them, in memory only, which owned ones are about to be frozen."""

    def __init__(self, store: Store) -> None:
        self._states: dict[int, tuple[str, int, str | None]] = {}
        #: slots that run what has begun, and take nothing new from outside
        self.leaving: set[int] = set()
        #: slots whose objects may run, nested calls included: looked at for every call
        self.owned: set[int] = set()
        for slot, state, version, move_id in store.scan(SLOTS):
            self._set(slot, state, version, move_id)

    def _set(self, slot: int, state: str, version: int, move_id: str | None) -> None:
        self._states[slot] = (state, version, move_id)
        if state == OWNED:
            self.owned.add(slot)
        else:
            self.owned.discard(slot)
            self.leaving.discard(slot)

    @property
    def moving(self) -> bool:
        """Whether there are slots that run nothing here."""
        return len(self.owned) < len(self._states)

    def state(self, slot: int) -> str | None:
        """The slot's state here; None when the partition has nothing of it."""
        found = self._states.get(slot)
        return None if found is None else found[0]

    def version(self, slot: int) -> int | None:
        """Since which version of the slot's it is in that state; None when the partition has nothing of it."""
        found = self._states.get(slot)
        return None if found is None else found[1]

    def slots_in(self, state: str, move_id: str) -> list[int]:
        """The slots of a move that are in this state."""
        return sorted(slot for slot, found in self._states.items() if found[0] == state and found[2] == move_id)

    def moves(self) -> dict[str, tuple[str, int]]:
        """The moves that have not come to their end here: the state of their slots, and one of them."""
        return {found[2]: (found[0], slot) for slot, found in self._states.items() if found[2] is not None}

    def moves_into(self, slots: Iterable[int]) -> set[str]:
        """The moves that these slots are arriving with."""
        found = (self._states.get(slot) for slot in slots)
        return {each[2] for each in found if each is not None and each[0] == INCOMING and each[2] is not None}

    def ranges(self) -> list[tuple[int, int]]:
        """The owned slots as inclusive ranges."""
        return as_ranges(self.owned)

    # --- what runs nothing any more: the operations to commit; memory follows at once ---------------

    def freeze(self, slots: Iterable[int], move_id: str) -> list[Op]:
        """The slots run nothing from now on."""
        return self._change(slots, FROZEN, move_id)

    def expect(self, slots: Iterable[int], move_id: str) -> list[Op]:
        """Rows of these slots will come; what there was of them counts no more."""
        return self._change(slots, INCOMING, move_id)

    def forget(self, slots: Iterable[int]) -> list[Op]:
        """Nothing of these slots is here any more."""
        ops: list[Op] = []
        for slot in slots:
            self._states.pop(slot, None)
            self.owned.discard(slot)
            self.leaving.discard(slot)
            ops.append((SLOTS, (slot,), None))
        return ops

    def _change(self, slots: Iterable[int], state: str, move_id: str) -> list[Op]:
        ops: list[Op] = []
        for slot in slots:
            version = self._version(slot)
            self._set(slot, state, version, move_id)
            ops.append((SLOTS, (slot,), (state, version, move_id)))
        return ops

    def _version(self, slot: int) -> int:
        known = self._states.get(slot)
        return 0 if known is None else known[1]

    # --- what runs (again): memory follows when it is durable ---------------------------------------

    def thaw(self, slots: Iterable[int]) -> list[Op]:
        """The operations to commit when a move was called off: its slots run here as before. `take_up` follows."""
        return [(SLOTS, (slot,), (OWNED, self._version(slot), None)) for slot in slots]

    def take_up(self, ops: Sequence[Op]) -> None:
        """These operations, of `thaw` or `owned_ops`, are durable: the slots run here from now on."""
        for _, (slot,), values in ops:
            assert isinstance(values, tuple)
            state, version, move_id = values
            self._set(slot, state, version, move_id)


def as_ranges(slots: Iterable[int]) -> list[tuple[int, int]]:
    """Slots as inclusive ranges, in order."""
    ranges: list[tuple[int, int]] = []
    for slot in sorted(slots):
        if ranges and ranges[-1][1] == slot - 1:
            ranges[-1] = (ranges[-1][0], slot)
        else:
            ranges.append((slot, slot))
    return ranges


def slots_of(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The slots of inclusive ranges."""
    return [slot for low, high in ranges for slot in range(low, high + 1)]
