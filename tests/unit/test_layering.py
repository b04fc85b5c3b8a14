"""Imports run one way, actors -> drivers -> timers, and the timer core is pure."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.source_rules import imports, is_within, references

ROOT = Path(__file__).parents[2]

#: What a folder may not import.
ABOVE = {"timers": frozenset({"drivers", "actors"}), "drivers": frozenset({"actors"}), "actors": frozenset[str]()}

#: Storage, event loops, Ray, threads and clocks: what the core is given instead.
IMPURE_MODULES = frozenset(
    {"asyncio", "apsw", "ray", "sched", "secrets", "sqlite3", "sqlite_utils", "threading", "time", "trio", "uvloop"}
)

#: The wheel is the one module of the core with a thread. Its clock and its sleep are arguments.
MAY_THREAD = "timers/release_timer.py"

#: Functions of otherwise harmless modules that read a clock or draw on chance.
IMPURE_FUNCTIONS = frozenset(
    {
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.datetime.today",
        "datetime.date.today",
        "os.getrandom",
        "os.times",
        "os.urandom",
        "uuid.uuid1",
        "uuid.uuid4",
    }
)

#: A generator that is seeded by its caller; everything else in `random` has state of its own.
SEEDED_RANDOM = frozenset({"random.Random"})


def layer_breaks(folder: str, source: str) -> list[str]:
    return [use.name for use in imports(source, folder) if is_within(use.name, ABOVE[folder])]


def impurities(source: str, *, may_thread: bool = False) -> list[str]:
    modules = IMPURE_MODULES - {"threading"} if may_thread else IMPURE_MODULES
    found = {use.name for use in imports(source, "timers") if is_within(use.name, modules)}
    for use in (*imports(source, "timers"), *references(source, "timers")):
        has_own_state = use.name.startswith("random.") and not is_within(use.name, SEEDED_RANDOM)
        if has_own_state or is_within(use.name, IMPURE_FUNCTIONS):
            found.add(use.name)
    return sorted(found)


def sources(folder: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", [path for folder in ABOVE for path in sources(folder)])
def test_imports_run_from_actors_over_drivers_to_timers_only(path: str) -> None:
    assert layer_breaks(path.split("/")[0], (ROOT / path).read_text()) == []


@pytest.mark.parametrize("path", sources("timers"))
def test_the_timer_core_reads_no_clock_draws_no_chance_and_knows_no_storage_loop_or_thread(path: str) -> None:
    assert impurities((ROOT / path).read_text(), may_thread=path == MAY_THREAD) == []


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("timers", "import drivers"),
        ("timers", "from drivers.clock import Clock"),
        ("timers", "def f():\n    import actors.codec"),
        ("timers", "if TYPE_CHECKING:\n    from actors import codec"),
        ("timers", "import importlib\nimportlib.import_module('drivers.clock')"),
        ("drivers", "from actors.errors import Rejected"),
    ],
)
def test_the_check_finds_an_import_against_the_direction(folder: str, source: str) -> None:
    assert layer_breaks(folder, source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import asyncio",
        "import sqlite3",
        "from ray import remote",
        "import threading",
        "def f():\n    from time import monotonic",
        "import datetime\ndatetime.datetime.now()",
        "from datetime import datetime as when\nwhen.utcnow()",
        "from datetime import date\ndate.today",
        "import random\nrandom.random()",
        "from random import shuffle",
        "import random as r\nr.SystemRandom()",
        "import uuid\nuuid.uuid4()",
        "from uuid import uuid4",
        "import os\nos.urandom(8)",
        "import secrets",
    ],
)
def test_the_check_finds_what_is_not_pure(source: str) -> None:
    assert impurities(source) != []


@pytest.mark.parametrize(
    "source",
    [
        "import datetime\ndatetime.datetime.fromtimestamp(0, datetime.timezone.utc)",
        "from timers.batch import Batch",
        "import random\nrandom.Random(1).random()",
        "import uuid\nuuid.UUID(bytes=b'0' * 16)",
        "def f(ctx):\n    return ctx.time.now()",
        "from zoneinfo import ZoneInfo",
    ],
)
def test_the_check_lets_pure_code_pass(source: str) -> None:
    assert impurities(source) == []


def test_only_the_wheel_may_have_a_thread_and_it_too_reads_no_clock() -> None:
    assert impurities("import threading", may_thread=True) == []
    assert impurities("import threading\nimport time", may_thread=True) == ["time"]


def test_who_uses_a_local_runtime_waits_for_no_ray() -> None:
    """Importing Ray takes most of a second."""
    look = "import sys, actors.testing; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", look], cwd=ROOT, check=False).returncode == 0
