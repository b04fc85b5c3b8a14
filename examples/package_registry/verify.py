"""Reads the whole registry back and compares every count with what was read from the environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors import Namespace
from examples.package_registry.app import Session
from examples.package_registry.calls import Caller, all_of
from examples.package_registry.check import Check
from examples.package_registry.ingest import Distribution, Environment
from examples.package_registry.keys import author_key, release_key
from examples.package_registry.namespaces import Namespaces
from examples.package_registry.uploads import Tally

__all__ = ["Found", "Verifier"]

#: Files in one page of a release, and keys in one page of a namespace.
_PAGE = 1_000


@dataclass
class Found:
    """What is in the registry."""

    objects: dict[str, set[str]] = field(default_factory=dict)
    waking: list[str] = field(default_factory=list)
    releases: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    authors: dict[str, dict[str, int]] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)

    @property
    def object_count(self) -> int:
        return sum(len(keys) for keys in self.objects.values())

    @property
    def file_count(self) -> int:
        return sum(len(files) for files in self.files.values())

    @property
    def byte_count(self) -> int:
        return sum(size for files in self.files.values() for size, _ in files.values())

    def timers(self, what: str) -> int:
        """Sum over the sessions of "armed", "cancelled" or "fired"."""
        return sum(session[what] for session in self.sessions.values())  # type: ignore[literal-required]

    @property
    def lateness_ms(self) -> list[float]:
        """How late each expiry ran."""
        return [float(s["fired_ms"] - s["due_ms"]) for s in self.sessions.values() if s["fired"]]


class Verifier:
    """Holds what was read and what the client saw against what the registry says."""

    def __init__(
        self, names: Namespaces, caller: Caller, repositories: Sequence[str], environment: Environment, tally: Tally
    ) -> None:
        self._names = names
        self._caller = caller
        self._repositories = repositories
        self._environment = environment
        self._tally = tally

    def published(self) -> Iterator[tuple[str, Distribution]]:
        """Every release key that must be there, with its distribution."""
        for repository in self._repositories:
            for distribution in self._environment.distributions:
                yield release_key(repository, distribution), distribution

    async def read(self) -> Found:
        """Everything that the registry has of these repositories, asked of every object itself."""
        found = Found()
        await all_of(
            self._list(found, name, namespace)
            for name, namespace in (
                ("Release", self._names.releases),
                ("Upload", self._names.uploads),
                ("Author", self._names.authors),
            )
        )
        objects, names = found.objects, self._names
        await all_of(self._read_release(found, key) for key in objects["Release"])
        await all_of(self._read(found.authors, "Author.totals", names.authors, key) for key in objects["Author"])
        await all_of(self._read(found.sessions, "Upload.session", names.uploads, key) for key in objects["Upload"])
        return found

    async def sessions(self, keys: Iterable[str]) -> dict[str, Session]:
        """The records of some sessions."""
        found: dict[str, Session] = {}
        await all_of(self._read(found, "Upload.session", self._names.uploads, key) for key in keys)
        return found

    async def _list(self, found: Found, name: str, namespace: Namespace) -> None:
        keys = found.objects.setdefault(name, set())
        for repository in self._repositories:
            after: str | None = None
            while page := await namespace.list(prefix=f"{repository}:", limit=_PAGE, after=after):
                keys.update(entry.key for entry in page)
                if name != "Release":  # which forgets its publish pipeline by a timer, days later
                    found.waking.extend(f"{name} {entry.key}" for entry in page if entry.next_wake_ms is not None)
                after = page[-1].key

    async def _read(self, into: dict[str, Any], name: str, namespace: Namespace, key: str) -> None:
        method = name.split(".")[1]
        into[key] = await self._caller.call(name, getattr(namespace.get(key), method))

    async def _read_release(self, found: Found, key: str) -> None:
        release = self._names.releases.get(key)
        found.releases[key] = await self._caller.call("Release.summary", release.summary)
        files = found.files.setdefault(key, {})
        after: str | None = None
        while page := await self._caller.call("Release.files", release.files, after, _PAGE):
            files.update(page)
            after = max(page)  # text sorts by code points, which is the order of the UTF-8 bytes

    # --- the counts -------------------------------------------------------------------------------

    def checks(self, found: Found) -> list[Check]:
        """Every count, in the order of a report."""
        published = dict(self.published())
        return [
            *self._object_checks(found, published),
            *self._file_checks(found, published),
            *self._author_checks(found),
            *self._session_checks(found),
        ]

    def _object_checks(self, found: Found, published: dict[str, Distribution]) -> list[Check]:
        authors = self.authors()
        wanted = {"Release": set(published), "Upload": set(self._tally.sessions), "Author": set(authors)}
        checks = []
        for name, keys in wanted.items():
            there = found.objects[name]
            differences = [f"missing: {key}" for key in sorted(keys - there)]
            differences += [f"nobody made: {key}" for key in sorted(there - keys)]
            checks.append(Check(f"objects of {name}", len(keys), len(there), tuple(differences)))
        return checks

    def _file_checks(self, found: Found, published: dict[str, Distribution]) -> list[Check]:
        intact = {key: [file for file in each.files if file.intact] for key, each in published.items()}
        wanted = {key: {file.path: [file.size, file.digest] for file in files} for key, files in intact.items()}
        sizes = {key: sum(file.size for file in files) for key, files in intact.items()}
        counts = {key: len(files) for key, files in intact.items()}
        requires = {key: list(each.requires) for key, each in published.items()}
        authors = {key: list(each.authors) for key, each in published.items()}
        matching, strange = 0, []
        for key, files in found.files.items():
            for path, file in files.items():
                if wanted.get(key, {}).get(path) == file:
                    matching += 1
                else:
                    strange.append(f"{key}: {path}")
        return [
            Check("files", sum(counts.values()), found.file_count),
            Check("files with their size and hash", sum(counts.values()), matching, tuple(strange)),
            Check("bytes", sum(sizes.values()), found.byte_count),
            self._per_release("files counted by their releases", found, counts, "files"),
            self._per_release("bytes counted by their releases", found, sizes, "bytes"),
            self._per_release("releases sealed", found, dict.fromkeys(published, 1), "sealed"),
            self._per_release("dependencies", found, requires, "requires", len),
            self._per_release("names of authors", found, authors, "authors", len),
            self._per_release("expired uploads counted by their releases", found, self._tally.expiring, "expired"),
        ]

    def _per_release(
        self,
        what: str,
        found: Found,
        wanted: dict[str, Any],
        name: str,
        size: Callable[[Any], int] = int,
    ) -> Check:
        there = {key: summary.get(name) for key, summary in found.releases.items()}
        differences = [
            f"{key}: expected {wanted.get(key)}, found {there.get(key)}"
            for key in sorted({*wanted, *there})
            if (wanted.get(key) or None) != (there.get(key) or None)
        ]
        expected = sum(size(value) for value in wanted.values())
        return Check(what, expected, sum(size(value) for value in there.values() if value), tuple(differences))

    def _author_checks(self, found: Found) -> list[Check]:
        wanted = self.authors()
        checks = []
        for name in ("releases", "files", "bytes"):
            differences = [
                f"{key}: expected {totals[name]}, found {found.authors.get(key, {}).get(name)}"
                for key, totals in wanted.items()
                if found.authors.get(key, {}).get(name) != totals[name]
            ]
            expected = sum(totals[name] for totals in wanted.values())
            there = sum(totals.get(name, 0) for totals in found.authors.values())
            checks.append(Check(f"{name} counted by their authors", expected, there, tuple(differences)))
        return checks

    def authors(self) -> dict[str, Counter[str]]:
        """What each author must have been credited: releases, files and bytes, by the author's key."""
        totals: dict[str, Counter[str]] = {}
        for key, distribution in self.published():
            repository = key.split(":", 1)[0]
            intact = [file for file in distribution.files if file.intact]
            for author in distribution.authors:
                sums = totals.setdefault(author_key(repository, author), Counter())
                sums.update(releases=1, files=len(intact), bytes=sum(file.size for file in intact))
        return totals

    def _session_checks(self, found: Found) -> list[Check]:
        wanted = Counter(self._tally.sessions.values())
        states = Counter(session["state"] for session in found.sessions.values())
        wrong = tuple(
            f"{key}: expected {state}, found {found.sessions[key]['state'] if key in found.sessions else 'nothing'}"
            for key, state in self._tally.sessions.items()
            if key not in found.sessions or found.sessions[key]["state"] != state
        )
        twice = tuple(
            f"{key}: fired {session['fired']} times, cancelled {session['cancelled']} times"
            for key, session in found.sessions.items()
            if session["fired"] + session["cancelled"] != 1
        )
        early = tuple(
            f"{key}: due {session['due_ms']}, ran {session['fired_ms']}"
            for key, session in found.sessions.items()
            if session["fired_ms"] < session["due_ms"]
        )
        return [
            Check("upload sessions finished", wanted["finished"], states["finished"], wrong),
            Check("upload sessions expired", wanted["expired"], states["expired"]),
            Check("timers armed", self._tally.armed, found.timers("armed")),
            Check("timers cancelled", wanted["finished"], found.timers("cancelled")),
            Check("timers fired, each once", wanted["expired"], found.timers("fired"), twice),
            Check("timers fired early", 0, len(early), early),
            Check("timers still set", 0, len(found.waking), tuple(found.waking)),
        ]
