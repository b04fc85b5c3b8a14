"""A change of the partitions that was cut short is finished by asking for it again, wherever it had stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from actors import scaling
from actors.errors import ActorUnreachable, ScaleSuperseded
from actors.ray_calls import COORDINATOR, partition_actor
from actors.scaling import Scaling


class CutShort(Exception):
    """The process that scales ends here."""


@dataclass
class Cluster:
    """A coordinator and the actors that Ray has, as far as `Scaling` sees them. Takes the place of `RayCalls`."""

    recorded: list[int]
    actors: dict[str, int] = field(default_factory=dict)  # name -> epoch
    environment: object = None
    goal: list[int] = field(default_factory=list)
    began: list[tuple[str, object]] = field(default_factory=list)
    ends_before: str = ""

    def call(self, actor: str, method: str, *args: Any, timeout_s: float) -> Any:
        assert timeout_s > 0
        self.step(method)
        if actor == COORDINATOR:
            return getattr(self, method)(*args)
        if actor not in self.actors:
            raise ActorUnreachable(f"there is no actor {actor}")
        if method == "restart" and args == (self.actors[actor],):
            self.actors[actor] += 1
        return SimpleNamespace(epoch=self.actors[actor]) if method == "endpoint" else ""

    def step(self, name: str) -> None:
        if name == self.ends_before:
            raise CutShort

    def describe(self) -> Any:
        return SimpleNamespace(partitions=tuple(self.recorded), environment=self.environment)

    def add_partition(self, number: int) -> None:
        self.recorded = sorted({*self.recorded, number})

    def remove_partition(self, number: int) -> None:
        self.recorded.remove(number)

    def deploy_environment(self, environment: object) -> None:
        self.environment = environment

    def spread(self, goal: list[int]) -> None:
        self.goal = goal

    def move_progress(self) -> dict[str, Any]:
        numbers = dict.fromkeys(("wanted", "moved", "put_off", "bytes_sent"), 0)
        return {"goal": self.goal, "running": False, "error": None, "last_error": "", **numbers}

    def start(self, _calls: Any, _runtime: str, description: Any, _transport: Any, _place: Any, wanted: Any) -> None:
        self.step("start")
        for name in map(partition_actor, wanted):
            if name not in self.actors:
                self.actors[name] = 1
                self.began.append((name, description.environment))

    def end(self, _calls: Any, name: str) -> None:
        self.actors.pop(name, None)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster([0, 1, 2], {partition_actor(number): 1 for number in range(3)})
    monkeypatch.setattr(scaling, "placement_of", lambda description: None)
    monkeypatch.setattr(scaling, "assign_disks", lambda calls, description, placement: description)
    monkeypatch.setattr(scaling, "start_partitions", made.start)
    monkeypatch.setattr(scaling, "end_actor", made.end)
    monkeypatch.setattr(scaling, "stop_partition", lambda calls, number: made.end(calls, partition_actor(number)))
    monkeypatch.setattr(scaling, "_POLL_S", 0.001)
    return made


def cut_short(cluster: Cluster, before: str, change: Callable[[Scaling], object]) -> None:
    """The change, by a process that ends before this step, and then by one that does not."""
    cluster.ends_before = before
    with pytest.raises(CutShort):
        change(Scaling(cluster, "r", "link", timeout_s=5))  # type: ignore[arg-type]
    cluster.ends_before = ""
    change(Scaling(cluster, "r", "link", timeout_s=5))  # type: ignore[arg-type]


@pytest.mark.parametrize("before", ["start", "spread", "leftovers", "remove_partition"])
def test_fewer_partitions(cluster: Cluster, before: str) -> None:
    cut_short(cluster, before, lambda scaling: scaling.to(2))
    assert cluster.recorded == [0, 1]
    assert sorted(cluster.actors) == [partition_actor(0), partition_actor(1)]


@pytest.mark.parametrize("before", ["start", "endpoint", "spread"])
def test_more_partitions(cluster: Cluster, before: str) -> None:
    cut_short(cluster, before, lambda scaling: scaling.to(4))
    assert cluster.recorded == [0, 1, 2, 3]
    assert len(cluster.actors) == 4


@pytest.mark.parametrize("before", ["leave", "start", "endpoint"])
def test_a_deployment_with_another_environment(cluster: Cluster, before: str) -> None:
    cut_short(cluster, before, lambda scaling: scaling.roll({"working_dir": "new"}))
    assert len(cluster.actors) == 3
    latest = dict(cluster.began)
    assert latest == {partition_actor(number): {"working_dir": "new"} for number in range(3)}


def test_a_deployment_of_the_code_as_it_is_after_one_with_an_environment_was_cut_short(cluster: Cluster) -> None:
    cluster.ends_before = "start"
    with pytest.raises(CutShort):
        Scaling(cluster, "r", "link", timeout_s=5).roll({"working_dir": "new"})  # type: ignore[arg-type]
    cluster.ends_before = ""
    Scaling(cluster, "r", "link", timeout_s=5).roll()  # type: ignore[arg-type]
    assert cluster.actors == {partition_actor(number): 2 for number in range(3)}


def test_who_asks_for_other_partitions_meanwhile_wins_and_the_first_is_told(cluster: Cluster) -> None:
    def spread(goal: list[int]) -> None:
        cluster.goal = [0, 1, 2]  # somebody else's wish comes right after

    cluster.spread = spread  # type: ignore[method-assign]
    with pytest.raises(ScaleSuperseded, match=r"to partitions \[0, 1\]; somebody else .* to \[0, 1, 2\]"):
        Scaling(cluster, "r", "link", timeout_s=5).to(2)  # type: ignore[arg-type]
    assert cluster.recorded == [0, 1, 2]
