"""Ray is started or joined on purpose, where the files are, with what its processes need."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors import disks, launch, local_ray
from actors.errors import InvalidOption, RuntimeNotStarted
from actors.launch import DISK_LABEL, choose_placement
from actors.local_ray import Connection, connect_ray_cluster, ensure_ray, import_paths

#: Where a Ray has been.
GONE_PORT = 9


class FakeRay:
    """Records how Ray is started or joined."""

    def __init__(self, *, initialised: bool = False, reachable: bool = True) -> None:
        self.initialised = initialised
        self.reachable = reachable
        self.inits: list[dict[str, Any]] = []
        self.loopback: list[bool] = []
        self.constants = SimpleNamespace(ENABLE_RAY_CLUSTER=True)
        self.last_started: str | None = None
        self.running: set[str] = set()
        self._private = SimpleNamespace(
            ray_constants=self.constants,
            utils=SimpleNamespace(read_ray_address=lambda: self.last_started),
            services=SimpleNamespace(find_gcs_addresses=lambda: self.running),
        )
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def check_listens(self, address: str, host: str, port: int) -> None:
        if port == GONE_PORT:
            raise RuntimeNotStarted(f"nobody listens at {address}")

    def is_initialized(self) -> bool:
        return self.initialised

    def init(self, **options: Any) -> None:
        if not self.reachable:
            raise ConnectionError("nobody there")
        self.inits.append(options)
        self.loopback.append(not self.constants.ENABLE_RAY_CLUSTER)
        self.initialised = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(local_ray, "ray", fake)
    monkeypatch.setattr(local_ray, "_check_listens", fake.check_listens)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_worker_niceness", raising=False)
    return fake


def test_without_an_address_a_new_ray_is_started_whatever_the_environment_says(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert ensure_ray(None) is Connection.OWN
    assert fake.inits[0]["address"] == "local"
    assert fake.loopback == [True]
    assert fake.constants.ENABLE_RAY_CLUSTER is True


def test_a_ray_that_this_process_is_connected_to_is_used(fake: FakeRay) -> None:
    fake.initialised = True
    assert ensure_ray(None) is Connection.FOUND
    assert ensure_ray("10.0.0.1:6379") is Connection.FOUND
    assert fake.inits == []


def test_workers_are_not_niced_unless_somebody_said_so(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_ray(None)
    assert fake.inits[0]["_system_config"] == {"worker_niceness": 0}
    fake.initialised = False
    monkeypatch.setenv("RAY_worker_niceness", "5")
    ensure_ray(None)
    assert fake.inits[1]["_system_config"] == {}


@pytest.mark.parametrize(
    ("address", "last_started", "joined", "loopback"),
    [
        ("127.0.0.1:6379", None, "127.0.0.1:6379", True),
        ("10.0.0.1:6379", "127.0.0.1:1", "10.0.0.1:6379", False),
        ("auto", "127.0.0.1:6379", "127.0.0.1:6379", True),
        ("auto", "10.0.0.1:6379", "10.0.0.1:6379", False),
    ],
)
def test_a_ray_on_loopback_is_joined_on_loopback(
    fake: FakeRay, address: str, last_started: str | None, joined: str, loopback: bool
) -> None:
    fake.last_started = last_started
    assert ensure_ray(address) is Connection.JOINED
    assert fake.inits[0]["address"] == joined
    assert fake.loopback == [loopback]


def test_connecting_without_an_address_finds_the_one_ray_that_runs_and_not_one_that_has_ended(fake: FakeRay) -> None:
    fake.running = {"127.0.0.1:6379", f"192.0.2.2:{GONE_PORT}"}
    assert connect_ray_cluster(None) is Connection.JOINED
    assert fake.inits[0]["address"] == "127.0.0.1:6379"
    assert fake.loopback == [True]


def test_the_environment_names_the_ray_that_auto_means(fake: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.running = {"127.0.0.1:6379"}
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    connect_ray_cluster(None)
    assert fake.inits[0]["address"] == "10.0.0.1:6379"


def test_no_ray_or_several_are_an_error_that_says_what_to_do(fake: FakeRay) -> None:
    with pytest.raises(RuntimeNotStarted, match="no Ray runs"):
        connect_ray_cluster(None)
    fake.running = {"127.0.0.1:6379", "127.0.0.1:6380"}
    with pytest.raises(RuntimeNotStarted, match="--address"):
        connect_ray_cluster(None)


def test_an_address_where_nobody_is_says_so(fake: FakeRay) -> None:
    fake.reachable = False
    with pytest.raises(RuntimeNotStarted, match=r"nobody there.*RAY_AUTH_TOKEN"):
        ensure_ray("10.0.0.1:6379")


def test_an_address_where_nothing_listens_is_not_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay()
    monkeypatch.setattr(local_ray, "ray", fake)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(RuntimeNotStarted, match=address):
            ensure_ray(address)
        taken.listen()
        assert ensure_ray(address) is Connection.JOINED


@pytest.mark.parametrize("address", ["nonsense", "10.0.0.1", ":6379", "host:port"])
def test_what_is_no_address_is_refused(fake: FakeRay, address: str) -> None:
    with pytest.raises(InvalidOption, match="host and port"):
        ensure_ray(address)


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001"])
def test_a_ray_client_is_refused(fake: FakeRay, address: str) -> None:
    with pytest.raises(InvalidOption):
        ensure_ray(address)


def test_workers_import_what_the_driver_imports_but_keep_their_own_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/srv/app", f"{sys.prefix}/lib/site-packages", "/srv/app", "/srv/lib"])
    assert import_paths() == [str(tmp_path), "/srv/app", "/srv/lib"]


def nodes(monkeypatch: pytest.MonkeyPatch, *labels: dict[str, str]) -> None:
    """A Ray of alive nodes with these labels, of which the first is this one, and a dead one."""
    alive = [{"NodeID": str(number), "Alive": True, "Labels": found} for number, found in enumerate(labels)]
    dead = {"NodeID": "dead", "Alive": False, "Labels": {}}
    fake = SimpleNamespace(
        nodes=lambda: [*alive, dead],
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "0"),
    )
    monkeypatch.setattr(launch, "ray", fake)
    monkeypatch.setattr(disks, "ray", fake)


def test_on_a_single_node_partitions_need_no_label(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, {})
    assert choose_placement().options() == {}


def test_partitions_stay_on_the_disk_of_this_node(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, {DISK_LABEL: "d1"}, {DISK_LABEL: "d2"})
    assert choose_placement().options() == {"label_selector": {DISK_LABEL: "d1"}}


def test_several_nodes_without_a_label_are_refused_with_the_command_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes(monkeypatch, {}, {})
    with pytest.raises(InvalidOption, match=r'ray start .*--labels "mainspring-disk='):
        choose_placement()
