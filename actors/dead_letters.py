"""Dead letters as code sees them: list, run again, forget."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from actors.client import Client

__all__ = ["DeadLetter", "DeadLetters"]

T = TypeVar("T")

#: Letters asked for at a time.
_PAGE = 1_000


@dataclass(frozen=True)
class DeadLetter:
    """A timer or a message whose tries were used up; a message (kind 3) belongs to its sender. `attempts` counts its
    runs, `crashes` the processes that died of it.

    `id` is unique in its partition; times are epoch ms; `error` is the end of the last traceback.
    """

    id: int
    partition: int
    type_name: str
    key: str
    kind: int
    name: str
    due_ms: int
    attempts: int
    crashes: int
    error: str
    created_ms: int


class _Access(Protocol):
    def client(self) -> Client: ...

    def run_sync(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T: ...


class DeadLetters:
    """What a runtime offers about its dead letters; a mixin for everything that has a client."""

    async def dead_letters(self: _Access, *, limit: int | None = None) -> list[DeadLetter]:
        """What has used up its tries, oldest first in each partition; all of it without a `limit`."""
        client = self.client()
        found: list[DeadLetter] = []
        for number in client.directory.partitions():
            after: int | None = None
            while limit is None or len(found) < limit:
                size = _PAGE if limit is None else min(_PAGE, limit - len(found))
                page: list[DeadLetter] = await client.admin(number, "dead_letters", [size, after])
                found.extend(page)
                if len(page) < size:
                    break
                after = page[-1].id
        return found

    async def redrive(self: _Access, letter: DeadLetter) -> bool:
        """Run it again with all its tries, due now; False when somebody has dealt with it already.

        A message is sent anew, behind what was sent since.
        """
        done: bool = await self.client().admin(letter.partition, "redrive", [letter.id])
        return done

    async def discard(self: _Access, letter: DeadLetter) -> bool:
        """Forget it; False when somebody has dealt with it already."""
        done: bool = await self.client().admin(letter.partition, "discard", [letter.id])
        return done
