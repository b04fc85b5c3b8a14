"""Takes in every distribution installed here, and proves that nothing was lost and nothing counted twice."""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from actors import Runtime, Settings
from examples.package_registry.calls import Caller, percentile
from examples.package_registry.check import Check
from examples.package_registry.hosting import Hosting, host_locally, host_on_ray
from examples.package_registry.ingest import Environment, read_environment
from examples.package_registry.readers import Readers
from examples.package_registry.uploads import Tally, Uploader
from examples.package_registry.verify import Found, Verifier
from examples.package_registry.verify_services import Services, ServicesVerifier

#: Besides the time to live itself: how long the last expiries may take before they are called missing. Long, because
#: a partition may just have been killed on a slow machine; it ends as soon as they are there.
_PATIENCE_S = 60.0
_LOOK_EVERY_S = 0.2
#: What all authors of a repository have published is to be known soon, not within a minute.
SETTINGS = Settings(quota_rollup_ms=1_000)
#: Lines that a run without a terminal prints about its progress.
_PLAIN_LINES = 10

console = Console()


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    repositories: tuple[str, ...]
    environment: Environment
    ttl: timedelta
    in_flight: int
    kills: int

    @property
    def files(self) -> int:
        return len(self.repositories) * sum(1 for _ in self.environment.files())


@dataclass(frozen=True)
class Result:
    """What came of it."""

    found: Found
    tally: Tally
    checks: list[Check]
    kills: list[str]


def plan_passes(environment: Environment, min_calls: int) -> int:
    """How often the environment must be taken in so that at least `min_calls` calls are made.

    Each pass makes, for each file, one call to open a session, one a part and one to finish, and two a release.
    """
    calls = sum(2 + len(file.parts) for file in environment.files()) + 2 * len(environment.distributions)
    return max(1, -(-min_calls // max(1, calls)))


# --- running ------------------------------------------------------------------------------------------


def _host(directory: Path, partitions: int, *, local: bool) -> AbstractAsyncContextManager[Hosting]:
    if local:
        return host_locally(directory, partitions, SETTINGS)
    return host_on_ray(Runtime.start(directory, partitions, name="package-registry", settings=SETTINGS))


async def run(host: AbstractAsyncContextManager[Hosting], plan: Plan) -> Result:
    """Ingest, wait for the expiries, read everything back, and report."""
    async with host as hosting:
        caller, reader = Caller(plan.in_flight), Caller(plan.in_flight)
        began = time.perf_counter()
        with _progress("uploading", plan.files) as advance:
            uploader = Uploader(hosting.names, caller, plan.ttl, plan.in_flight, advance)
            async with _chaos(hosting, uploader.tally, plan) as kills:
                await uploader.ingest(plan.repositories, plan.environment)
                ingest_s = time.perf_counter() - began
        tally = uploader.tally
        verifier = Verifier(hosting.names, reader, plan.repositories, plan.environment, tally)
        published = dict(verifier.published())
        readers = Readers(hosting.names, caller, plan.ttl)
        await _read_and_index(hosting, readers, plan, list(published), kills)
        await _expiries(verifier, tally, plan.ttl)
        authors = verifier.authors()
        await readers.over_quota(list(authors))
        services_verifier = ServicesVerifier(
            hosting.names, reader, plan.repositories, published, authors, tally, readers.tally
        )
        with console.status("reading everything back"):
            services = await services_verifier.read(_PATIENCE_S)
            found = await verifier.read()
        checks = verifier.checks(found) + services_verifier.checks(services, found.releases)
        if plan.kills:
            checks.append(Check("partition processes killed", plan.kills + 1, len(kills)))
        console.print(_table(plan, found, services, tally, caller, reader, kills, ingest_s))
        return Result(found, tally, checks, kills)


async def _read_and_index(
    hosting: Hosting, readers: Readers, plan: Plan, releases: Sequence[str], kills: list[str]
) -> None:
    """Wait until everything is published, then download and index it; with chaos one more partition dies meanwhile."""
    with console.status("waiting until everything is published, in the order of its dependencies"):
        await readers.until_published(releases, _PATIENCE_S)
        await readers.until_shipped(releases)
    with console.status("downloading and indexing"):
        downloading = asyncio.ensure_future(readers.download(releases))
        if plan.kills:
            kills.append(await hosting.kill(0))
            console.print(f"[red]{kills[-1]}[/red]", highlight=False, soft_wrap=True)
        await downloading
        for repository in plan.repositories:
            own = [key for key in releases if key.startswith(f"{repository}:")]
            await readers.index(repository, own)


async def _expiries(verifier: Verifier, tally: Tally, ttl: timedelta) -> None:
    """Wait until no session that must expire is open any more; the counts are checked afterwards."""
    waiting = [key for key, state in tally.sessions.items() if state == "expired"]
    deadline = time.monotonic() + ttl.total_seconds() + _PATIENCE_S
    with console.status("waiting for the uploads that were left unfinished to expire"):
        while waiting and time.monotonic() < deadline:
            records = await verifier.sessions(waiting)
            waiting = [key for key in waiting if records[key]["state"] == "open"]
            await asyncio.sleep(_LOOK_EVERY_S if waiting else 0)


@asynccontextmanager
async def _chaos(hosting: Hosting, tally: Tally, plan: Plan) -> AsyncIterator[list[str]]:
    """Kill partitions in turn, spread over the upload. Gives what was done; all of it once the block has ended."""
    done: list[str] = []

    async def kill_all() -> None:
        for number in range(plan.kills):
            await tally.reached(plan.files * (number + 1) // (plan.kills + 1))
            done.append(await hosting.kill(number % hosting.partitions))
            console.print(f"[red]{done[-1]}[/red]", highlight=False, soft_wrap=True)

    killing = asyncio.ensure_future(kill_all())
    try:
        yield done
        await killing
    finally:
        killing.cancel()


# --- showing ------------------------------------------------------------------------------------------


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar at a terminal, plain lines elsewhere. Gives what is to be called after each step."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(what, total=total)
            yield lambda: bar.advance(task)
        return
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if done * _PLAIN_LINES // total > (done - 1) * _PLAIN_LINES // total:
            console.print(f"{what}: {done:,} of {total:,}")

    yield step


def _table(
    plan: Plan,
    found: Found,
    services: Services,
    tally: Tally,
    caller: Caller,
    reader: Caller,
    kills: Sequence[str],
    ingest_s: float,
) -> Table:
    milliseconds = [seconds * 1_000 for seconds in caller.seconds]
    needed = sum(summary.get("needed", 0) for summary in found.releases.values())
    credited = sum(each["releases"] for each in found.authors.values())
    nested = found.file_count + found.timers("fired") + credited + needed + len(found.releases)
    told = sum(sum(counts.values()) for counts in services.counts.values())
    uploads = sum(count for name, count in caller.made.items() if name.startswith("Upload."))
    rows: list[tuple[str, str]] = [
        ("repositories (passes)", f"{len(plan.repositories):,}"),
        ("objects", f"{found.object_count:,}"),
        *((f"  {name}", f"{len(keys):,}") for name, keys in found.objects.items()),
        ("files", f"{found.file_count:,}"),
        ("bytes", f"{found.byte_count:,}"),
        ("files refused: not as RECORD says", f"{tally.refused:,}"),
        ("calls", f"{caller.total:,}"),
        *((f"  {name}", f"{count:,}") for name, count in sorted(caller.made.items())),
        ("calls between objects, besides", f"{nested:,}"),
        ("calls to read everything back, besides", f"{reader.total:,}"),
        ("upload sessions left unfinished", f"{tally.left:,}"),
        ("upload sessions overtaken by their expiry", f"{tally.overtaken:,}"),
        ("timers armed", f"{found.timers('armed'):,}"),
        ("timers cancelled", f"{found.timers('cancelled'):,}"),
        ("timers fired", f"{found.timers('fired'):,}"),
        ("  late, p50 / p99", f"{percentile(found.lateness_ms, 50):.0f} / {percentile(found.lateness_ms, 99):.0f} ms"),
        ("releases published, after so many dependencies", f"{len(found.releases):,} / {needed:,}"),
        ("outcomes and messages in the audit trail", f"{told:,}"),
        *((f"  {what}", f"{count:,}") for what, count in sorted(services.totals().items())),
        ("publish pipelines, of two steps and a promise", f"{len(found.releases):,}"),
        ("files charged to the quotas", f"{sum(files for files, _ in services.charged.values()):,}"),
        ("releases in the index", f"{sum(len(entries) for entries in services.index.values()):,}"),
        ("upload time", f"{ingest_s:.1f} s"),
        ("calls/s while uploading", f"{uploads / ingest_s:,.0f}"),
        ("call latency, p50 / p99", f"{percentile(milliseconds, 50):.1f} / {percentile(milliseconds, 99):.1f} ms"),
        ("calls in flight, at most", f"{plan.in_flight:,}"),
    ]
    if plan.kills:
        rows.append(("partition processes killed", f"{len(kills):,}"))
    table = Table("", "", title="package registry", show_header=False)
    table.columns[1].justify = "right"
    for row in rows:
        table.add_row(*row)
    return table


def _report(checks: Sequence[Check]) -> bool:
    """Print what is off, or that nothing is; whether all counts hold."""
    wrong = [check for check in checks if not check.holds]
    for check in wrong:
        console.print(f"[bold red]OFF[/bold red] {check}", highlight=False, soft_wrap=True)
    if not wrong:
        console.print(f"[bold green]verified[/bold green]: all {len(checks)} counts are what was read from the input")
    return not wrong


# --- the command --------------------------------------------------------------------------------------


def main(
    data: Annotated[Path | None, typer.Option(help="Where the data is kept; a temporary directory by default.")] = None,
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill partition processes in the middle.")] = False,
    kills: Annotated[int, typer.Option(min=1, help="How often --chaos kills.")] = 4,
    local: Annotated[bool, typer.Option("--local", help="Run in this process, without Ray.")] = False,
    partitions: Annotated[int, typer.Option(min=1, max=64, help="Partitions of a new data directory.")] = 2,
    distributions: Annotated[
        int | None, typer.Option(min=1, help="Take in only the so many smallest distributions.")
    ] = None,
    min_calls: Annotated[int, typer.Option(min=1, help="Take everything in again until there are so many.")] = 20_000,
    in_flight: Annotated[int, typer.Option(min=1, max=2_000, help="Calls in flight at most.")] = 256,
    ttl_ms: Annotated[
        int, typer.Option(min=50, help="An upload session expires this long after its last call.")
    ] = 2_000,
) -> None:
    """Run the package registry on every distribution installed here, and verify every count.

    The exit status is 1 when a count is off.
    """
    with console.status("reading the installed distributions") as status:
        environment = read_environment(distributions, lambda name: status.update(f"reading {name}"))
    if not any(environment.files()):
        console.print("no installed distribution has files with hashes, so there is nothing to do")
        raise typer.Exit(1)
    # a name of its own for each run: the data directory may hold earlier ones
    run_id = uuid.uuid4().hex[:8]
    repositories = tuple(f"{run_id}-{number}" for number in range(plan_passes(environment, min_calls)))
    plan = Plan(repositories, environment, timedelta(milliseconds=ttl_ms), in_flight, kills if chaos else 0)
    if chaos and not local:
        console.print("Ray will have something to say about each process that is killed; that is as it should be")
    console.print(
        f"read {len(environment.distributions):,} distributions, {plan.files // len(repositories):,} files; left out: "
        f"{environment.without_hash:,} without a hash in RECORD, {environment.missing:,} not on disk",
        soft_wrap=True,
    )
    with tempfile.TemporaryDirectory(prefix="package-registry-") as temporary:
        directory = data if data is not None else Path(temporary)
        result = uvloop.run(run(_host(directory, partitions, local=local), plan))
    if not _report(result.checks):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
