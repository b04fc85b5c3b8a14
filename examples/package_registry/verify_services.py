"""Compares what the services say with what was read from the environment and with what the client saw."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from examples.package_registry.app import repository_of
from examples.package_registry.calls import Caller
from examples.package_registry.check import Check
from examples.package_registry.ingest import Distribution
from examples.package_registry.namespaces import Namespaces
from examples.package_registry.readers import ReaderTally
from examples.package_registry.uploads import Tally

__all__ = ["Services", "ServicesVerifier"]

_LOOK_EVERY_S = 0.2


@dataclass
class Services:
    """What the services say, by repository."""

    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    repeated: dict[str, list[str]] = field(default_factory=dict)
    index: dict[str, dict[str, int]] = field(default_factory=dict)
    #: files and bytes charged to the quota, by author and by repository
    charged: dict[str, tuple[int, int]] = field(default_factory=dict)
    repository_charged: dict[str, tuple[int, int]] = field(default_factory=dict)

    def totals(self) -> Counter[str]:
        """How often each thing has happened, in all repositories."""
        totals: Counter[str] = Counter()
        for counts in self.counts.values():
            totals.update(counts)
        return totals

    def count(self, what: str) -> int:
        """How often something has happened, in all repositories."""
        return sum(counts.get(what, 0) for counts in self.counts.values())


class ServicesVerifier:
    """`published` are the releases that must be there, by key; `authors` what each author must have been credited."""

    def __init__(
        self,
        names: Namespaces,
        caller: Caller,
        repositories: Sequence[str],
        published: Mapping[str, Distribution],
        authors: Mapping[str, Mapping[str, int]],
        uploads: Tally,
        readers: ReaderTally,
    ) -> None:
        self._names = names
        self._caller = caller
        self._repositories = repositories
        self._published = published
        self._authors = authors
        self._uploads = uploads
        self._readers = readers

    def expected(self) -> Counter[str]:
        """What the audit trail must have been told, and how often."""
        wanted = Counter(f"outcome/{kind}/{_REASONS[kind]}" for kind in self._readers.downloads.values())
        wanted["outcome/ticket.expired/expired"] = sum(state == "expired" for state in self._uploads.sessions.values())
        wanted["announced"] = len(self._published)
        return wanted

    async def read(self, patience_s: float) -> Services:
        """Everything that the services say, once it is complete or `patience_s` has passed."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience_s
        while True:
            found = await self._read()
            complete = +Counter({what: found.count(what) for what in self.expected()}) == +self.expected()
            if (complete and found.repository_charged == self._repository_charges()) or loop.time() > deadline:
                return found
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _read(self) -> Services:
        found, names, call = Services(), self._names, self._caller.call
        for repository in self._repositories:
            audit = names.audits.get(repository)
            found.counts[repository] = await call("Audit.counts", audit.counts)
            found.repeated[repository] = await call("Audit.repeated", audit.repeated)
            found.index[repository] = await call("Index.entries", names.indexes.get(repository).entries)
        for key in self._authors:
            author, repository = names.authors.get(key), repository_of(key)
            found.charged[key] = await call("Author.charged", author.charged)
            if repository not in found.repository_charged:
                total = await call("Author.repository_total", author.repository_total)
                found.repository_charged[repository] = total
        return found

    def checks(self, found: Services, releases: Mapping[str, Mapping[str, Any]]) -> list[Check]:
        """Every count. `releases` are the summaries of the releases."""
        checks = [
            Check(f"told to the audit trail: {what}", count, found.count(what))
            for what, count in sorted(self.expected().items())
        ]
        strange = sum(sum(counts.values()) for counts in found.counts.values()) - sum(
            found.count(what) for what in self.expected()
        )
        repeated = tuple(each for repeats in found.repeated.values() for each in repeats)
        return [
            *checks,
            Check("anything else told to the audit trail", 0, strange),
            Check("told to the audit trail twice", 0, len(repeated), repeated),
            *self._publication_checks(releases),
            *self._pipeline_checks(releases),
            *self._quota_checks(found),
            *self._index_checks(found),
        ]

    def _publication_checks(self, releases: Mapping[str, Mapping[str, Any]]) -> list[Check]:
        edges = sum(len(each.needs) for each in self._published.values())
        unmet = tuple(key for key, summary in releases.items() if summary.get("unmet"))
        return [
            Check(
                "releases published, each once",
                len(self._published),
                sum(summary.get("published") == 1 for summary in releases.values()),
            ),
            Check(
                "dependencies that were published first",
                edges,
                sum(summary.get("needed", 0) - summary.get("unmet", 0) for summary in releases.values()),
                unmet,
            ),
        ]

    def _pipeline_checks(self, releases: Mapping[str, Mapping[str, Any]]) -> list[Check]:
        wrong = []
        for key in self._published:
            result, summary = self._readers.shipped.get(key), releases.get(key, {})
            wanted = {"files": summary.get("files") or 0, "bytes": summary.get("bytes") or 0}
            if result != wanted:
                wrong.append(f"{key}: {result!r} instead of {wanted}")
        return [
            Check(
                "publish pipelines that ended with what was published",
                len(self._published),
                len(self._published) - len(wrong),
                tuple(wrong),
            )
        ]

    def _repository_charges(self) -> dict[str, tuple[int, int]]:
        charges: dict[str, tuple[int, int]] = {}
        for key, credited in self._authors.items():
            files, size = charges.get(repository_of(key), (0, 0))
            charges[repository_of(key)] = (files + credited["files"], size + credited["bytes"])
        return charges

    def _quota_checks(self, found: Services) -> list[Check]:
        by_author = {key: (credited["files"], credited["bytes"]) for key, credited in self._authors.items()}
        checks = [
            Check(f"{what} charged, {whose}", _sum(wanted, place), _sum(there, place), _apart(wanted, there))
            for whose, wanted, there in (
                ("by each author", by_author, found.charged),
                ("by all of a repository", self._repository_charges(), found.repository_charged),
            )
            for place, what in enumerate(("files", "bytes"))
        ]
        refused = len(self._readers.over_quota)
        return [*checks, Check("authors who were refused what is over their quota", len(self._authors), refused)]

    def _index_checks(self, found: Services) -> list[Check]:
        noted = Counter[str]()
        for entries in found.index.values():
            noted.update(entries)
        wrong = tuple(key for key in {*noted, *self._published} if noted[key] != (key in self._published))
        return [
            Check("releases in the index, each once", len(self._published), len(noted), wrong),
            Check(
                "indexers that had the lease",
                len(self._repositories),
                sum(count == 1 for count in self._readers.indexed_by.values()),
            ),
        ]


def _sum(charges: Mapping[str, tuple[int, int]], place: int) -> int:
    return sum(each[place] for each in charges.values())


def _apart(wanted: Mapping[str, tuple[int, int]], there: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
    return tuple(
        f"{key}: expected {charge}, found {there.get(key)}"
        for key, charge in wanted.items()
        if there.get(key) != charge
    )


#: Why an outcome of each kind happens here.
_REASONS = {"reservation.read_served": "requested", "reservation.aborted": "abandoned"}
