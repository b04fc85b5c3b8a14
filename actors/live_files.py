"""Reading the files of partitions that run, wherever they are: each partition reads its own, in a thread."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.errors import InvalidOption
from drivers.files import store_files
from drivers.inspection import integrity, read_one

if TYPE_CHECKING:
    from actors.client import Client
    from actors.partition_config import PartitionConfig

__all__ = ["MAX_ROWS", "check", "check_running", "read", "read_running"]

#: Rows that one partition gives for one query: they travel in one frame.
MAX_ROWS = 10_000


# --- in the partition -------------------------------------------------------------------------------------


async def read(config: PartitionConfig, query: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a query, on a connection of its own that can only read. Raises `InvalidOption`."""
    path = _file(config)
    try:
        rows = await asyncio.to_thread(read_one, path, query, parameters, MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning) as error:  # several statements: a Warning before Python 3.11
        raise InvalidOption(f"the query can't be run: {error}") from error
    if len(rows) > MAX_ROWS:
        raise InvalidOption(f"the query has more than {MAX_ROWS:,} rows in partition {config.partition}: give a LIMIT")
    return rows


async def check(config: PartitionConfig) -> list[Any]:
    """What SQLite's integrity check says of the partition's file, and how many timers no tick would find."""
    return list(await asyncio.to_thread(integrity, _file(config)))


def _file(config: PartitionConfig) -> Path:
    path = store_files(config.data_dir, config.partition).database
    if not config.data_dir or not path.exists():
        raise InvalidOption(f"partition {config.partition} has no file that could be read")
    return path


# --- who asks ---------------------------------------------------------------------------------------------


async def read_running(client: Client, query: str, **parameters: Any) -> list[tuple[int, dict[str, Any]]]:
    """(partition, row) of a query on every partition of a runtime. Raises `InvalidOption`."""
    found = await _of_all(client, "read", [query, parameters])
    return [(partition, row) for partition, rows in found for row in rows]


async def check_running(client: Client) -> list[tuple[int, tuple[str, int]]]:
    """(partition, (verdict, lost timers)) of every partition of a runtime."""
    return [(partition, (verdict, lost)) for partition, (verdict, lost) in await _of_all(client, "check", [])]


async def _of_all(client: Client, op: str, arguments: list[Any]) -> list[tuple[int, Any]]:
    partitions = client.directory.partitions()
    answers = await asyncio.gather(*(client.admin(partition, op, arguments) for partition in partitions))
    return list(zip(partitions, answers, strict=True))
