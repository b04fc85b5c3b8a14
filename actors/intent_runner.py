"""Runs again, before any other turn of its object, what had called out or synced when the process died."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from actors.address import ObjectId, slot_of
from actors.durable_object import ClassInfo
from actors.logs import log_event
from actors.object_host import ObjectHost
from actors.recovery import Intent
from actors.timer_dispatcher import CLASS_RETRY_MS
from actors.timer_work import TimerWork
from actors.work import CallWork
from drivers.tables import INTENTS

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["IntentRunner"]


class IntentRunner:
    """Turns recovered intents into turns."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def run(self, intent: Intent) -> None:
        """Run again, before any other turn of the object, what had called out when the process died."""
        info = self._partition.classes.get(intent.class_name)
        if info is None:
            self._partition.classes.when_loaded(intent.class_name, partial(self.run, intent))
            return
        object_id = ObjectId(intent.class_name, intent.key, slot_of(intent.class_name, intent.key))
        if not isinstance(info, ClassInfo):
            log_event(logging.ERROR, "intent_waits", f"a turn of {object_id} can't be run again: {info}")
            self._partition.clock.call_later(CLASS_RETRY_MS, partial(self._retry, intent))
            return
        host = self._partition.host(info, object_id)
        if intent.fields[0] == "timer":
            self._run_timer(host, intent)
            return
        _, method_name, args, flags, now_ms, attempt, chain, caller, answers = intent.fields
        work = CallWork(host, info.method_or_refusal(method_name), intent.turn_id, args, flags)
        work.chain = tuple((name, key) for name, key in chain)
        work.made_by(tuple(caller) if caller else None)
        work.attempt, work.began_ms, work.resumed, work.answers = attempt + 1, now_ms, True, answers
        self._partition.admission.adopt(work)
        host.recovering = True
        self._partition.careful.suspect(work, host.expect(partial(host.resume, work)))

    def _retry(self, intent: Intent) -> None:
        self._partition.classes.forget_failure(intent.class_name)
        self.run(intent)

    def _run_timer(self, host: ObjectHost, intent: Intent) -> None:
        _, name, generation, now_ms, attempt, answers = intent.fields
        row = host.directory().get(name)
        if row is None or row.generation != generation:
            self._partition.persist([(INTENTS, (intent.class_name, intent.key), None)])
            return
        work = TimerWork(host, row)
        work.attempt, work.began_ms, work.resumed, work.answers = attempt + 1, now_ms, True, answers
        host.recovering = True
        self._partition.dispatcher.adopt(work)
        self._partition.careful.suspect(work, host.expect(partial(host.resume, work)))
