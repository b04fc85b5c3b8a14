"""The client's second half: waits until everything is published, downloads some of it, and has it indexed."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from actors.errors import QuotaExceeded
from examples.package_registry.app import AUTHOR_LIMIT
from examples.package_registry.calls import Caller, all_of
from examples.package_registry.namespaces import Namespaces
from examples.package_registry.uploads import PIPELINE

__all__ = ["ReaderTally", "Readers"]

#: Downloads of each release; of so many, one is given up by whoever began it.
_DOWNLOADS = 5
_ONE_GIVEN_UP_OF = 4
_INDEXERS = 3
_LOOK_EVERY_S = 0.2
#: A download that is not finished so much later is given up. Far longer than a killed partition is away.
_DOWNLOAD_TTL = timedelta(seconds=15)
_PIPELINE_TIMEOUT = "60s"


@dataclass
class ReaderTally:
    """What the client saw happen."""

    #: the outcome that each download must have, by its id
    downloads: dict[str, str] = field(default_factory=dict)
    #: how many indexers wrote the index of each repository
    indexed_by: dict[str, int] = field(default_factory=dict)
    #: what the publish pipeline of each release gave or raised
    shipped: dict[str, Any] = field(default_factory=dict)
    #: authors who were refused what is over their quota
    over_quota: set[str] = field(default_factory=set)


class Readers:
    """Uses what has been published."""

    def __init__(self, names: Namespaces, caller: Caller, ttl: timedelta) -> None:
        self._names = names
        self._caller = caller
        self._ttl = ttl
        self.tally = ReaderTally()

    async def until_published(self, releases: Sequence[str], patience_s: float) -> None:
        """Wait until every release is published, but not for ever: the counts are checked afterwards."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        waiting = list(releases)
        while waiting and loop.time() < deadline:
            there = await asyncio.gather(*(self._names.releases.get(key).summary() for key in waiting))
            waiting = [key for key, summary in zip(waiting, there, strict=True) if not summary.get("published")]
            await asyncio.sleep(_LOOK_EVERY_S if waiting else 0)

    async def download(self, releases: Sequence[str]) -> None:
        """Download each release some times; leave some of the downloads unfinished."""
        await all_of(self._download(key, number) for key in releases for number in range(_DOWNLOADS))

    async def until_shipped(self, releases: Sequence[str]) -> None:
        """Wait for the publish pipeline of each release, and note what came of it."""
        handles = [self._names.releases.get(key).ship.execution(PIPELINE) for key in releases]
        waiting = (handle.result(timeout=_PIPELINE_TIMEOUT) for handle in handles)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        self.tally.shipped.update(zip(releases, results, strict=True))

    async def over_quota(self, authors: Sequence[str]) -> None:
        """Try to publish more than an author may, each."""
        await all_of(self._over_quota(key) for key in authors)

    async def _over_quota(self, key: str) -> None:
        assert AUTHOR_LIMIT.local_operations is not None
        author = self._names.authors.get(key)
        try:
            await self._caller.call("Author.credit", author.credit, AUTHOR_LIMIT.local_operations + 1, 0)
        except QuotaExceeded:
            self.tally.over_quota.add(key)

    async def _download(self, key: str, number: int) -> None:
        release, download = self._names.releases.get(key), f"{key}/{number}"
        given_up = zlib.crc32(download.partition(":")[2].encode()) % _ONE_GIVEN_UP_OF == 0
        ttl = self._ttl if given_up else _DOWNLOAD_TTL
        await self._caller.call("Release.begin_download", release.begin_download, download, ttl)
        self.tally.downloads[download] = "reservation.aborted" if given_up else "reservation.read_served"
        if not given_up:
            await self._caller.call("Release.finish_download", release.finish_download, download)

    async def index(self, repository: str, releases: Sequence[str]) -> None:
        """Several indexers come at once; one of them gets the lease."""
        indexers = [self._names.indexers.get(f"{repository}:{number}") for number in range(_INDEXERS)]
        ran = await asyncio.gather(
            *(self._caller.call("Indexer.run", indexer.run, repository, list(releases)) for indexer in indexers)
        )
        self.tally.indexed_by[repository] = sum(ran)
