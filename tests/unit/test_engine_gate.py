"""The engine's batches and the turns of an object never decide by what the other is just changing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from actors import DurableObject, Rejected
from actors.errors import RowConflict
from actors.testing import LocalRuntime
from drivers.tables import TableSpec
from tests.support.stores import extra_table
from timers.batch import Absent, Batch, Delete, Equals, Put
from timers.firing import Done, DueTimer, Fired, TimerCtx
from timers.rows import TimerRow, oid_of, owned_ref

KIND = 0xF1
TOKENS = TableSpec("tokens", ("oid", "name"), ("state",), per_object=True)


@dataclass(frozen=True)
class Token:
    """A row of an object that turns take and the engine withdraws."""

    table: ClassVar[str] = "tokens"

    oid: int
    name: str
    state: str = "open"

    def key(self) -> tuple[int, str]:
        return (self.oid, self.name)

    def values(self) -> tuple[str]:
        return (self.state,)

    @classmethod
    def from_columns(cls, key: tuple[Any, ...], values: tuple[Any, ...]) -> Token:
        return cls(*key, *values)


class Withdraw:
    """Withdraws a token when its timer is due, if it is still open."""

    kind = KIND

    async def fire(self, ctx: TimerCtx, timer: DueTimer) -> Fired:
        owner = oid_of(timer.reference)
        assert owner is not None
        oid, name = owner
        token = await ctx.store.get(Token, (oid, name.decode()))
        if token is None or token.state != "open":
            return Done()
        return Done(Batch((Equals(token),), (Put(replace(token, state="withdrawn")),)))


class Desk(DurableObject):
    """Holds tokens; `take` reads, waits, then writes, as application code does."""

    gates: ClassVar[dict[str, asyncio.Event]] = {}

    @property
    def rows(self) -> Any:
        return self._ms_host.rows

    def open(self, name: str, due_ms: int) -> None:
        rows = self.rows
        token = Token(rows.oid, name)
        timer = TimerRow(KIND, due_ms, KIND, owned_ref(rows.oid, name.encode()), 0, due_ms)
        rows.apply(Batch((Absent(Token.table, token.key()),), (Put(token), Put(timer))))

    async def take(self, name: str, wait: bool = False) -> str:
        token = self.rows.get(Token, name)
        if token is None or token.state != "open":
            raise Rejected(f"{name} is gone")
        if wait:
            await self.gates[self.key].wait()
        self.rows.apply(Batch((Equals(token),), (Put(replace(token, state="taken")),)))
        return "taken"

    def peek(self, name: str) -> str | None:
        token = self.rows.get(Token, name)
        return None if token is None else str(token.state)

    def names(self, limit: int = 100) -> list[str]:
        return [token.name for token in self.rows.scan(Token, limit=limit)]

    def drop_and_list(self, name: str) -> list[str]:
        self.rows.apply(Batch((), (Delete(Token.table, (self.rows.oid, name)),)))
        return self.names(2)

    def drop_and_fail(self, name: str) -> None:
        self.drop_and_list(name)
        raise Rejected("no")

    def drop_in_transaction(self, name: str) -> list[str]:
        with self.storage.transaction() as transaction:
            self.drop_and_list(name)
            transaction.rollback()
        return self.names()

    def put_wrongly(self, name: str) -> None:
        self.rows.apply(Batch((Absent(Token.table, (self.rows.oid, name)),), (Put(Token(self.rows.oid, name)),)))


@pytest.fixture(autouse=True)
def tokens_table() -> Iterator[None]:
    with extra_table(TOKENS):
        yield


async def started() -> LocalRuntime:
    runtime = await LocalRuntime(memory=True, partitions=1).start()
    for partition in runtime.partitions:
        assert partition is not None
        partition.registry.register(Withdraw())
    Desk.gates = {}
    return runtime


async def test_rows_are_part_of_the_turn_and_survive_a_crash() -> None:
    runtime = await started()
    desk = runtime.namespace(Desk).get("a")
    for name in ("x", "y", "z"):
        await desk.open(name, runtime.clock.wall_ms() + 2_000)
    await runtime.crash()
    assert await desk.names() == ["x", "y", "z"]
    assert await desk.drop_and_list("x") == ["y", "z"]
    with pytest.raises(Rejected):
        await desk.drop_and_fail("y")
    assert await desk.names() == ["y", "z"]
    assert await desk.drop_in_transaction("y") == ["y", "z"]
    await runtime.stop()


async def test_a_batch_whose_preconditions_do_not_hold_in_the_turn_changes_nothing() -> None:
    runtime = await started()
    desk = runtime.namespace(Desk).get("a")
    await desk.open("x", runtime.clock.wall_ms() + 2_000)
    with pytest.raises(RowConflict):
        await desk.put_wrongly("x")
    assert await desk.peek("x") == "open"
    await runtime.stop()


async def test_an_engine_timer_of_an_object_fires_at_its_instant() -> None:
    runtime = await started()
    desk = runtime.namespace(Desk).get("a")
    await desk.open("x", runtime.clock.wall_ms() + 2_000)
    await runtime.advance(ms=1_999)
    assert await desk.peek("x") == "open"
    await runtime.advance(ms=1)
    assert await desk.peek("x") == "withdrawn"
    await runtime.stop()


async def test_the_engine_waits_for_a_turn_that_has_read_what_it_would_change() -> None:
    runtime = await started()
    desk = runtime.namespace(Desk).get("a")
    Desk.gates["a"] = asyncio.Event()
    await desk.open("x", runtime.clock.wall_ms() + 2_000)
    taking = asyncio.ensure_future(desk.take("x", True))
    await runtime.advance(ms=3_000)  # due while the turn waits
    assert not taking.done()
    Desk.gates["a"].set()
    assert await taking == "taken"
    await runtime.run_until_idle()
    assert await desk.peek("x") == "taken"
    partition = runtime.partitions[0]
    assert partition is not None
    assert partition.store.scan("timers") == []  # and the timer has ended
    await runtime.stop()


async def test_the_engine_goes_before_the_next_turn_of_a_busy_object() -> None:
    runtime = await started()
    desk = runtime.namespace(Desk).get("a")
    Desk.gates["a"] = asyncio.Event()
    for name in ("x", "y"):
        await desk.open(name, runtime.clock.wall_ms() + 2_000)
    taking = asyncio.ensure_future(desk.take("x", True))
    await runtime.advance(ms=3_000)
    behind = asyncio.ensure_future(desk.take("y"))
    await asyncio.sleep(0)
    Desk.gates["a"].set()
    assert await taking == "taken"
    with pytest.raises(Rejected):
        await behind  # the withdrawal was waiting longer
    await runtime.stop()


async def test_other_objects_are_not_held_up() -> None:
    runtime = await started()
    desks = runtime.namespace(Desk)
    Desk.gates["a"] = asyncio.Event()
    for key in ("a", "b"):
        await desks.get(key).open("x", runtime.clock.wall_ms() + 2_000)
    taking = asyncio.ensure_future(desks.get("a").take("x", True))
    await runtime.advance(ms=3_000)
    assert await desks.get("b").peek("x") == "withdrawn"
    Desk.gates["a"].set()
    await taking
    await runtime.stop()


async def test_deleting_an_object_removes_its_rows() -> None:
    runtime = await started()
    desks = runtime.namespace(Desk)
    await desks.get("a").open("x", runtime.clock.wall_ms() + 2_000)
    await runtime.run_until_idle()
    assert await desks.delete("a")
    partition = runtime.partitions[0]
    assert partition is not None
    assert partition.store.scan(TOKENS.name) == []
    assert await desks.get("a").names() == []
    await runtime.advance(ms=3_000)
    assert partition.store.scan("timers") == []
    await runtime.stop()


def test_a_reference_names_object_and_row() -> None:
    assert oid_of(owned_ref(7, b"x")) == (7, b"x")
    assert oid_of(owned_ref(7)) == (7, b"")
    assert oid_of(b"short") is None
