"""Application code that is not on the workers' path reaches them as packages, also the newer code of a deployment."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from actors.errors import InvalidOption, RuntimeNotStarted
from actors.runtime import Runtime
from actors.settings import Settings
from tests.support.readme import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

APPLICATION = """
    from actors.durable_object import DurableObject

    VERSION = 1

    class Shipped(DurableObject):
        def add(self):
            total = self.storage.get("total", 0) + 1
            self.storage.put("total", total)
            return total, VERSION, __file__
"""

DRIVER = """
    import importlib
    import pathlib
    import subprocess
    import sys

    app = pathlib.Path("app").resolve()
    sys.path.insert(0, str(app))
    import shipping.objects as objects
    sys.path.remove(str(app))  # what is on this process's path, partitions find without being sent it

    import ray
    from actors.errors import ClassNotImportable, InvalidOption
    from actors.runtime import Runtime

    def say(what, runtime):
        keys = [f"key-{number}" for number in range(20)]
        found = [runtime.namespace(objects.Shipped).get(key).add.sync() for key in keys]
        totals, versions, files = (sorted(set(each)) for each in zip(*found))
        owners = {runtime._directory.partition_of(runtime.namespace(objects.Shipped).get(key).id.slot) for key in keys}
        shipped = all("runtime_resources" in file for file in files)
        print(what, totals, versions, len(owners), "shipped" if shipped else files)

    with Runtime.start("bare", 1, name="bare") as runtime:
        try:
            runtime.namespace(objects.Shipped).get("a").add.sync()
        except ClassNotImportable:
            print("without: not importable")
        with Runtime.start("data", 1, name="shipping", runtime_env={"working_dir": str(app)}) as runtime:
            say("started", runtime)
            address = ray.get_runtime_context().gcs_address
            scale = ["from actors.cli import app; app()", "scale", "2", "--name", "shipping", "--address", address]
            subprocess.run([sys.executable, "-c", *scale], check=True, stdout=subprocess.DEVNULL)
            say("scaled", runtime)
            source = app / "shipping" / "objects.py"
            source.write_text(source.read_text().replace("VERSION = 1", "VERSION = 2"))
            runtime.deploy(runtime_env={"py_modules": [str(app / "shipping")]})
            say("deployed", runtime)
            runtime.deploy()
            say("restarted", runtime)
            source.write_text(source.read_text().replace("VERSION = 2", "VERSION = 3"))
            deploy = ["from actors.cli import app; app()", "deploy", "--name", "shipping", "--address", address]
            deploy += ["--working-dir", str(app)]
            subprocess.run([sys.executable, "-c", *deploy], check=True, stdout=subprocess.DEVNULL)
            say("by command", runtime)
            try:
                runtime.deploy(runtime_env={"working_dir": "/nonexistent"})
            except InvalidOption as error:
                print("refused:", "/nonexistent" in str(error))
            say("as before", runtime)
"""


def write_package(app: Path, name: str) -> None:
    package = app / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "objects.py").write_text(textwrap.dedent(APPLICATION))


def test_partitions_import_what_is_not_on_their_path_from_a_package(
    local_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path / "app", "shipping_here")
    with monkeypatch.context() as patch:  # what is on this process's path, partitions would find without being sent it
        patch.syspath_prepend(tmp_path / "app")
        objects = importlib.import_module("shipping_here.objects")
    with Runtime.start(tmp_path / "data", 1, name="shipped", runtime_env={"working_dir": tmp_path / "app"}) as runtime:
        total, version, file = runtime.namespace(objects.Shipped).get("a").add.sync()
        assert (total, version) == (1, 1)
        assert "runtime_resources" in file


@pytest.mark.soak
def test_partitions_import_the_application_from_its_package_when_started_scaled_and_deployed(tmp_path: Path) -> None:
    write_package(tmp_path / "app", "shipping")
    (tmp_path / "driver").mkdir()
    script = tmp_path / "driver" / "driver.py"
    script.write_text(textwrap.dedent(DRIVER))
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "raylet" not in line] == [
        "without: not importable",
        "started [1] [1] 1 shipped",
        "scaled [2] [1] 2 shipped",
        "deployed [3] [2] 2 shipped",
        "restarted [4] [2] 2 shipped",
        "by command [5] [3] 2 shipped",
        "refused: True",
        "as before [6] [3] 2 shipped",
    ], done.stdout + done.stderr


def test_what_no_node_has_is_named_when_the_runtime_can_not_start(local_ray: None, tmp_path: Path) -> None:
    settings = Settings(connect_timeout_ms=3_000, lock_wait_ms=0)
    with pytest.raises(RuntimeNotStarted, match=r"num_cpus = 64, memory = 1024, resources = \{'tape': 1\}"):
        Runtime.start(
            tmp_path, 1, name="greedy", num_cpus=64, memory_bytes=1024, resources={"tape": 1}, settings=settings
        )


def test_an_environment_that_makes_no_sense_is_refused_before_anything_is_created(
    local_ray: None, tmp_path: Path
) -> None:
    for runtime_env in ("app", {"working_dir": "/nonexistent"}, {"working_dir": 7}, {"env_vars": {"A": object()}}):
        with pytest.raises(InvalidOption, match="runtime_env"):
            Runtime.start(tmp_path / "data", 1, name="odd", runtime_env=runtime_env)  # type: ignore[arg-type]
    assert not (tmp_path / "data" / "cluster.json").exists()
