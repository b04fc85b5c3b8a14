"""Plans move the fewest slots, end in balance, and are the same for the same question."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from actors.coordinator_store import balanced_ranges
from actors.move_plan import plan_moves

PARTITIONS = st.sets(st.integers(0, 12), min_size=1, max_size=8).map(sorted)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=300), PARTITIONS, st.integers(1, 50))
def test_a_plan_ends_in_balance_with_the_fewest_moves(
    owners: list[int], partitions: list[int], most_slots: int
) -> None:
    moves = plan_moves(owners, partitions, most_slots)
    after = list(owners)
    moved = 0
    for move in moves:
        assert 1 <= len(move.slots) <= most_slots
        assert move.source != move.target
        for slot in move.slots:
            assert after[slot] == move.source
            after[slot] = move.target
            moved += 1
    counts = Counter(after)
    assert set(counts) <= set(partitions)
    sizes = [counts[number] for number in partitions]
    assert max(sizes) - min(sizes) <= 1
    # nobody can do with fewer: each partition keeps as much of its own as its share allows
    before = Counter(owners)
    least, larger = divmod(len(owners), len(partitions))
    kept = sorted((before[number] for number in partitions), reverse=True)
    assert moved == len(owners) - sum(min(had, least + (place < larger)) for place, had in enumerate(kept))
    assert moves == plan_moves(owners, partitions, most_slots)


@given(PARTITIONS, st.integers(1, 50))
def test_what_is_in_balance_stays(partitions: list[int], most_slots: int) -> None:
    ranges = balanced_ranges(len(partitions))
    owners = [partitions[place] for place, (low, high) in enumerate(ranges) for _ in range(low, high + 1)]
    assert plan_moves(owners, partitions, most_slots) == []


def test_scaling_from_two_to_four_moves_half_of_the_slots_and_back_the_same_number() -> None:
    owners = [slot * 2 // 4096 for slot in range(4096)]
    moves = plan_moves(owners, [0, 1, 2, 3], 64)
    assert sum(len(move.slots) for move in moves) == 2048
    assert {move.source for move in moves} == {0, 1}
    assert {(moves[0].source, moves[0].target), (moves[1].source, moves[1].target)} == {(0, 2), (1, 3)}
    for move in moves:
        for slot in move.slots:
            owners[slot] = move.target
    assert sum(len(move.slots) for move in plan_moves(owners, [0, 1], 64)) == 2048
