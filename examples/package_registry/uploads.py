"""The client: publishes every release, uploads its files, and remembers what must have come of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count

from examples.package_registry.app import UploadExpired, UploadRefused
from examples.package_registry.calls import Caller, all_of
from examples.package_registry.ingest import Distribution, Environment, File
from examples.package_registry.keys import author_key, left_unfinished, release_key, session_key
from examples.package_registry.namespaces import Namespaces

__all__ = ["PIPELINE", "Tally", "Uploader"]

#: The id of a release's one execution of its publish pipeline.
PIPELINE = "publish"

#: A file whose sessions expire under the client's hands this often means that the machine is far too slow for the TTL.
MAX_ATTEMPTS = 20


@dataclass
class Tally:
    """What the client saw happen. Calls happen once, so this is exact, whatever was killed meanwhile."""

    #: the state in which each session must end, by its key
    sessions: dict[str, str] = field(default_factory=dict)
    #: sessions that expire, by release
    expiring: Counter[str] = field(default_factory=Counter)
    #: accepted calls that set or moved a session's timer
    armed: int = 0
    #: sessions left alone on purpose
    left: int = 0
    #: sessions that expired although the client was still at it, as a killed partition may make them
    overtaken: int = 0
    #: files whose content is not what RECORD says
    refused: int = 0
    files_done: int = 0
    _waiting: list[tuple[int, asyncio.Event]] = field(default_factory=list)

    def file_done(self) -> None:
        """One more file is through."""
        self.files_done += 1
        for number, event in self._waiting:
            if self.files_done >= number:
                event.set()

    async def reached(self, files: int) -> None:
        """Wait until so many files are through."""
        if self.files_done < files:
            event = asyncio.Event()
            self._waiting.append((files, event))
            await event.wait()


class Uploader:
    """Takes whole environments in. `progress` is called after each file."""

    def __init__(
        self, names: Namespaces, caller: Caller, ttl: timedelta, files_in_flight: int, progress: Callable[[], None]
    ) -> None:
        self._names = names
        self._caller = caller
        self._ttl = ttl
        self._files = asyncio.Semaphore(files_in_flight)
        self._progress = progress
        self.tally = Tally()

    async def ingest(self, repositories: Sequence[str], environment: Environment) -> None:
        """Publish and upload everything, once for each repository."""
        for repository in repositories:
            await all_of(self._release(repository, distribution) for distribution in environment.distributions)

    async def _release(self, repository: str, distribution: Distribution) -> None:
        key = release_key(repository, distribution)
        release = self._names.releases.get(key)
        requires, authors = list(distribution.requires), list(distribution.authors)
        await self._caller.call("Release.publish", release.publish, requires, authors)
        await all_of(self._file(repository, distribution, file) for file in distribution.files)
        author_keys = [author_key(repository, author) for author in authors]
        needs = [f"{repository}:{need}" for need in distribution.needs]
        start = partial(release.ship.start, execution_id=PIPELINE)
        await self._caller.call("Release.ship.start", start, author_keys, needs)

    async def _file(self, repository: str, distribution: Distribution, file: File) -> None:
        release = release_key(repository, distribution)
        async with self._files:
            for attempt in count(1):
                session = session_key(repository, distribution, file, attempt)
                if attempt > MAX_ATTEMPTS:
                    raise UploadExpired(f"{session}: every session before it expired during the upload")
                leave = attempt == 1 and left_unfinished(distribution, file)
                if await self._session(session, release, file, leave=leave):
                    break
        self.tally.file_done()
        self._progress()

    async def _session(self, key: str, release: str, file: File, *, leave: bool) -> bool:
        """One upload session; whether the file is done with, finished or refused for good."""
        tally, call = self.tally, self._caller.call
        upload = self._names.uploads.get(key)
        tally.sessions[key] = "expired"
        tally.left += leave
        try:
            await call("Upload.open", upload.open, release, file.path, file.size, file.digest, self._ttl)
            tally.armed += 1
            parts = file.parts[:1] if leave else file.parts
            await all_of(self._part(key, number, part.size, part.digest) for number, part in enumerate(parts))
            if not leave:
                await call("Upload.finish", upload.finish, file.measured_digest)
        except UploadExpired:
            tally.overtaken += not leave
            tally.expiring[release] += 1
            return False
        except UploadRefused:
            if file.intact:
                raise
            tally.refused += 1
            tally.expiring[release] += 1
            return True
        if leave:
            tally.expiring[release] += 1
            return False
        tally.sessions[key] = "finished"
        return True

    async def _part(self, key: str, number: int, size: int, digest: str) -> None:
        # started in order and delivered in order: calls to one object keep their order
        await self._caller.call("Upload.part", self._names.uploads.get(key).part, number, size, digest)
        self.tally.armed += 1
