"""The tables of a partition, as data: stores, write sets and migrations all speak of these."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

__all__ = [
    "BACKLOGS",
    "CLAIMS",
    "CLASSES",
    "CLEAR",
    "DEAD_LETTERS",
    "DELAYED",
    "DELIVERED",
    "DIRECTORY",
    "EXECUTIONS",
    "INBOX",
    "INTENTS",
    "JOURNAL",
    "KV",
    "LEASES",
    "LEASE_GUARDS",
    "OBJECTS",
    "OUTBOX",
    "OUTCOMES",
    "PUBLICATION_ADVANCES",
    "PUBLICATION_ITEMS",
    "PUBLICATION_LINES",
    "PUBLICATION_STATES",
    "QUOTA_COUNTERS",
    "QUOTA_SOURCES",
    "QUOTA_TOTALS",
    "QUOTA_VIEWS",
    "RECEIVED",
    "RESERVATIONS",
    "SLOTS",
    "SLOT_NUMBERS",
    "TABLES",
    "TALLIES",
    "TICKETS",
    "TICKET_NAMES",
    "TIMERS",
    "VERSIONS",
    "Clear",
    "Key",
    "Op",
    "TableSpec",
    "TurnRule",
    "Values",
]

Key = tuple[Any, ...]
Values = tuple[Any, ...]


class Clear:
    """Marks an operation that removes every row whose key starts with the operation's key."""

    _instance: Clear | None = None

    def __new__(cls) -> Clear:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "CLEAR"


CLEAR = Clear()

#: (table, key, values): values put the row, None deletes it, CLEAR deletes all rows with that key prefix.
Op = tuple[str, Key, "Values | Clear | None"]


class TurnRule(enum.IntEnum):
    """When the engine may change rows of an object that its turns use too. The larger one holds for a whole batch."""

    #: at any time: turns add such rows, and decide nothing by them
    BESIDE_TURNS = 0
    #: between two turns, but no turn waits for it
    BETWEEN_TURNS = 1
    #: between two turns, and before the next one if a turn was in the way
    ENGINE_FIRST = 2


@dataclass(frozen=True)
class TableSpec:
    """Name and columns of one table, key columns first, in schema order.

    `per_object`: rows of the runtime's own that belong to one object; their key begins with its `oid`, and `delete`
    removes them with it. `outlives_object`: not these, since others still wait for them. `turns` says how the engine
    changes such rows beside the turns of the object: see `TurnRule`. `per_slot`: rows whose key begins with a slot,
    and that move with it.
    """

    name: str
    key: tuple[str, ...]
    values: tuple[str, ...]
    per_object: bool = False
    outlives_object: bool = False
    turns: TurnRule = TurnRule.ENGINE_FIRST
    per_slot: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return self.key + self.values


OBJECTS = "objects"
KV = "kv"
DIRECTORY = "directory"
TIMERS = "timers"
INBOX = "inbox"
INTENTS = "intents"
CLAIMS = "claims"
DEAD_LETTERS = "dead_letters"
SLOTS = "slots"
CLASSES = "classes"
OUTCOMES = "outcomes"
BACKLOGS = "backlogs"
EXECUTIONS = "executions"
JOURNAL = "journal"
VERSIONS = "versions"
DELIVERED = "delivered"
TALLIES = "tallies"
TICKETS = "tickets"
TICKET_NAMES = "ticket_names"
RESERVATIONS = "reservations"
OUTBOX = "outbox"
DELAYED = "delayed"
SLOT_NUMBERS = "slot_numbers"
RECEIVED = "received"

_MESSAGE = ("source_class", "source_key", "class", "key", "method", "args", "retry")
LEASES = "leases"
LEASE_GUARDS = "lease_guards"
QUOTA_COUNTERS = "quota_counters"
QUOTA_VIEWS = "quota_views"
QUOTA_TOTALS = "quota_totals"
QUOTA_SOURCES = "quota_sources"

_WINDOW = ("name", "window_ms", "window_number")
PUBLICATION_LINES = "publication_lines"
PUBLICATION_ADVANCES = "publication_advances"
PUBLICATION_STATES = "publication_states"
PUBLICATION_ITEMS = "publication_items"

TABLES: dict[str, TableSpec] = {
    spec.name: spec
    for spec in (
        TableSpec(OBJECTS, ("oid",), ("slot", "class", "key")),
        TableSpec(KV, ("oid", "key"), ("value",)),
        TableSpec(
            DIRECTORY,
            ("oid", "name"),
            ("kind", "due_ms", "generation", "first_due_ms", "attempt", "crashes", "missed", "spec"),
        ),
        TableSpec(TIMERS, ("lane", "due_ms", "kind", "ref", "generation"), ("first_due_ms", "attempt", "payload")),
        TableSpec(INBOX, ("commit_seq",), ("entries",)),
        TableSpec(INTENTS, ("class", "key"), ("turn_id", "payload")),
        TableSpec(CLAIMS, ("turn_id",), ("kind", "class", "key", "name", "generation", "alone", "let_go", "crashes")),
        TableSpec(
            DEAD_LETTERS,
            ("id",),
            (
                "class",
                "key",
                "kind",
                "name",
                "due_ms",
                "attempts",
                "crashes",
                "error",
                "spec",
                "created_ms",
            ),
        ),
        TableSpec(SLOTS, ("slot",), ("state", "version", "move_id")),
        TableSpec(CLASSES, ("type_name",), ("module", "qualname")),
        TableSpec(
            OUTCOMES,
            ("oid", "seq"),
            ("outcome_id", "kind", "subject", "reason", "detail", "sink", "payload", "created_ms", "tries"),
            per_object=True,
            outlives_object=True,
            turns=TurnRule.BESIDE_TURNS,
        ),
        TableSpec(
            BACKLOGS,
            ("oid",),
            ("class", "key", "next_seq", "bytes", "first_ms"),
            per_object=True,
            outlives_object=True,
            turns=TurnRule.BETWEEN_TURNS,
        ),
        TableSpec(
            DELIVERED,
            ("oid",),
            ("rows", "bytes", "oldest_ms"),
            per_object=True,
            outlives_object=True,
            turns=TurnRule.BESIDE_TURNS,
        ),
        # Keyed by slot: they outlive their objects.
        TableSpec(OUTBOX, ("slot", "number"), (*_MESSAGE, "created_ms", "attempt", "next_ms"), per_slot=True),
        TableSpec(DELAYED, ("slot", "ident"), (*_MESSAGE, "due_ms"), per_slot=True),
        TableSpec(SLOT_NUMBERS, ("slot",), ("last",), per_slot=True),
        TableSpec(RECEIVED, ("slot", "pair"), ("number", "source_class", "source_key", "applied_ms"), per_slot=True),
        TableSpec(
            EXECUTIONS,
            ("oid", "execution_id"),
            ("method", "status", "seed", "began_ms", "ended_ms", "steps", "wake_ms", "waits_for"),
            per_object=True,
        ),
        TableSpec(
            JOURNAL,
            ("oid", "execution_id", "step"),
            ("kind", "name", "fingerprint", "state", "attempt", "due_ms", "at_ms", "payload"),
            per_object=True,
        ),
        TableSpec(VERSIONS, ("oid",), ("version",), per_object=True),
        TableSpec(TALLIES, ("oid", "scope"), ("rows", "size"), per_object=True),
        TableSpec(
            TICKETS,
            ("oid", "ticket_id"),
            ("name", "holder", "size", "opened_ms", "expires_ms", "reservation", "sink", "payload"),
            per_object=True,
        ),
        TableSpec(TICKET_NAMES, ("oid", "name"), ("ticket_id",), per_object=True),
        TableSpec(
            RESERVATIONS,
            ("oid", "reservation_id"),
            (
                "serial",
                "kind",
                "state",
                "deadline_ms",
                "held_ms",
                "sink",
                "payload",
                "ticket_id",
                "ended_ms",
                "reason",
                "detail",
            ),
            per_object=True,
        ),
        # The coordinator's: who holds each lease.
        TableSpec(
            LEASES,
            ("name",),
            ("epoch", "holder_class", "holder_key", "request_id", "expires_ms", "sweep_due_ms", "watermark_ms"),
        ),
        TableSpec(LEASE_GUARDS, ("oid", "name"), ("epoch",), per_object=True),
        # What was charged is told to the coordinator even when the object is gone.
        TableSpec(
            QUOTA_COUNTERS,
            ("oid", *_WINDOW),
            ("source", "operations", "bytes"),
            per_object=True,
            outlives_object=True,
            turns=TurnRule.BETWEEN_TURNS,
        ),
        TableSpec(
            QUOTA_VIEWS,
            ("oid", *_WINDOW),
            ("total_operations", "total_bytes", "pushed_operations", "pushed_bytes", "observed_ms"),
            per_object=True,
            outlives_object=True,
            turns=TurnRule.BESIDE_TURNS,
        ),
        # The coordinator's: what all objects together have charged, and what each of them has told so far.
        TableSpec(QUOTA_TOTALS, _WINDOW, ("operations", "bytes", "sources")),
        TableSpec(QUOTA_SOURCES, (*_WINDOW, "source"), ("operations", "bytes")),
        TableSpec(
            PUBLICATION_LINES, ("oid", "line"), ("next_sequence", "published", "announced", "hooked"), per_object=True
        ),
        TableSpec(PUBLICATION_ADVANCES, ("oid", "line", "sequence"), ("contents", "created_ms"), per_object=True),
        TableSpec(PUBLICATION_STATES, ("oid", "line", "sequence"), ("clearance", "generation"), per_object=True),
        TableSpec(PUBLICATION_ITEMS, ("oid", "item"), ("line", "sequence"), per_object=True),
    )
}
