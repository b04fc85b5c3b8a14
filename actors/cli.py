"""The `mainspring` command: look into a running runtime, or into a data directory at rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from importlib.metadata import version as package_version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from actors.errors import InvalidOption, MainspringError
from drivers.inspection import DEAD_LETTERS, OBJECTS, TIMERS, find_partitions, integrity, read_all
from timers.registry import TimerKind

if TYPE_CHECKING:
    from actors.runtime import Runtime

__all__ = ["app"]

app = typer.Typer(help="Durable objects on Ray: look into a runtime or into its files.", no_args_is_help=True)
console = Console()
errors = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DataDir = Annotated[Path, typer.Argument(help="The data directory of a runtime.", exists=True, file_okay=False)]
RuntimeName = Annotated[str, typer.Option("--name", help="Name of the runtime.")]
ClusterAddress = Annotated[
    str | None, typer.Option("--address", help="Ray cluster, host:port; default: this machine's.")
]
Limit = Annotated[int, typer.Option(help="Rows to show at most.", min=1, max=10_000)]


@contextmanager
def _explained() -> Iterator[None]:
    """Our own errors are for the user: their message, without a traceback, and exit status 1."""
    try:
        yield
    except MainspringError as error:
        errors.print(f"[red]{type(error).__name__}[/]: {error}", highlight=False)
        raise typer.Exit(1) from error


def _show(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2, default=str))
        return
    table = Table(title=title)
    for column in rows[0] if rows else ():
        table.add_column(column, overflow="fold")  # a cut date says nothing
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table if rows else f"{title}: none")


def _instant(epoch_ms: int | None) -> str | None:
    if epoch_ms is None:
        return None
    return datetime.fromtimestamp(epoch_ms / 1_000, tz=timezone.utc).isoformat(timespec="milliseconds")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(package_version("mainspring"))


@contextmanager
def _connected(name: str, address: str | None) -> Iterator[Runtime]:
    from actors.runtime import Runtime

    runtime = Runtime.connect(name, address=address or "auto")
    try:
        yield runtime
    finally:
        runtime.close()


@app.command()
def status(name: RuntimeName = "default", address: ClusterAddress = None) -> None:
    """What the partitions of a running runtime are doing, as JSON."""
    with _explained(), _connected(name, address) as runtime:
        document = json.dumps(runtime.status(), indent=2, default=_plain)
    typer.echo(document)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def _kind(number: int) -> str:
    return TimerKind(number).name.lower() if number in TimerKind._value2member_map_ else str(number)


@app.command()
def objects(
    data_dir: DataDir,
    type_name: Annotated[str | None, typer.Option("--class", help="Only objects of this class.")] = None,
    limit: Limit = 100,
    as_json: AsJson = False,
) -> None:
    """The objects in a data directory."""
    with _explained():
        rows = [
            {"partition": number, **row, "next_due": _instant(row["next_due"])}
            for number, row in read_all(data_dir, OBJECTS, **{"class": type_name, "limit": limit})
        ]
    _show("objects", rows[:limit], as_json)


@app.command()
def timers(data_dir: DataDir, limit: Limit = 100, as_json: AsJson = False) -> None:
    """The timers in a data directory, earliest first."""
    with _explained():
        found = sorted(read_all(data_dir, TIMERS, limit=limit), key=lambda each: each[1]["due_ms"])
    rows = [
        {
            "partition": number,
            "class": row["class"],
            "key": row["key"],
            "name": row["name"],
            "kind": _kind(row["kind"]),
            "next": _instant(row["due_ms"]),
            "due": _instant(row["first_due_ms"]),
            "attempt": row["attempt"],
            "crashes": row["crashes"],
        }
        for number, row in found[:limit]
    ]
    _show("timers", rows, as_json)


@app.command(name="dead-letters")
def dead_letters(data_dir: DataDir, limit: Limit = 100, as_json: AsJson = False) -> None:
    """What has used up its tries, with its last error."""
    with _explained():
        rows = [
            {
                "partition": number,
                **{name: row[name] for name in ("id", "class", "key", "name")},
                "kind": _kind(row["kind"]),
                "due": _instant(row["due_ms"]),
                "created": _instant(row["created_ms"]),
                "attempts": row["attempts"],
                "crashes": row["crashes"],
                "error": row["error"] if as_json else row["error"].strip().rpartition("\n")[2],
            }
            for number, row in read_all(data_dir, DEAD_LETTERS, limit=limit)
        ]
    _show("dead letters", rows[:limit], as_json)


@app.command()
def redrive(
    partition: Annotated[int, typer.Argument(help="The partition that has the dead letter.")],
    letter: Annotated[int, typer.Argument(help="Its id there.")],
    name: RuntimeName = "default",
    address: ClusterAddress = None,
) -> None:
    """Run a dead letter again, with all its tries."""
    _deal_with("redrive", partition, letter, name, address)


@app.command()
def discard(
    partition: Annotated[int, typer.Argument(help="The partition that has the dead letter.")],
    letter: Annotated[int, typer.Argument(help="Its id there.")],
    name: RuntimeName = "default",
    address: ClusterAddress = None,
) -> None:
    """Forget a dead letter."""
    _deal_with("discard", partition, letter, name, address)


def _deal_with(operation: str, partition: int, letter: int, name: str, address: str | None) -> None:
    with _explained(), _connected(name, address) as runtime:

        async def ask() -> bool:
            if partition not in (known := runtime.client().directory.partitions()):
                raise InvalidOption(f"there is no partition {partition}; there are {', '.join(map(str, known))}")
            done: bool = await runtime.client().admin(partition, operation, [letter])
            return done

        if not runtime.run_sync(ask):
            raise MainspringError(f"partition {partition} has no dead letter {letter} (any more)")
    typer.echo(f"{operation}: done")


@app.command()
def verify(data_dir: DataDir, as_json: AsJson = False) -> None:
    """Check every partition file: SQLite's own integrity check, and timers against their directory."""
    rows = []
    with _explained():
        for number, path in find_partitions(data_dir):
            verdict, lost = integrity(path)
            rows.append({"partition": number, "integrity": verdict, "lost_timers": lost})
    _show("verification", rows, as_json)
    if any(row["integrity"] != "ok" or row["lost_timers"] for row in rows):
        raise typer.Exit(1)
