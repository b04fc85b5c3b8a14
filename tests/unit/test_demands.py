"""What partitions may ask of Ray, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from actors.demands import Demands
from actors.errors import InvalidOption


def test_nothing_is_asked_for_unless_it_is_said() -> None:
    assert Demands.checked(0, 0, None) == Demands()
    assert Demands().options() == {"num_cpus": 0}


def test_demands_become_options_of_ray() -> None:
    demands = Demands.checked(0.5, 1_024, {"disk": 2}).with_environment({"env_vars": {"A": "1"}})
    assert demands.options() == {
        "num_cpus": 0.5,
        "memory": 1_024,
        "resources": {"disk": 2},
        "runtime_env": {"env_vars": {"A": "1"}},
    }


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("num_cpus", (-1, 0, None)),
        ("num_cpus", (1.5, 0, None)),
        ("num_cpus", (float("nan"), 0, None)),
        ("num_cpus", ("2", 0, None)),
        ("num_cpus", (True, 0, None)),
        ("memory_bytes", (0, -1, None)),
        ("memory_bytes", (0, 1.5, None)),
        ("resources", (0, 0, ["disk"])),
        ("resources", (0, 0, {"disk": -1})),
        ("resources", (0, 0, {"": 1})),
        ("num_cpus and memory_bytes", (0, 0, {"CPU": 1})),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(named: str, arguments: tuple[Any, Any, Any]) -> None:
    with pytest.raises(InvalidOption, match=named):
        Demands.checked(*arguments)
