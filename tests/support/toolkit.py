"""Objects and helpers that the tests of the toolkit share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

from actors import DurableObject, Outcome, Rejected
from actors.testing import LocalRuntime

__all__ = ["Audit", "HttpServer", "quiet", "scan", "until"]


class NotNow(Rejected):
    """The audit can't take the outcome now; `retry_after_ms` is when it can."""

    def __init__(self, message: str = "", retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Audit(DurableObject):
    """Records outcomes, and notices one that comes twice."""

    #: per key: errors that the next runs raise, after they have written
    faults: ClassVar[dict[str, list[Exception]]] = {}
    #: per key: what a run waits for, after it has written
    gates: ClassVar[dict[str, asyncio.Event]] = {}

    async def record(self, outcome: Outcome) -> None:
        self.storage[f"o/{outcome.id}"] = outcome
        self.storage["count"] = self.storage.get("count", 0) + 1
        if self.key in self.gates:
            await self.gates[self.key].wait()
        faults = self.faults.get(self.key)
        if faults:
            raise faults.pop()

    def outcomes_seen(self) -> list[Outcome]:
        """In the order of their time; as often as they were recorded."""
        outcomes: list[Outcome] = list(self.storage.list(prefix="o/").values())
        assert self.storage.get("count", 0) == len(outcomes), "an outcome took effect twice"
        return sorted(outcomes, key=lambda outcome: (outcome.created_ms, outcome.subject, repr(outcome.payload)))


async def until(runtime: LocalRuntime, ready: Callable[[], Awaitable[bool]], *, seconds: int = 1_000) -> None:
    """Let virtual time pass until something is so. Connections heal in real time, so some of that passes too."""
    for second in range(seconds):
        if await ready():
            return
        await runtime.advance(seconds=1)
        if second < 50:
            await asyncio.sleep(0.002)
    raise AssertionError("it did not come to pass")


def scan(runtime: LocalRuntime, table: str) -> list[tuple[Any, ...]]:
    """Durable rows of a table, in all partitions."""
    return [row for partition in runtime.partitions if partition is not None for row in partition.store.scan(table)]


async def quiet(runtime: LocalRuntime) -> None:
    """Until all outcomes are delivered."""

    async def nothing_waits() -> bool:
        await runtime.run_until_idle()
        return None not in runtime.partitions and not scan(runtime, "backlogs")

    await until(runtime, nothing_waits)


class HttpServer:
    """Answers each request with the next of `answers` (status line and headers), and keeps what came."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.answers: list[str] = []
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[HttpServer]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}/hook"
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append((head[0], headers, body))
        answer = self.answers.pop(0) if self.answers else "204 No Content"
        if answer != "hang":
            writer.write(f"HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            writer.close()
