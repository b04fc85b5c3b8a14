"""What a soak has seen, and whether it can have happened to objects with one owner at a time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

__all__ = ["History", "Sighting"]


class Sighting(NamedTuple):
    """What one turn saw and committed: the place of its write in its object's order, and who wrote it."""

    place: int
    slot: int
    slot_version: int
    partition: int
    epoch: int
    pid: int


class History:
    """Sightings of acknowledged calls, in the order of each key's caller, and of committed fires."""

    def __init__(self) -> None:
        self._answered: dict[str, list[tuple[str, Sighting]]] = defaultdict(list)
        self._fired: dict[str, list[Sighting]] = defaultdict(list)

    def answered(self, key: str, token: str, seen: Iterable[int]) -> None:
        """A call was acknowledged, and this is what its reply said."""
        self._answered[key].append((token, Sighting(*seen)))

    def fired(self, key: str, seen: Iterable[int]) -> None:
        """A fire is in the object's state."""
        self._fired[key].append(Sighting(*seen))

    def tokens(self, key: str) -> list[str]:
        """Those whose calls were acknowledged, in order."""
        return [token for token, _ in self._answered[key]]

    @property
    def count(self) -> int:
        """Acknowledged calls."""
        return sum(map(len, self._answered.values()))

    def incarnations(self) -> int:
        """How many processes have owned a partition."""
        return len({(seen.partition, seen.epoch) for seen in self._all()})

    def slot_owners(self) -> int:
        """How often a slot that was seen has had an owner: each slot once, and once more for each move."""
        return len({(seen.slot, seen.slot_version) for seen in self._all()})

    def check_tokens(self, key: str, applied: Mapping[str, int], under_way: int = 0) -> None:
        """Each acknowledged token was applied, none twice; at most so many others, whose caller died, were."""
        tokens = self.tokens(key)
        lost = [token for token in tokens if token not in applied]
        assert not lost, f"{key}: {len(lost)} acknowledged calls are lost: {lost[:5]}"
        repeated = {token: count for token, count in applied.items() if count != 1}
        assert not repeated, f"{key}: applied more than once: {repeated}"
        others = len(applied) - len(tokens)
        assert others <= under_way, f"{key}: {others} calls were applied that nobody acknowledged"

    def check_owners(self) -> None:
        """One partition per slot and version, one process per partition and epoch, and one order for each object."""
        _assert_single("slot {} in version {} has had two owners", self._all(), _owner_of_slot)
        _assert_single("partition {} in epoch {} has had two processes", self._all(), _process_of_partition)
        for key in {*self._answered, *self._fired}:
            sightings = [seen for _, seen in self._answered[key]]
            places = [seen.place for seen in sightings]
            assert places == sorted(set(places)), f"{key}: calls in order were applied out of order: {places}"
            every = sorted((*sightings, *self._fired[key]))
            for before, after in itertools.pairwise(every):
                assert before.place != after.place, f"{key}: two writes in one place: {before}, {after}"
                earlier, later = (before.slot_version, before.epoch), (after.slot_version, after.epoch)
                assert earlier <= later, f"{key}: {before}, then {after}"

    def _all(self) -> Iterable[Sighting]:
        for answers in self._answered.values():
            yield from (seen for _, seen in answers)
        for fires in self._fired.values():
            yield from fires


def _owner_of_slot(seen: Sighting) -> tuple[tuple[int, int], int]:
    return (seen.slot, seen.slot_version), seen.partition


def _process_of_partition(seen: Sighting) -> tuple[tuple[int, int], int]:
    return (seen.partition, seen.epoch), seen.pid


def _assert_single(message: str, sightings: Iterable[Sighting], split: object) -> None:
    assert callable(split)
    known: dict[tuple[int, int], Sighting] = {}
    for seen in sightings:
        unit, owner = split(seen)
        first = known.setdefault(unit, seen)
        assert split(first)[1] == owner, f"{message.format(*unit)}: {first}, {seen}"
