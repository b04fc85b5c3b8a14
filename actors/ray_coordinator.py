"""The coordinator behind Ray calls, as partitions see it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.channel import Endpoint
from actors.coordinator import OpeningFacts, Verdict
from actors.coordinator_store import ClassDefinition
from actors.ray_calls import COORDINATOR, RayCalls

__all__ = ["COORDINATOR_TIMEOUT_S", "RayCoordinator"]

#: How long the coordinator may take to answer before a partition goes on without it.
COORDINATOR_TIMEOUT_S = 3.0
#: How long a class may be on its way from the process that uses it to the coordinator.
_CLASS_WAIT_MS = 2_000


class RayCoordinator:
    """The coordinator behind Ray calls, for partitions. See `CoordinatorPort`."""

    def __init__(self, calls: RayCalls) -> None:
        self._calls = calls

    async def opening_facts(self, partition: int) -> OpeningFacts:
        facts: OpeningFacts = await self._ask("opening_facts", partition)
        return facts

    async def initialised(self, partition: int) -> None:
        await self._ask("initialised", partition)

    async def announce(
        self, partition: int, epoch: int, endpoint: Endpoint, commit_seq: int, slots: Sequence[tuple[int, int]]
    ) -> Verdict:
        verdict: Verdict = await self._ask("announce", partition, epoch, endpoint, commit_seq, list(slots))
        return verdict

    async def report(self, partition: int, epoch: int, commit_seq: int) -> Verdict:
        verdict: Verdict = await self._ask("report", partition, epoch, commit_seq)
        return verdict

    async def settle_moves(self, partition: int, moves: dict[str, tuple[str, int]]) -> None:
        await self._ask("settle_moves", partition, moves)

    async def class_definition(self, type_name: str) -> ClassDefinition | None:
        definition: ClassDefinition | None = await self._ask("class_definition", type_name, _CLASS_WAIT_MS)
        return definition

    async def _ask(self, method: str, *args: Any) -> Any:
        return await self._calls.call_async(COORDINATOR, method, *args, timeout_s=COORDINATOR_TIMEOUT_S)
