"""Several nodes: partitions are spread over the disks, and come back to their own when a node is lost and returns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.readme import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


def test_partitions_are_spread_over_nodes_and_come_back_to_their_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.several_nodes", str(tmp_path / "data")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line in ("spread", "returned", "scaled True")] == [
        "spread",
        "returned",
        "scaled True",
    ]
