"""Fills the disk that a runtime is on, frees it again, and says what the callers saw. Run on a small file system."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections import Counter
from pathlib import Path

from actors.errors import CommitFailed
from tests.cluster.apps import Ledger
from tests.crash.child import local_runtime

_CHUNK = b"\0" * 65_536


def fill(ballast: Path) -> None:
    """Take all the space that is left."""
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(_CHUNK)
    with contextlib.suppress(OSError), ballast.open("ab", buffering=0) as file:
        while True:
            file.write(b"\0")


async def run(data_dir: Path) -> dict[str, object]:
    """Before, while, and after the disk is full."""
    ballast = data_dir / "ballast"
    async with local_runtime(str(data_dir / "data"), 1) as runtime:
        ledgers = [runtime.namespace(Ledger).get(f"ledger-{number}") for number in range(8)]
        outcomes: dict[str, Counter[str]] = {}
        acknowledged: Counter[str] = Counter()

        async def apply(phase: str, number: int, index: int) -> None:
            token = f"{phase}-{number}"
            try:
                await ledgers[index].apply(token + "x" * 1_500)
            except CommitFailed:
                outcomes.setdefault(phase, Counter())["CommitFailed"] += 1
            else:
                outcomes.setdefault(phase, Counter())["applied"] += 1
                acknowledged[token] += 1

        for phase in ("before", "full", "after"):
            if phase == "full":
                await asyncio.to_thread(fill, ballast)
            if phase == "after":
                ballast.unlink()
            for number in range(20):
                await asyncio.gather(*(apply(phase, number * 8 + index, index) for index in range(8)))
        applied: Counter[str] = Counter()
        for ledger in ledgers:
            applied.update({key.rstrip("x"): count for key, count in (await ledger.applied()).items()})
    return {"outcomes": outcomes, "exact": applied == acknowledged, "most": max(applied.values())}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(Path(sys.argv[1])))), flush=True)
    os._exit(0)
