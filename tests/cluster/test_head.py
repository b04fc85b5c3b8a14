"""When Ray's head dies, partitions keep serving; on its return the coordinator attaches again by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster.scenarios import run_scenario

pytestmark = [pytest.mark.cluster, pytest.mark.soak, pytest.mark.timeout(420)]


@pytest.mark.parametrize("storage", ["redis", "rocksdb"])
def test_when_the_head_dies_partitions_keep_serving_and_on_its_return_all_is_as_before(
    tmp_path: Path, storage: str
) -> None:
    if storage == "redis" and shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (Debian: apt-get install redis-server)")
    run_scenario(f"head-killed-{storage}", tmp_path)


def test_without_storage_for_its_tables_ray_ends_with_its_head_and_the_data_is_whole_at_the_next_start(
    tmp_path: Path,
) -> None:
    run_scenario("head-killed", tmp_path)
