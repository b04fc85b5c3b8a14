"""Commands that change something: a running runtime, or data at rest."""

from __future__ import annotations

import signal
import sqlite3
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from actors.address import slot_of
from actors.cli_support import AsJson, ClusterAddress, DataDir, RuntimeName, connected, explained, show
from actors.coordinator_rebuild import rebuild_coordinator as rebuild
from actors.errors import InvalidOption
from drivers.inspection import read_all
from drivers.snapshot import restore as restore_snapshot
from drivers.snapshot import snapshot as make_snapshot

__all__ = ["register"]


def start(
    data_dir: Annotated[Path, typer.Argument(help="Where the data is kept.")],
    partitions: Annotated[int | None, typer.Option(min=1, help="Partitions of a new data directory.")] = None,
    name: RuntimeName = "default",
    address: ClusterAddress = None,
) -> None:
    """Start a runtime. In a Ray cluster (--address) it goes on by itself; otherwise it runs until this is ended."""
    from actors.runtime import Runtime

    with explained():
        runtime = Runtime.start(data_dir, partitions, name=name, address=address)
    if address is not None:
        runtime.close()
        typer.echo(f"runtime {name!r} runs at {address}")
        return
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    typer.echo(f"runtime {name!r} runs; it ends with Ctrl-C")
    ended.wait()
    runtime.stop()


def stop(name: RuntimeName = "default", address: ClusterAddress = None) -> None:
    """Stop a running runtime for everybody; its data stays."""
    with explained(), connected(name, address) as runtime:
        runtime.stop()
    typer.echo(f"runtime {name!r} was stopped")


def scale(
    partitions: Annotated[int, typer.Argument(min=1, help="How many partitions there shall be.")],
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for it.", min=1)] = 600.0,
) -> None:
    """Change the number of partitions while everything goes on."""
    with explained(), connected(name, address) as runtime:
        with Progress(transient=True) as bar:
            task = bar.add_task("moving slots", total=None)
            runtime.scale(
                partitions,
                timeout_s=timeout,
                progress=lambda told: bar.update(task, total=told.slots_wanted, completed=told.slots_moved),
            )
    typer.echo(f"runtime {name!r} has {partitions} partitions")


def deploy(name: RuntimeName = "default", address: ClusterAddress = None) -> None:
    """Start the partitions' processes again, one at a time, with the code as it is now."""
    with explained(), connected(name, address) as runtime:
        runtime.deploy()
    typer.echo(f"runtime {name!r} runs the new code")


def drain(
    node: Annotated[str, typer.Argument(help="The node, as `status` names it.")],
    name: RuntimeName = "default",
    address: ClusterAddress = None,
) -> None:
    """Move every slot away from a node."""
    with explained(), connected(name, address) as runtime:
        runtime.drain(node)
    typer.echo(f"no slot is on {node} any more")


def move(
    partition: Annotated[int, typer.Argument(help="The partition that shall have it.")],
    slot: Annotated[int | None, typer.Option(help="The slot's number.")] = None,
    type_name: Annotated[str | None, typer.Option("--class", help="Class of an object in the slot.")] = None,
    key: Annotated[str | None, typer.Option(help="Key of an object in the slot.")] = None,
    name: RuntimeName = "default",
    address: ClusterAddress = None,
) -> None:
    """Move one slot, given by its number or by an object in it."""
    with explained(), connected(name, address) as runtime:
        if slot is None:
            if type_name is None or key is None:
                raise InvalidOption("give the slot by --slot, or by --class and --key of an object in it")
            slot = slot_of(type_name, key)
        runtime.move(slot, partition)
    typer.echo(f"slot {slot} is at partition {partition}")


def snapshot(data_dir: DataDir, target: Annotated[Path, typer.Argument(help="A new directory for the copy.")]) -> None:
    """Copy the data of a stopped runtime, whole."""
    with explained():
        count = make_snapshot(data_dir, target)
    typer.echo(f"copied {count} files to {target}")


def restore(source: DataDir, data_dir: Annotated[Path, typer.Argument(help="A new data directory.")]) -> None:
    """Make a data directory from a snapshot."""
    with explained():
        count = restore_snapshot(source, data_dir)
    typer.echo(f"copied {count} files to {data_dir}")


def rebuild_coordinator(
    data_dir: DataDir,
    yes: Annotated[bool, typer.Option("--yes", help="The coordinator's file is lost for good.")] = False,
) -> None:
    """Make a lost coordinator file again from the partitions' files. Every partition must be there, and stopped."""
    with explained():
        if not yes:
            raise InvalidOption(
                "say --yes if the coordinator's file is lost for good: a file that is only on another disk, and comes "
                "back later, would be a second truth"
            )
        rebuilt = rebuild(data_dir)
    typer.echo(f"partitions {', '.join(map(str, rebuilt.partitions))}; slot map version {rebuilt.map_version}")
    if rebuilt.undecided:
        typer.echo(f"slots {list(rebuilt.undecided)} were on their way; they stay where they came from")


def sql(
    data_dir: DataDir,
    query: Annotated[str, typer.Argument(help="A query; it can only read.")],
    as_json: AsJson = False,
) -> None:
    """Run a query on every partition file; the tables are in docs/architecture.md."""
    with explained():
        try:
            rows = [{"partition": number, **row} for number, row in read_all(data_dir, query)]
        except sqlite3.Error as error:
            raise InvalidOption(f"the query can't be run: {error}") from error
    show("rows", rows, as_json)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (start, stop, scale, deploy, drain, move, snapshot, restore, sql, rebuild_coordinator):
        app.command()(command)
