"""The inbox: what each call was answered, kept until its caller can't ask again.

One packed row per commit holds the outcomes recorded in it; the row is deleted when all of them are released, and the
few that stay behind are packed again. So the inbox is as large as what is in flight, and costs two rows per commit
however many calls it serves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgpack

from actors.address import slot_of
from actors.messages import is_keyed, outside_call_id
from actors.ranges import covers, merged
from drivers.store import Store
from drivers.tables import INBOX, Op
from drivers.write_set import InboxEntry

__all__ = ["Inbox", "outside_parts"]

#: A row is packed again when at most a quarter of it is left and this many commits have passed since.
_REPACK_AFTER_COMMITS = 64
_REPACK_BELOW = 4
#: Entries packed again with one commit, so that upkeep never makes a commit long.
_REPACK_ENTRIES = 256
#: Ids of nested calls that were released before their turn ended: kept while their frames can still arrive.
_RELEASED_MEMORY_MS = 60_000

_OUTSIDE_TAG = b"o"
#: Calls named by an idempotency key: their callers may come back in another process, so only age releases them.
_TAGS_KEPT_BY_AGE = (b"k",)
_SESSION_END = 17


def outside_parts(call_id: bytes) -> tuple[bytes, int] | None:
    """(session, seq) of an outside call id, or None for other ids."""
    if call_id[:1] != _OUTSIDE_TAG:
        return None
    return call_id[1:_SESSION_END], int.from_bytes(call_id[_SESSION_END:], "big")


def _nobody() -> None:
    return None


@dataclass
class _Session:
    """What one client session has not released, and the ranges of what it has."""

    entries: dict[int, InboxEntry] = field(default_factory=dict)
    released: list[int] = field(default_factory=list)
    gone_ms: int | None = None

    def release(self, low: int, high: int) -> None:
        released = self.released
        if released and low <= released[-1] + 1 and low >= released[-2]:  # the usual case: it grows at its end
            released[-1] = max(released[-1], high)
        else:
            self.released = merged([*released, low, high])

    def is_released(self, seq: int) -> bool:
        released = self.released
        return bool(released) and seq <= released[-1] and covers(released, seq)


@dataclass
class _Row:
    entries: dict[bytes, InboxEntry]
    total: int


class Inbox:
    """Recorded outcomes by call id. A `Rider` of the group commit: its rows travel with every group."""

    def __init__(self) -> None:
        self._sessions: dict[bytes, _Session] = {}
        self._others: dict[bytes, InboxEntry] = {}
        self._row_of: dict[bytes, int] = {}
        self._rows: OrderedDict[int, _Row] = OrderedDict()
        self._empty: list[int] = []
        self._riding: dict[int, tuple[list[InboxEntry], list[int]]] = {}
        self._released_inside: OrderedDict[bytes, int] = OrderedDict()
        self._keyed_since: dict[bytes, int] = {}
        #: of moving slots: they ride with the next commit, and again should that fail
        self._taken_in: list[InboxEntry] = []
        self._riding_in: dict[int, list[InboxEntry]] = {}
        #: told when outcomes are recorded, so that somebody looks after them
        self.on_entries: Callable[[], None] = _nobody

    def __len__(self) -> int:
        """Outcomes that are kept."""
        return len(self._row_of)

    def load(self, store: Store, now_ms: int) -> None:
        """Rebuild the table of ids from the durable rows."""
        for commit_seq, packed in store.scan(INBOX):
            entries = [InboxEntry.unpack(fields) for fields in msgpack.unpackb(packed)]
            self._keep(commit_seq, entries, now_ms)
        for session in self._sessions.values():
            session.gone_ms = now_ms  # nobody is connected yet
        for call_id in self._others:
            if is_keyed(call_id):
                self._keyed_since[call_id] = now_ms

    # --- looking up -----------------------------------------------------------------------------

    def look_up(self, call_id: bytes) -> tuple[InboxEntry | None, bool]:
        """(the recorded outcome or None, whether the caller has said that it will not ask for this call again)."""
        if call_id[:1] != _OUTSIDE_TAG:
            return self._others.get(call_id), call_id in self._released_inside
        session = self._sessions.get(call_id[1:_SESSION_END])
        if session is None:
            return None, False
        seq = int.from_bytes(call_id[_SESSION_END:], "big")
        return session.entries.get(seq), session.is_released(seq)

    # --- forgetting -----------------------------------------------------------------------------

    def acknowledge(self, session_id: bytes, low: int, high: int) -> None:
        """The session has the replies of calls `low` to `high`."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _Session()
        session.release(low, high)
        entries = session.entries
        if high - low < len(entries):
            seqs: Iterable[int] = (seq for seq in range(low, high + 1) if seq in entries)
        else:
            seqs = [seq for seq in entries if low <= seq <= high]
        for seq in list(seqs):
            self._forget(outside_call_id(session_id, seq))

    def acknowledge_one(self, call_id: bytes) -> None:
        """The same for a call that was first sent in another session. Calls named by a key are kept by age."""
        parts = outside_parts(call_id)
        if parts is not None:
            self.acknowledge(parts[0], parts[1], parts[1])

    def release(self, call_ids: Iterable[bytes], now_ms: int) -> None:
        """The outcome of the calling turn is durable: these nested calls are never repeated."""
        for call_id in call_ids:
            self._released_inside[call_id] = now_ms
            self._forget(call_id)

    def _forget(self, call_id: bytes) -> None:
        number = self._row_of.pop(call_id, None)
        parts = outside_parts(call_id)
        if parts is None:
            self._others.pop(call_id, None)
            self._keyed_since.pop(call_id, None)
        else:
            self._sessions[parts[0]].entries.pop(parts[1], None)
        if number is None:
            return
        row = self._rows[number]
        del row.entries[call_id]
        if not row.entries:
            del self._rows[number]
            self._empty.append(number)

    # --- moving -----------------------------------------------------------------------------------

    def entries_of(self, slots: Collection[int]) -> list[InboxEntry]:
        """The outcomes recorded for objects of these slots."""
        every = [row.entries.values() for row in self._rows.values()]
        return [entry for entries in every for entry in entries if slot_of(entry.class_name, entry.key) in slots]

    def take_in(self, entries: Iterable[InboxEntry]) -> None:
        """Outcomes that another partition has recorded: they become durable here with the next commit."""
        waiting = {entry.call_id for entry in self._taken_in}
        self._taken_in += [e for e in entries if e.call_id not in self._row_of and e.call_id not in waiting]

    def forget_slots(self, slots: Collection[int]) -> None:
        """The objects of these slots are elsewhere now, and so are their outcomes."""
        self._taken_in = [each for each in self._taken_in if slot_of(each.class_name, each.key) not in slots]
        for entry in self.entries_of(slots):
            self._forget(entry.call_id)

    # --- sessions and age -----------------------------------------------------------------------

    def connected(self, session_id: bytes) -> None:
        """A client of this session is connected: its replies are kept however old they get."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _Session()
        session.gone_ms = None

    def disconnected(self, session_id: bytes, now_ms: int) -> None:
        session = self._sessions.get(session_id)
        if session is not None:
            session.gone_ms = now_ms

    def sweep(self, now_ms: int, memory_ms: int) -> list[InboxEntry]:
        """Forget what vanished clients have left for `memory_ms`, and released ids that can't arrive any more.

        Returns the outcomes of nested calls, which are never forgotten by age: their callers must be asked.
        """
        gone = [
            session_id
            for session_id, session in self._sessions.items()
            if session.gone_ms is not None and now_ms - session.gone_ms >= memory_ms
        ]
        for session_id in gone:
            for seq in list(self._sessions[session_id].entries):
                self._forget(outside_call_id(session_id, seq))
            del self._sessions[session_id]
        for call_id in [c for c, since in self._keyed_since.items() if now_ms - since >= memory_ms]:
            self._forget(call_id)
        while self._released_inside:
            call_id, since = next(iter(self._released_inside.items()))
            if now_ms - since < _RELEASED_MEMORY_MS:
                break
            del self._released_inside[call_id]
        return [entry for entry in self._others.values() if entry.caller is not None]

    # --- riding along with commits --------------------------------------------------------------

    @property
    def needs_sweep(self) -> bool:
        """Whether anything is kept that a later sweep may forget."""
        return bool(
            self._row_of
            or self._empty
            or self._released_inside
            or any(s.gone_ms is not None for s in self._sessions.values())
        )

    @property
    def has_upkeep(self) -> bool:
        """Whether rows wait to be deleted by the next commit."""
        return bool(self._empty)

    def ride(self, commit_seq: int, entries: Sequence[InboxEntry]) -> Iterable[Op]:
        deleted, self._empty = self._empty, []
        taken_in, self._taken_in = self._taken_in, []
        packed = [*entries, *taken_in, *self._stragglers(commit_seq, deleted)]
        self._riding[commit_seq] = (packed, deleted)
        self._riding_in[commit_seq] = taken_in
        ops: list[Op] = [(INBOX, (number,), None) for number in deleted]
        if packed:
            self.on_entries()
            ops.append((INBOX, (commit_seq,), (msgpack.packb(packed),)))
        return ops

    def _stragglers(self, commit_seq: int, deleted: list[int]) -> list[InboxEntry]:
        """Entries of the oldest rows that hold little else than air; their rows are added to `deleted`."""
        found: list[InboxEntry] = []
        for number in list(self._rows):
            row = self._rows[number]
            if commit_seq - number < _REPACK_AFTER_COMMITS or len(found) + len(row.entries) > _REPACK_ENTRIES:
                break
            if len(row.entries) * _REPACK_BELOW > row.total:
                continue
            found.extend(row.entries.values())
            deleted.append(number)
        return found

    def landed(self, commit_seq: int, now_ms: int) -> None:
        entries, deleted = self._riding.pop(commit_seq, ([], []))
        self._riding_in.pop(commit_seq, None)
        for number in deleted:
            self._rows.pop(number, None)
        for entry in entries:
            if entry.call_id[:1] not in _TAGS_KEPT_BY_AGE:
                continue
            self._keyed_since.setdefault(entry.call_id, now_ms)
        self._keep(commit_seq, entries, now_ms)

    def lost(self, commit_seq: int) -> None:
        _, deleted = self._riding.pop(commit_seq, ([], []))
        self._taken_in[:0] = self._riding_in.pop(commit_seq, [])
        # rows that were to be packed again still hold their entries; empty ones wait for the next commit
        self._empty.extend(number for number in deleted if number not in self._rows)

    def _keep(self, commit_seq: int, entries: Sequence[InboxEntry], now_ms: int) -> None:
        """Remember the outcomes of one commit, but for those that were released on their way."""
        kept: dict[bytes, InboxEntry] = {}
        sessions = self._sessions
        for entry in entries:
            call_id = entry.call_id
            parts = outside_parts(call_id)
            if parts is None:
                if call_id in self._released_inside:
                    continue
                self._others[call_id] = entry
            else:
                session_id, seq = parts
                session = sessions.get(session_id)
                if session is None:
                    # of a client that is connected elsewhere (its slot has moved here): kept by age
                    session = sessions[session_id] = _Session(gone_ms=now_ms)
                elif session.is_released(seq):
                    continue
                session.entries[seq] = entry
            kept[call_id] = entry
            self._row_of[call_id] = commit_seq
        if kept:
            self._rows[commit_seq] = _Row(kept, len(entries))
        elif entries:
            self._empty.append(commit_seq)
