"""Something that is opened in the background, tried again until it works, and waited for by whoever needs it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from actors.errors import MainspringError
from actors.logs import log_event

__all__ = ["RETRY_S", "Opening"]

T = TypeVar("T")

#: How often an opening that failed is tried again: what is missing comes back when a person or a disk brings it.
RETRY_S = 5.0


class Opening(Generic[T]):
    """Runs `attempt` until it returns. Bound to the event loop that calls `run`."""

    def __init__(self, name: str, attempt: Callable[[], Awaitable[T]], retry_s: float = RETRY_S) -> None:
        self._name = name
        self._attempt = attempt
        self._retry_s = retry_s
        self._decided = asyncio.Event()
        self._value: T | None = None
        self._error: Exception | None = None

    async def run(self) -> T:
        """Try until it is open. Returns what was opened."""
        while True:
            try:
                value = await self._attempt()
            except Exception as error:
                self._failed(error)
                await asyncio.sleep(self._retry_s)
            else:
                self._value, self._error = value, None
                self._decided.set()
                return value

    async def get(self) -> T:
        """What was opened, after waiting for the attempt that runs first. Raises the error of the last attempt."""
        await self._decided.wait()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value

    @property
    def opened(self) -> T | None:
        """What was opened, or None so far."""
        return self._value

    def _failed(self, error: Exception) -> None:
        if type(error) is not type(self._error) or str(error) != str(self._error):  # once, not each 5 s
            traceback = None if isinstance(error, MainspringError) else error
            log_event(
                logging.ERROR,
                "opening_failed",
                f"{self._name} can't open: {error!s} Looking again every {self._retry_s:g} s.",
                error=traceback,
                opening=self._name,
                reason=type(error).__name__,
            )
        self._error = error
        self._decided.set()
