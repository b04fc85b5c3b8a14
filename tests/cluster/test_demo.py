"""The package registry on a Ray of its own: the counts hold, also when partition processes are killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.readme import ROOT, write_readme_files

pytestmark = pytest.mark.cluster


def run(*arguments: str, directory: Path = ROOT) -> str:
    """Run a module from a directory; gives what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=directory,
        env={**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def number(row: str, output: str) -> int:
    """A number of the table."""
    found = re.search(rf"│ {row} +│ +([\d,]+) │", output)
    assert found is not None, output
    return int(found.group(1).replace(",", ""))


@pytest.mark.parametrize("kills", [pytest.param(0, marks=pytest.mark.soak), 3])
def test_every_count_is_that_of_the_input(tmp_path: Path, kills: int) -> None:
    options = ["--distributions", "25", "--min-calls", "1", "--ttl-ms", "1000", "--in-flight", "32"]
    chaos = ["--chaos", "--kills", str(kills)] if kills else []
    output = run("examples.package_registry", "--data", str(tmp_path / "data"), *options, *chaos)
    assert "verified: all" in output
    assert output.count("SIGKILL to partition") == (kills + 1 if kills else 0)  # the last one while it is read
    assert number("files", output) > 100
    assert number("calls", output) >= 3 * number("files", output)
    assert number("timers fired", output) >= number("upload sessions left unfinished", output) > 0


def test_the_quickstart_runs_on_ray() -> None:
    assert run("examples.quickstart").splitlines()[-2:] == [
        "bought: {'apple': 2}",
        "refused: apple: 9 wanted, 8 there",
    ]


def test_the_tour_of_the_readme_runs_on_ray(tmp_path: Path) -> None:
    write_readme_files(tmp_path)
    lines = run("shop", directory=tmp_path).splitlines()
    assert lines == ["bought {'apple': 2}", "refused apple: 100 wanted", "['alice', 'bob']"]
