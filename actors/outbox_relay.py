"""The relay: carries messages from a partition's outbox to their receivers.

It holds in memory which messages wait, per pair of objects, and sends them as calls of the partition's own client. It
learns of messages when their write set is durable, and reads the table when it opens. What it decides about a pair is
in `timers.message_pair`; what an outcome changes on disk is gathered and written together, once per loop turn.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections import Counter, deque
from collections.abc import Collection, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from actors.address import ClassRef
from actors.errors import MainspringError, RuntimeNotStarted
from actors.logs import log_event
from actors.message_ids import MessageMark, message_call_id
from actors.message_outcomes import NOWHERE, Outcome, Verdict, after_raise, buried_op, judge
from actors.outbox_change import Change, Kind
from actors.outbox_loader import OutboxLoader
from actors.outbox_pair import Pair
from drivers.tables import OUTBOX, Op
from drivers.write_set import WriteSet
from timers.message_rows import OutboxRow

if TYPE_CHECKING:
    from actors.partition import Partition

__all__ = ["OutboxRelay"]

#: Messages sent in one step of the loop; one takes about 50 us.
_STEP_MESSAGES: Final = 64
#: Numbers that a pair has in memory; the others of a long queue are read again when it has become short.
_PAIR_NUMBERS: Final = 1_024
_PAIR_LOW: Final = 64
#: Pairs that `status` looks at: one read each.
_STATUS_PAIRS: Final = 1_000
#: What could not be written (a full disk) is written again after this.
_SAVE_RETRY_MS: Final = 1_000


class OutboxRelay:
    """Lives on the partition's loop. `busy` while anything moves; what waits for a time or a retry does not."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._pairs: dict[bytes, Pair] = {}
        self._loader = OutboxLoader(partition.store, self._take)
        #: pairs that may send, by the partition of their receiver: one that does not answer holds up nobody else
        self._ready: dict[int, deque[Pair]] = {}
        self._in_flight: Counter[int] = Counter()
        self._changes: list[Change] = []
        self._saving = 0
        self._step_scheduled = False
        self._context = contextvars.Context()  # steps belong to no turn, whoever caused them
        self._stopped = False
        #: slots whose messages are sent from here
        self._slots: set[int] = set()
        #: messages in their outbox
        self.count = 0

    # --- what the partition says and asks ---------------------------------------------------------

    def start(self) -> None:
        """Begin with what is in the table."""
        self._slots = set(self._partition.slot_table.owned)
        for slot in self._loader.find_slots():
            if slot in self._slots:
                self.count += self._partition.store.count(OUTBOX, (slot,))
                self._loader.want(slot)
        self._step_soon()

    def slots_arrived(self, slots: Collection[int]) -> None:
        """These slots run here: they came, or their move was called off."""
        for slot in slots:
            if slot not in self._slots:
                self._slots.add(slot)
                self.count += self._partition.store.count(OUTBOX, (slot,))
            self._loader.want(slot)
        for pair in [pair for pair in self._pairs.values() if pair.slot in slots]:
            self._look(pair)
        self._step_soon()

    def slots_left(self, slots: Collection[int]) -> None:
        """From now on these slots send nothing here, and nothing of their outbox is changed here."""
        for slot in slots:
            self._slots.discard(slot)
            self.count -= self._partition.store.count(OUTBOX, (slot,))
            self._loader.forget(slot)
        for pair in [pair for pair in self._pairs.values() if pair.slot in slots]:
            self._forget(pair)
        self._partition.numbers.forget(slots)

    def stop(self) -> None:
        """Send nothing more. What was applied is still removed."""
        self._stopped = True

    def messages_left(self, rows: Sequence[OutboxRow]) -> None:
        """These messages are durable."""
        for row in rows:
            if row.slot not in self._slots:
                continue
            self.count += 1
            # while the slot is being read, the pass over it will meet the message in its place
            if self._loader.is_complete(row.slot) and not self._take(row):
                self._loader.want(row.slot, row.number - 1)
        self._step_soon()

    @property
    def busy(self) -> bool:
        """Whether anything is under way, may be sent now, or is on its way to disk."""
        return not self._stopped and bool(
            self._step_scheduled
            or self._changes
            or self._saving
            or self._loader.has_work
            or self._in_flight.total()
            or any(self._ready.values())
        )

    def is_unfinished(self, slot: int, mark: MessageMark) -> bool:
        """Whether this try of a message may still be sent again."""
        values = self._partition.store.get(OUTBOX, (slot, mark.number))
        return values is not None and OutboxRow.from_columns((slot, mark.number), values).attempt == mark.attempt

    def anything_left(self, slot: int, pair: bytes) -> bool:
        """Whether there are messages of the pair, as far as is known here."""
        return pair in self._pairs or not self._loader.is_complete(slot)

    def status(self) -> dict[str, Any]:
        """Counts, and the age of the oldest message among the pairs that have waited longest."""
        store = self._partition.store
        oldest = islice(self._pairs.values(), _STATUS_PAIRS)  # in the order in which they came
        heads = ((pair.slot, pair.queue.head) for pair in oldest if pair.queue)
        rows = (OutboxRow.from_columns(key, values) for key in heads if (values := store.get(OUTBOX, key)) is not None)
        oldest_ms = min((row.created_ms for row in rows), default=None)
        return {
            "outbox": self.count,
            "outbox_pairs": len(self._pairs),
            "outbox_in_flight": self._in_flight.total(),
            "outbox_oldest_age_ms": None if oldest_ms is None else self._partition.clock.wall_ms() - oldest_ms,
        }

    # --- what waits -------------------------------------------------------------------------------

    def _take(self, row: OutboxRow) -> bool:
        """Note a message; False when there is no room for its pair."""
        pair = self._pairs.get(row.pair)
        if pair is None:
            if len(self._pairs) >= self._partition.settings.max_outbox_pairs:
                return False
            pair = self._pairs[row.pair] = Pair(row, self._partition.settings.message_page)
        if row.number <= pair.queue.tail or pair.truncated:
            return True  # known, or read again later
        if len(pair.queue) >= _PAIR_NUMBERS:
            pair.truncated = True
            return True
        pair.queue.append(row.number)
        self._look(pair)
        return True

    def _look(self, pair: Pair) -> None:
        """Let the pair send if it may."""
        if not self._is_known(pair):
            return
        if pair.truncated and len(pair.queue) < _PAIR_LOW:
            pair.truncated = False
            self._loader.want(pair.slot, pair.queue.tail)
            self._step_soon()
        if pair.is_done:
            self._forget(pair)
            return
        now_ms = self._partition.clock.wall_ms()
        if not self._partition.starts_timers(pair.slot):
            return  # about to leave: looked at again if it stays
        if not pair.is_ready and pair.queue.peek(now_ms) is not None:
            pair.is_ready = True
            pair.partition = self._partition.client.directory.partition_of(pair.target_slot)
            self._ready.setdefault(pair.partition, deque()).append(pair)
            self._step_soon()

    def _is_known(self, pair: Pair) -> bool:
        """Whether the pair is still this relay's; its slot may have left, and come back."""
        return self._pairs.get(pair.id) is pair

    def _forget(self, pair: Pair) -> None:
        del self._pairs[pair.id]
        self._sleep_on(pair)
        self._loader.has_room()
        if self._loader.has_work:
            self._step_soon()

    def _wait(self, pair: Pair, due_ms: int) -> None:
        """Look at the pair again at an instant."""
        self._sleep_on(pair)
        pair.wake = self._partition.clock.call_at(due_ms, partial(self._awake, pair))

    def _wake_after(self, pair: Pair, delay_ms: int) -> None:
        """Look at the pair again after a pause."""
        self._sleep_on(pair)
        pair.wake = self._partition.clock.call_later(delay_ms, partial(self._awake, pair))

    @staticmethod
    def _sleep_on(pair: Pair) -> None:
        if pair.wake is not None:
            pair.wake.cancel()

    def _awake(self, pair: Pair) -> None:
        pair.wake = None
        pair.queue.wait_until(0)  # a message's own instant is looked at again before it is sent
        if not self._stopped:
            self._look(pair)

    # --- one step of the loop ---------------------------------------------------------------------

    def _step_soon(self) -> None:
        if not self._step_scheduled and not self._partition.stopped:
            self._step_scheduled = True
            self._partition.loop.call_soon(self._step, context=self._context)

    def _step(self) -> None:
        self._step_scheduled = False
        if self._partition.stopped:
            return
        self._save()
        if self._stopped:
            return
        if self._loader.has_work:
            self._loader.read_page()
        left = _STEP_MESSAGES
        for number in list(self._ready):
            ready = self._ready.pop(number)  # to the end: whoever was served last in this step is last in the next
            self._ready[number] = ready
            while ready and left and self._has_room(number):
                pair = ready.popleft()
                pair.is_ready = False
                left -= self._send_some(pair, left)
            if not left:
                break
        if self._loader.has_work or any(ready and self._has_room(number) for number, ready in self._ready.items()):
            self._step_soon()

    def _has_room(self, number: int) -> bool:
        return self._in_flight[number] < self._partition.settings.max_messages_in_flight

    def _send_some(self, pair: Pair, most: int) -> int:
        """Send what the pair may send now; how many that were. It stands in line again for the rest."""
        now_ms = self._partition.clock.wall_ms()
        sent = 0
        while sent < most and self._has_room(pair.partition) and self._may_send(pair):
            number = pair.queue.peek(now_ms)
            if number is None:
                break
            row = self._row(pair.slot, number)
            if row.next_ms > now_ms:
                pair.queue.wait_until(row.next_ms)
                self._wait(pair, row.next_ms)
                break
            self._send(pair, row)
            sent += 1
        self._look(pair)
        return sent

    def _may_send(self, pair: Pair) -> bool:
        return self._is_known(pair) and self._partition.starts_timers(pair.slot)

    def _row(self, slot: int, number: int) -> OutboxRow:
        values = self._partition.store.get(OUTBOX, (slot, number))
        assert values is not None, "only the relay removes rows of the outbox"
        return OutboxRow.from_columns((slot, number), values)

    def _send(self, pair: Pair, row: OutboxRow) -> None:
        mark = MessageMark(row.number, row.attempt, pair.queue.sent())
        self._in_flight[pair.partition] += 1
        client = self._partition.client
        try:
            future: asyncio.Future[Any] = client.submit(
                self._ref(row.target_class),
                row.target_key,
                row.method,
                row.args,
                timeout_ms=self._partition.settings.call_memory_ms,  # the client cuts it to what it may be
                call_id=message_call_id(pair.id, row.number, row.attempt),
                caller=(row.source_class, row.source_key, mark.to_bytes()),
                slot=pair.target_slot,
            )
        except RuntimeNotStarted:  # the partition is closing: nothing was sent
            self._stopped = True
            return
        except MainspringError as error:
            future = self._partition.loop.create_future()
            future.set_exception(error)
        future.add_done_callback(partial(self._answered, pair, row, pair.partition), context=self._context)

    def _ref(self, type_name: str) -> ClassRef:
        """Where the class is; without a place for one that nobody here knows, which its own partition may know."""
        return self._partition.classes.ref(type_name) or ClassRef(type_name, "", "")

    # --- answers ----------------------------------------------------------------------------------

    def _answered(self, pair: Pair, row: OutboxRow, number: int, future: asyncio.Future[Any]) -> None:
        self._in_flight[number] -= 1
        outcome = judge(future)
        if self._partition.stopped or not self._is_known(pair):
            return
        if outcome.verdict is Verdict.APPLIED:
            pair.queue.applied(row.number)
            pair.undeleted += 1
            ops: list[Op] = [(OUTBOX, row.key(), None)]
            self._change(Change(pair, row, Kind.REMOVED, ops, outcome.answered_by))
        elif outcome.verdict is Verdict.OUT_OF_ORDER:
            pair.queue.out_of_order()
        elif outcome.verdict is Verdict.NOT_RUN:
            now_ms = self._partition.clock.wall_ms()
            # a pause, not an instant: the wall clock may be set back meanwhile
            self._wake_after(pair, pair.queue.not_run(now_ms) - now_ms)
            log_event(logging.DEBUG, "message_waits", f"{row.title}: {outcome.error}", number=row.number)
        else:
            pair.queue.raised()
            self._failed(pair, row, outcome)
        self._look(pair)
        self._step_soon()

    def _failed(self, pair: Pair, row: OutboxRow, outcome: Outcome) -> None:
        """Its run raised: the next try, or the dead letters."""
        partition = self._partition
        source = f"{row.source_class}/{row.source_key}"
        log_event(logging.INFO, "message_failed", f"{source}: {row.title}: {outcome.error}", attempt=row.attempt)
        now_ms = partition.clock.wall_ms()
        again = after_raise(row, now_ms) if outcome.verdict is Verdict.RAISED else None
        if again is not None:
            ops: list[Op] = [(OUTBOX, again.key(), again.values())]
            self._change(Change(pair, row, Kind.RETRIED, ops, outcome.answered_by, again.next_ms))
            return
        poisoned = outcome.verdict is Verdict.POISONED
        attempts, crashes = (row.attempt, partition.settings.crash_limit) if poisoned else (row.attempt + 1, 0)
        letter = buried_op(partition.counters.take_id(), row, outcome.text, now_ms, attempts, crashes)
        ops = [(OUTBOX, row.key(), None), letter]
        self._change(Change(pair, row, Kind.BURIED, ops, outcome.answered_by))

    # --- writing ----------------------------------------------------------------------------------

    def _change(self, change: Change) -> None:
        self._changes.append(change)
        self._step_soon()

    def _save(self) -> None:
        """Write what the outcomes of this loop turn have changed, in one write set."""
        changes, self._changes = [each for each in self._changes if self._is_known(each.pair)], []
        if not changes:
            return
        write_set = WriteSet([op for change in changes for op in change.ops])
        write_set.waiters.append(partial(self._saved, changes))
        self._saving += 1
        self._partition.submit(write_set)

    def _saved(self, changes: list[Change], error: BaseException | None) -> None:
        self._saving -= 1
        if error is not None:
            log_event(logging.WARNING, "outbox_not_saved", f"outcomes of messages are written again: {error}")
            self._partition.clock.call_later(_SAVE_RETRY_MS, partial(self._save_again, changes))
            return
        released: dict[int, list[bytes]] = {}
        for change in changes:
            if change.answered_by != NOWHERE:
                call_id = message_call_id(change.pair.id, change.row.number, change.row.attempt)
                released.setdefault(change.answered_by, []).append(call_id)
            self._durable(change)
        for number, call_ids in released.items():
            self._partition.client.release(number, call_ids)
        self._step_soon()

    def _save_again(self, changes: list[Change]) -> None:
        self._changes += changes
        self._step_soon()

    def _durable(self, change: Change) -> None:
        pair, row, partition = change.pair, change.row, self._partition
        if not self._is_known(pair):
            return  # it was durable before its slot left
        if change.kind is Kind.RETRIED:
            partition.retries += 1
            pair.queue.retried(change.next_ms)
            self._wait(pair, change.next_ms)
        else:
            self.count -= 1
            sender = partition.find_host(row.source_class, row.source_key)
            if sender is not None:
                sender.state.message_ended()
            if change.kind is Kind.REMOVED:
                pair.undeleted -= 1
            else:
                partition.dead_letters += 1
                pair.queue.buried(row.number)
        if not self._stopped:
            self._look(pair)
