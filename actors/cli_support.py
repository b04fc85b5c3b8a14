"""What all commands of the `mainspring` command share."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from actors.errors import InvalidOption, MainspringError
from actors.live_files import read_running
from drivers.inspection import read_all

if TYPE_CHECKING:
    from actors.runtime import Runtime

__all__ = [
    "AsJson",
    "ClusterAddress",
    "DataDir",
    "Limit",
    "LiveOrFiles",
    "RuntimeName",
    "connected",
    "explained",
    "read",
    "say",
    "show",
]

console = Console()
errors = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
LiveOrFiles = Annotated[
    Path | None,
    typer.Argument(
        help="The data directory of a runtime; without it the running one is asked.", exists=True, file_okay=False
    ),
]
DataDir = Annotated[Path, typer.Argument(help="The data directory of a runtime.", exists=True, file_okay=False)]
RuntimeName = Annotated[str, typer.Option("--name", help="Name of the runtime.")]
ClusterAddress = Annotated[
    str | None, typer.Option("--address", help="Ray cluster, host:port; default: this machine's.")
]
Limit = Annotated[int, typer.Option(help="Rows to show at most.", min=1, max=10_000)]


@contextmanager
def explained() -> Iterator[None]:
    """Our own errors are for the user: their message, without a traceback, and exit status 1."""
    try:
        yield
    except MainspringError as error:
        errors.print(f"[red]{type(error).__name__}[/]: {error}", highlight=False)
        raise typer.Exit(1) from error


def show(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
        return
    table = Table(title=title)
    for column in rows[0] if rows else ():
        table.add_column(column, overflow="fold")  # a cut date says nothing
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table if rows else f"{title}: none")


def say(text: str, as_json: bool, **facts: Any) -> None:
    """Tell what was done, in words or as the facts."""
    typer.echo(json.dumps(facts, default=str) if as_json else text)


def read(
    data_dir: Path | None, name: str, address: str | None, query: str, **parameters: Any
) -> list[tuple[int, dict[str, Any]]]:
    """(partition, row) of a query on every partition: of the files in `data_dir`, or else of a running runtime."""
    if data_dir is not None:
        try:
            return list(read_all(data_dir, query, **parameters))
        except (sqlite3.Error, sqlite3.Warning) as error:  # several statements: a Warning before Python 3.11
            raise InvalidOption(f"the query can't be run: {error}") from error
    with connected(name, address) as runtime:
        return runtime.run_sync(lambda: read_running(runtime.client(), query, **parameters))


@contextmanager
def connected(name: str, address: str | None) -> Iterator[Runtime]:
    from actors.runtime import Runtime

    runtime = Runtime.connect(name, address=address or "auto")
    try:
        yield runtime
    finally:
        runtime.close()
