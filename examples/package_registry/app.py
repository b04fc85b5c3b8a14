"""The registry's durable objects: releases, upload sessions, and one counter per author.

A release is published once everything that it requires is: its publication waits for theirs, wherever they live.

What they keep is what a registry must get right: who published what, how large it is, which hash it has. The bytes
themselves would go to a blob store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypedDict

from actors import (
    Advance,
    DurableContext,
    DurableObject,
    QuotaLimit,
    Rejected,
    TimerInfo,
    durable,
    shared,
)
from actors.errors import TicketGone
from examples.package_registry.services import Audit

__all__ = ["AUTHOR_LIMIT", "Author", "Release", "Upload", "UploadExpired", "UploadRefused"]

EXPIRY = "expiry"
#: What a release publishes, and what others wait for.
RELEASED = "released"
#: An upload has this many times the session's time to live in all, however alive it is.
_TICKET_LIVES = 3
#: Long enough for everything that a release requires to be published.
_ANNOUNCED_WITHIN = "1h"
#: What one author may publish in a month. What all of them publish together is counted too, and not limited.
AUTHOR_LIMIT = QuotaLimit("30d", local_operations=1_000_000, local_bytes=10**15)


def repository_of(key: str) -> str:
    """The repository that an object belongs to."""
    return key.partition(":")[0]


def published_quota(key: str) -> str:
    """The quota that all authors of a repository charge."""
    return f"published/{repository_of(key)}"


class UploadRefused(Rejected):
    """What was sent does not fit what the session was opened for."""


class UploadExpired(UploadRefused):
    """The session gave no sign of life for its time to live; open another one."""


class Session(TypedDict):
    """The durable record of an upload session. Sizes are bytes; `armed` counts how often its timer was set."""

    release: str
    path: str
    size: int
    digest: str
    ttl_ms: int
    state: str  # "open", then "finished" or "expired"
    received: int
    parts: int
    armed: int
    cancelled: int
    fired: int
    due_ms: int
    fired_ms: int
    ticket: str


class Upload(DurableObject):
    """One upload session of one file. It expires by itself when nothing has come for its time to live.

    Its ticket is what makes the upload count: one that is not consumed expires, and the audit trail hears of it.
    """

    def open(self, release: str, path: str, size: int, digest: str, ttl: timedelta) -> None:
        """Begin the session for a file of `size` bytes with this digest. Raises `UploadRefused` when it has begun."""
        if "session" in self.storage:
            raise UploadRefused(f"{self.key} has been opened before")
        session = Session(
            release=release,
            path=path,
            size=size,
            digest=digest,
            ttl_ms=ttl // timedelta(milliseconds=1),
            state="open",
            received=0,
            parts=0,
            armed=0,
            cancelled=0,
            fired=0,
            due_ms=0,
            fired_ms=0,
            ticket=self.tickets.open(
                "upload", ttl=ttl * _TICKET_LIVES, size=max(size, 1), sink=(Audit, repository_of(self.key), "record")
            ).id,
        )
        self._stay_alive(session)

    def part(self, number: int, size: int, digest: str) -> int:
        """Take the next part; gives the bytes received so far. Raises `UploadExpired`, `UploadRefused`."""
        session = self._open_session()
        if number != session["parts"]:
            raise UploadRefused(f"{self.key}: part {number} came where part {session['parts']} belongs")
        session["parts"] += 1
        session["received"] += size
        self.storage.put(f"part/{number:06}", [size, digest])
        self._stay_alive(session)
        return session["received"]

    async def finish(self, digest: str) -> None:
        """Hand the file to its release and end the session. Raises `UploadExpired`, `UploadRefused`."""
        session = self._open_session()
        if session["received"] != session["size"]:
            raise UploadRefused(f"{self.key}: {session['received']} bytes came, {session['size']} were announced")
        if digest != session["digest"]:
            raise UploadRefused(f"{self.key}: the content's hash is {digest}, {session['digest']} was announced")
        try:
            self.tickets.consume(session["ticket"])
        except TicketGone as gone:
            raise UploadExpired(f"{self.key} took too long: {gone}") from gone
        # Should the process die after this call, this turn runs again and gets the recorded reply: one file, once.
        await self.namespace(Release).get(session["release"]).add_file(session["path"], session["size"], digest)
        session["state"] = "finished"
        session["cancelled"] += int(self.timers.cancel(EXPIRY))
        self.storage.put("session", session)

    async def on_expired(self, timer: TimerInfo) -> None:
        """Nobody came back: end the session and tell the release. Counts without looking, so twice would show."""
        session: Session = self.storage["session"]
        await self.namespace(Release).get(session["release"]).upload_expired()
        session["state"] = "expired"
        session["fired"] += 1
        session["due_ms"] = timer.due_ms
        session["fired_ms"] = timer.fired_ms
        self.storage.put("session", session)

    @shared
    def session(self) -> dict[str, Any] | None:
        """The session's record, or None before it was opened."""
        record: dict[str, Any] | None = self.storage.get("session")
        return record

    def _open_session(self) -> Session:
        session: Session | None = self.storage.get("session")
        if session is None:
            raise UploadRefused(f"{self.key} has not been opened")
        if session["state"] == "expired":
            raise UploadExpired(f"{self.key} expired after {session['ttl_ms']} ms without a sign of life")
        if session["state"] != "open":
            raise UploadRefused(f"{self.key} is {session['state']}")
        return session

    def _stay_alive(self, session: Session) -> None:
        self.timers.set(EXPIRY, after=timedelta(milliseconds=session["ttl_ms"]), method="on_expired")
        session["armed"] += 1
        self.storage.put("session", session)


class Release(DurableObject):
    """One version of one distribution, and the files that belong to it."""

    def publish(self, requires: Sequence[str], authors: Sequence[str]) -> None:
        """Make the release known. Raises `Rejected` when it is."""
        if "requires" in self.storage:
            raise Rejected(f"{self.key} has been published before")
        self.storage.put_many({"requires": list(requires), "authors": list(authors)})

    def add_file(self, path: str, size: int, digest: str) -> None:
        """Record an uploaded file. Raises `Rejected` for one that is there already."""
        name = f"file/{path}"
        if name in self.storage:
            raise Rejected(f"{self.key} has {path} already")
        self.storage.put_many(
            {
                name: [size, digest],
                "files": self.storage.get("files", 0) + 1,
                "bytes": self.storage.get("bytes", 0) + size,
            }
        )

    def upload_expired(self) -> None:
        """One of the release's upload sessions came to nothing."""
        self.storage.put("expired", self.storage.get("expired", 0) + 1)

    @durable
    async def ship(self, ctx: DurableContext, author_keys: Sequence[str], needs: Sequence[str]) -> dict[str, int]:
        """All files are here: credit the authors, publish once `needs` are published, and wait until the audit trail
        has heard of it. Each step happens once, whatever dies on the way; gives the files and bytes.
        """
        totals: dict[str, int] = await ctx.step("seal", self._seal, author_keys)
        announced = ctx.promise("announced", timeout=_ANNOUNCED_WITHIN)
        await ctx.step("publish", self._publish, needs, announced.token)
        await announced
        return totals

    async def _seal(self, author_keys: Sequence[str]) -> dict[str, int]:
        if self.storage.get("sealed", False):
            raise Rejected(f"{self.key} has been sealed before")
        totals = {"files": self.storage.get("files", 0), "bytes": self.storage.get("bytes", 0)}
        objects = self.namespace(Author)
        await asyncio.gather(*(objects.get(key).credit(totals["files"], totals["bytes"]) for key in author_keys))
        self.storage.put("sealed", True)
        return totals

    def _publish(self, needs: Sequence[str], token: str) -> None:
        self.storage["announced"] = token
        self.publications.advance(items=[RELEASED], depends_on=[(Release, key, RELEASED) for key in needs])

    async def on_published(self, advance: Advance) -> None:
        """Look whether what this release requires is really there, and tell the audit trail."""
        needed = [need[1] for need in advance.depends_on if not isinstance(need, str)]
        releases = self.namespace(Release)
        there = await asyncio.gather(*(releases.get(key).is_released() for key in needed))
        self.storage.put_many(
            {
                "published": self.storage.get("published", 0) + 1,
                "needed": len(needed),
                "unmet": self.storage.get("unmet", 0) + there.count(False),
            }
        )
        self.send(Audit, repository_of(self.key)).announced(self.key, self.storage["announced"])

    @shared
    def is_released(self) -> bool:
        """Whether the release is published."""
        return self.publications.is_published(RELEASED)

    # --- downloads ----------------------------------------------------------------------------------

    def begin_download(self, download: str, ttl: timedelta) -> None:
        """Reserve a download; one that is not finished in time is given up by itself."""
        self.reservations.hold(download, kind="read", deadline=ttl, sink=(Audit, repository_of(self.key), "record"))

    def finish_download(self, download: str) -> int:
        """The download is through; gives the bytes. Raises `IllegalTransition` for one that was given up."""
        self.reservations.serve_read(download)
        size: int = self.storage.get("bytes", 0)
        return size

    @shared
    def summary(self) -> dict[str, Any]:
        """Counts and metadata, without the files."""
        names = ("requires", "authors", "files", "bytes", "expired", "sealed", "published", "needed", "unmet")
        return self.storage.get_many(names)

    @shared
    def files(self, after: str | None, limit: int) -> dict[str, list[Any]]:
        """A page of files by path, each with its size and hash; `after` is the last path of the page before."""
        start_after = None if after is None else f"file/{after}"
        found = self.storage.list(prefix="file/", start_after=start_after, limit=limit)
        return {name.removeprefix("file/"): value for name, value in found.items()}


class Author(DurableObject):
    """What one author has published. Adds up whatever it is told: a call that ran twice would show."""

    def credit(self, files: int, size: int) -> None:
        """One more release, with so many files and bytes. Raises `QuotaExceeded`."""
        self.quotas.charge(published_quota(self.key), operations=files, bytes=size, limit=AUTHOR_LIMIT)
        self.storage.put_many(
            {
                "releases": self.storage.get("releases", 0) + 1,
                "files": self.storage.get("files", 0) + files,
                "bytes": self.storage.get("bytes", 0) + size,
            }
        )

    async def repository_total(self) -> tuple[int, int]:
        """Files and bytes that all authors of the repository have published this month, as far as it is known."""
        total = await self.quotas.total(published_quota(self.key), AUTHOR_LIMIT.window)
        return total.operations, total.bytes

    @shared
    def charged(self) -> tuple[int, int]:
        """Files and bytes that the author has published this month, by what is left of the quota."""
        left = self.quotas.check(published_quota(self.key), operations=0, limit=AUTHOR_LIMIT)
        assert AUTHOR_LIMIT.local_operations is not None
        assert AUTHOR_LIMIT.local_bytes is not None
        assert left.remaining_operations is not None
        assert left.remaining_bytes is not None
        return (
            AUTHOR_LIMIT.local_operations - left.remaining_operations,
            AUTHOR_LIMIT.local_bytes - left.remaining_bytes,
        )

    @shared
    def totals(self) -> dict[str, int]:
        """Releases, files and bytes."""
        totals: dict[str, int] = self.storage.get_many(("releases", "files", "bytes"))
        return totals
