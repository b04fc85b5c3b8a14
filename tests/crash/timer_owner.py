"""A process that owns timers in a data directory: `python -m tests.crash.timer_owner MODE DATA_DIR ...`.

`cancel`: arms and cancels 1,000 timers, says so, and waits to be killed. `compete`: opens the directory again and
again, serving for some milliseconds each time, until all timers have fired. `arm TIMERS`: arms so many for tomorrow.
`open`: opens what is there, and says what it costs.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from pathlib import Path

from actors import DurableObject, TimerInfo
from actors.errors import PartitionBusy
from actors.settings import Settings
from actors.testing import LocalRuntime, SystemClock

#: Timers of one object.
PER_OBJECT = 100
#: How long a competitor serves before it lets others have the data.
_SHORTEST_S, _LONGEST_S = 0.005, 0.08


class Peal(DurableObject):
    """Timers that record how often each has fired."""

    def arm(self, first: int, count: int, due_ms: int) -> None:
        for number in range(first, first + count):
            self.timers.set(f"t{number}", at=due_ms, method="ring", payload=number)

    def cancel(self) -> int:
        return sum(self.timers.cancel(timer.name) for timer in self.timers.list())

    def ring(self, timer: TimerInfo) -> None:
        key = f"rung {timer.name}"
        self.storage[key] = self.storage.get(key, 0) + 1

    def rung(self) -> dict[str, int]:
        return {key.removeprefix("rung "): count for key, count in self.storage.list(prefix="rung ").items()}

    def armed(self) -> int:
        return len(self.timers.list())


def runtime_in(data_dir: str) -> LocalRuntime:
    """What all processes of these tests use. `lock_wait_ms` is short, so that who is refused hears of it."""
    return LocalRuntime(clock=SystemClock(), data_dir=data_dir, settings=Settings(lock_wait_ms=20))


def say(what: object) -> None:
    """One line of JSON for the test."""
    print(json.dumps(what), flush=True)


async def cancel(data_dir: str) -> None:
    """Arm, cancel, and wait for the end."""
    async with runtime_in(data_dir) as runtime:
        peal = runtime.namespace(Peal).get("p")
        due_ms = time.time_ns() // 1_000_000 + 3_600_000
        for first in range(0, 1_000, PER_OBJECT):
            await peal.arm(first, PER_OBJECT, due_ms)
        say(await peal.cancel())
        await asyncio.Event().wait()


async def compete(data_dir: str) -> None:
    """Serve now and then, whenever nobody else does, until nothing is armed."""
    refused = served = 0
    armed = 1
    while armed:
        try:
            async with runtime_in(data_dir) as runtime:
                served += 1
                peal = runtime.namespace(Peal).get("p")
                await asyncio.sleep(random.uniform(_SHORTEST_S, _LONGEST_S))
                armed = await peal.armed()
        except PartitionBusy:
            refused += 1
        await asyncio.sleep(random.uniform(0, _LONGEST_S))
    say({"refused": refused, "served": served})


def resident_bytes() -> int:
    """Memory of this process that is in RAM now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


async def arm_idle(data_dir: str, timers: int) -> None:
    """Arm timers for tomorrow, `PER_OBJECT` at each object."""
    async with runtime_in(data_dir) as runtime:
        peals = runtime.namespace(Peal)
        due_ms = time.time_ns() // 1_000_000 + 86_400_000
        for first in range(0, timers, PER_OBJECT * PER_OBJECT):
            last = min(timers, first + PER_OBJECT * PER_OBJECT)
            await asyncio.gather(
                *(
                    peals.get(f"p{start}").arm(start, min(PER_OBJECT, last - start), due_ms)
                    for start in range(first, last, PER_OBJECT)
                )
            )


async def open_idle(data_dir: str) -> None:
    """Open what is there and say what that costs."""
    async with runtime_in(data_dir) as runtime:
        runtime.namespace(Peal)
        await asyncio.sleep(0.5)
        (status,) = runtime.status()
        say({"resident": resident_bytes(), "active_objects": status["active_objects"]})


def main() -> None:
    """Do what the arguments say."""
    mode, data_dir, *more = sys.argv[1:]
    if mode == "cancel":
        asyncio.run(cancel(data_dir))
    elif mode == "compete":
        asyncio.run(compete(data_dir))
    elif mode == "arm":
        asyncio.run(arm_idle(data_dir, int(more[0])))
    else:
        asyncio.run(open_idle(data_dir))


if __name__ == "__main__":
    main()
