"""Several things that a durable function waits for at once, in ways that every replay repeats: all, or the first.

`asyncio.gather` and its like know nothing of a journal: which of two branches raised first, or ended first, is told by
the loop's order at a replay and not by what happened. Here it follows from the journal alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

from actors.codec import decode, encode
from actors.errors import InvalidOption
from actors.execution_rows import DONE, JournalRow
from actors.execution_run import Branch, ExecutionRun

__all__ = ["gather", "wait_for_first"]

#: The branch of each thing that is waited for, and the thing.
_Ways = list[tuple[Branch, Awaitable[Any]]]


def _check(run: ExecutionRun, awaitables: Sequence[Awaitable[Any]], what: str) -> None:
    """Raises `InvalidOption` for a task or a future. It begins by itself: a replay could neither keep it from that nor
    number its steps as they were."""
    for each in awaitables:
        if asyncio.isfuture(each):
            run.drop(awaitables)
            raise InvalidOption(
                f"ctx.{what}() takes sleeps, promises, steps and coroutines, and not {type(each).__name__}: give it "
                "the coroutine itself, and `ctx.gather(...)` in the place of `asyncio.gather(...)`"
            )


def _ways(run: ExecutionRun, awaitables: Sequence[Awaitable[Any]]) -> _Ways:
    """A branch for each."""
    parent, now_ms = run.here(), run.now_ms()
    return [(parent.child(run.row.seed, now_ms), each) for each in awaitables]


def _begin(run: ExecutionRun, ways: _Ways) -> None:
    """What waits for the ways may have become a way of something else, and is given up with that."""
    here = run.here()
    for branch, _ in ways:
        if branch is not here:
            branch.parent = here


def gather(run: ExecutionRun, awaitables: Sequence[Awaitable[Any]]) -> Coroutine[Any, Any, list[Any]]:
    """See `DurableContext.gather`."""
    _check(run, awaitables, "gather")
    waiting = _gather(run, _ways(run, awaitables))
    run.groups[waiting] = list(awaitables)
    return waiting


async def _gather(run: ExecutionRun, ways: _Ways) -> list[Any]:
    _begin(run, ways)
    if not ways:
        return []
    tasks = [run.start_branch(branch, each) for branch, each in ways]
    try:
        await asyncio.wait(tasks)
    finally:
        for task in tasks:
            task.cancel()  # of those that have not ended, when this was cancelled itself
    run.here()
    run.pass_time(max(branch.now_ms for branch, _ in ways))
    return [task.result() for task in tasks]


def wait_for_first(run: ExecutionRun, awaitables: Sequence[Awaitable[Any]]) -> Coroutine[Any, Any, tuple[int, Any]]:
    """See `DurableContext.first`."""
    if not awaitables:
        raise InvalidOption("ctx.first() needs something to wait for")
    _check(run, awaitables, "first")
    mine = run.next_step("first", "", encode(len(awaitables)))
    waiting = _first(run, mine, _ways(run, awaitables))
    run.groups[waiting] = list(awaitables)
    return waiting


async def _first(run: ExecutionRun, mine: JournalRow, ways: _Ways) -> tuple[int, Any]:
    _begin(run, ways)
    known = run.known(mine)
    if known is None:
        tasks = [_begin_way(run, mine, ways, number) for number in range(len(ways))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        run.here()
        if run.known(mine) is None:  # it was cancelled by its own code
            _decide(run, mine, ways, next(number for number, task in enumerate(tasks) if task.done()))
        known = run.known(mine)
        assert known is not None
        place = int(decode(known.payload))
        for number, task in enumerate(tasks):
            if number != place:
                task.cancel()
        winner = tasks[place]
    else:
        place = int(decode(known.payload))
        # never begun: what they did before they were given up does not count
        run.drop([each for number, (_, each) in enumerate(ways) if number != place])
        winner = run.start_branch(*ways[place])
    run.saw(known)
    return place, await winner


def _begin_way(run: ExecutionRun, mine: JournalRow, ways: _Ways, number: int) -> asyncio.Task[Any]:
    branch, each = ways[number]
    way = _way(run, mine, ways, number)
    run.groups[way] = [each]
    return run.start_branch(branch, way)


async def _way(run: ExecutionRun, mine: JournalRow, ways: _Ways, number: int) -> Any:
    """One of several. The first to end says so at once, before another can begin a step."""
    try:
        value = await ways[number][1]
    except Exception:
        _decide(run, mine, ways, number)
        raise
    _decide(run, mine, ways, number)
    return value


def _decide(run: ExecutionRun, mine: JournalRow, ways: _Ways, number: int) -> None:
    if not run.is_over and run.read(mine.step) is None:
        run.put(mine, state=DONE, payload=encode(number))
        for other, (branch, _) in enumerate(ways):
            branch.given_up = other != number
