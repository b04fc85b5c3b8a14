"""What a partition says of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivers.tables import OBJECTS, TABLES

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["leftovers_of", "status_of"]


def status_of(partition: Partition) -> dict[str, Any]:
    """What the partition is doing, as plain data."""
    next_due_ms = partition.store.next_due_ms()
    return {
        "partition": partition.config.partition,
        "epoch": partition.epoch,
        "commit_seq": partition.commit_seq,
        "slots": len(partition.slot_table.owned),
        "active_objects": partition.active_objects,
        "held_calls": partition.admission.held,
        "calls": partition.admission.calls,
        "repeats": partition.admission.repeats,
        "turns": partition.turns,
        "commits": partition.committer.commits,
        "write_sets": partition.committer.units,
        "fires": partition.fires,
        "retries": partition.retries,
        "dead_letters": partition.dead_letters,
        "activations": partition.activations,
        "resets": partition.resets,
        "timer_turns": partition.dispatcher.in_flight,
        "next_due_ms": next_due_ms,
        "oldest_due_ms": 0 if next_due_ms is None else max(0, partition.clock.wall_ms() - next_due_ms),
        **partition.tick_status(),
        "inbox": len(partition.inbox),
        "connections": partition.connections,
        "careful": partition.careful.active,
        "sleeps_rescued": partition.sleeps.woken,
        **partition.metrics.summary(),
        **partition.deliveries.status(),
        **partition.relay.status(),
    }


def leftovers_of(partition: Partition) -> str:
    """What is here although the partition may own no slot any more, for people; empty when it can be ended."""
    left = [f"{len(partition.slot_table.owned)} slots"] if partition.slot_table.owned else []
    left += ["moves that have not ended"] if partition.moves else []
    kept = (spec.name for spec in TABLES.values() if spec.per_object or spec.per_slot or spec.name == OBJECTS)
    left += [f"rows of {name}" for name in kept if partition.store.scan(name, limit=1)]
    return ", ".join(left)
