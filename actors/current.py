"""Which turn the code that runs right now belongs to."""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from actors.address import ClassRef

__all__ = ["CURRENT", "TurnPort"]


class TurnPort(Protocol):
    """What a stub needs of the turn it is used in."""

    def outgoing_call(
        self,
        ref: ClassRef,
        key: str,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_ms: int | None,
    ) -> Awaitable[Any]:
        """Start a call that belongs to this turn. Raises `TurnOver`, `WrongThread` or `ReentrantCall` at once."""
        ...


#: The turn of the running code; None outside turns. Tasks and threads started in a turn inherit it, which is how
#: their use of the object after the turn's end is found.
CURRENT: ContextVar[TurnPort | None] = ContextVar("mainspring_turn", default=None)
