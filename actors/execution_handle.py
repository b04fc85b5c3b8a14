"""What starts durable functions from outside, and holds on to their executions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from actors.address import ClassRef
from actors.codec import decode, encode
from actors.errors import (
    CallExpired,
    CallOutcomeUnknown,
    DataMissing,
    ExecutionBuried,
    ExecutionUnfinished,
    Overloaded,
)
from actors.execution_rows import BURIED, FAILED_STEP, RUNNING
from actors.execution_waits import MAX_WAIT_MS
from actors.wire_errors import decode_error
from timers.schedule import parse_duration_ms

__all__ = ["ExecutionHandle", "ExecutionStatus"]

#: After a partition did not answer in time, it is asked again so much later.
_PAUSE_S: Final = 0.2


class DurableMethod(Protocol):
    """A durable function of one object, as a stub has it. Can be pickled."""

    def address(self) -> tuple[ClassRef, str, str]:
        """Class, key and method name."""
        ...

    def ask(self, name: str, *args: Any) -> Awaitable[Any]:
        """Call a method of the object by its name."""
        ...

    def wait(self, execution_id: str, wait_ms: int) -> Awaitable[Any]:
        """Wait in the object's partition: plain facts, or None when it takes longer."""
        ...


@dataclass(frozen=True)
class ExecutionStatus:
    """An execution at one moment. Times are epoch ms.

    `status`: "running", "completed", "failed" (its function raised), "aborted" (its code has changed under it),
    "canceled", or "buried" (it could not be run on, time and again: a dead letter). `waits_for` says in words
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
        """Whether it has an outcome."""
        return self.status not in (RUNNING, BURIED)


class ExecutionHandle:
    """One execution of a durable function. Can be made anew from the object's stub and the id.

    Handles of one execution are equal. They can be pickled where stubs can.
    """

    __slots__ = ("_method", "execution_id")

    def __init__(self, method: DurableMethod, execution_id: str) -> None:
        """Applications get it from `stub.function.start(...)` or `stub.function.execution(id)`."""
        self._method = method
        self.execution_id = execution_id

    @classmethod
    async def start(
        cls, method: DurableMethod, execution_id: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ExecutionHandle:
        """Begin an execution, or find the one of this id."""
        _, _, name = method.address()
        await method.ask("execution:start", name, execution_id, encode([list(args), kwargs]))
        return cls(method, execution_id)

    async def status(self) -> ExecutionStatus:
        """How far it is. Raises `UnknownExecution`."""
        return _status(await self._method.ask("execution:status", self.execution_id))

    async def cancel(self) -> bool:
        """End it, behind the step that runs; False when it has ended. What its steps have done stays, and nothing of
        its function runs any more. Raises `UnknownExecution`."""
        canceled: bool = await self._method.ask("execution:cancel", self.execution_id)
        return canceled

    async def resume(self) -> bool:
        """Let an aborted or a buried execution go on where it was, once what stopped it is repaired; False for others.
        Raises `UnknownExecution`."""
        resumed: bool = await self._method.ask("execution:resume", self.execution_id)
        return resumed

    async def result(self, timeout: Any = None) -> Any:
        """Wait until it has ended, and give what it returned or raise what it raised.

        `timeout`: a timedelta or a text like "5s"; then it raises `ExecutionUnfinished`, and the execution goes on.
        Raises `ExecutionCanceled`, `ExecutionDiverged`, `ExecutionBuried`, `UnknownExecution`.
        """
        loop = asyncio.get_running_loop()
        until = None if timeout is None else loop.time() + parse_duration_ms(timeout) / 1_000
        while True:
            left_s = None if until is None else until - loop.time()
            told = None
            if left_s is None or left_s > 0:
                told = await self._look(left_s)
            elif left_s is not None:
                raise ExecutionUnfinished(
                    f"execution {self.execution_id!r} had not ended after {timeout}; it goes on. `status()` tells what "
                    "it waits for"
                )
            if told is not None and told["status"] != RUNNING:
                return _outcome(told)

    async def _look(self, left_s: float | None) -> Any:
        """What the partition says within the time, or None."""
        wait_ms = MAX_WAIT_MS if left_s is None else max(1, min(MAX_WAIT_MS, int(left_s * 1_000)))
        try:
            return await asyncio.wait_for(self._method.wait(self.execution_id, wait_ms), left_s)
        except asyncio.TimeoutError:
            return None
        except (CallOutcomeUnknown, CallExpired, Overloaded, DataMissing):  # nothing was changed: ask again
            await asyncio.sleep(_PAUSE_S if left_s is None else max(0.0, min(_PAUSE_S, left_s)))
            return None

    def _name(self) -> tuple[str, str, str]:
        """Names the execution among all there are; which function it is of does not matter."""
        ref, key, _ = self._method.address()
        return ref.type_name, key, self.execution_id

    def __eq__(self, other: object) -> bool:
        return self._name() == other._name() if isinstance(other, ExecutionHandle) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._name())

    def __reduce__(self) -> tuple[Any, ...]:
        return ExecutionHandle, (self._method, self.execution_id)

    def __repr__(self) -> str:
        type_name, key, _ = self._name()
        return f"<ExecutionHandle {self.execution_id!r} of {type_name}({key!r})>"


def _outcome(told: dict[str, Any]) -> Any:
    if told["outcome"] is None:
        raise ExecutionBuried(
            f"execution {told['execution_id']!r} of {told['method']} could not be run on, time and again: its dead "
            "letter says why. Repair that, then redrive the letter or call `resume()`"
        )
    state, payload = told["outcome"]
    if state == FAILED_STEP:
        raise decode_error(payload)
    return decode(payload)


def _status(told: dict[str, Any]) -> ExecutionStatus:
    return ExecutionStatus(**{name: value for name, value in told.items() if name != "outcome"})
