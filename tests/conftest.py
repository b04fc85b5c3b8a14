"""Which tests may run beside each other when there are several workers (`make test`)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """A file's tests stay together. All that need a Ray have one worker to themselves: two Rays are too much for two
    cores, and what a test kills must be its own."""
    for item in items:
        group = "cluster" if item.get_closest_marker("cluster") is not None else item.location[0]
        item.add_marker(pytest.mark.xdist_group(group))
