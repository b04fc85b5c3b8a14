"""Which disks the nodes of a Ray have, by their labels: partitions stay where their files are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import ray

__all__ = ["DISK_LABEL", "DisksPresent", "disk_of", "disks_of", "living_nodes"]

#: Node label that says which disk a node has: partitions go back to where their files are.
DISK_LABEL = "mainspring-disk"
#: How long an answer of Ray about its nodes is good enough: it takes seconds to notice a loss anyway.
_FRESH_S = 1.0
#: How long Ray's control service may take to answer; while it is gone Ray lets the question hang for a minute.
_ANSWER_S = 2.0


def living_nodes() -> list[dict[str, Any]]:
    """The nodes that Ray takes for alive. Blocks while it asks Ray's control service."""
    return [node for node in ray.nodes() if node["Alive"]]


def disk_of(node: dict[str, Any]) -> str | None:
    """The label of a node's disk."""
    disk: str | None = (node.get("Labels") or {}).get(DISK_LABEL)
    return disk


def disks_of(nodes: Sequence[dict[str, Any]]) -> list[str]:
    """The labels of the disks of these nodes, each once."""
    return sorted({disk for node in nodes if (disk := disk_of(node)) is not None})


class DisksPresent:
    """The disks that are in the cluster now, for event loops. However many ask, Ray is asked by one, once a second."""

    def __init__(self) -> None:
        self._asking: asyncio.Future[list[str]] | None = None
        self._asked_s = float("-inf")

    async def get(self) -> list[str] | None:
        """Their labels; None when Ray does not answer, so that nobody knows."""
        asking, now_s = self._asking, time.monotonic()
        if asking is None or (asking.done() and now_s - self._asked_s > _FRESH_S):
            asking = self._asking = asyncio.ensure_future(asyncio.to_thread(lambda: disks_of(living_nodes())))
            self._asked_s = now_s
        await asyncio.wait({asking}, timeout=_ANSWER_S)
        return asking.result() if asking.done() and asking.exception() is None else None
