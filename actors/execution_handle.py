"""What starts durable functions from outside, and holds on to their executions."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from actors.codec import decode, encode
from actors.errors import ExecutionUnfinished
from actors.execution_rows import FAILED_STEP, RUNNING
from actors.wire_errors import decode_error
from timers.schedule import parse_duration_ms

__all__ = ["ExecutionHandle", "ExecutionStatus"]

#: Who waits for a result asks again after so long, then less and less often.
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0

#: Calls a method of the object by its name.
Ask = Callable[..., Awaitable[Any]]


@dataclass(frozen=True)
class ExecutionStatus:
    """An execution at one moment. Times are epoch ms.

    `status`: "running", "completed", "failed" (its function raised), "aborted" (its code has changed under it),
    "canceled", or "buried" (its segments kept failing: a dead letter, which can be redriven). `waits_for` says in words
    what a running one waits for, `wake_ms` until when at the latest (None: until a promise is resolved).
    """

    execution_id: str
    method: str
    status: str
    began_ms: int
    ended_ms: int | None
    steps: int
    wake_ms: int | None
    waits_for: str

    @property
    def has_ended(self) -> bool:
        """Whether it will do nothing more by itself."""
        return self.status != RUNNING


class ExecutionHandle:
    """One execution of a durable function. Can be made anew from the object's stub and the id."""

    __slots__ = ("_ask", "execution_id")

    def __init__(self, ask: Ask, execution_id: str) -> None:
        """Applications get it from `stub.function.start(...)` or `stub.function.execution(id)`."""
        self._ask = ask
        self.execution_id = execution_id

    @classmethod
    async def start(
        cls, ask: Ask, method: str, execution_id: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ExecutionHandle:
        """Begin an execution, or find the one of this id."""
        handle = cls(ask, uuid.uuid4().hex if execution_id is None else execution_id)
        await ask("execution:start", method, handle.execution_id, encode([list(args), kwargs]))
        return handle

    async def status(self) -> ExecutionStatus:
        """How far it is. Raises `UnknownExecution`."""
        return _status(await self._ask("execution:status", self.execution_id))

    async def cancel(self) -> bool:
        """End it; False when it has ended. What its steps have done stays. Raises `UnknownExecution`."""
        canceled: bool = await self._ask("execution:cancel", self.execution_id)
        return canceled

    async def result(self, timeout: Any = None) -> Any:
        """Wait until it has ended, and give what it returned or raise what it raised.

        `timeout`: a timedelta or a text like "5s"; then it raises `ExecutionUnfinished`, and the execution goes on.
        Raises `ExecutionCanceled`, `ExecutionDiverged`, `UnknownExecution`.
        """
        loop = asyncio.get_running_loop()
        until = None if timeout is None else loop.time() + parse_duration_ms(timeout) / 1_000
        pause_s = _FIRST_PAUSE_S
        while True:
            told = await self._ask("execution:status", self.execution_id)
            if told["outcome"] is not None:
                state, payload = told["outcome"]
                if state == FAILED_STEP:
                    raise decode_error(payload)
                return decode(payload)
            if until is not None and loop.time() >= until:
                raise ExecutionUnfinished(
                    f"execution {self.execution_id!r} had not ended after {timeout}; it is {told['status']} and waits "
                    f"for {told['waits_for'] or 'nothing'}"
                )
            await asyncio.sleep(pause_s if until is None else min(pause_s, max(0.0, until - loop.time())))
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)

    def __repr__(self) -> str:
        return f"<ExecutionHandle {self.execution_id!r}>"


def _status(told: dict[str, Any]) -> ExecutionStatus:
    return ExecutionStatus(**{name: value for name, value in told.items() if name != "outcome"})
