"""What moves may take from the work beside them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from actors import Settings
from actors.coordinator_store import CoordinatorStore
from actors.mover import MoveLimits, Mover
from actors.slot_moves import SlotMoves

BYTES = 5_000


class Partitions:
    """Do what they are told, and say how many are copying at the same time."""

    def __init__(self) -> None:
        self.copying = self.most = 0
        self.sizes: list[int] = []

    async def check(self, target: int) -> None:
        """There."""

    async def send_slots(
        self, source: int, move_id: str, slots: Sequence[int], target: int, patience_ms: int, cut_short: bool
    ) -> int:
        self.copying += 1
        self.most = max(self.most, self.copying)
        self.sizes.append(len(slots))
        await asyncio.sleep(0)
        self.copying -= 1
        return BYTES

    async def done(self, *_: object) -> None:
        """Nothing is left to do."""

    own = complete = call_off = discard = done


@pytest.fixture
def record(tmp_path: Path) -> CoordinatorStore:
    path = tmp_path / "coordinator.sqlite"
    CoordinatorStore.create(path, "c", 4, b"s" * 32)
    store = CoordinatorStore.open(path, "c")
    for number in (4, 5):
        store.add_partition(number)
    return store


async def spread(record: CoordinatorStore, limits: MoveLimits) -> tuple[Partitions, list[float], Mover]:
    """From four partitions to six; with what the mover has rested."""
    partitions, rests, numbers = Partitions(), list[float](), itertools.count()

    async def sleep(seconds: float) -> None:
        rests.append(seconds)

    mover = Mover(
        record.moves,
        partitions,
        owners=lambda: record.slot_map().owners(),
        new_id=lambda: f"move-{next(numbers)}",
        sleep=sleep,
        limits=limits,
    )
    await mover.spread(range(6))
    return partitions, rests, mover


async def test_moves_are_as_large_and_as_many_at_a_time_as_the_settings_say(record: CoordinatorStore) -> None:
    partitions, _rests, mover = await spread(record, MoveLimits(side_by_side=1, slots_per_move=100))
    assert partitions.most == 1
    assert max(partitions.sizes) == 100
    assert mover.progress.moved == sum(partitions.sizes) > 0


async def test_sources_send_side_by_side(record: CoordinatorStore) -> None:
    partitions, _rests, _mover = await spread(record, MoveLimits(side_by_side=3, slots_per_move=100))
    assert partitions.most == 3


async def test_a_mover_rests_after_each_move_until_its_rate_is_kept(record: CoordinatorStore) -> None:
    partitions, rests, _mover = await spread(record, MoveLimits(bytes_per_s=1_000))
    assert rests == [BYTES / 1_000] * len(partitions.sizes)


def test_the_limits_are_settings(record: CoordinatorStore) -> None:
    settings = Settings(moves_side_by_side=5, slots_per_move=7, move_bytes_per_s=2**21)
    moves = SlotMoves(record, None, settings)  # type: ignore[arg-type]
    assert moves.mover._limits == MoveLimits(5, 7, 2**21)
    with pytest.raises(ValidationError, match="slots_per_move"):
        Settings(slots_per_move=0)
