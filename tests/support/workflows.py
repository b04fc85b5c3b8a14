"""Durable functions that the crash tests run, and what they did to the world outside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from actors import DurableContext, DurableObject, durable, shared

__all__ = ["Flow", "Till", "World", "Wrong"]


class Wrong(Exception):
    """An exception of the application's own."""


@dataclass
class World:
    """What is not rolled back and not forgotten: effects in order, tokens that were sent, and the functions to run."""

    did: list[str] = field(default_factory=list)
    tokens: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)


class Till(DurableObject):
    """Another object, which counts what it is asked for."""

    def charge(self, amount: int) -> int:
        total: int = self.storage.get("total", 0) + amount
        self.storage.put("total", total)
        self.storage.put("calls", self.storage.get("calls", 0) + 1)
        return total

    @shared
    def total(self) -> tuple[int, int]:
        return self.storage.get("total", 0), self.storage.get("calls", 0)


class Flow(DurableObject):
    """Runs what the test has put into the world under a name."""

    world: ClassVar[World] = World()

    @durable
    async def run(self, ctx: DurableContext, function: str, *args: Any) -> Any:
        return await self.world.functions[function](self, ctx, *args)

    def do(self, what: str) -> str:
        """Something in the world outside, and in the state."""
        self.world.did.append(what)
        self.storage.put(what, self.storage.get(what, 0) + 1)
        return what

    def fail(self, what: str, times: int) -> str:
        """Fails so often, after having written."""
        self.do(what)
        if self.world.did.count(what) <= times:
            raise Wrong(f"{what} {self.world.did.count(what)}")
        return what

    def send_token(self, name: str, token: str) -> None:
        self.world.did.append(f"sent {name}")
        self.world.tokens[name] = token

    @shared
    def state(self) -> dict[str, Any]:
        return self.storage.list()
