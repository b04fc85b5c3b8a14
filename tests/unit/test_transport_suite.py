"""The contract of channels, run against the links and the Ray transport on both event loops."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator

import pytest
import uvloop

from tests.support.link_transport import LinkTransport
from tests.support.ray_transports import FakeRayTransport
from tests.support.transport_suite import Transport, TransportSuite

# The hook that replaces this fixture is newer than the oldest pytest-asyncio that we support.
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture:DeprecationWarning")


@pytest.fixture
def socket_dir() -> Iterator[str]:
    """A directory with a short name: the suite's own temporary paths may not fit a socket address."""
    with tempfile.TemporaryDirectory(prefix="ms") as path:
        yield path


@pytest.fixture(params=["uvloop", "asyncio"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


@pytest.fixture(params=["unix", "tcp", "ray"])
async def transport(request: pytest.FixtureRequest, socket_dir: str) -> AsyncIterator[Transport]:
    name = request.param
    chosen: Transport = FakeRayTransport() if name == "ray" else LinkTransport(socket_dir, tcp=name == "tcp")
    yield chosen
    await chosen.stop()


class TestTransports(TransportSuite):
    pass
