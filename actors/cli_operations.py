"""Commands that change something: a running runtime, or data at rest."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from actors.address import slot_of
from actors.cli_support import (
    AsJson,
    ClusterAddress,
    DataDir,
    RuntimeName,
    connected,
    explained,
    read,
    say,
    show,
)
from actors.coordinator_rebuild import rebuild_coordinator as rebuild
from actors.errors import InvalidOption
from drivers.snapshot import restore as restore_snapshot
from drivers.snapshot import snapshot as make_snapshot

__all__ = ["register"]


WorkingDir = Annotated[
    Path | None, typer.Option(help="Directory with the application's code, which is sent to all nodes.")
]


def _environment(working_dir: Path | None) -> dict[str, str] | None:
    return None if working_dir is None else {"working_dir": str(working_dir)}


def start(
    data_dir: Annotated[Path, typer.Argument(help="Where the data is kept.")],
    partitions: Annotated[int | None, typer.Option(min=1, help="Partitions of a new data directory.")] = None,
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    working_dir: WorkingDir = None,
    num_cpus: Annotated[float, typer.Option(min=0, help="CPUs that each partition reserves in Ray.")] = 0,
) -> None:
    """Start a runtime. In a Ray cluster (--address) it goes on by itself; otherwise it runs until this is ended."""
    from actors.runtime import Runtime

    with explained():
        runtime = Runtime.start(
            data_dir, partitions, name=name, address=address, num_cpus=num_cpus, runtime_env=_environment(working_dir)
        )
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


def stop(name: RuntimeName = "default", address: ClusterAddress = None, as_json: AsJson = False) -> None:
    """Stop a running runtime for everybody; its data stays."""
    with explained(), connected(name, address) as runtime:
        runtime.stop()
    say(f"runtime {name!r} was stopped", as_json, name=name, stopped=True)


def scale(
    partitions: Annotated[int, typer.Argument(min=1, help="How many partitions there shall be.")],
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for it.", min=1)] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Change the number of partitions while everything goes on."""
    with explained(), connected(name, address) as runtime:
        with Progress(transient=True, disable=as_json) as bar:
            task = bar.add_task("moving slots", total=None)
            runtime.scale(
                partitions,
                timeout_s=timeout,
                progress=lambda told: bar.update(task, total=told.slots_wanted, completed=told.slots_moved),
            )
    say(f"runtime {name!r} has {partitions} partitions", as_json, name=name, partitions=partitions)


def deploy(
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    working_dir: WorkingDir = None,
    as_json: AsJson = False,
) -> None:
    """Start the partitions' processes again, one at a time, with the code as it is now."""
    with explained(), connected(name, address) as runtime:
        runtime.deploy(runtime_env=_environment(working_dir))
    say(f"runtime {name!r} runs the new code", as_json, name=name, deployed=True)


def drain(
    node: Annotated[str, typer.Argument(help="The node, as `status` names it.")],
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    as_json: AsJson = False,
) -> None:
    """Move every slot away from a node."""
    with explained(), connected(name, address) as runtime:
        runtime.drain(node)
    say(f"no slot is on {node} any more", as_json, name=name, drained=node)


def move(
    partition: Annotated[int, typer.Argument(help="The partition that shall have it.")],
    slot: Annotated[int | None, typer.Option(help="The slot's number.")] = None,
    type_name: Annotated[str | None, typer.Option("--class", help="Class of an object in the slot.")] = None,
    key: Annotated[str | None, typer.Option(help="Key of an object in the slot.")] = None,
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    as_json: AsJson = False,
) -> None:
    """Move one slot, given by its number or by an object in it."""
    with explained(), connected(name, address) as runtime:
        if slot is None:
            if type_name is None or key is None:
                raise InvalidOption("give the slot by --slot, or by --class and --key of an object in it")
            slot = slot_of(type_name, key)
        runtime.move(slot, partition)
    say(f"slot {slot} is at partition {partition}", as_json, slot=slot, partition=partition)


def snapshot(
    data_dir: DataDir,
    target: Annotated[Path, typer.Argument(help="A new directory for the copy.")],
    as_json: AsJson = False,
) -> None:
    """Copy the data of a stopped runtime, whole."""
    with explained():
        count = make_snapshot(data_dir, target)
    say(f"copied {count} files to {target}", as_json, files=count, target=target)


def restore(
    source: DataDir,
    data_dir: Annotated[Path, typer.Argument(help="A new data directory.")],
    as_json: AsJson = False,
) -> None:
    """Make a data directory from a snapshot."""
    with explained():
        count = restore_snapshot(source, data_dir)
    say(f"copied {count} files to {data_dir}", as_json, files=count, target=data_dir)


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
        rebuilt = rebuild(data_dir, time.time_ns() // 1_000_000)
    if rebuilt.made_engine:
        typer.echo("leases and quotas: made anew; leases that were held are free, their epochs are over")
    if not rebuilt.made_map:
        return
    typer.echo(f"partitions {', '.join(map(str, rebuilt.partitions))}; slot map version {rebuilt.map_version}")
    if rebuilt.undecided:
        typer.echo(f"slots {list(rebuilt.undecided)} were on their way; they stay where they came from")


def sql(
    words: Annotated[list[str], typer.Argument(metavar="[DATA_DIR] QUERY", help="A query; it can only read.")],
    name: RuntimeName = "default",
    address: ClusterAddress = None,
    as_json: AsJson = False,
) -> None:
    """Run a query on every partition file; the tables are in docs/architecture.md."""
    with explained():
        *directories, query = words
        if len(directories) > 1:
            raise InvalidOption("give a data directory and a query, the query in quotes; or the query alone")
        data_dir = Path(directories[0]) if directories else None
        rows = [{"partition": number, **row} for number, row in read(data_dir, name, address, query)]
    show("rows", rows, as_json)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (start, stop, scale, deploy, drain, move, snapshot, restore, sql, rebuild_coordinator):
        app.command()(command)
