"""Code of the application as the runtime meets it: whatever it raises is a failure of the turn, and of nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["failure_of", "shown", "start_body"]


def failure_of(error: BaseException) -> BaseException:
    """What a turn fails with when its code raised `error`. Raises KeyboardInterrupt, which is meant for the process."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if isinstance(error, SystemExit):
        exit_refused = RuntimeError(f"the code called sys.exit({error.code!r}): an object can't end its process")
        exit_refused.__cause__ = error
        return exit_refused
    return error


def start_body(body: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """A task for the coroutine that a method returned."""
    task = asyncio.ensure_future(_contained(body))
    task.add_done_callback(lambda _: body.close())  # it never began when its task was cancelled at once
    return task


async def _contained(body: Coroutine[Any, Any, Any]) -> Any:
    """A task would let SystemExit through to the event loop, and so end everybody's turns."""
    try:
        return await body
    except SystemExit as error:
        raise failure_of(error) from error


def shown(error: BaseException) -> str:
    """The error for a log line, also one whose own repr() fails."""
    try:
        return repr(error)
    except Exception as failure:
        return f"<{type(error).__qualname__}: its repr() raised {type(failure).__qualname__}>"
