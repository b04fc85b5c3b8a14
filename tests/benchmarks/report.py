"""Numbers with what they were measured on: percentiles, machine, versions, JSON."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

__all__ = ["Sample", "machine", "percentile", "save"]


@dataclass(frozen=True)
class Sample:
    """One measured run. Latencies are milliseconds."""

    who: str
    callers: int
    keys: int
    calls: int
    seconds: float
    per_second: float
    p50_ms: float
    p95_ms: float
    p99_ms: float

    @classmethod
    def of(cls, who: str, callers: int, keys: int, latencies_ms: Sequence[float], seconds: float) -> Sample:
        ordered = sorted(latencies_ms)
        return cls(
            who,
            callers,
            keys,
            len(ordered),
            round(seconds, 3),
            round(len(ordered) / seconds, 1),
            *(round(percentile(ordered, share), 3) for share in (0.50, 0.95, 0.99)),
        )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the (sorted) values does not exceed."""
    return ordered[min(len(ordered) - 1, max(0, -(-int(len(ordered) * share * 1_000) // 1_000) - 1))]


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: the platform's own word stands
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "sqlite": sqlite3.sqlite_version,
        **{name: version(name) for name in ("mainspring", "ray", "msgpack", "uvloop")},
    }


def save(name: str, document: dict[str, Any], samples: Sequence[Sample], directory: Path) -> Path:
    """Write the run as JSON and return the file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.write_text(json.dumps({**document, "samples": [asdict(sample) for sample in samples]}, indent=2) + "\n")
    return path
