"""Control calls have limits that hold, also while Ray's control service is gone and its lookups hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from actors import disks, ray_calls
from actors.disks import DISK_LABEL, DisksPresent
from actors.ray_calls import ActorUnreachable, RayCalls

#: Long enough for whatever must come in time.
LONG_S = 30.0


class FakeRay:
    """Actors by name; `gone` holds lookups up until it is set again."""

    def __init__(self) -> None:
        self.there = threading.Event()
        self.there.set()
        self.answers: dict[str, Any] = {}
        self.looked_up: list[str] = []
        self.killed: list[str] = []

    def get_actor(self, name: str, namespace: str) -> Any:
        self.looked_up.append(name)
        self.there.wait()
        return SimpleNamespace(name=name, ask=SimpleNamespace(remote=lambda: SimpleNamespace(future=self._answer)))

    def _answer(self) -> Future[Any]:
        future: Future[Any] = Future()
        if isinstance(answer := self.answers.get("ask"), Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return future

    def kill(self, handle: Any, no_restart: bool) -> None:
        self.there.wait()
        self.killed.append(handle.name)

    def nodes(self) -> list[dict[str, Any]]:
        self.there.wait()
        return [{"Alive": True, "Labels": {DISK_LABEL: "d1"}}, {"Alive": False, "Labels": {DISK_LABEL: "d2"}}]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRay]:
    fake = FakeRay()
    monkeypatch.setattr(ray_calls, "ray", fake)
    monkeypatch.setattr(disks, "ray", fake)
    yield fake
    fake.there.set()


def test_a_lookup_that_hangs_ends_with_the_limit_and_known_actors_are_called_all_the_same(fake: FakeRay) -> None:
    calls = RayCalls("ns")
    fake.answers["ask"] = 7
    assert calls.call("known", "ask", timeout_s=LONG_S) == 7
    fake.there.clear()
    for number in range(8):  # more than there are threads
        with pytest.raises(ActorUnreachable):
            calls.call(f"unknown-{number}", "ask", timeout_s=0.01)
    assert calls.call("known", "ask", timeout_s=LONG_S) == 7
    with pytest.raises(ActorUnreachable, match="control service"):
        calls.ask_ray(fake.nodes, 0.01)
    calls.close()


async def test_the_same_in_async_code(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_calls, "_KILL_TIMEOUT_S", 0.01)
    calls = RayCalls("ns")
    fake.answers["ask"] = 7
    assert await calls.call_async("known", "ask", timeout_s=LONG_S) == 7
    fake.there.clear()
    for number in range(8):
        with pytest.raises(ActorUnreachable):
            await calls.call_async(f"unknown-{number}", "ask", timeout_s=0.01)
    with pytest.raises(ActorUnreachable):
        await calls.kill_async("known")
    assert await calls.call_async("known", "ask", timeout_s=LONG_S) == 7
    calls.close()


@pytest.mark.parametrize(
    ("answer", "lookups"),
    [(None, 1), (ActorUnavailableError("restarting", b"\0" * 16), 1), (ActorDiedError(), 2)],
    ids=["slow", "restarting", "dead"],
)
def test_only_a_dead_actor_is_looked_up_again(fake: FakeRay, answer: Any, lookups: int) -> None:
    calls = RayCalls("ns")
    fake.answers["ask"] = answer
    for _ in range(2):
        with pytest.raises(ActorUnreachable):
            calls.call("actor", "ask", timeout_s=0.01)
    assert fake.looked_up == ["actor"] * lookups
    calls.close()


async def test_disks_are_those_of_living_nodes_and_unknown_while_ray_does_not_answer(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disks, "_FRESH_S", -1)
    present = DisksPresent()
    assert await present.get() == ["d1"]
    fake.there.clear()
    monkeypatch.setattr(disks, "_ANSWER_S", 0.01)
    assert await present.get() is None
    fake.there.set()
    monkeypatch.setattr(disks, "_ANSWER_S", LONG_S)
    assert await present.get() == ["d1"]
