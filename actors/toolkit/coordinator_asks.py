"""What a turn asks the coordinator: once in effect, and with the same answer when the turn is run again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from actors.codec import decode, encode
from actors.coordinator_services import CoordinatorServices
from actors.errors import CoordinatorUnavailable, MainspringError, Overloaded
from actors.wire_errors import decode_error, encode_error
from drivers.clock import Clock

if TYPE_CHECKING:
    from actors.turn import Turn

__all__ = ["ask_coordinator"]

#: How soon a coordinator that did not answer is asked again.
_RETRY_MS: Final = 250

#: Gets the coordinator and the id of the request, which is the same whenever the turn is run.
Ask = Callable[[CoordinatorServices, str], Awaitable[Any]]


async def ask_coordinator(turn: Turn, what: str, ask: Ask, *, reads: bool = False) -> Any:
    """What the coordinator answers; it is on disk, with the turn's intent, before the code can decide by it.

    A request that only `reads` may come from a `@shared` method, whose answers are not kept. Raises
    `CoordinatorUnavailable` after `coordinator_wait_ms`; a turn that is run again meets that too. `ReadOnlyTurn`.
    """
    if not reads:
        turn.check_writable()
    most = turn.host.partition.settings.max_nested_calls
    if turn.outstanding >= most:
        raise Overloaded(f"{turn.host.id}: {turn.outstanding} calls of this turn are outstanding already")
    asked = _ask(turn, turn.unique_id(what), ask)
    return await (asked if turn.is_activation else turn.begin_call(asked))


async def _ask(turn: Turn, request_id: str, ask: Ask) -> Any:
    ask_id = request_id.encode()
    answer = turn.answer_to(ask_id)
    if answer is None:
        if not turn.read_only:
            await turn.before_asking()
        answer = await _answer(turn, request_id, ask)
        await turn.remember(ask_id, answer)
    value, error = decode(answer)
    if error is not None:
        raise decode_error(error)
    return value


async def _answer(turn: Turn, request_id: str, ask: Ask) -> bytes:
    """The answer or the error, encoded."""
    partition = turn.host.partition
    deadline_ns = partition.clock.monotonic_ns() + partition.settings.coordinator_wait_ms * 1_000_000
    while True:
        try:
            return encode((await ask(partition.coordinator, request_id), None))
        except CoordinatorUnavailable as error:
            if partition.clock.monotonic_ns() + _RETRY_MS * 1_000_000 > deadline_ns:
                return encode((None, encode_error(error)))
        except MainspringError as error:
            return encode((None, encode_error(error)))
        await _pause(partition.clock, _RETRY_MS)


async def _pause(clock: Clock, delay_ms: int) -> None:
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    handle = clock.call_later(delay_ms, end)
    try:
        await over
    finally:
        handle.cancel()
