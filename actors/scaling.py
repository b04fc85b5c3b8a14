"""Changing the number of partitions while everything goes on: new actors first, then the slots, then the old actors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.address import SLOTS
from actors.errors import InvalidOption, ScaleSuperseded, ScaleTimeout
from actors.launch import assign_disks, end_actor, placement_of, start_partitions, stop_partition
from actors.ray_calls import COORDINATOR, ActorUnreachable, RayCalls, partition_actor
from actors.ray_directory import Transport

__all__ = ["ScaleProgress", "Scaling"]

#: How often the coordinator is asked how far it is.
_POLL_S = 0.2
_ASK_TIMEOUT_S = 5.0
#: How long a new actor may take to serve before it is looked whether it is there at all.
_BEGIN_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class ScaleProgress:
    """How far a change of the number of partitions is. `put_off` counts moves that are tried again."""

    slots_wanted: int
    slots_moved: int
    put_off: int
    bytes_sent: int
    last_error: str


class Scaling:
    """One change of a runtime's partitions. Every step may be repeated: a change that was cut short goes on when it is
    asked for again."""

    def __init__(
        self,
        calls: RayCalls,
        runtime: str,
        transport: Transport,
        *,
        timeout_s: float,
        progress: Callable[[ScaleProgress], None] | None = None,
    ) -> None:
        self._calls = calls
        self._runtime = runtime
        self._transport = transport
        self._progress = progress
        self._deadline = time.monotonic() + timeout_s

    def to(self, partitions: int) -> tuple[int, ...]:
        """Have so many partitions; the numbers of those there are then. Raises `InvalidOption`, `ScaleTimeout`,
        `ScaleSuperseded`."""
        if isinstance(partitions, bool) or not isinstance(partitions, int) or not 1 <= partitions <= SLOTS:
            raise InvalidOption(f"partitions = {partitions!r}: a runtime has 1 to {SLOTS} partitions")
        present = set(self._ask("describe").partitions)
        goal = sorted(present)[:partitions]
        goal += [number for number in range(SLOTS) if number not in present][: partitions - len(goal)]
        for number in sorted(set(goal) - present):
            self._ask("add_partition", number)
        self._start(goal)
        self._spread(goal)
        for number in sorted(present - set(goal), reverse=True):
            self._end(number)
        return tuple(sorted(goal))

    def away_from(self, node: str) -> tuple[int, ...]:
        """Move every slot away from the partitions of a node; the partitions that have them then.

        Raises `InvalidOption` when no partition is elsewhere, or none there, `ScaleTimeout` and `ScaleSuperseded`.
        """
        records = self._ask("status").partitions
        goal = sorted(record.partition for record in records if record.node != node)
        if not goal or len(goal) == len(records):
            nodes = ", ".join(sorted({record.node for record in records}))
            raise InvalidOption(f"slots can't leave node {node!r}: the partitions are on {nodes}")
        self._spread(goal)
        return tuple(goal)

    def roll(self, runtime_env: Mapping[str, Any] | None = None) -> None:
        """Start every partition's process again, one after the other, each once the one before it serves again; with
        another environment, when one is given.

        Raises `ScaleTimeout`.
        """
        if runtime_env is not None:
            self._ask("deploy_environment", runtime_env)
        for number in sorted(self._ask("describe").partitions):
            if runtime_env is not None:
                self._exchange(number)
                continue
            epoch = self._epoch(number)
            while self._epoch(number) == epoch:  # it waits while the process is being exchanged
                self._reach(number, "restart", epoch)
                self._pause(f"partition {number} comes to rest")

    def _exchange(self, number: int) -> None:
        """Put a new actor in the place of a partition's: Ray starts an actor again only as it was made."""
        self._reach(number, "leave")
        end_actor(self._calls, partition_actor(number))
        self._make([number])
        self._reach(number, "endpoint", timeout_s=_BEGIN_TIMEOUT_S)

    def _epoch(self, number: int) -> int:
        """The epoch that the partition serves in, once it does."""
        return int(self._reach(number, "endpoint").epoch)

    def _start(self, goal: list[int]) -> None:
        """Have an actor for each partition of the goal, also where an earlier change ended before it had made one."""
        placement = placement_of(self._ask("describe"))
        self._insist(lambda: assign_disks(self._calls, self._ask("describe"), placement))
        self._make(goal)
        for number in goal:
            self._reach(number, "endpoint")

    def _make(self, numbers: list[int]) -> None:
        """Make actors for those of these partitions that have none. Not waited for."""
        description = self._ask("describe")
        placement = placement_of(description)
        start_partitions(self._calls, self._runtime, description, self._transport, placement, numbers)

    def _spread(self, goal: list[int]) -> None:
        self._ask("spread", goal)
        while True:
            told: dict[str, Any] = self._ask("move_progress")
            self._report(told)
            if told["goal"] not in (None, sorted(goal)):
                raise ScaleSuperseded(
                    f"the slots of runtime {self._runtime!r} were to go to partitions {sorted(goal)}; somebody else "
                    f"has sent them to {told['goal']} meanwhile, and the newest wish counts. Look at `status`, and "
                    "ask again if this one still holds."
                )
            if told["goal"] == sorted(goal) and not told["running"] and told["error"] is None:
                return
            if not told["running"]:  # a coordinator that was restarted meanwhile, or one that met an error
                self._ask("spread", goal)
            self._pause(str(told["last_error"]))

    def _end(self, number: int) -> None:
        """Stop a partition that owns nothing any more, once what its objects still had to deliver has gone out."""
        while left := self._reach(number, "leftovers", timeout_s=_ASK_TIMEOUT_S):
            self._pause(f"partition {number} still has {left}")
        stop_partition(self._calls, number)
        self._ask("remove_partition", number)

    # --- waiting ------------------------------------------------------------------------------------

    def _ask(self, method: str, *args: Any) -> Any:
        return self._insist(lambda: self._calls.call(COORDINATOR, method, *args, timeout_s=_ASK_TIMEOUT_S))

    def _reach(self, number: int, method: str, *args: Any, timeout_s: float = math.inf) -> Any:
        """Ask a partition until it answers, each time for `timeout_s` at most. One without an actor gets one: a change
        that was cut short may have ended the actor and not have come to what follows."""

        def ask() -> Any:
            limit_s = min(timeout_s, self._left_s())
            try:
                return self._calls.call(partition_actor(number), method, *args, timeout_s=limit_s)
            except ActorUnreachable:
                self._make([number])  # also while the name of an actor that was just ended is still taken
                raise

        return self._insist(ask)

    def _insist(self, step: Callable[[], Any]) -> Any:
        while True:
            try:
                return step()
            except ActorUnreachable as error:
                self._pause(str(error))

    def _left_s(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    def _pause(self, why: str) -> None:
        if time.monotonic() >= self._deadline:
            raise ScaleTimeout(
                f"the partitions of runtime {self._runtime!r} were not changed in time ({why or 'slots still move'}). "
                "What was begun goes on; ask for the same number again to wait for it."
            )
        time.sleep(_POLL_S)

    def _report(self, told: dict[str, Any]) -> None:
        if self._progress is not None:
            self._progress(
                ScaleProgress(told["wanted"], told["moved"], told["put_off"], told["bytes_sent"], told["last_error"])
            )
