"""The examples do what they say, in this process and on virtual time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from actors import Outcome, Settings
from actors.testing import LocalRuntime
from examples.cart import Cart, OutOfStock, Shelf
from examples.package_registry import __main__ as command
from examples.package_registry.app import Release, Upload, UploadExpired, UploadRefused
from examples.package_registry.calls import Caller, percentile
from examples.package_registry.check import Check
from examples.package_registry.ingest import Distribution, Environment, File, Part, read_environment
from examples.package_registry.keys import author_key, left_unfinished
from examples.package_registry.namespaces import Namespaces
from examples.package_registry.needs import needs_of
from examples.package_registry.readers import Readers
from examples.package_registry.uploads import Uploader
from examples.package_registry.verify import Verifier
from examples.package_registry.verify_services import ServicesVerifier
from examples.toolkit import publications
from tests.support.readme import ROOT, write_readme_files

TTL = timedelta(seconds=2)
FILES = 200
REPOSITORY = "r"


#: The totals of quotas are known soon.
SETTINGS = Settings(durability="off", quota_rollup_ms=1_000)


def make_file(number: int) -> File:
    """Every tenth has several parts, one in fifty is empty."""
    parts = tuple(Part(100 + number, f"sha256=part{index}") for index in range(3 if number % 10 == 0 else 1))
    if number % 50 == 1:
        parts = (Part(0, "sha256=none"),)
    digest = f"sha256=whole{number}"
    return File(f"pkg/file{number}.py", sum(part.size for part in parts), digest, digest, parts)


def make_environment() -> Environment:
    files = [make_file(number) for number in range(FILES)]
    damaged = replace(files[7], measured_digest="sha256=other")
    return Environment(
        (
            Distribution(
                "one", "1.0", ("two>=1", "three; extra == 'x'"), ("Ann", "Bob"), tuple(files[:150]), ("two==2.0",)
            ),
            Distribution(
                "two", "2.0", (), ("Ann",), (*files[150:], replace(damaged, path="pkg/damaged.py")), ("empty==0",)
            ),
            Distribution("empty", "0", (), ("unknown",), ()),
        ),
        without_hash=0,
        missing=0,
    )


class Registry:
    """The registry on a `LocalRuntime`, with a client."""

    def __init__(self, runtime: LocalRuntime) -> None:
        self.runtime = runtime
        self.names = Namespaces.of(runtime.namespace)
        self.environment = make_environment()
        self.caller = Caller(64)
        self.uploader = Uploader(self.names, self.caller, TTL, 64, lambda: None)
        self.verifier = Verifier(self.names, Caller(64), [REPOSITORY], self.environment, self.uploader.tally)

    async def ingest(self) -> None:
        await self.uploader.ingest([REPOSITORY], self.environment)

    async def read_and_index(self) -> ServicesVerifier:
        """The client's second half; what can verify it."""
        published = dict(self.verifier.published())
        readers = Readers(self.names, self.caller, TTL)
        await readers.until_shipped(list(published))
        await readers.download(list(published))
        await readers.index(REPOSITORY, list(published))
        authors = self.verifier.authors()
        await readers.over_quota(list(authors))
        return ServicesVerifier(
            self.names, Caller(64), [REPOSITORY], published, authors, self.uploader.tally, readers.tally
        )

    async def services_wrong(self, verifier: ServicesVerifier) -> list[str]:
        """The counts of the services that are off."""
        found = await self.verifier.read()
        checks = verifier.checks(await verifier.read(patience_s=0), found.releases)
        return [check.what for check in checks if not check.holds]

    async def wrong(self) -> list[str]:
        """The counts that are off."""
        checks = self.verifier.checks(await self.verifier.read())
        return [check.what for check in checks if not check.holds]


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    async with LocalRuntime(partitions=2, memory=True, settings=SETTINGS) as runtime:
        yield Registry(runtime)


@pytest.fixture
async def runtime() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime(memory=True) as runtime:
        yield runtime


# --- the cart -----------------------------------------------------------------------------------------


async def test_a_cart_is_reminded_once_half_an_hour_after_the_last_addition(runtime: LocalRuntime) -> None:
    cart = runtime.namespace(Cart).get("alice")
    await cart.add("apple")
    await runtime.advance(minutes=20)
    assert await cart.add("apple", 2) == 3
    await runtime.advance(minutes=29)
    assert await cart.reminders() == 0
    await runtime.advance(minutes=1)
    await runtime.crash()
    await runtime.advance(days=1)
    assert await cart.reminders() == 1


async def test_checking_out_takes_from_the_shelves_and_empties_the_cart(runtime: LocalRuntime) -> None:
    cart, shelf = runtime.namespace(Cart).get("alice"), runtime.namespace(Shelf).get("apple")
    await shelf.fill(10)
    await cart.add("apple", 4)
    assert await cart.check_out() == {"apple": 4}
    assert await cart.items() == {}
    assert await shelf.fill(0) == 6


async def test_what_is_not_there_can_not_be_taken_and_nothing_changes(runtime: LocalRuntime) -> None:
    cart, shelf = runtime.namespace(Cart).get("alice"), runtime.namespace(Shelf).get("apple")
    await shelf.fill(3)
    await cart.add("apple", 4)
    with pytest.raises(OutOfStock, match="4 wanted, 3 there"):
        await cart.check_out()
    assert await cart.items() == {"apple": 4}
    assert await shelf.fill(0) == 3


def test_the_quickstart_runs_without_ray() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.quickstart", "--local"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "in the cart: {'apple': 2, 'pear': 1}",
        "reminders after half an hour and a crash: 1",
    ]


def test_the_tour_of_the_readme_works_in_process(tmp_path: Path) -> None:
    assert write_readme_files(tmp_path) == {"cart.py", "shop.py", "test_cart.py"}
    done = subprocess.run(
        [sys.executable, "-c", "import test_cart; test_cart.test_an_abandoned_cart_is_emptied()"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


async def test_releases_appear_after_what_they_are_built_on() -> None:
    assert await publications.run() == [
        "before base-1: app-3 is pending, waits for ('Release', 'lib-2', 'metadata')",
        "before base-1: lib-2 is pending, waits for ('Release', 'base-1', 'metadata')",
        "after base-1: app-3 is published, waits for nothing",
        "after base-1: lib-2 is published, waits for nothing",
    ]


# --- upload sessions ----------------------------------------------------------------------------------


async def test_an_upload_that_is_left_alone_expires_once(runtime: LocalRuntime) -> None:
    upload = runtime.namespace(Upload).get("s")
    await upload.open("rel", "a.py", 10, "d", TTL)
    await runtime.advance(seconds=1.5)
    await upload.part(0, 4, "p")
    await runtime.advance(seconds=1.5)
    assert (await upload.session())["state"] == "open"  # the part was a sign of life
    await runtime.advance(days=1)
    session = await upload.session()
    assert (session["state"], session["fired"], session["fired_ms"] - session["due_ms"]) == ("expired", 1, 0)
    assert (await runtime.namespace(Release).get("rel").summary())["expired"] == 1
    with pytest.raises(UploadExpired):
        await upload.part(1, 6, "p")
    with pytest.raises(UploadExpired):
        await upload.finish("d")


async def test_a_finished_upload_never_expires(runtime: LocalRuntime) -> None:
    upload = runtime.namespace(Upload).get("s")
    await upload.open("rel", "a.py", 10, "d", TTL)
    await upload.part(0, 10, "p")
    await upload.finish("d")
    await runtime.advance(days=1)
    session = await upload.session()
    assert (session["state"], session["fired"], session["cancelled"]) == ("finished", 0, 1)
    assert await runtime.namespace(Release).get("rel").files(None, 10) == {"a.py": [10, "d"]}


async def test_content_that_is_not_what_was_announced_is_refused_and_nothing_recorded(runtime: LocalRuntime) -> None:
    upload = runtime.namespace(Upload).get("s")
    with pytest.raises(UploadRefused, match="not been opened"):
        await upload.part(0, 10, "p")
    await upload.open("rel", "a.py", 10, "d", TTL)
    with pytest.raises(UploadRefused, match="opened before"):
        await upload.open("rel", "a.py", 10, "d", TTL)
    with pytest.raises(UploadRefused, match="part 1 came where part 0 belongs"):
        await upload.part(1, 10, "p")
    with pytest.raises(UploadRefused, match="0 bytes came, 10 were announced"):
        await upload.finish("d")
    await upload.part(0, 10, "p")
    with pytest.raises(UploadRefused, match="hash is other, d was announced"):
        await upload.finish("other")
    assert await runtime.namespace(Release).get("rel").files(None, 10) == {}


# --- the whole registry -------------------------------------------------------------------------------


async def test_every_count_of_the_registry_is_that_of_the_input(registry: Registry) -> None:
    await registry.ingest()
    await registry.runtime.advance(seconds=3)
    assert await registry.wrong() == []
    tally = registry.uploader.tally
    left = sum(left_unfinished(each, file) for each in registry.environment.distributions for file in each.files)
    assert (tally.left, tally.refused, tally.overtaken) == (left, 1, 0)
    assert left > 0
    assert registry.caller.total >= 3 * FILES


async def test_the_counts_hold_when_partitions_crash_in_the_middle(registry: Registry) -> None:
    async def crash() -> None:
        for number in range(4):
            await registry.uploader.tally.reached(FILES * (number + 1) // 5)
            await registry.runtime.crash(number % 2)

    await asyncio.gather(registry.ingest(), crash())
    await registry.runtime.crash()
    await registry.runtime.advance(seconds=3)
    assert await registry.wrong() == []


async def test_before_the_expiries_their_counts_are_off(registry: Registry) -> None:
    await registry.ingest()
    assert {"upload sessions expired", "timers fired, each once", "timers still set"} <= set(await registry.wrong())


async def test_what_is_published_downloaded_and_indexed_adds_up_whatever_crashes(registry: Registry) -> None:
    await registry.ingest()
    await registry.runtime.advance(seconds=7)  # every ticket that was not used has expired
    await registry.runtime.crash()
    verifier = await registry.read_and_index()
    await registry.runtime.advance(seconds=1)  # the downloads that were left are given up after two
    assert await registry.services_wrong(verifier) == ["told to the audit trail: outcome/reservation.aborted/abandoned"]
    await registry.runtime.crash(1)
    await registry.runtime.advance(seconds=3)
    assert await registry.services_wrong(verifier) == []
    audit = registry.names.audits.get(REPOSITORY)
    served = Outcome("1", "reservation.read_served", None, 0, ("Release", "r:one==1.0"), reason="requested")
    for _ in range(2):
        await audit.record(served)
    assert await registry.services_wrong(verifier) == [
        "told to the audit trail: outcome/reservation.read_served/requested",
        "told to the audit trail twice",
    ]


async def test_a_release_waits_for_what_it_requires(registry: Registry) -> None:
    releases = registry.names.releases
    for name, needs in (("a", ["r:b"]), ("b", ["r:c"])):
        await releases.get(f"r:{name}").publish([], [])
        await releases.get(f"r:{name}").ship.start([], needs)
    await registry.runtime.advance(minutes=5)
    assert [await releases.get(f"r:{name}").is_released() for name in "abc"] == [False, False, False]
    await releases.get("r:c").ship.start([], [])
    await registry.runtime.advance(minutes=5)
    assert [await releases.get(f"r:{name}").is_released() for name in "abc"] == [True, True, True]
    assert (await releases.get("r:a").summary())["unmet"] == 0


def test_requirements_that_go_round_in_circles_are_cut_open() -> None:
    needs, dropped = needs_of({"a": ["B>=1"], "b": ["c", "gone"], "c": ["a", "d; extra == 'x'"], "d": []})
    assert dropped == 1
    assert sum(len(each) for each in needs.values()) == 2
    assert needs_of({"a": ["b", "not a requirement ("], "b": []}) == ({"a": ["b"], "b": []}, 0)


Tamper = Callable[[Registry], object]


@pytest.mark.parametrize(
    ("tamper", "off"),
    [
        (
            lambda registry: registry.names.authors.get(author_key(REPOSITORY, "Ann")).credit(1, 0),
            ["releases counted by their authors", "files counted by their authors"],
        ),
        (
            lambda registry: registry.names.releases.get("r:two==2.0").add_file("extra.py", 0, "d"),
            ["files", "files with their size and hash", "files counted by their releases"],
        ),
        (
            lambda registry: registry.names.releases.get("r:two==2.0").upload_expired(),
            ["expired uploads counted by their releases"],
        ),
        (
            lambda registry: registry.names.authors.delete(author_key(REPOSITORY, "unknown")),
            ["objects of Author", "releases counted by their authors", "files counted by their authors"],
        ),
        (
            lambda registry: registry.names.uploads.get("r:stranger").open(
                "r:two==2.0", "x", 0, "d", timedelta(days=1)
            ),
            ["objects of Upload", "timers armed", "timers fired, each once", "timers still set"],
        ),
    ],
    ids=["credited twice", "a file too many", "expired twice", "an author lost", "a session nobody made"],
)
async def test_a_count_that_is_off_is_found(registry: Registry, tamper: Tamper, off: list[str]) -> None:
    await registry.ingest()
    await registry.runtime.advance(seconds=3)
    await tamper(registry)  # type: ignore[misc]
    wrong = await registry.wrong()
    assert set(wrong) - {"bytes counted by their authors"} == set(off)


async def test_a_second_repository_counts_for_itself(registry: Registry) -> None:
    await registry.uploader.ingest(["other"], registry.environment)
    registry.uploader.tally.sessions.clear()
    registry.uploader.tally.expiring.clear()
    registry.uploader.tally.armed = 0
    await registry.ingest()
    await registry.runtime.advance(seconds=3)
    assert await registry.wrong() == []


def test_what_is_installed_here_is_read_as_it_is() -> None:
    environment = read_environment(limit=5)
    assert len(environment.distributions) == 5
    assert all(each.authors and each.version for each in environment.distributions)
    files = list(environment.files())
    assert all(file.parts and file.digest.startswith("sha") for file in files)
    assert sum(file.intact for file in files) > 0


def test_a_percentile_is_a_value_that_occurred() -> None:
    assert percentile([], 50) == 0
    assert percentile([3.0, 1.0, 2.0], 50) == 2
    assert percentile([float(number) for number in range(1, 101)], 99) == 99


# --- the command --------------------------------------------------------------------------------------


def small_run(*options: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(command.main)
    arguments = ["--local", "--distributions", "5", "--min-calls", "1", "--ttl-ms", "200", *options]
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, result.output


def test_the_command_verifies_what_it_took_in(tmp_path: Path) -> None:
    code, output = small_run("--data", str(tmp_path))
    assert (code, "verified: all" in output) == (0, True), output
    assert "calls/s" in output


def test_the_command_kills_when_told_to_and_the_counts_hold() -> None:
    code, output = small_run("--chaos", "--kills", "2")
    assert (code, "verified: all" in output) == (0, True), output
    assert output.count("opened it again") == 2 + 1  # one more while it is read


def test_the_command_exits_with_1_and_says_which_count_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = Verifier.checks

    def one_more(self: Verifier, found: object) -> list[Check]:
        return [*checks(self, found), Check("fish", 1, 2, ("a: missing",))]  # type: ignore[arg-type]

    monkeypatch.setattr(Verifier, "checks", one_more)
    code, output = small_run()
    assert code == 1
    assert "OFF fish: expected 1, found 2\n    a: missing" in output
    assert "verified" not in output
