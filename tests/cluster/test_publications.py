"""Publications over the partitions of a real Ray, one of which is killed."""

from __future__ import annotations

import os
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from actors.runtime import Runtime
from tests.support.durable_classes import Publisher

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(180)]

#: Longer than a recheck and a recovery together; ends the test only when it would fail anyway.
PATIENCE_S = 90


def test_a_chain_over_two_partitions_is_published_although_one_is_killed(tmp_path: Path) -> None:
    with Runtime.start(tmp_path, 2, name="publications") as runtime:
        publishers = runtime.namespace(Publisher)
        chain = [publishers.get(f"k{number}") for number in range(20)]
        partitions = [runtime._directory.partition_of(each.id.slot) for each in chain]
        assert set(partitions) == {0, 1}
        for earlier, later in pairwise(chain):
            assert later.advance.sync([earlier.key]).state == "pending"
        victim = chain[partitions.index(1)]
        os.kill(victim.process.sync(), signal.SIGKILL)
        assert chain[0].advance.sync([]).state == "published"
        until = time.monotonic() + PATIENCE_S
        while chain[-1].heard.sync() == 0 and time.monotonic() < until:
            time.sleep(0.05)
        assert [each.get.sync().state for each in chain] == ["published"] * len(chain)
        assert [each.heard.sync() for each in chain] == [1] * len(chain)
