"""The SQLite schema of a partition and its migrations (made by sqlite-utils, read by everything else)."""

from __future__ import annotations

from pathlib import Path

from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from drivers.errors import SchemaTooNew

__all__ = ["SCHEMA_VERSION", "check_schema", "migrate"]

#: Written to PRAGMA user_version; a file with a higher number belongs to a newer Mainspring.
SCHEMA_VERSION = 4

partition_migrations = Migrations("mainspring_partition")

# The timer table is clustered by lane and due time: arming appends near the end of a lane and firing deletes a
# range, which measured 2.4 times faster to arm and 9 times faster to fire than a key-ordered table with a due index.
# KV is clustered by object, so one object's state lies together.
_TABLES_V1 = """
CREATE TABLE partition (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    cluster_id TEXT NOT NULL,
    partition_id INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    commit_seq INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    next_id INTEGER NOT NULL,
    clean INTEGER NOT NULL
);
CREATE TABLE objects (
    oid INTEGER PRIMARY KEY,
    slot INTEGER NOT NULL,
    class TEXT NOT NULL,
    key TEXT NOT NULL,
    UNIQUE (class, key)
);
CREATE INDEX objects_by_slot ON objects (slot, class, key);
CREATE TABLE kv (
    oid INTEGER NOT NULL,
    key TEXT NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (oid, key)
) WITHOUT ROWID;
CREATE TABLE directory (
    oid INTEGER NOT NULL,
    name TEXT NOT NULL,
    kind INTEGER NOT NULL,
    due_ms INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    first_due_ms INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    crashes INTEGER NOT NULL,
    missed INTEGER NOT NULL,
    spec BLOB NOT NULL,
    PRIMARY KEY (oid, name)
) WITHOUT ROWID;
CREATE TABLE timers (
    lane INTEGER NOT NULL,
    due_ms INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    ref BLOB NOT NULL,
    generation INTEGER NOT NULL,
    first_due_ms INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (lane, due_ms, kind, ref, generation)
) WITHOUT ROWID;
CREATE TABLE inbox (
    commit_seq INTEGER PRIMARY KEY,
    entries BLOB NOT NULL
);
CREATE TABLE intents (
    class TEXT NOT NULL,
    key TEXT NOT NULL,
    turn_id BLOB NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (class, key)
) WITHOUT ROWID;
CREATE TABLE claims (
    turn_id BLOB PRIMARY KEY,
    kind TEXT NOT NULL,
    class TEXT NOT NULL,
    key TEXT NOT NULL,
    name TEXT NOT NULL,
    generation INTEGER NOT NULL,
    alone INTEGER NOT NULL,
    let_go INTEGER NOT NULL,
    crashes INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE dead_letters (
    id INTEGER PRIMARY KEY,
    class TEXT NOT NULL,
    key TEXT NOT NULL,
    kind INTEGER NOT NULL,
    name TEXT NOT NULL,
    due_ms INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    crashes INTEGER NOT NULL,
    error TEXT NOT NULL,
    spec BLOB NOT NULL,
    created_ms INTEGER NOT NULL
);
CREATE TABLE slots (
    slot INTEGER PRIMARY KEY,
    state TEXT NOT NULL,
    version INTEGER NOT NULL,
    move_id TEXT
);
CREATE TABLE classes (
    type_name TEXT PRIMARY KEY,
    module TEXT NOT NULL,
    qualname TEXT NOT NULL
) WITHOUT ROWID;
"""

# Terminal outcomes that wait to be delivered; per object what was queued, and what of it is done with.
_OUTCOME_TABLES = """
CREATE TABLE outcomes (
    oid INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    outcome_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    subject TEXT NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    sink TEXT NOT NULL,
    payload BLOB NOT NULL,
    created_ms INTEGER NOT NULL,
    tries INTEGER NOT NULL,
    PRIMARY KEY (oid, seq)
) WITHOUT ROWID;
CREATE TABLE backlogs (
    oid INTEGER PRIMARY KEY,
    class TEXT NOT NULL,
    key TEXT NOT NULL,
    next_seq INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    first_ms INTEGER NOT NULL
);
CREATE TABLE delivered (
    oid INTEGER PRIMARY KEY,
    rows INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    oldest_ms INTEGER
);
"""

# Messages between objects: on their way, waiting for their time, the last number given per slot, and on the other side
# the last number applied per pair of objects.
_MESSAGE_TABLES = """
CREATE TABLE outbox (
    slot INTEGER NOT NULL,
    number INTEGER NOT NULL,
    source_class TEXT NOT NULL,
    source_key TEXT NOT NULL,
    class TEXT NOT NULL,
    key TEXT NOT NULL,
    method TEXT NOT NULL,
    args BLOB NOT NULL,
    retry BLOB NOT NULL,
    created_ms INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    next_ms INTEGER NOT NULL,
    PRIMARY KEY (slot, number)
) WITHOUT ROWID;
CREATE TABLE delayed (
    slot INTEGER NOT NULL,
    ident INTEGER NOT NULL,
    source_class TEXT NOT NULL,
    source_key TEXT NOT NULL,
    class TEXT NOT NULL,
    key TEXT NOT NULL,
    method TEXT NOT NULL,
    args BLOB NOT NULL,
    retry BLOB NOT NULL,
    due_ms INTEGER NOT NULL,
    PRIMARY KEY (slot, ident)
) WITHOUT ROWID;
CREATE TABLE slot_numbers (
    slot INTEGER PRIMARY KEY,
    last INTEGER NOT NULL
);
CREATE TABLE received (
    slot INTEGER NOT NULL,
    pair BLOB NOT NULL,
    number INTEGER NOT NULL,
    source_class TEXT NOT NULL,
    source_key TEXT NOT NULL,
    applied_ms INTEGER NOT NULL,
    PRIMARY KEY (slot, pair)
) WITHOUT ROWID;
"""

# Tickets and reservations of objects, and how many of them there are.
_TICKET_TABLES = """
CREATE TABLE tallies (
    oid INTEGER NOT NULL,
    scope TEXT NOT NULL,
    rows INTEGER NOT NULL,
    size INTEGER NOT NULL,
    PRIMARY KEY (oid, scope)
) WITHOUT ROWID;
CREATE TABLE tickets (
    oid INTEGER NOT NULL,
    ticket_id TEXT NOT NULL,
    name TEXT NOT NULL,
    holder TEXT NOT NULL,
    size INTEGER NOT NULL,
    opened_ms INTEGER NOT NULL,
    expires_ms INTEGER NOT NULL,
    reservation TEXT NOT NULL,
    sink TEXT NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (oid, ticket_id)
) WITHOUT ROWID;
CREATE TABLE ticket_names (
    oid INTEGER NOT NULL,
    name TEXT NOT NULL,
    ticket_id TEXT NOT NULL,
    PRIMARY KEY (oid, name)
) WITHOUT ROWID;
CREATE TABLE reservations (
    oid INTEGER NOT NULL,
    reservation_id TEXT NOT NULL,
    serial TEXT NOT NULL,
    kind TEXT NOT NULL,
    state TEXT NOT NULL,
    deadline_ms INTEGER NOT NULL,
    held_ms INTEGER NOT NULL,
    sink TEXT NOT NULL,
    payload BLOB NOT NULL,
    ticket_id TEXT NOT NULL,
    ended_ms INTEGER NOT NULL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL,
    PRIMARY KEY (oid, reservation_id)
) WITHOUT ROWID;
"""

# Leases and what all objects together have charged to a quota live in the coordinator's file; guards, counters and
# views beside the objects they belong to.
_LEASE_TABLES = """
CREATE TABLE leases (
    name TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    holder_class TEXT NOT NULL,
    holder_key TEXT NOT NULL,
    request_id TEXT NOT NULL,
    expires_ms INTEGER NOT NULL,
    sweep_due_ms INTEGER NOT NULL,
    watermark_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE lease_guards (
    oid INTEGER NOT NULL,
    name TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    PRIMARY KEY (oid, name)
) WITHOUT ROWID;
"""
_QUOTA_TABLES = """
CREATE TABLE quota_counters (
    oid INTEGER NOT NULL,
    name TEXT NOT NULL,
    window_ms INTEGER NOT NULL,
    window_number INTEGER NOT NULL,
    source TEXT NOT NULL,
    operations INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (oid, name, window_ms, window_number)
) WITHOUT ROWID;
CREATE TABLE quota_views (
    oid INTEGER NOT NULL,
    name TEXT NOT NULL,
    window_ms INTEGER NOT NULL,
    window_number INTEGER NOT NULL,
    total_operations INTEGER NOT NULL,
    total_bytes INTEGER NOT NULL,
    pushed_operations INTEGER NOT NULL,
    pushed_bytes INTEGER NOT NULL,
    observed_ms INTEGER NOT NULL,
    PRIMARY KEY (oid, name, window_ms, window_number)
) WITHOUT ROWID;
CREATE TABLE quota_totals (
    name TEXT NOT NULL,
    window_ms INTEGER NOT NULL,
    window_number INTEGER NOT NULL,
    operations INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    sources INTEGER NOT NULL,
    PRIMARY KEY (name, window_ms, window_number)
) WITHOUT ROWID;
CREATE TABLE quota_sources (
    name TEXT NOT NULL,
    window_ms INTEGER NOT NULL,
    window_number INTEGER NOT NULL,
    source TEXT NOT NULL,
    operations INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    PRIMARY KEY (name, window_ms, window_number, source)
) WITHOUT ROWID;
"""

# Publications: an item is published when its sequence is at most its line's `published`.
_PUBLICATION_TABLES = """
CREATE TABLE publication_lines (
    oid INTEGER NOT NULL,
    line TEXT NOT NULL,
    next_sequence INTEGER NOT NULL,
    published INTEGER NOT NULL,
    announced INTEGER NOT NULL,
    hooked INTEGER NOT NULL,
    PRIMARY KEY (oid, line)
) WITHOUT ROWID;
CREATE TABLE publication_advances (
    oid INTEGER NOT NULL,
    line TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    contents BLOB NOT NULL,
    created_ms INTEGER NOT NULL,
    PRIMARY KEY (oid, line, sequence)
);
CREATE TABLE publication_states (
    oid INTEGER NOT NULL,
    line TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    clearance INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    PRIMARY KEY (oid, line, sequence)
) WITHOUT ROWID;
CREATE TABLE publication_items (
    oid INTEGER NOT NULL,
    item TEXT NOT NULL,
    line TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    PRIMARY KEY (oid, item)
) WITHOUT ROWID;
"""


# Executions of durable functions, and the journal that they are replayed from: clustered by object and execution, since
# it is read from the first step to the last.
_EXECUTION_TABLES = """
CREATE TABLE executions (
    oid INTEGER NOT NULL,
    execution_id TEXT NOT NULL,
    method TEXT NOT NULL,
    status TEXT NOT NULL,
    seed BLOB NOT NULL,
    began_ms INTEGER NOT NULL,
    ended_ms INTEGER,
    steps INTEGER NOT NULL,
    wake_ms INTEGER,
    waits_for TEXT NOT NULL,
    PRIMARY KEY (oid, execution_id)
) WITHOUT ROWID;
CREATE TABLE journal (
    oid INTEGER NOT NULL,
    execution_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    state TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    due_ms INTEGER,
    at_ms INTEGER NOT NULL,
    payload BLOB NOT NULL,
    PRIMARY KEY (oid, execution_id, step)
) WITHOUT ROWID;
"""

# The version of an object's state; no row means 1.
_VERSIONS = "CREATE TABLE versions (oid INTEGER PRIMARY KEY, version INTEGER NOT NULL);"

# Executions that wait for a time, in its order; few of them are past it.
_EXECUTIONS_BY_WAKE = "CREATE INDEX executions_by_wake ON executions (status, wake_ms) WHERE wake_ms IS NOT NULL;"

# Finds the engine's timers of one object, to move or delete them with it; the user lane is found by the directory.
_TIMER_OWNERS = "CREATE INDEX timers_by_owner ON timers (substr(ref, 1, 8)) WHERE lane <> 32;"


@partition_migrations()
def m001_first_tables(db: Database) -> None:
    """State, timers, inbox, intents, claims, dead letters, slots and classes of a partition."""
    _create(db, _TABLES_V1)


@partition_migrations()
def m002_toolkit(db: Database) -> None:
    """What the timer kinds of the toolkit serve, and messages between objects."""
    _create(db, _OUTCOME_TABLES)
    _create(db, _TICKET_TABLES)
    _create(db, _TIMER_OWNERS)
    _create(db, _EXECUTION_TABLES)
    _create(db, _MESSAGE_TABLES)
    _create(db, _LEASE_TABLES)
    _create(db, _QUOTA_TABLES)
    _create(db, _PUBLICATION_TABLES)


@partition_migrations()
def m003_executions_by_wake(db: Database) -> None:
    """The backstop of durable functions looks for what should have been woken."""
    _create(db, _EXECUTIONS_BY_WAKE)


@partition_migrations()
def m004_versions(db: Database) -> None:
    """Versions of the state of objects whose class has migrations."""
    _create(db, _VERSIONS)


def _create(db: Database, statements: str) -> None:
    for statement in statements.split(";"):
        if statement.strip():
            db.execute(statement)


def check_schema(db: Database, path: Path | str) -> int:
    """The file's schema version. Raises `SchemaTooNew` when a newer Mainspring wrote it. Reads only."""
    version: int
    (version,) = db.execute("PRAGMA user_version").fetchone()
    known = {migration.name for migration in partition_migrations._migrations}
    applied = {migration.name for migration in partition_migrations.applied(db)}
    if version > SCHEMA_VERSION or applied - known:
        raise SchemaTooNew(
            f"{path} has schema version {version} ({', '.join(sorted(applied - known)) or 'no unknown migrations'}), "
            f"this Mainspring knows up to {SCHEMA_VERSION}. Upgrade Mainspring before opening it; nothing was changed."
        )
    return version


def migrate(db: Database, path: Path | str) -> None:
    """Bring the file to this version's schema; one that has it is not written to. Raises `SchemaTooNew` before any
    write."""
    version = check_schema(db, path)
    if partition_migrations.pending(db):
        partition_migrations.apply(db)
    if version != SCHEMA_VERSION:
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
