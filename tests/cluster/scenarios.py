"""Runs one scenario of node_failures.py in a process of its own: it joins another Ray than the tests do, and dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.readme import ROOT

__all__ = ["run_scenario"]

_TIMEOUT_S = 400


def run_scenario(name: str, directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.node_failures", name, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("done"), done.stdout + done.stderr
