"""A coordinator whose file is lost: nothing starts by itself, and on an operator's word it is made again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.cli import app
from actors.errors import DataMissing, StaleLease
from actors.runtime import Runtime
from tests.cluster.apps import Ledger
from tests.cluster.lease_apps import Vault, Worker

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(120)]

KEYS = [f"kept-{number}" for number in range(20)]


def test_a_lost_coordinator_file_is_made_again_from_the_partitions_on_an_operators_word(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Runtime.start(data, 2, name="rebuilt") as runtime:
        for key in KEYS:
            runtime.namespace(Ledger).get(key).apply.sync("x")
        moved = runtime.namespace(Ledger).get(KEYS[0])
        runtime.move(moved, 1)
        before = runtime.namespace(Worker).get("a").take.sync("job")
        runtime.namespace(Vault).get("v").write.sync("job", before.epoch, "before")
    shutil.rmtree(data / "coordinator")
    with pytest.raises(DataMissing):
        Runtime.start(data, name="rebuilt")
    shutil.rmtree(data / "coordinator", ignore_errors=True)
    runner = CliRunner()
    refused = runner.invoke(app, ["rebuild-coordinator", str(data)])
    assert refused.exit_code == 1
    assert "--yes" in refused.output
    done = runner.invoke(app, ["rebuild-coordinator", str(data), "--yes"])
    assert done.exit_code == 0, done.output
    with Runtime.start(data, name="rebuilt") as runtime:
        assert [runtime.namespace(Ledger).get(key).total.sync() for key in KEYS] == [1] * len(KEYS)
        slot_map = runtime._directory.slot_map
        assert slot_map.owners()[moved.id.slot] == 1
        after = runtime.namespace(Worker).get("b").take.sync("job")  # nobody knows any more who had it
        runtime.namespace(Vault).get("v").write.sync("job", after.epoch, "after")
        with pytest.raises(StaleLease):
            runtime.namespace(Vault).get("v").write.sync("job", before.epoch, "before, late")
