"""The `mainspring` command: look into a running runtime, or into a data directory at rest."""

from __future__ import annotations

from datetime import datetime, timezone
from importlib.metadata import version as package_version
from typing import Annotated

import typer

from actors.cli_operations import register
from actors.cli_support import AsJson, ClusterAddress, DataDir, Limit, RuntimeName, connected, explained, show
from actors.errors import InvalidOption, MainspringError
from drivers.inspection import DEAD_LETTERS, OBJECTS, TIMERS, find_partitions, integrity, read_all
from timers.registry import TimerKind

__all__ = ["app"]

app = typer.Typer(help="Durable objects on Ray: look into a runtime or into its files.", no_args_is_help=True)
register(app)


def _instant(epoch_ms: int | None) -> str | None:
    if epoch_ms is None:
        return None
    return datetime.fromtimestamp(epoch_ms / 1_000, tz=timezone.utc).isoformat(timespec="milliseconds")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(package_version("mainspring"))


@app.command()
def status(name: RuntimeName = "default", address: ClusterAddress = None) -> None:
    """What the partitions of a running runtime are doing, as JSON."""
    with explained(), connected(name, address) as runtime:
        document = runtime.status().model_dump_json(indent=2)
    typer.echo(document)


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
    with explained():
        rows = [
            {"partition": number, **row, "next_due": _instant(row["next_due"])}
            for number, row in read_all(data_dir, OBJECTS, **{"class": type_name, "limit": limit})
        ]
    show("objects", rows[:limit], as_json)


@app.command()
def timers(data_dir: DataDir, limit: Limit = 100, as_json: AsJson = False) -> None:
    """The timers in a data directory, earliest first."""
    with explained():
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
    show("timers", rows, as_json)


@app.command(name="dead-letters")
def dead_letters(data_dir: DataDir, limit: Limit = 100, as_json: AsJson = False) -> None:
    """What has used up its tries, with its last error."""
    with explained():
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
    show("dead letters", rows[:limit], as_json)


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
    with explained(), connected(name, address) as runtime:

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
    with explained():
        for number, path in find_partitions(data_dir):
            verdict, lost = integrity(path)
            rows.append({"partition": number, "integrity": verdict, "lost_timers": lost})
    show("verification", rows, as_json)
    if any(row["integrity"] != "ok" or row["lost_timers"] for row in rows):
        raise typer.Exit(1)
