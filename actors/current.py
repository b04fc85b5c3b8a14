"""Which turn the code that runs right now belongs to."""

from __future__ import annotations

from collections.abc import Awaitable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from actors.address import ClassRef

__all__ = ["CURRENT", "IN_STEP", "TurnPort"]


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

    def check_may_wait(self, type_name: str, key: str) -> None:
        """Raise when the turn may not wait for an execution of this object."""
        ...

    def unique_id(self, what: str) -> str:
        """An id that nothing else has, the same when the turn is run again."""
        ...


#: The step of a durable function that the running code belongs to. Of several branches of one function, which run
#: beside each other, only that of the step may write.
IN_STEP: ContextVar[object | None] = ContextVar("mainspring_step", default=None)

#: The turn of the running code; None outside turns. Tasks and threads started in a turn inherit it, which is how
#: their use of the object after the turn's end is found.
CURRENT: ContextVar[TurnPort | None] = ContextVar("mainspring_turn", default=None)
