"""The `mainspring` command: look into a running runtime, or into a data directory at rest."""

from __future__ import annotations

from datetime import datetime, timezone
from importlib.metadata import version as package_version
from typing import Annotated

import typer

from actors.cli_operations import register
from actors.cli_support import (
    AsJson,
    ClusterAddress,
    Limit,
    LiveOrFiles,
    RuntimeName,
    connected,
    explained,
    read,
    say,
    show,
)
from actors.errors import InvalidOption, MainspringError
from actors.live_files import check_running
from drivers.inspection import (
    DEAD_LETTERS,
    OBJECTS,
    TIMERS,
    coordinator_integrity,
    find_partitions,
    integrity,
)
from timers.registry import TimerKind

__all__ = ["app"]

app = typer.Typer(help="Durable objects on Ray: look into a runtime or into its files.", no_args_is_help=True)
register(app)


#: Columns of `status`: what one wants to see first.
_SHOWN = ("epoch", "slots", "active_objects", "held_calls", "fires", "oldest_due_ms", "dead_letters", "lateness_p99_ms")


def _instant(epoch_ms: int | None) -> str | None:
    if epoch_ms is None:
        return None
    return datetime.fromtimestamp(epoch_ms / 1_000, tz=timezone.utc).isoformat(timespec="milliseconds")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(package_version("mainspring"))


@app.command()
def status(name: RuntimeName = "default", address: ClusterAddress = None, as_json: AsJson = False) -> None:
    """What a running runtime is doing; --json has all that is known."""
    with explained(), connected(name, address) as runtime:
        found = runtime.status()
    if as_json:
        typer.echo(found.model_dump_json(indent=2))
        return
    rows = [
        {"partition": number, **{each: getattr(report, each) for each in _SHOWN}, "error": report.error}
        for number, report in sorted(found.partitions.items())
    ]
    show(f"runtime {found.name!r}", rows, as_json=False)
    moves = found.moves
    typer.echo(f"slot map version {found.coordinator.map_version}; slots moved {moves.moved} of {moves.wanted}")
    for what, error in (("coordinator", found.coordinator.error), ("moves", moves.error or moves.last_error)):
        if error:
            typer.echo(f"{what}: {error}")


def _kind(number: int) -> str:
    return TimerKind(number).name.lower() if number in TimerKind._value2member_map_ else str(number)


@app.command()
def objects(
    data_dir: LiveOrFiles = None,
    type_name: Annotated[str | None, typer.Option("--class", help="Only objects of this class.")] = None,
    limit: Limit = 100,
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    as_json: AsJson = False,
) -> None:
    """The objects of a runtime."""
    with explained():
        rows = [
            {"partition": number, **row, "next_due": _instant(row["next_due"])}
            for number, row in read(data_dir, name, address, OBJECTS, **{"class": type_name, "limit": limit})
        ]
    show("objects", rows[:limit], as_json)


@app.command()
def timers(
    data_dir: LiveOrFiles = None,
    limit: Limit = 100,
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    as_json: AsJson = False,
) -> None:
    """The timers of a runtime, earliest first."""
    with explained():
        found = sorted(read(data_dir, name, address, TIMERS, limit=limit), key=lambda each: each[1]["due_ms"])
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
def dead_letters(
    data_dir: LiveOrFiles = None,
    limit: Limit = 100,
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    as_json: AsJson = False,
) -> None:
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
            for number, row in read(data_dir, name, address, DEAD_LETTERS, limit=limit)
        ]
    show("dead letters", rows[:limit], as_json)


@app.command()
def redrive(
    partition: Annotated[int, typer.Argument(help="The partition that has the dead letter.")],
    letter: Annotated[int, typer.Argument(help="Its id there.")],
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    as_json: AsJson = False,
) -> None:
    """Run a dead letter again, with all its tries."""
    _deal_with("redrive", partition, letter, name, address, as_json)


@app.command()
def discard(
    partition: Annotated[int, typer.Argument(help="The partition that has the dead letter.")],
    letter: Annotated[int, typer.Argument(help="Its id there.")],
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    as_json: AsJson = False,
) -> None:
    """Forget a dead letter."""
    _deal_with("discard", partition, letter, name, address, as_json)


def _deal_with(operation: str, partition: int, letter: int, name: str, address: str | None, as_json: bool) -> None:
    with explained(), connected(name, address) as runtime:

        async def ask() -> bool:
            if partition not in (known := runtime.client().directory.partitions()):
                raise InvalidOption(f"there is no partition {partition}; there are {', '.join(map(str, known))}")
            done: bool = await runtime.client().admin(partition, operation, [letter])
            return done

        if not runtime.run_sync(ask):
            raise MainspringError(f"partition {partition} has no dead letter {letter} (any more)")
    say(f"{operation}: done", as_json, operation=operation, partition=partition, id=letter)


@app.command()
def verify(
    data_dir: LiveOrFiles = None,
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    as_json: AsJson = False,
) -> None:
    """Check every partition file: SQLite's own integrity check, and timers against their directory. In a data directory
    the coordinator's files as well."""
    with explained():
        if data_dir is not None:
            found = [(number, integrity(path)) for number, path in find_partitions(data_dir)]
            others = coordinator_integrity(data_dir)
        else:
            with connected(name, address) as runtime:
                found, others = runtime.run_sync(lambda: check_running(runtime.client())), []
    rows: list[dict[str, object]] = [
        {"partition": number, "integrity": verdict, "lost_timers": lost} for number, (verdict, lost) in found
    ]
    rows += [{"partition": name, "integrity": verdict, "lost_timers": 0} for name, verdict in others]
    show("verification", rows, as_json)
    if any(row["integrity"] != "ok" or row["lost_timers"] for row in rows):
        raise typer.Exit(1)
