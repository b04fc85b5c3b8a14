"""Leases as applications use them: one holder at a time, growing epochs, the same lease when a turn is run again."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from actors import DurableObject, Lease, Settings
from actors.durable_object import shared
from actors.errors import (
    CoordinatorUnavailable,
    DataMissing,
    InvalidOption,
    LeaseHeld,
    LeaseLost,
    ReadOnlyTurn,
    SerialTurnsNeeded,
    StaleLease,
)
from actors.testing import COORDINATOR, LocalRuntime
from tests.support.crash_points import CommitControl, crash_when_stopped, finish, key_in, runtime_with

TTL_MS = 30_000


class Worker(DurableObject):
    """Holds leases, keeps what it was given, and takes it to what they protect."""

    gates: ClassVar[dict[str, asyncio.Event]] = {}

    async def take(self, name: str = "job", ttl: Any = None) -> Lease:
        lease = await self.leases.acquire(name, ttl)
        self.storage[name] = lease
        return lease

    async def take_and_raise(self, name: str = "job") -> None:
        await self.leases.acquire(name)
        raise ValueError("after it was given")

    async def renew(self, name: str = "job", ttl: Any = None) -> Lease:
        self.storage[name] = await self.leases.renew(self.storage[name], ttl)
        lease: Lease = self.storage[name]
        return lease

    async def give_back(self, name: str = "job") -> None:
        await self.leases.release(self.storage[name])

    async def take_write_and_give_back(self, vault: str) -> int:
        """Everything in one turn, twice, so that what is done at a later grant rests on an earlier one."""
        for number in (1, 2):
            lease = await self.leases.acquire("job")
            await self.namespace(Vault).get(vault).write(lease.epoch, f"{self.key} {number}")
            await self.leases.release(lease)
        self.storage["runs"] = self.storage.get("runs", 0) + 1
        return lease.epoch

    async def try_twice(self) -> list[str]:
        """Decides by a refusal, waits, and decides again."""
        seen = []
        for number in (1, 2):
            try:
                await self.leases.acquire("job")
                seen.append("held")
            except LeaseHeld:
                seen.append("refused")
            if number == 1 and self.key in self.gates:
                await self.gates[self.key].wait()
        self.storage["seen"] = seen
        return seen

    async def take_many(self, names: list[str]) -> list[Lease]:
        return list(await asyncio.gather(*(self.leases.acquire(name) for name in names)))

    @shared
    async def look(self) -> None:
        await self.leases.acquire("job")

    async def write(self, vault: str, what: str, name: str = "job") -> int:
        written: int = await self.namespace(Vault).get(vault).write(self.storage[name].epoch, what)
        return written

    def runs(self) -> int:
        runs: int = self.storage.get("runs", 0)
        return runs


class Vault(DurableObject):
    """What the lease protects."""

    def write(self, epoch: int, what: str) -> int:
        self.leases.guard("job", epoch)
        self.storage["writes"] = [*self.storage.get("writes", []), what]
        return epoch

    def guard_and_raise(self, epoch: int) -> None:
        self.leases.guard("job", epoch)
        raise ValueError("rolled back, with the guard")

    def writes(self) -> list[str]:
        writes: list[str] = self.storage.get("writes", [])
        return writes


class Starter(DurableObject):
    """Takes its lease before its first turn."""

    lease: Lease | None = None

    async def on_start(self) -> None:
        self.lease = await self.leases.acquire("starter")

    def epoch(self) -> int:
        assert self.lease is not None
        return self.lease.epoch


class Interleaved(DurableObject):
    turns = "interleaved"

    async def take(self) -> None:
        await self.leases.acquire("job")


def lease_rows(runtime: LocalRuntime) -> list[tuple[Any, ...]]:
    engine = runtime.coordinator.engine
    return [] if engine is None else engine.store.scan("leases")


# --- one holder ---------------------------------------------------------------------------------------


async def test_a_lease_is_held_by_one_object_until_its_time_is_over() -> None:
    async with LocalRuntime(memory=True, partitions=2) as runtime:
        workers = runtime.namespace(Worker)
        begin_ms = runtime.clock.wall_ms()
        lease = await workers.get("a").take()
        assert lease == Lease("job", lease.epoch, begin_ms + TTL_MS, begin_ms + 25_000, TTL_MS)
        with pytest.raises(LeaseHeld, match="Worker/a") as refused:
            await workers.get("b").take()
        assert (refused.value.holder, refused.value.until_ms) == (("Worker", "a"), lease.expires_ms)
        await runtime.advance(ms=TTL_MS - 1)
        with pytest.raises(LeaseHeld):
            await workers.get("b").take()
        await runtime.advance(ms=1)
        assert (await workers.get("b").take()).epoch > lease.epoch


async def test_leases_of_different_names_do_not_meet() -> None:
    async with LocalRuntime(memory=True) as runtime:
        workers = runtime.namespace(Worker)
        await workers.get("a").take("one")
        await workers.get("b").take("two")


async def test_who_holds_a_lease_takes_it_anew_and_its_earlier_epoch_is_over() -> None:
    async with LocalRuntime(memory=True) as runtime:
        worker = runtime.namespace(Worker).get("a")
        vault = runtime.namespace(Vault).get("v")
        first, second = await worker.take(), await worker.take()
        assert second.epoch > first.epoch
        await vault.write(second.epoch, "new")
        with pytest.raises(StaleLease):
            await vault.write(first.epoch, "old")


async def test_of_many_that_want_it_at_once_one_gets_it() -> None:
    async with LocalRuntime(memory=True, partitions=2) as runtime:
        workers = runtime.namespace(Worker)
        answers = await asyncio.gather(*(workers.get(f"w{n}").take() for n in range(40)), return_exceptions=True)
        granted = [answer for answer in answers if isinstance(answer, Lease)]
        assert len(granted) == 1
        assert all(isinstance(answer, LeaseHeld) for answer in answers if not isinstance(answer, Lease))


async def test_many_leases_at_once_share_commits() -> None:
    async with LocalRuntime(memory=True) as runtime:
        names = [f"n{number}" for number in range(50)]
        leases = await runtime.namespace(Worker).get("a").take_many(names)
        assert [lease.name for lease in leases] == names
        assert runtime.coordinator.commits < 10


# --- renewal and release ------------------------------------------------------------------------------


async def test_renewal_keeps_the_epoch_and_moves_the_end() -> None:
    async with LocalRuntime(memory=True) as runtime:
        worker = runtime.namespace(Worker).get("a")
        lease = await worker.take()
        for _ in range(5):
            await runtime.advance(seconds=20)
            renewed = await worker.renew()
            assert (renewed.epoch, renewed.expires_ms) == (lease.epoch, runtime.clock.wall_ms() + TTL_MS)
        (row,) = lease_rows(runtime)
        assert row[1] == lease.epoch


async def test_renewal_lasts_as_long_as_it_was_taken_for_and_never_makes_it_shorter() -> None:
    async with LocalRuntime(memory=True) as runtime:
        worker = runtime.namespace(Worker).get("a")
        lease = await worker.take("job", "10m")
        await runtime.advance(seconds=60)
        assert (await worker.renew("job", "20s")).expires_ms == lease.expires_ms
        assert (await worker.renew()).expires_ms == lease.expires_ms


async def test_an_expired_lease_that_nobody_took_can_be_renewed_until_it_is_swept() -> None:
    async with LocalRuntime(memory=True) as runtime:
        worker = runtime.namespace(Worker).get("a")
        await worker.take()
        await runtime.advance(ms=TTL_MS)
        assert lease_rows(runtime) == []
        with pytest.raises(LeaseLost):
            await worker.renew()


async def test_a_lease_that_another_took_is_lost() -> None:
    async with LocalRuntime(memory=True) as runtime:
        workers = runtime.namespace(Worker)
        await workers.get("a").take()
        await runtime.advance(ms=TTL_MS)
        await workers.get("b").take()
        with pytest.raises(LeaseLost):
            await workers.get("a").renew()
        await workers.get("a").give_back()  # which does nothing to the lease of the other
        assert len(lease_rows(runtime)) == 1


async def test_a_released_lease_is_free_at_once_and_its_epoch_is_never_given_again() -> None:
    async with LocalRuntime(memory=True) as runtime:
        workers = runtime.namespace(Worker)
        lease = await workers.get("a").take()
        await workers.get("a").give_back()
        await workers.get("a").give_back()
        assert lease_rows(runtime) == []
        await runtime.crash()
        assert (await workers.get("b").take()).epoch > lease.epoch


async def test_epochs_only_grow_over_expiry_crash_and_restart(tmp_path: Any) -> None:
    epochs = []
    for _ in range(3):
        async with LocalRuntime(data_dir=tmp_path) as runtime:
            worker = runtime.namespace(Worker).get("a")
            for _ in range(2):
                epochs.append((await worker.take()).epoch)
                await runtime.crash()
            await runtime.advance(ms=2 * TTL_MS)
            epochs.append((await worker.take()).epoch)
            await worker.give_back()
    assert epochs == sorted(set(epochs))


async def test_a_turn_that_raises_does_not_give_its_lease_back() -> None:
    async with LocalRuntime(memory=True) as runtime:
        workers = runtime.namespace(Worker)
        with pytest.raises(ValueError):
            await workers.get("a").take_and_raise()
        with pytest.raises(LeaseHeld):
            await workers.get("b").take()


# --- fencing ------------------------------------------------------------------------------------------


async def test_what_a_lease_protects_refuses_the_holder_of_before() -> None:
    async with LocalRuntime(memory=True, partitions=2) as runtime:
        workers, vault = runtime.namespace(Worker), runtime.namespace(Vault).get("v")
        await workers.get("a").take()
        await workers.get("a").write("v", "a")
        await runtime.advance(ms=TTL_MS)
        await workers.get("b").take()
        await workers.get("a").write("v", "a is late, and b was not here yet")
        await workers.get("b").write("v", "b")
        with pytest.raises(StaleLease):
            await workers.get("a").write("v", "a again")
        await runtime.crash()
        with pytest.raises(StaleLease):
            await workers.get("a").write("v", "a again")
        assert await vault.writes() == ["a", "a is late, and b was not here yet", "b"]


async def test_a_guard_is_part_of_its_turn() -> None:
    async with LocalRuntime(memory=True) as runtime:
        vault = runtime.namespace(Vault).get("v")
        with pytest.raises(ValueError):
            await vault.guard_and_raise(7)
        assert await vault.write(3, "3") == 3


@pytest.mark.parametrize("epoch", [0, -1, True, "1", None])
async def test_an_epoch_is_a_positive_number(epoch: Any) -> None:
    async with LocalRuntime(memory=True) as runtime:
        with pytest.raises(InvalidOption):
            await runtime.namespace(Vault).get("v").write(epoch, "x")


# --- crashes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [True, False])
async def test_a_crash_at_any_commit_leaves_one_effect_and_growing_epochs(applied: bool) -> None:
    """Coordinator, worker and vault die alone at each of their commits, before or after it is applied."""
    crash_at, done = 0, False
    while not done:
        crash_at += 1
        control = CommitControl(crash_at, applied=applied)
        async with runtime_with(control, partitions=2) as runtime:
            worker = runtime.namespace(Worker).get(key_in("Worker", 0, 2))
            vault = runtime.namespace(Vault).get(key_in("Vault", 1, 2))
            async with crash_when_stopped(runtime, control, all_partitions=False):
                await finish(runtime, worker.take_write_and_give_back(vault.key))
                done = not control.stopped
            assert await vault.writes() == [f"{worker.key} 1", f"{worker.key} 2"]
            assert await worker.runs() == 1
    assert crash_at > 12


async def test_a_turn_that_is_run_again_meets_the_refusal_that_it_met() -> None:
    async with LocalRuntime(memory=True) as runtime:
        workers = runtime.namespace(Worker)
        await workers.get("a").take()
        Worker.gates = {"b": asyncio.Event()}
        trying = asyncio.ensure_future(workers.get("b").try_twice())
        await runtime.run_until_idle()
        await workers.get("a").give_back()
        await runtime.crash()
        Worker.gates.pop("b").set()
        assert await trying == ["refused", "held"]


async def test_the_coordinator_restarts_with_its_leases() -> None:
    async with LocalRuntime(memory=True) as runtime:
        workers = runtime.namespace(Worker)
        lease = await workers.get("a").take()
        await runtime.crash(COORDINATOR)
        with pytest.raises(LeaseHeld):
            await workers.get("b").take()
        await runtime.advance(ms=TTL_MS)
        assert lease_rows(runtime) == []  # its timer was there too
        assert (await workers.get("b").take()).epoch > lease.epoch


async def test_a_coordinator_that_is_away_is_waited_for_and_then_reported_each_time() -> None:
    async with LocalRuntime(memory=True, settings=Settings(durability="off", coordinator_wait_ms=1_000)) as runtime:
        worker = runtime.namespace(Worker).get("a")
        await worker.take()
        engine = runtime.coordinator.engine
        assert engine is not None
        await engine.abandon()
        asked = asyncio.ensure_future(worker.take())
        await runtime.advance(ms=749)
        assert not asked.done()
        await runtime.advance(ms=251)
        with pytest.raises(CoordinatorUnavailable):
            await asked
        asked = asyncio.ensure_future(worker.take())
        await runtime.advance(ms=500)
        await runtime.crash(COORDINATOR)
        await runtime.advance(ms=250)
        assert (await asked).name == "job"


async def test_leases_can_be_listed_by_name_in_pages() -> None:
    async with LocalRuntime(memory=True) as runtime:
        worker = runtime.namespace(Worker).get("a")
        given = await worker.take_many(["x/2", "y/1", "x/1", "x/3"])
        found = await runtime.leases("x/")
        assert [lease.name for lease in found] == ["x/1", "x/2", "x/3"]
        assert (found[1].epoch, found[1].holder, found[1].expires_ms) == (
            given[0].epoch,
            ("Worker", "a"),
            given[0].expires_ms,
        )
        assert [lease.name for lease in await runtime.leases("x/", after="x/1", limit=1)] == ["x/2"]
        assert [lease.name for lease in await runtime.leases()] == ["x/1", "x/2", "x/3", "y/1"]
        with pytest.raises(InvalidOption):
            await runtime.leases(limit=0)


# --- what is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [6_000, "6s", 0, -1, "2d"])
async def test_a_lease_outlasts_its_margin_and_ends_some_day(ttl: Any) -> None:
    async with LocalRuntime(memory=True) as runtime:
        with pytest.raises(InvalidOption, match="lease_margin_ms"):
            await runtime.namespace(Worker).get("a").take("job", ttl)
        assert (await runtime.namespace(Worker).get("a").take("job", 6_001)).ttl_ms == 6_001


@pytest.mark.parametrize("name", ["", "x" * 513, 7])
async def test_a_name_is_short_text(name: Any) -> None:
    async with LocalRuntime(memory=True) as runtime:
        with pytest.raises(InvalidOption):
            await runtime.namespace(Worker).get("a").take(name)


def test_settings_that_leave_nothing_of_a_lease_are_refused() -> None:
    """A.5: lease must be more than margin + min budget; a margin of 0 is refused."""
    Settings(lease_ttl_ms=6_001)
    for wrong in ({"lease_ttl_ms": 6_000}, {"lease_margin_ms": 0}, {"max_lease_ttl_ms": 29_999}):
        with pytest.raises(ValueError):
            Settings(**wrong)


async def test_shared_methods_and_interleaved_classes_take_no_leases() -> None:
    async with LocalRuntime(memory=True) as runtime:
        with pytest.raises(ReadOnlyTurn):
            await runtime.namespace(Worker).get("a").look()
        with pytest.raises(SerialTurnsNeeded):
            await runtime.namespace(Interleaved).get("a").take()


async def test_a_lease_taken_on_start_is_taken_anew_at_each_start() -> None:
    async with LocalRuntime(memory=True) as runtime:
        starter = runtime.namespace(Starter).get("a")
        first = await starter.epoch()
        assert await runtime.evict(starter)
        assert await starter.epoch() > first


# --- files --------------------------------------------------------------------------------------------


async def test_a_runtime_that_uses_no_leases_has_no_file_for_them(tmp_path: Any) -> None:
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        await runtime.namespace(Worker).get("a").runs()
    assert not (tmp_path / "coordinator").exists()


async def test_a_file_that_is_lost_later_is_missing_and_never_made_again(tmp_path: Any) -> None:
    async with LocalRuntime(data_dir=tmp_path) as runtime:
        await runtime.namespace(Worker).get("a").take()
    (tmp_path / "coordinator" / "engine.sqlite").unlink()
    with pytest.raises(DataMissing):
        await LocalRuntime(data_dir=tmp_path).start()
