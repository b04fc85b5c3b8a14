"""The timer kinds that a partition's own engine serves, and what each of them is given to reach beyond its rows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from actors.logs import log_event
from actors.message_sources import MessageSources
from timers.errors import CorruptRow
from timers.firing import DueTimer
from timers.inbox_sweep import InboxSweepHandler
from timers.outbox_relay import OutboxRelayHandler
from timers.outcome_delivery import OutcomeDelivery
from timers.publication_notice import PublicationNotice
from timers.publication_recheck import PublicationRecheck
from timers.quota_rollup import QuotaRollup
from timers.registry import TimerHandler, TimerKind
from timers.reservation_reconcile import ReservationReconcile
from timers.ticket_expiry import TicketExpiry

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["REMOTE_KINDS", "engine_handlers"]

#: Kinds whose handlers wait for others (a sink, the coordinator, another partition): each has ticks of its own.
REMOTE_KINDS: Final = frozenset(
    {
        TimerKind.OUTCOME_DELIVERY,
        TimerKind.QUOTA_ROLLUP,
        TimerKind.PUBLICATION_RECHECK,
        TimerKind.PUBLICATION_NOTICE,
        TimerKind.INBOX_SWEEP,
    }
)


def engine_handlers(partition: Partition) -> list[TimerHandler]:
    """The handlers of this partition's tick."""
    memory_ms = partition.settings.reservation_memory_ms
    return [
        QuotaRollup(partition.coordinator, partition.settings.quota_rollup_ms),
        OutcomeDelivery(
            partition.deliveries,
            partition.deliveries,
            monotonic_ms=lambda: partition.clock.monotonic_ns() // 1_000_000,
        ),
        OutboxRelayHandler(partition.numbers),
        InboxSweepHandler(MessageSources(partition)),
        TicketExpiry(memory_ms, _warn),
        ReservationReconcile(memory_ms),
        PublicationRecheck(partition.publications),
        PublicationNotice(partition.publications),
    ]


def _warn(timer: DueTimer, error: CorruptRow) -> None:
    text = f"a timer of kind {TimerKind(timer.kind).name} met rows that make no sense, and tries again: {error}"
    log_event(logging.WARNING, "corrupt_row", text, kind=timer.kind, reference=timer.reference.hex())
