"""kill -9 of a raylet, of the application that started the runtime, and of everything at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.scenarios import run_scenario

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]


def test_in_a_cluster_actors_outlive_the_driver_and_are_found_by_name(tmp_path: Path) -> None:
    run_scenario("driver-killed", tmp_path)


@pytest.mark.soak
def test_a_killed_raylet_costs_its_own_keys_time_and_errors_that_name_its_disk_and_the_others_nothing(
    tmp_path: Path,
) -> None:
    run_scenario("raylet-killed", tmp_path)


@pytest.mark.soak
def test_after_everything_was_killed_at_once_the_next_start_has_all_that_was_answered(tmp_path: Path) -> None:
    run_scenario("everything-killed", tmp_path)
