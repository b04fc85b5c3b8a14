"""What the timer engine has in hand when a slot is frozen changes nothing of it: its rows are being copied."""

from __future__ import annotations

from typing import Any

from actors.address import slot_of
from actors.testing import LocalRuntime
from drivers.tables import DELAYED, OUTBOX
from drivers.timer_store import CommittingTimerStore, read_timer
from tests.support.mail import Box, Post, until_delivered
from timers.batch import Batch, Outcome
from timers.firing import DueTimer, PartitionName, PartitionRole, TimerCtx
from timers.plan import ending
from timers.rows import TimerRow, slot_owner


async def test_a_delayed_message_that_comes_due_while_its_slot_is_frozen_is_not_lost_between_two_chunks() -> None:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        await runtime.namespace(Post).get("a").send_after("b", "late", "1h")
        slot = slot_of("Post", "a")
        source = runtime.moves.partition_of(slot)
        partition = runtime.partitions[source]
        assert partition is not None
        store = CommittingTimerStore(partition.store, partition.committer, partition.gate)
        batch = await _departure(
            partition, store
        )  # a tick has decided that it departs, and is held up before it writes
        await partition.departures.send("m1", [slot], 1 - source, patience_ms=1_000, cut_short=False)
        assert await store.apply([batch]) == [Outcome.PRECONDITION_FAILED]
        assert len(partition.store.scan(DELAYED)) == 1
        assert partition.store.scan(OUTBOX) == []
        await partition.departures.call_off("m1")
        await runtime.advance(seconds=3_601)
        await until_delivered(runtime)
        assert await runtime.namespace(Box).get("b").values() == ["late"]


async def _departure(partition: Any, store: CommittingTimerStore) -> Batch:
    (columns,) = partition.store.engine_timers(slot_owner(slot_of("Post", "a")))
    row = read_timer(columns)
    assert isinstance(row, TimerRow)
    ctx = TimerCtx(store, PartitionName(PartitionRole.PARTITION, 0), row.due_ms)
    handler = partition.registry.get(row.kind)
    due = DueTimer(row.first_due_ms, row.kind, row.ref, row.payload, row.generation, row.attempt)
    batch = ending(row, await handler.fire(ctx, due))
    assert batch is not None
    return batch
