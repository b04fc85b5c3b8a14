"""Starts or joins Ray on purpose, and never by accident."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

import ray
from ray.exceptions import RayError
from ray.job_config import JobConfig

from actors.errors import InvalidOption, RuntimeNotStarted
from actors.logs import tell

__all__ = ["Connection", "connect_ray_cluster", "ensure_ray", "import_paths"]

_NICENESS_VARIABLE = "RAY_worker_niceness"
_ADDRESS_VARIABLE = "RAY_ADDRESS"
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
#: Where nothing listens, Ray itself would keep looking for minutes.
_REACH_TIMEOUT_S = 5.0
_starting = threading.Lock()


class Connection(Enum):
    """How this process came to its Ray."""

    OWN = "own"  # started here: ends with this process
    JOINED = "joined"  # connected here, at an address that somebody gave
    FOUND = "found"  # this process was connected already


def ensure_ray(address: str | None, options: Mapping[str, Any] | None = None) -> Connection:
    """Make this process a part of Ray: of the one that it is connected to, else of `address`, else of a new local one.

    A Ray that happens to run on the machine, or that RAY_ADDRESS names, is joined only when `address` says so
    ("auto" finds it). `options` go to `ray.init`. Raises `RuntimeNotStarted` when nothing is at the address, and
    `InvalidOption` for what is no address.
    """
    if address is not None and address.startswith("ray://"):
        raise InvalidOption(
            f"address = {address!r}: a Ray client has no connection to partitions. Run this program inside the "
            "cluster, for example as a Ray job, with address='auto'."
        )
    if ray.is_initialized():
        return Connection.FOUND
    with _starting:
        if ray.is_initialized():
            return Connection.FOUND
        if address not in (None, "local"):
            assert address is not None
            _join(address, options or {})
            return Connection.JOINED
        _start(options or {})
        return Connection.OWN


def connect_ray_cluster(address: str | None) -> Connection:
    """The same for what must exist already: without an address the running Ray of this machine is looked for."""
    if address == "local":
        raise RuntimeNotStarted('address="local" starts a new Ray, in which no runtime can be found')
    return ensure_ray(address or "auto")


def import_paths() -> list[str]:
    """Where this process imports from, in order, without what the interpreter itself brings along."""
    own = tuple(os.path.realpath(prefix) + os.sep for prefix in {sys.prefix, sys.base_prefix})
    paths = [os.path.abspath(path or os.getcwd()) for path in sys.path]
    return [path for path in dict.fromkeys(paths) if not os.path.realpath(path).startswith(own)]


def _start(options: Mapping[str, Any]) -> None:
    with _loopback(True):
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level="WARNING",
            job_config=JobConfig(_py_driver_sys_path=import_paths()),
            _system_config=_system_config(),
            **options,
        )
    node_ip = ray.util.get_node_ip_address()
    if node_ip != "127.0.0.1":
        tell("ray_not_loopback", f"the local Ray listens on {node_ip}, not only on loopback", node_ip=node_ip)


def _system_config() -> dict[str, Any]:
    # Ray runs workers at nice 15; beside ordinary processes timers are then 85 ms to seconds late.
    return {} if _NICENESS_VARIABLE in os.environ else {"worker_niceness": 0}


def _join(address: str, options: Mapping[str, Any]) -> None:
    if address == "auto":
        address = _running_address()
    host, port = _host_and_port(address)
    _check_listens(address, host, port)
    try:
        with _loopback(_is_loopback(address)):
            ray.init(
                address=address,
                logging_level="WARNING",
                job_config=JobConfig(_py_driver_sys_path=import_paths()),
                **options,
            )
    except (ConnectionError, RayError) as error:  # the latter: no token at all
        raise RuntimeNotStarted(
            f"the Ray at {address!r} can't be joined: {error}. Something listens there; if the cluster wants a token, "
            "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as on its nodes."
        ) from error


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise InvalidOption(
            f"address = {address!r}: must be 'auto', or host and port of a Ray cluster, like '10.0.0.1:6379'"
        )
    return host.strip("[]"), int(port)


def _check_listens(address: str, host: str, port: int) -> None:
    try:
        socket.create_connection((host, port), timeout=_REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise RuntimeNotStarted(f"no Ray can be reached at {address!r}: {error}") from error


def _is_loopback(address: str) -> bool:
    return address.startswith(_LOOPBACK)


def _running_address() -> str:
    """The Ray that "auto" means: RAY_ADDRESS, else the one that `ray start` began, else the only one that runs here.

    Ray itself would take any one of several, also one that has just ended, and then look for it for minutes.
    """
    named = os.environ.get(_ADDRESS_VARIABLE) or ray._private.utils.read_ray_address()
    if named:
        return str(named)
    running = [address for address in sorted(ray._private.services.find_gcs_addresses()) if _listens(address)]
    if not running:
        raise RuntimeNotStarted("no Ray runs on this machine; name one by its address if it runs elsewhere")
    if len(running) > 1:
        raise RuntimeNotStarted(
            f"several Rays run on this machine ({', '.join(running)}): say which one by its address "
            "(`address=`, on the command line `--address`)"
        )
    return str(running[0])


def _listens(address: str) -> bool:
    try:
        host, port = _host_and_port(address)
        _check_listens(address, host, port)
    except (InvalidOption, RuntimeNotStarted):
        return False
    return True


@contextmanager
def _loopback(wanted: bool) -> Iterator[None]:
    """Let Ray take 127.0.0.1 as the address of this node: its processes then listen on loopback only.

    Ray does that by itself on macOS and Windows. On Linux it replaces 127.0.0.1, also where `_node_ip_address` says
    so, by an address that other machines reach, and listens on all of them; this switch is the only way. A process
    that joins such a Ray needs it too: otherwise it looks for the Ray at the machine's outer address.
    """
    constants = ray._private.ray_constants
    before = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = before and not wanted
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
