"""A process that forks children on request; each works on a data directory and may be killed at it.

Started once as `python -m tests.crash.child`: it has imported everything, so that a child costs milliseconds. One
JSON request per line on stdin, one JSON answer per line on stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from actors.settings import Settings
from actors.testing import LocalRuntime, SystemClock
from tests.cluster.apps import Bell, Crew, Ledger

#: What changes files, or could: a child may be killed before each call of one of these.
_STEPS = frozenset({"connect", "execute", "executemany", "fsync", "link", "mkdir", "open", "unlink", "lockf"})
#: Callers of a child that serves, and the objects that they share.
_CALLERS = 16
_OBJECTS = 4


def local_runtime(data_dir: str, partitions: int) -> LocalRuntime:
    """The runtime that all processes of these tests use."""
    settings = Settings(lock_wait_ms=100)
    return LocalRuntime(clock=SystemClock(), partitions=partitions, data_dir=data_dir, settings=settings)


class KillAt:
    """Kills this process before the n-th of `_STEPS`, in whichever thread it comes."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._active = True
        self.steps = 0

    def __call__(self, frame: FrameType, event: str, what: Any) -> None:
        if self._active and event == "c_call" and what.__name__ in _STEPS:
            self.steps += 1
            if self.steps == self._number:
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def remove(self) -> None:
        self._active = False
        sys.setprofile(None)


async def open_and_apply(data_dir: str, partitions: int, token: str, kill_at: int) -> dict[str, Any]:
    """Open the directory, killed at a step of that, or else apply the token once."""
    kill = KillAt(kill_at)
    kill.install()
    runtime = local_runtime(data_dir, partitions)
    await runtime.start()
    kill.remove()
    try:
        ledger = runtime.namespace(Ledger).get("ledger")
        await ledger.apply(token)
        return {"steps": kill.steps, "applied": await ledger.applied()}
    finally:
        await runtime.stop()


async def serve(data_dir: str, partitions: int, name: str, acknowledged: int) -> None:
    """Make calls, trees of calls and timers until killed; each acknowledged token goes to the descriptor as a line."""
    async with local_runtime(data_dir, partitions) as runtime:
        ledgers, crews, bells = (runtime.namespace(cls) for cls in (Ledger, Crew, Bell))

        async def call(caller: int) -> None:
            for number in range(1_000_000):
                token, place = f"{name}-{caller}-{number}", caller % _OBJECTS
                await ledgers.get(f"ledger-{place}").apply(token)
                os.write(acknowledged, f"applied {token}\n".encode())
                below = [[f"crew-{(place + n) % _OBJECTS}-below", [], ""] for n in (1, 2)]
                await crews.get(f"crew-{place}").work(token, below)
                os.write(acknowledged, f"worked {token}\n".encode())
                await bells.get(f"bell-{place}").arm({token: time.time_ns() // 1_000_000 + number % 5}, "ring")
                os.write(acknowledged, f"armed {token}\n".encode())

        await asyncio.gather(*(call(caller) for caller in range(_CALLERS)))


def _child(request: dict[str, Any], writer: int) -> None:
    where = request["data_dir"], request["partitions"]
    try:
        if "kill_after" in request:
            asyncio.run(serve(*where, request["token"], writer))
        else:
            answer = asyncio.run(open_and_apply(*where, request["token"], request["kill_at"]))
            os.write(writer, json.dumps(answer).encode())
    except Exception as error:
        os.write(writer, json.dumps({"error": type(error).__name__, "message": str(error)}).encode())
    os._exit(0)


def fork(request: dict[str, Any]) -> dict[str, Any]:
    """Do the request in a child of its own. With `kill_after` it is killed after so many acknowledgements."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(request, writer)
    os.close(writer)
    lines = []
    with os.fdopen(reader) as pipe:
        for line in pipe:
            lines.append(line.rstrip("\n"))
            if len(lines) == request.get("kill_after"):
                os.kill(pid, signal.SIGKILL)  # what it wrote before it died is read all the same
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return {"signal": os.WTERMSIG(status), "acknowledged": [line for line in lines if " " in line]}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def main() -> None:
    """Answer requests until stdin ends."""
    for line in sys.stdin:
        print(json.dumps(fork(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
