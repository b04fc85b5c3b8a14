"""A runtime on Ray whose small disk is filled and freed again; prints what the caller sees."""

from __future__ import annotations

import sys
from pathlib import Path

from actors.errors import CommitFailed
from actors.runtime import Runtime
from tests.cluster.apps import Ledger
from tests.crash.full_disk import fill

_PADDING = "x" * 1_500


def main(mount: Path) -> None:
    """Before, while, and after the disk is full."""
    ballast = mount / "ballast"
    with Runtime.start(mount / "data", 1, name="full") as runtime:
        ledger = runtime.namespace(Ledger).get("ledger")
        applied = {}
        for phase in ("before", "full", "after"):
            if phase == "full":
                fill(ballast)
            if phase == "after":
                ballast.unlink()
            outcomes = set()
            for number in range(50):  # some fit into what the log has reserved already
                token = f"{phase}-{number}" + _PADDING
                try:
                    ledger.apply.sync(token)
                    applied[token] = 1
                    outcomes.add("applied")
                except CommitFailed:
                    outcomes.add("CommitFailed")
            print(f"{phase}: {min(outcomes)}", flush=True)
        assert ledger.applied.sync() == applied


if __name__ == "__main__":
    main(Path(sys.argv[1]))
