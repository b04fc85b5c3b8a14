"""Which tests may run beside each other when there are several workers (`make test`)."""

from __future__ import annotations

from typing import Any

import pytest

#: The tests that need a Ray.
CLUSTER = "tests/cluster/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins first."""
    items.sort(key=lambda item: not item.nodeid.startswith(CLUSTER))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests stay together. All that need a Ray have one worker to themselves: two Rays are too much for two
    cores, and what a test kills must be its own."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc,unused-ignore]
        def _split_scope(self, nodeid: str) -> str:
            return CLUSTER if nodeid.startswith(CLUSTER) else nodeid.partition("::")[0]

    return Scheduling(config, log)
