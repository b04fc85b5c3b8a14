"""Durable functions under seeded schedules of crashes, evictions and moves: the same result, each effect once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any, ClassVar

import pytest

from actors import DurableContext, DurableObject, RetryPolicy, durable
from actors.errors import PromiseTimeout, Rejected
from actors.testing import LocalRuntime

KEYS = ("p", "q", "r")
SOON = RetryPolicy(max_attempts=4, base_ms=500, factor=1, cap_ms=500, jitter=0)


class Ledger(DurableObject):
    def add(self, what: str) -> int:
        count: int = self.storage.get(what, 0) + 1
        self.storage[what] = count
        return count

    def all(self) -> dict[str, int]:
        return dict(self.storage.list())


class Unlucky(Rejected):
    pass


class Program(DurableObject):
    """Everything that a durable function can do, at once. What it knows of time and chance goes into its steps."""

    tokens: ClassVar[dict[str, str]] = {}

    async def add(self, what: str) -> int:
        count: int = await self.namespace(Ledger).get("ledger").add(f"{self.key} {what}")
        self.storage[what] = self.storage.get(what, 0) + 1
        return count

    def own(self) -> dict[str, int]:
        return dict(self.storage.list())

    def tell(self, token: str) -> None:
        Program.tokens[self.key] = token

    def unlucky(self) -> str:
        self.storage["unlucky"] = 1
        tries = self.storage.get("tries", 0)
        raise Unlucky(f"after {tries}")

    @durable
    async def flow(self, ctx: DurableContext) -> list[Any]:
        promise = ctx.promise("answer", timeout="20s")
        await ctx.step("tell", self.tell, promise.token)

        async def line(name: str, count: int) -> float:
            for number in range(count):
                await ctx.sleep(f"{ctx.random.randint(0, 3)}s")
                await ctx.step("line", self.add, f"{name} {number} at {ctx.now_ms} {ctx.random.random():.6f}")
            return ctx.random.random()

        async def answer() -> str:
            try:
                return str(await promise)
            except PromiseTimeout:
                return "nobody"

        told = await asyncio.gather(line("a", 3), line("b", 2), answer())
        place, _ = await ctx.first(line("c", 3), ctx.sleep("4s"), line("d", 1))
        try:
            await ctx.step("unlucky", self.unlucky, retry=SOON)
        except Unlucky as error:
            await ctx.step("caught", self.add, f"caught {error}")
        for number in range(3):
            await ctx.step("last", self.add, f"last {number} {ctx.uuid()}")
        return [*told, place, await ctx.step("sum", lambda: sorted(self.storage.list()))]


async def disturb(runtime: LocalRuntime, chance: random.Random) -> None:
    """One thing that must make no difference."""
    what = chance.randrange(8)
    if what == 0:
        await runtime.crash()
    elif what == 1:
        await runtime.crash(chance.randrange(runtime.partition_count))
    elif what == 2:
        await runtime.scale(chance.randint(1, 3))
    elif what == 3:
        await runtime.evict(runtime.namespace(Program).get(chance.choice(KEYS)))
    elif what == 4:
        commits = sum(each["commits"] for each in runtime.status()) + chance.randint(1, 6)
        for _ in range(400):  # to die in the middle of a segment, and not between two
            await asyncio.sleep(0)
            runtime.clock.run_due()  # type: ignore[attr-defined]  # a virtual clock
            if sum(each["commits"] for each in runtime.status()) >= commits:
                break
        await runtime.crash()
    elif what == 5 and Program.tokens:
        key, token = chance.choice(sorted(Program.tokens.items()))
        await runtime.namespace(Program).resolve_promise(token, f"answer for {key}")
    else:
        await runtime.advance(ms=chance.randint(1, 1_500))


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 100))])
async def test_each_effect_happens_once_whatever_comes_in_between(seed: int) -> None:
    chance = random.Random(seed)
    Program.tokens = {}
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        programs = {key: runtime.namespace(Program).get(key) for key in KEYS}
        handles = {key: await program.flow.start(execution_id="flow") for key, program in programs.items()}
        for _ in range(40):
            await disturb(runtime, chance)
        await runtime.advance(minutes=2)
        everything = await runtime.namespace(Ledger).get("ledger").all()
        assert set(everything.values()) == {1}, {what: count for what, count in everything.items() if count > 1}
        for key, program in programs.items():
            *_told, place, effects = await handles[key].result()
            own = await program.own()
            assert set(own.values()) == {1}
            assert sorted(own) == effects
            assert sorted(f"{key} {what}" for what in own) == sorted(
                what for what in everything if what.startswith(f"{key} ")
            )
            kinds = Counter(what.split()[0] for what in own)
            assert (kinds["a"], kinds["b"], kinds["caught"], kinds["last"]) == (3, 2, 1, 3)
            if place != 1:  # the line that was first has come to its end
                assert kinds["c d"[place]] == (3, 0, 1)[place]
        assert await runtime.dead_letters() == []
