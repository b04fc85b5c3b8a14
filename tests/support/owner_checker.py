"""A process that watches from outside that no slot ever has two owners: `python -m tests.support.owner_checker DIR`.

It reads the files of all partitions, again and again, until its input ends, and then prints what it has seen as JSON.
"""

from __future__ import annotations

import json
import select
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

__all__ = ["owners_watched"]

#: Often enough to meet a slot that is moving, and not so often that it takes a core.
LOOK_EVERY_S = 0.02
#: partition -> slot -> version since which it owns the slot
Owners = dict[str, dict[int, int]]


def _look(data_dir: Path) -> Owners:
    """What the partitions say one after the other."""
    found: Owners = {}
    for path in sorted(data_dir.glob("partitions/*/partition.sqlite")):
        try:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as db:
                found[path.parent.name] = dict(db.execute("SELECT slot, version FROM slots WHERE state = 'owned'"))
        except sqlite3.Error:  # it is just being made, opened or recovered
            continue
    return found


def _twice(first: Owners, second: Owners) -> list[str]:
    """Slots with two owners at one moment. Who owns a slot in both looks since the same version owned it all the time
    between; if that holds of two partitions, one of them was looked at while the other owned it."""
    owners: dict[int, str] = {}
    twice: list[str] = []
    for partition, slots in first.items():
        for slot, version in slots.items():
            if second.get(partition, {}).get(slot) != version:
                continue
            other = owners.setdefault(slot, partition)
            if other != partition:
                twice.append(f"slot {slot}: {other} and {partition}")
    return twice


def main() -> None:
    """Watch until the input ends."""
    data_dir = Path(sys.argv[1])
    looks, twice = 0, list[str]()
    first = _look(data_dir)
    print("watching", flush=True)
    left = 2  # looks that are made after the input has ended
    while left:
        left -= bool(select.select([sys.stdin], [], [], LOOK_EVERY_S)[0])
        second = _look(data_dir)
        twice += _twice(first, second)
        first, looks = second, looks + 1
    print(json.dumps({"looks": looks, "twice": sorted(set(twice)), "partitions": len(first)}))


@contextmanager
def owners_watched(data_dir: Path) -> Iterator[dict[str, Any]]:
    """Watch inside the block; afterwards the dictionary has what was seen. Raises when a slot had two owners."""
    command = [sys.executable, "-m", "tests.support.owner_checker", str(data_dir)]
    seen: dict[str, Any] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as checker:
        assert checker.stdin is not None
        assert checker.stdout is not None
        assert checker.stdout.readline() == "watching\n"
        try:
            yield seen
        finally:
            checker.stdin.close()
            seen.update(json.loads(checker.stdout.readline()))
    assert not seen["twice"], seen["twice"]


if __name__ == "__main__":
    main()
