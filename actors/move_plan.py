"""Which slots must move so that every partition has its share: the fewest, and always the same ones. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PlannedMove", "plan_moves"]


@dataclass(frozen=True)
class PlannedMove:
    """Slots that go from one partition to another."""

    source: int
    target: int
    slots: tuple[int, ...]


def plan_moves(owners: Sequence[int], partitions: Sequence[int], most_slots: int) -> list[PlannedMove]:
    """Moves of at most `most_slots` slots each after which the counts of `partitions` differ by one at most, and
    nobody else owns a slot.

    `owners` is the owner of each slot by slot number. Partitions keep what they have as far as it is their share; the
    shares that are one larger go to those that have the most. Moves that share no partition come next to each other,
    so that they can run side by side.
    """
    if not partitions:
        raise ValueError("slots need at least one partition")
    held: dict[int, list[int]] = {number: [] for number in partitions}
    spare: list[tuple[int, int]] = []
    for slot, owner in enumerate(owners):
        if owner in held:
            held[owner].append(slot)
        else:
            spare.append((slot, owner))
    least, larger = divmod(len(owners), len(partitions))
    by_size = sorted(partitions, key=lambda number: (-len(held[number]), number))
    share = {number: least + (place < larger) for place, number in enumerate(by_size)}
    for number in sorted(held):
        over = len(held[number]) - share[number]
        if over > 0:
            spare += [(slot, number) for slot in held[number][-over:]]
    wanting = [(number, share[number] - len(held[number])) for number in sorted(held)]
    return _interleaved(_assigned(spare, [(number, count) for number, count in wanting if count > 0], most_slots))


def _assigned(spare: list[tuple[int, int]], wanting: list[tuple[int, int]], most_slots: int) -> list[PlannedMove]:
    by_source: dict[int, list[int]] = {}
    for slot, owner in spare:
        by_source.setdefault(owner, []).append(slot)
    moves: list[PlannedMove] = []
    for source in sorted(by_source):
        slots = by_source[source]
        while slots:
            target, count = wanting.pop(0)
            taken, slots = slots[:count], slots[count:]
            if count > len(taken):
                wanting.insert(0, (target, count - len(taken)))
            for first in range(0, len(taken), most_slots):
                moves.append(PlannedMove(source, target, tuple(taken[first : first + most_slots])))
    return moves


def _interleaved(moves: list[PlannedMove]) -> list[PlannedMove]:
    """The same moves, those of different pairs of partitions in turn."""
    queues: dict[tuple[int, int], list[PlannedMove]] = {}
    for move in moves:
        queues.setdefault((move.source, move.target), []).append(move)
    ordered: list[PlannedMove] = []
    while queues:
        for pair in list(queues):
            ordered.append(queues[pair].pop(0))
            if not queues[pair]:
                del queues[pair]
    return ordered
