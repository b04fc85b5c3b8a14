"""`self.outcomes`: queued with the turn that caused them, delivered to each kind of sink, through crashes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from actors import DurableObject, Outcome, Rejected, Settings, register_sink, shared
from actors.errors import (
    InvalidClassOption,
    InvalidOption,
    NoSuchMethod,
    ReadOnlyTurn,
    SerialTurnsNeeded,
    SinkFailed,
    TooManyOutcomes,
    UndeliverableOutcome,
    UnstorableValue,
    ValueTooLarge,
)
from actors.testing import LocalRuntime
from actors.toolkit.http_sink import retry_after_ms
from actors.toolkit.sinks import FunctionSink, HttpSink, ObjectSink, read_sink
from tests.support.crash_points import CommitControl, crash_when_stopped, finish, key_in, runtime_with, until_forgotten
from tests.support.toolkit import Audit, HttpServer, NotNow, quiet, scan, until
from timers.outcome_delivery import MAX_BACKOFF_MS, SINK_TIMEOUT_MS, backoff_ms
from timers.outcomes import OutcomeRow
from timers.rows import owned_ref

FUNCTION = "tests.unit.test_toolkit_outcomes:take"
taken: list[Outcome] = []
failing: list[Exception] = []


async def take(outcome: Outcome) -> None:
    """A function sink."""
    if failing:
        raise failing.pop()
    taken.append(outcome)


class Order(DurableObject):
    """Queues outcomes."""

    outcome_sink = (Audit, "main", "record")

    def pay(self, count: int, payload: Any = None) -> list[str]:
        self.storage["paid"] = self.storage.get("paid", 0) + count
        return [self.outcomes.add("paid", payload or {"number": number}) for number in range(count)]

    def pay_to(self, sink: Any, payload: Any = "x") -> str:
        return self.outcomes.add("paid", payload, sink=sink)

    def pay_to_stub(self, key: str) -> str:
        return self.outcomes.add("paid", "x", sink=self.namespace(Audit).get(key).record)

    def pay_to_class(self, key: str, method: str = "record") -> str:
        return self.outcomes.add("paid", "x", sink=(Audit, key, method))

    def pay_to_nobody(self) -> None:
        self.outcomes.add("paid", sink=None)

    def probe(self) -> str:
        return self.outcomes.add("probe", synthetic=True)

    def pay_and_raise(self) -> None:
        self.pay(1)
        raise Rejected("no")

    def pay_and_roll_back(self) -> None:
        with self.storage.transaction() as transaction:
            self.pay(1)
            transaction.rollback()

    async def pay_then_wait(self, gate: str) -> str:
        outcome_id = self.pay(1)[0]
        await self.namespace(Audit).get("other").outcomes_seen()
        await Audit.gates.setdefault(gate, asyncio.Event()).wait()
        return outcome_id

    def unstorable(self) -> None:
        self.outcomes.add("paid", object())

    @shared
    def pay_in_shared(self) -> None:
        self.outcomes.add("paid")

    @shared
    def waiting(self) -> list[Any]:
        return [[each.number, each.kind, each.tries, each.problem] for each in self.outcomes.pending(limit=10)]

    def page(self, limit: int, after: int | None) -> list[int]:
        return [each.number for each in self.outcomes.pending(limit=limit, after=after)]

    def left(self) -> tuple[int, int]:
        backlog = self.outcomes.backlog()
        return backlog.rows, backlog.bytes

    def note(self, outcome: Outcome) -> None:
        self.storage["noted"] = [*self.storage.get("noted", []), outcome.payload]

    def state(self) -> dict[str, Any]:
        return self.storage.list()


class Diary(DurableObject):
    """Tells itself."""

    outcome_sink = "on_outcome"

    def tell(self, text: str) -> None:
        self.outcomes.add("told", text)

    def on_outcome(self, outcome: Outcome) -> None:
        self.storage["told"] = [*self.storage.get("told", []), outcome.payload]

    def told(self) -> list[str]:
        told: list[str] = self.storage.get("told", [])
        return told


class Own(DurableObject):
    """Each object has an audit of its own."""

    @property
    def outcome_sink(self) -> Any:  # type: ignore[override]
        return (Audit, f"of-{self.key}", "record")

    def pay(self) -> None:
        self.outcomes.add("paid")


class Plain(DurableObject):
    """Has no sink."""

    def pay(self) -> None:
        self.outcomes.add("paid")


class Interleaved(DurableObject):
    """Its turns commit between awaits."""

    turns = "interleaved"

    def pay(self) -> None:
        self.outcomes.add("paid", sink=FUNCTION)


class Started(DurableObject):
    """Queues an outcome each time it comes into memory."""

    outcome_sink = (Audit, "main", "record")
    starts: ClassVar[int] = 0

    def on_start(self) -> None:
        self.outcomes.add("started")

    def look(self) -> None:
        return None


@pytest.fixture(autouse=True)
def clean() -> None:
    Audit.faults, Audit.gates = {}, {}
    taken.clear()
    failing.clear()


@pytest.fixture
async def rt() -> AsyncIterator[LocalRuntime]:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        yield runtime


async def seen(runtime: LocalRuntime, key: str = "main") -> list[Outcome]:
    outcomes: list[Outcome] = await runtime.namespace(Audit).get(key).outcomes_seen()
    return outcomes


# --- queueing -----------------------------------------------------------------------------------------


async def test_an_outcome_comes_to_its_sink_with_what_was_said_of_it(rt: LocalRuntime) -> None:
    ids = await rt.namespace(Order).get("a").pay(2)
    await rt.advance(seconds=1)
    first, second = await seen(rt)
    assert first == Outcome(ids[0], "paid", {"number": 0}, first.created_ms, ("Order", "a"))
    assert second == replace(first, id=ids[1], payload={"number": 1})
    assert len({*ids}) == 2


async def test_a_turn_that_raises_or_rolls_back_queues_nothing(rt: LocalRuntime) -> None:
    order = rt.namespace(Order).get("a")
    with pytest.raises(Rejected):
        await order.pay_and_raise()
    await order.pay_and_roll_back()
    await rt.advance(hours=1)
    assert await seen(rt) == []
    assert scan(rt, "backlogs") == []


async def test_an_outcome_survives_a_crash_and_an_eviction_before_its_delivery(rt: LocalRuntime) -> None:
    Audit.faults["main"] = [NotNow(), NotNow()]
    order = rt.namespace(Order).get("a")
    await order.pay(1)
    await until(rt, lambda: rt.evict(order))
    await rt.crash()
    await quiet(rt)
    assert len(await seen(rt)) == 1


async def test_outcomes_outlive_their_object(rt: LocalRuntime) -> None:
    Audit.faults["main"] = [NotNow()]
    orders = rt.namespace(Order)
    await orders.get("a").pay(3)
    await rt.run_until_idle()
    assert await orders.delete("a")
    assert await orders.get("a").left() == (0, 0)
    await orders.get("a").pay(1, "new life")  # its backlog is another one
    await quiet(rt)
    assert [outcome.payload for outcome in await seen(rt)].count("new life") == 1
    assert len(await seen(rt)) == 4
    assert scan(rt, "outcomes") == scan(rt, "delivered") == []


async def test_what_is_wrong_with_an_outcome_is_said_at_once(rt: LocalRuntime) -> None:
    order = rt.namespace(Order).get("a")
    for sink in ("no sink", "ftp://x/y", "http:///x", 7, ["a"], ("a", "b", "c"), "a:b:c", "http://x/" + "y" * 5_000):
        with pytest.raises(InvalidOption):
            await order.pay_to(sink)
    with pytest.raises(NoSuchMethod):
        await order.pay_to("no_such_method")
    with pytest.raises(NoSuchMethod):
        await order.pay_to_class("k", "no_such_method")
    with pytest.raises(InvalidOption, match="plain JSON"):
        await order.pay_to("https://example.org/hook", b"bytes")
    with pytest.raises(InvalidOption, match="outcome_sink"):
        await rt.namespace(Plain).get("a").pay()
    with pytest.raises(InvalidOption):
        await order.pay_to_nobody()
    with pytest.raises(UnstorableValue):
        await order.unstorable()
    with pytest.raises(ReadOnlyTurn):
        await order.pay_in_shared()
    with pytest.raises(ValueTooLarge, match="max_outcome_bytes"):
        await order.pay(1, "x" * 70_000)
    assert await order.left() == (0, 0)


async def test_interleaved_classes_are_told_to_keep_them_elsewhere(rt: LocalRuntime) -> None:
    with pytest.raises(SerialTurnsNeeded, match="another class"):
        await rt.namespace(Interleaved).get("a").pay()


def test_a_class_can_not_take_the_names_or_have_a_sink_that_is_none() -> None:
    with pytest.raises(InvalidClassOption):
        type("Wrong", (DurableObject,), {"outcome_sink": 3})
    with pytest.raises(InvalidClassOption):
        type("Wrong", (DurableObject,), {"outcomes": 3})


async def test_a_limit_on_what_waits_holds_for_the_application(rt: LocalRuntime) -> None:
    async with LocalRuntime(memory=True, settings=Settings(durability="off", max_outcomes_per_object=3)) as runtime:
        Audit.faults["main"] = [NotNow()]
        order = runtime.namespace(Order).get("a")
        with pytest.raises(TooManyOutcomes, match="max_outcomes_per_object"):
            await order.pay(4)
        await order.pay(3)
        await quiet(runtime)
        await order.pay(3)
        await quiet(runtime)
        assert len(await seen(runtime)) == 6


async def test_what_waits_can_be_read_in_pages(rt: LocalRuntime) -> None:
    Audit.gates["main"] = asyncio.Event()
    order = rt.namespace(Order).get("a")
    await order.pay(5)
    assert await order.page(2, None) == [1, 2]
    assert await order.page(2, 2) == [3, 4]
    assert await order.page(2, 4) == [5]
    rows, size = await order.left()
    assert (rows, size > 0) == (5, True)
    with pytest.raises(InvalidOption):
        await order.page(0, None)


async def test_on_start_may_queue_outcomes_each_of_its_own(rt: LocalRuntime) -> None:
    started = rt.namespace(Started).get("a")
    await started.look()
    await until(rt, lambda: rt.evict(started))
    await started.look()
    await quiet(rt)
    assert [outcome.kind for outcome in await seen(rt)] == ["started"] * 2


# --- sinks: objects -----------------------------------------------------------------------------------


async def test_sinks_may_be_a_class_and_key_a_stub_or_the_object_itself(rt: LocalRuntime) -> None:
    order = rt.namespace(Order).get("a")
    await order.pay_to_class("tuple")
    await order.pay_to_stub("stub")
    await order.pay_to("note", [1, 2])
    await rt.namespace(Own).get("x").pay()
    diary = rt.namespace(Diary).get("d")
    await diary.tell("hello")
    await rt.advance(seconds=1)
    assert [len(await seen(rt, key)) for key in ("tuple", "stub", "of-x")] == [1, 1, 1]
    assert (await order.state())["noted"] == [[1, 2]]
    assert await diary.told() == ["hello"]


async def test_a_sink_that_raises_has_done_nothing_and_gets_the_outcome_again(rt: LocalRuntime) -> None:
    Audit.faults["main"] = [NotNow("later"), ValueError("broken")]
    order = rt.namespace(Order).get("a")
    await order.pay(1)
    await rt.run_until_idle()
    assert await seen(rt) == []
    assert await order.waiting() == [[1, "paid", 1, None]]
    await quiet(rt)
    assert len(await seen(rt)) == 1


async def test_a_sink_may_say_when_it_wants_the_outcome_again(rt: LocalRuntime) -> None:
    Audit.faults["main"] = [NotNow("in a minute", retry_after_ms=60_000)]
    await rt.namespace(Order).get("a").pay(1)
    await rt.run_until_idle()
    await rt.advance(ms=59_999)
    assert await seen(rt) == []
    await rt.advance(ms=1)
    assert len(await seen(rt)) == 1


async def test_a_sink_that_is_late_is_asked_again_and_its_one_run_counts(rt: LocalRuntime) -> None:
    gate = Audit.gates["main"] = asyncio.Event()
    order = rt.namespace(Order).get("a")
    await order.pay(1)
    await rt.advance(ms=SINK_TIMEOUT_MS + 10)  # it runs on: nobody knows how it will end
    assert await order.waiting() == [[1, "paid", 0, None]]
    gate.set()
    await quiet(rt)
    assert len(await seen(rt)) == 1


async def test_a_slow_sink_keeps_neither_the_object_nor_its_other_timers_waiting(rt: LocalRuntime) -> None:
    gate = Audit.gates["main"] = asyncio.Event()
    order = rt.namespace(Order).get("a")
    await order.pay(1)
    await rt.run_until_idle()
    await order.pay(1)  # while the sink has not answered
    assert (await order.left())[0] == 2
    gate.set()
    await quiet(rt)
    assert len(await seen(rt)) == 2


async def test_outcomes_of_a_turn_that_still_waits_are_not_delivered(rt: LocalRuntime) -> None:
    order = rt.namespace(Order).get("a")
    call = asyncio.ensure_future(order.pay_then_wait("gate"))
    await rt.advance(seconds=10)
    assert await seen(rt) == []
    Audit.gates["gate"].set()
    outcome_id = await call
    await quiet(rt)
    assert [outcome.id for outcome in await seen(rt)] == [outcome_id]


async def test_outcomes_are_delivered_while_a_turn_of_their_object_waits(rt: LocalRuntime) -> None:
    order = rt.namespace(Order).get("a")
    Audit.faults["main"] = [NotNow()]
    await order.pay(1)
    await rt.run_until_idle()
    call = asyncio.ensure_future(order.pay_then_wait("gate"))
    await rt.advance(seconds=10)
    assert len(await seen(rt)) == 1
    Audit.gates["gate"].set()
    await call
    await quiet(rt)
    assert len(await seen(rt)) == 2


async def test_what_a_sink_recorded_is_forgotten_once_the_outcome_is_acknowledged(rt: LocalRuntime) -> None:
    Audit.faults["main"] = [NotNow(), NotNow(), NotNow()]
    await rt.namespace(Order).get("a").pay(5)
    await quiet(rt)
    assert len(await seen(rt)) == 5
    await until_forgotten(rt)


async def test_a_sink_that_kills_its_process_each_time_is_left_alone() -> None:
    control = CommitControl()
    async with runtime_with(control) as rt:
        gate = Audit.gates["main"] = asyncio.Event()
        await rt.namespace(Order).get("a").pay(1)
        await rt.run_until_idle()
        for _ in range(5):  # it runs, and its process dies
            await rt.crash()
            for _ in range(10):
                await asyncio.sleep(0.003)
                await rt.run_until_idle()
        gate.set()
        await rt.advance(minutes=20)
        assert await seen(rt) == []
        assert await rt.namespace(Order).get("a").waiting() == [[1, "paid", 0, None]]


# --- sinks: functions ---------------------------------------------------------------------------------


async def test_a_function_is_found_by_module_and_name_or_as_it_was_registered(rt: LocalRuntime) -> None:
    order = rt.namespace(Order).get("a")
    direct: list[Outcome] = []
    register_sink("somewhere.else:take", direct.append)
    await order.pay_to(FUNCTION)
    await order.pay_to("somewhere.else:take", "y")
    await rt.advance(seconds=1)
    assert [outcome.payload for outcome in (*taken, *direct)] == ["x", "y"]


async def test_a_function_that_raises_is_called_again_when_it_says(rt: LocalRuntime) -> None:
    failing.append(SinkFailed("later", retry_after_ms=30_000))
    await rt.namespace(Order).get("a").pay_to(FUNCTION)
    await rt.advance(ms=29_999)
    assert taken == []
    await rt.advance(ms=1)
    assert len(taken) == 1


async def test_a_function_that_swallows_its_cancellation_holds_nobody_up(rt: LocalRuntime) -> None:
    ended = asyncio.Event()

    async def stubborn(outcome: Outcome) -> None:
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue

    register_sink("stubborn:take", stubborn)
    order = rt.namespace(Order).get("a")
    await order.pay_to("stubborn:take")
    await rt.namespace(Order).get("b").pay_to(FUNCTION)
    await rt.advance(ms=SINK_TIMEOUT_MS + 1_000)
    assert len(taken) == 1
    ended.set()
    await quiet(rt)


async def test_a_function_that_can_not_be_imported_is_tried_again_and_kept(
    rt: LocalRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    order = rt.namespace(Order).get("a")
    await order.pay_to("no.such.module:take")
    await rt.advance(minutes=1)
    assert (await order.left())[0] == 1
    assert "can't be imported" in caplog.text
    register_sink("no.such.module:take", take)
    await quiet(rt)
    assert len(taken) == 1


@pytest.mark.parametrize("name", ["", "take", "a:", ":b", "a b:c", "http://x", "a:b:c"])
def test_the_name_of_a_function_names_a_module(name: str) -> None:
    with pytest.raises(InvalidOption):
        register_sink(name, take)


def test_what_is_registered_can_be_called() -> None:
    with pytest.raises(InvalidOption):
        register_sink("a:b", 7)  # type: ignore[arg-type]


# --- sinks: URLs --------------------------------------------------------------------------------------


async def test_an_outcome_is_posted_as_json_with_its_id_in_a_header(rt: LocalRuntime) -> None:
    async with HttpServer().running() as server:
        outcome_id = await rt.namespace(Order).get("a").pay_to(server.url, {"n": 1})
        await until(rt, lambda: _arrived(server))
        await quiet(rt)
        ((request, headers, body),) = server.requests
        assert request == "POST /hook HTTP/1.1"
        assert headers["idempotency-key"] == outcome_id
        assert headers["content-type"] == "application/json"
        assert json.loads(body) == {
            "id": outcome_id,
            "kind": "paid",
            "payload": {"n": 1},
            "created_ms": json.loads(body)["created_ms"],
            "source": {"class": "Order", "key": "a"},
            "subject": "",
            "reason": "",
            "detail": "",
        }


@pytest.mark.parametrize(
    "answer",
    ["500 Oops", "302 Found\r\nLocation: http://127.0.0.1:1/", "429 Slow\r\nRetry-After: 120", "hang"],
    ids=["error", "redirect", "retry_after", "hang"],
)
async def test_an_answer_that_is_not_2xx_means_again_with_the_same_id(rt: LocalRuntime, answer: str) -> None:
    async with HttpServer().running() as server:
        server.answers = [answer]
        order = rt.namespace(Order).get("a")
        outcome_id = await order.pay_to(server.url)
        await until(rt, lambda: _arrived(server))
        if "429" in answer:
            await rt.advance(seconds=100)
            assert len(server.requests) == 1
        await quiet(rt)
        assert [headers["idempotency-key"] for _, headers, _ in server.requests] == [outcome_id] * 2


async def test_a_url_where_nobody_listens_is_tried_until_somebody_does(rt: LocalRuntime) -> None:
    server = HttpServer()
    async with server.running():
        url = server.url
    order = rt.namespace(Order).get("a")
    await order.pay_to(url)
    await rt.advance(minutes=1)
    assert (await order.left())[0] == 1
    assert rt.status()[0]["outcomes_failed"] + rt.status()[1]["outcomes_failed"] > 1


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("-1", None),
        ("0", 0),
        (" 30 ", 30_000),
        ("Thu, 01 Jan 1970 00:01:00 GMT", 50_000),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("Thu, 99 Jan 1970 00:00:00 GMT", None),
        ("9" * 5_000, 999_999_999_000),
    ],
)
def test_retry_after_is_seconds_or_a_date(value: str | None, expected: int | None) -> None:
    assert retry_after_ms(value, 10_000) == expected


async def _arrived(server: HttpServer) -> bool:
    await asyncio.sleep(0.002)
    return bool(server.requests)


# --- what can't be delivered --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "x", "object:", "object:{}", 'object:["a"]', "object:[1,2,3,4,5]", "http://", "a:b:c"]
)
def test_a_stored_sink_that_is_none_can_not_be_read(text: str) -> None:
    with pytest.raises(UndeliverableOutcome):
        read_sink(text)


@pytest.mark.parametrize(
    "sink",
    [
        ObjectSink("T", "m.n", "C.D", 'k"ey:ü', "take"),
        FunctionSink("a.b:c.d"),
        HttpSink("https://example.org:8080/x?y=z"),
    ],
    ids=repr,
)
def test_a_stored_sink_is_read_as_it_was(sink: Any) -> None:
    assert read_sink(sink.to_text()) == sink


async def test_what_can_never_be_delivered_is_kept_shown_and_passed_over(
    rt: LocalRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    order = rt.namespace(Order).get("a")
    Audit.faults["main"] = [NotNow()]
    await order.pay(3)
    await rt.run_until_idle()
    (partition,) = [each for each in rt.partitions if each is not None and each.store.scan("outcomes")]
    first, second = [OutcomeRow(*columns) for columns in partition.store.scan("outcomes")][1:]
    partition.persist([(first.table, first.key(), replace(first, sink="junk").values())])
    partition.persist([(second.table, second.key(), replace(second, payload=b"\xc1").values())])
    with caplog.at_level(logging.WARNING):
        await rt.advance(minutes=10)
    assert len(await seen(rt)) == 1
    assert "'junk' is no sink" in caplog.text
    assert [row[3] for row in await order.waiting()] == ["'junk' is no sink", None]
    status = next(each for each in rt.status() if each["outcomes_waiting"])
    assert (status["outcomes_waiting"], status["outcome_objects"]) == (2, 1)
    assert status["oldest_outcome_ms"] == first.created_ms
    assert status["outcomes_retained"] > 2


async def test_a_probe_goes_the_whole_way_except_for_the_call(rt: LocalRuntime) -> None:
    assert (await rt.namespace(Order).get("a").probe()).startswith("s:")
    await quiet(rt)
    assert await seen(rt) == []
    assert sum(status["outcomes_synthetic"] for status in rt.status()) == 1


async def test_the_pause_of_a_failing_sink_grows_to_a_quarter_of_an_hour(rt: LocalRuntime) -> None:
    Audit.faults["main"] = [NotNow() for _ in range(100)]
    await rt.namespace(Order).get("a").pay(1)
    await rt.run_until_idle()
    (timer,) = scan(rt, "timers")
    pauses = []
    while len(pauses) < 12:
        before = rt.clock.wall_ms()
        (timer,) = scan(rt, "timers")
        await rt.advance(ms=timer[1] - before)
        pauses.append(timer[1] - before)
    oid = int.from_bytes(timer[3], "big")
    assert pauses == [backoff_ms(owned_ref(oid), attempt) for attempt in range(12)]
    assert pauses[-1] == MAX_BACKOFF_MS


# --- crashes ------------------------------------------------------------------------------------------

PARTITIONS = 2
ORDER = key_in("Order", 0, PARTITIONS)
AUDITS = [key_in("Audit", partition, PARTITIONS) for partition in range(PARTITIONS)]


@pytest.mark.parametrize("applied", [True, False], ids=["after_the_commit", "before_the_commit"])
@pytest.mark.parametrize(
    "everything",
    [pytest.param(True, marks=pytest.mark.soak), False],
    ids=["all_partitions", "the_committing_partition"],
)
@pytest.mark.parametrize("audit", AUDITS, ids=["same_partition", "other_partition"])
async def test_outcomes_take_effect_once_whichever_commit_the_crash_is_at(
    applied: bool, everything: bool, audit: str
) -> None:
    number = 1
    while await _deliver_with_a_crash_at(number, applied=applied, everything=everything, audit=audit):
        number += 1
    assert number > 10


async def _deliver_with_a_crash_at(number: int, *, applied: bool, everything: bool, audit: str) -> bool:
    control = CommitControl(number, applied=applied)
    Audit.faults[audit] = [NotNow("once")]
    async with runtime_with(control, partitions=PARTITIONS) as runtime:
        order = runtime.namespace(Order).get(ORDER)
        async with crash_when_stopped(runtime, control, all_partitions=everything):
            for _ in range(3):
                await finish(runtime, order.pay_to_class(audit))
            await quiet(runtime)
            outcomes = await finish(runtime, runtime.namespace(Audit).get(audit).outcomes_seen())
            assert len(outcomes) == 3, f"crash at commit {number}"
            assert await finish(runtime, order.left()) == (0, 0)
        await until_forgotten(runtime)
        for table in ("outcomes", "backlogs", "delivered", "timers"):
            assert scan(runtime, table) == [], f"crash at commit {number}"
        return control.stopped


async def test_many_objects_through_crash_after_crash_lose_and_double_nothing() -> None:
    async with LocalRuntime(partitions=2, memory=True) as runtime:
        Audit.faults["main"] = [NotNow() for _ in range(10)]
        orders = runtime.namespace(Order)
        for number in range(30):
            await finish(runtime, orders.get(f"o{number}").pay(number % 4 + 1))
            if number % 5 == 0:
                await runtime.crash(number % 2)
        await quiet(runtime)
        assert len(await finish(runtime, seen(runtime))) == sum(number % 4 + 1 for number in range(30))
