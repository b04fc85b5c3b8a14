"""Reads what is to be published: the distributions installed in this environment, with their real files.

Size and hash of each file are announced as RECORD states them; what is uploaded is measured from the file on disk.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from email.utils import getaddresses
from pathlib import Path

from examples.package_registry.needs import needs_of

__all__ = ["Distribution", "Environment", "File", "Part", "read_environment"]

#: Bytes of one part of an upload. Most files of a distribution fit in one.
PART_BYTES = 1024 * 1024
#: Hashes that RECORD may name and that we compute; others would not say whether the content is right.
_HASHES = frozenset({"sha256", "sha384", "sha512"})
#: A longer author is cut: authors are keys of objects.
_MAX_AUTHOR_CHARACTERS = 200


@dataclass(frozen=True)
class Part:
    """A piece of a file, as it is on disk."""

    size: int
    digest: str


@dataclass(frozen=True)
class File:
    """A file of a distribution: what RECORD states, and what is there."""

    path: str
    size: int
    digest: str
    measured_digest: str
    parts: tuple[Part, ...]

    @property
    def intact(self) -> bool:
        """Whether the file is still what RECORD says, so that its upload must succeed."""
        return self.measured_digest == self.digest and sum(part.size for part in self.parts) == self.size


@dataclass(frozen=True)
class Distribution:
    """One installed distribution. `authors` has no duplicates and at least one name; `needs` are the releases of those
    that are here and that it requires."""

    name: str
    version: str
    requires: tuple[str, ...]
    authors: tuple[str, ...]
    files: tuple[File, ...]
    needs: tuple[str, ...] = ()

    @property
    def release(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class Environment:
    """What was read, and how many files were left out: no hash in RECORD (compiled code, say), or not on disk.

    `circular`: requirements that were left out because they close a circle.
    """

    distributions: tuple[Distribution, ...]
    without_hash: int
    missing: int
    circular: int = 0

    def files(self) -> Iterator[File]:
        for distribution in self.distributions:
            yield from distribution.files


def read_environment(limit: int | None = None, progress: Callable[[str], None] = lambda _: None) -> Environment:
    """Read every installed distribution, or the `limit` smallest; `progress` is told the name of each before it is
    read. The same name and version twice counts once."""
    found: dict[str, importlib.metadata.Distribution] = {}
    for installed in importlib.metadata.distributions():
        names = installed.metadata.get_all("Name")
        if names:  # a damaged installation has none
            found.setdefault(f"{_normalised(names[0])}=={installed.version}", installed)
    chosen = sorted(found, key=lambda key: (len(found[key].files or ()), key))[:limit]
    reader = _Reader()
    distributions = []
    for key in sorted(chosen):
        progress(key)
        distributions.append(reader.read(_normalised(found[key].metadata["Name"]), found[key]))
    return _with_needs(Environment(tuple(distributions), reader.without_hash, reader.missing))


def _with_needs(environment: Environment) -> Environment:
    by_name = {each.name: each for each in environment.distributions}
    needs, circular = needs_of({name: each.requires for name, each in by_name.items()})
    distributions = tuple(
        replace(each, needs=tuple(by_name[name].release for name in needs[each.name]))
        for each in environment.distributions
    )
    return replace(environment, distributions=distributions, circular=circular)


class _Reader:
    """Reads distributions and counts what it had to leave out."""

    def __init__(self) -> None:
        self.without_hash = 0
        self.missing = 0

    def read(self, name: str, installed: importlib.metadata.Distribution) -> Distribution:
        files: dict[str, File] = {}
        for entry in installed.files or ():
            if entry.hash is None or entry.size is None or entry.hash.mode not in _HASHES:
                self.without_hash += 1
                continue
            path = Path(str(entry.locate()))
            if not path.is_file():
                self.missing += 1
                continue
            measured, parts = _measure(path, entry.hash.mode)
            announced = f"{entry.hash.mode}={entry.hash.value}"
            files[entry.as_posix()] = File(entry.as_posix(), entry.size, announced, measured, parts)
        return Distribution(
            name=name,
            version=installed.version,
            requires=tuple(installed.requires or ()),
            authors=_authors(
                installed.metadata.get_all("Author-email") or [], installed.metadata.get_all("Author") or []
            ),
            files=tuple(files.values()),
        )


def _measure(path: Path, mode: str) -> tuple[str, tuple[Part, ...]]:
    """The digest of the whole file and its parts. An empty file has one part, of no bytes."""
    whole = hashlib.new(mode)
    parts: list[Part] = []
    with path.open("rb") as stream:
        while (piece := stream.read(PART_BYTES)) or not parts:
            whole.update(piece)
            parts.append(Part(len(piece), _text(hashlib.sha256(piece))))
    return _text(whole), tuple(parts)


def _text(digest: hashlib._Hash) -> str:
    """As RECORD writes it."""
    return f"{digest.name}={base64.urlsafe_b64encode(digest.digest()).decode().rstrip('=')}"


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _authors(addresses: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Who wrote it: the names in Author-email, else those in Author, else the addresses."""
    parsed = getaddresses(list(addresses))
    named = [name for name, _ in parsed if name]
    plain = [name for text in names for name in text.split(",")]
    unnamed = [address for _, address in parsed if address]
    cleaned = ([" ".join(name.split())[:_MAX_AUTHOR_CHARACTERS] for name in group] for group in (named, plain, unnamed))
    for group in cleaned:
        if any(group):
            return tuple(dict.fromkeys(name for name in group if name))
    return ("unknown",)
