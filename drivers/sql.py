"""Every SQL statement of a partition's database, named."""

from __future__ import annotations

from functools import lru_cache

from drivers.tables import TABLES, TableSpec

__all__ = [
    "BEGIN",
    "CHECKPOINT_PASSIVE",
    "CHECKPOINT_TRUNCATE",
    "CLEAR_SQL",
    "COMMIT",
    "COUNT_SQL",
    "DELETE_SQL",
    "ENGINE_TIMERS",
    "FIND_OBJECT",
    "GET_SQL",
    "INSERT_HEADER",
    "LANES",
    "LIST_OBJECTS",
    "NEXT_DUE",
    "NEXT_DUE_AFTER",
    "NEXT_DUE_IN_LANE",
    "OBJECTS_IN_SLOT",
    "PUT_SQL",
    "READ_HEADER",
    "ROLLBACK",
    "TAKE_EPOCH",
    "TOUCH_HEADER",
    "UNWATCHED_EXECUTIONS",
    "clear_sql",
    "delete_sql",
    "get_sql",
    "put_sql",
    "scan_sql",
]

BEGIN = "BEGIN IMMEDIATE"
COMMIT = "COMMIT"
ROLLBACK = "ROLLBACK"
CHECKPOINT_PASSIVE = "PRAGMA wal_checkpoint(PASSIVE)"
CHECKPOINT_TRUNCATE = "PRAGMA wal_checkpoint(TRUNCATE)"

READ_HEADER = (
    "SELECT cluster_id, partition_id, epoch, commit_seq, generation, next_id, clean FROM partition WHERE id = 1"
)
INSERT_HEADER = (
    "INSERT INTO partition (id, cluster_id, partition_id, epoch, commit_seq, generation, next_id, clean)"
    " VALUES (1, ?, ?, 0, 0, ?, 1, 1)"
)
TAKE_EPOCH = "UPDATE partition SET epoch = epoch + 1, clean = 0 WHERE id = 1"
# One statement checks the epoch and carries every counter: no row changed means that a newer owner was here.
TOUCH_HEADER = "UPDATE partition SET commit_seq = ?, generation = ?, next_id = ?, clean = ? WHERE id = 1 AND epoch = ?"

FIND_OBJECT = "SELECT oid FROM objects WHERE class = ? AND key = ?"
LIST_OBJECTS = (
    "SELECT oid, key, (SELECT min(due_ms) FROM directory WHERE directory.oid = objects.oid) FROM objects"
    " WHERE class = ? AND key >= ? AND key > ? AND (? IS NULL OR key < ?) ORDER BY key LIMIT ?"
)
OBJECTS_IN_SLOT = "SELECT oid, class, key FROM objects WHERE slot = ? ORDER BY class, key"
# The text must be as in the index `timers_by_owner`, or SQLite does not use it.
ENGINE_TIMERS = (
    "SELECT lane, due_ms, kind, ref, generation, first_due_ms, attempt, payload FROM timers"
    " WHERE substr(ref, 1, 8) = ? AND lane <> 32"
)
# Skips from lane to lane through the primary key instead of reading every row.
LANES = (
    "WITH RECURSIVE lanes(lane) AS (SELECT min(lane) FROM timers UNION ALL"
    " SELECT (SELECT min(timers.lane) FROM timers WHERE timers.lane > lanes.lane) FROM lanes"
    " WHERE lanes.lane IS NOT NULL) SELECT lane FROM lanes WHERE lane IS NOT NULL"
)
UNWATCHED_EXECUTIONS = (
    "SELECT oid, execution_id, wake_ms FROM executions WHERE status = ? AND wake_ms <= ? AND NOT EXISTS"
    " (SELECT 1 FROM directory WHERE directory.oid = executions.oid AND name = ? || execution_id) ORDER BY wake_ms"
)
NEXT_DUE_IN_LANE = "SELECT min(due_ms) FROM timers WHERE lane = ?"
NEXT_DUE_AFTER = "SELECT min(due_ms) FROM timers WHERE lane = ? AND due_ms > ?"
NEXT_DUE = f"SELECT min((SELECT min(due_ms) FROM timers WHERE timers.lane = l.lane)) FROM ({LANES}) AS l"


def _where_key(spec: TableSpec) -> str:
    return " AND ".join(f"{column} = ?" for column in spec.key)


def _where_prefix(spec: TableSpec, size: int) -> str:
    return " AND ".join(f"{column} = ?" for column in spec.key[:size]) or "1"


def put_sql(spec: TableSpec) -> str:
    """Put a row: all columns, in schema order."""
    marks = ", ".join("?" * len(spec.columns))
    return f"INSERT OR REPLACE INTO {spec.name} ({', '.join(spec.columns)}) VALUES ({marks})"


def get_sql(spec: TableSpec) -> str:
    """The value columns of the row with this key."""
    return f"SELECT {', '.join(spec.values)} FROM {spec.name} WHERE {_where_key(spec)}"


def delete_sql(spec: TableSpec) -> str:
    """Delete the row with this key."""
    return f"DELETE FROM {spec.name} WHERE {_where_key(spec)}"


def clear_sql(spec: TableSpec, size: int) -> str:
    """Delete the rows with these first `size` key columns."""
    return f"DELETE FROM {spec.name} WHERE {_where_prefix(spec, size)}"


def count_sql(spec: TableSpec, size: int) -> str:
    """Count the rows with these first `size` key columns."""
    return f"SELECT count(*) FROM {spec.name} WHERE {_where_prefix(spec, size)}"


PUT_SQL = {name: put_sql(spec) for name, spec in TABLES.items()}
GET_SQL = {name: get_sql(spec) for name, spec in TABLES.items()}
DELETE_SQL = {name: delete_sql(spec) for name, spec in TABLES.items()}
COUNT_SQL = {(name, size): count_sql(spec, size) for name, spec in TABLES.items() for size in range(len(spec.key) + 1)}
CLEAR_SQL = {(name, size): clear_sql(spec, size) for name, spec in TABLES.items() for size in range(len(spec.key) + 1)}


@lru_cache(maxsize=1_024)  # there are a few dozen shapes; building the text costs as much as a short scan
def scan_sql(table: str, prefix: int, start: int, start_after: int, end: int, reverse: bool, limited: bool) -> str:
    """A range scan in key order: each number says how many key columns that bound gives."""
    spec = TABLES[table]
    parts = [f"{column} = ?" for column in spec.key[:prefix]]
    for size, operator in ((start, ">="), (start_after, ">"), (end, "<")):
        if size:
            columns = spec.key[prefix : prefix + size]
            parts.append(f"({', '.join(columns)}) {operator} ({', '.join('?' * size)})")
    direction = " DESC" if reverse else ""
    order = ", ".join(f"{column}{direction}" for column in spec.key[prefix:] or spec.key)
    where = f" WHERE {' AND '.join(parts)}" if parts else ""
    limit = " LIMIT ?" if limited else ""
    return f"SELECT {', '.join(spec.columns)} FROM {table}{where} ORDER BY {order}{limit}"
