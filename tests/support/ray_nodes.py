"""A Ray of several nodes on this machine, each started by `ray start` as an operator would, each one killable."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actors.launch import DISK_LABEL
from tests.support.killing import is_alive, wait_for

__all__ = ["GCS_SERVER", "RAYLET", "RayNode", "RayNodes", "start_redis"]

#: Parts of the command lines of Ray's own processes.
GCS_SERVER = "/gcs/gcs_server"
RAYLET = "/raylet/raylet"
#: In the environment of every process of a node, its workers included: so they are found, and nothing else is.
_MARK = "MAINSPRING_TEST_NODE"
_START_PATIENCE_S = 60.0


@dataclass
class RayNode:
    """One node: all processes that descend from one `ray start`."""

    ip: str
    disk: str | None
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def pids(self, part: str = "") -> list[int]:
        """Its processes whose command lines have this in them."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):  # it ended just now, or belongs to somebody else
                    if f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        if part in command and is_alive(int(entry.name)):
                            found.append(int(entry.name))
        return found

    def kill(self, part: str = "") -> None:
        """SIGKILL to those processes; without `part` to all at once, as when the machine loses its power."""
        _kill_all([self], part)


class RayNodes:
    """The nodes have addresses of their own on loopback. A context manager: at its end all of them are killed."""

    def __init__(self, directory: Path, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: what is set for `ray start` of every node."""
        self._directory = directory
        self._temp = Path("/tmp") / f"ms-{uuid.uuid4().hex[:8]}"  # sockets' paths must be short
        self._environment = dict(environment or {})
        self._port = free_port()
        self.address = f"127.0.0.2:{self._port}"
        self.nodes: list[RayNode] = []

    def __enter__(self) -> RayNodes:
        self._directory.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if error is not None:  # said now: Ray ends this process once it has missed its nodes for a while
            traceback.print_exception(error)
        self.kill_all()
        shutil.rmtree(self._temp, ignore_errors=True)

    def start_head(self, disk: str | None = None, **environment: str) -> RayNode:
        """The node with Ray's control service; also again, after it has been killed."""
        # Ray takes the other nodes' processes, which run here too, for a cluster that is up.
        (self._temp / "ray_current_cluster").unlink(missing_ok=True)
        options = ["--head", f"--port={self._port}", "--include-dashboard=false"]
        return self._start(RayNode("127.0.0.2", disk), options, environment)

    def start_node(self, disk: str | None, **environment: str) -> RayNode:
        """Another node."""
        used = {node.ip for node in self.nodes if node.pids()}
        ip = next(ip for number in range(3, 255) if (ip := f"127.0.0.{number}") not in used)
        return self._start(RayNode(ip, disk), [f"--address={self.address}"], environment)

    def kill_all(self) -> None:
        """SIGKILL to every process of every node."""
        _kill_all(self.nodes)

    def driver_environment(self) -> dict[str, str]:
        """What a process needs that joins."""
        return {**os.environ, **self._ray_environment()}

    def _ray_environment(self) -> dict[str, str]:
        return {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            **self._environment,
        }

    def _start(self, node: RayNode, options: Sequence[str], environment: Mapping[str, str]) -> RayNode:
        labels = [] if node.disk is None else ["--labels", f"{DISK_LABEL}={node.disk}"]
        log = self._directory / f"{node.mark}.log"
        with open(log, "wb") as output:
            started = subprocess.Popen(
                [
                    *(str(Path(sys.executable).parent / "ray"), "start", "--block", *options, *labels),
                    *(f"--node-ip-address={node.ip}", f"--temp-dir={self._temp}"),
                    *(f"--num-cpus={0 if node.disk is None else 2}", "--object-store-memory=80000000"),
                    *("--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"),
                ],
                env={**self.driver_environment(), **environment, _MARK: node.mark},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.nodes.append(node)

        def is_up() -> bool:
            assert started.poll() is None, f"ray start ended:\n{log.read_text()}"
            return "Ray runtime started" in log.read_text()

        wait_for(is_up, f"the Ray node at {node.ip}", _START_PATIENCE_S)
        return node


def start_redis(directory: Path, port: int) -> subprocess.Popen[bytes]:
    """A Redis that keeps what it is told in memory, like the one that Ray's control service is given."""
    directory.mkdir(parents=True, exist_ok=True)
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--dir", str(directory), "--save", ""]
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: _listens(port), "Redis")
    return redis


def free_port() -> int:
    """A port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _kill_all(nodes: Sequence[RayNode], part: str = "") -> None:
    """SIGKILL until nothing is left: a process may have been started while the others were killed."""
    deadline = time.monotonic() + _START_PATIENCE_S
    while pids := [pid for node in nodes for pid in node.pids(part)]:
        assert time.monotonic() < deadline, f"processes {pids} do not end"
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
