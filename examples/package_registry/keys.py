"""How the objects of a repository are addressed. A repository is one complete pass over the environment."""

from __future__ import annotations

import zlib

from examples.package_registry.ingest import Distribution, File

__all__ = ["author_key", "left_unfinished", "release_key", "session_key"]

#: Of so many files, one is at first uploaded by somebody who goes away in the middle.
_ONE_LEFT_OF = 40


def release_key(repository: str, distribution: Distribution) -> str:
    return f"{repository}:{distribution.release}"


def author_key(repository: str, author: str) -> str:
    return f"{repository}:{author}"


def session_key(repository: str, distribution: Distribution, file: File, attempt: int) -> str:
    return f"{release_key(repository, distribution)}/{file.path}#{attempt}"


def left_unfinished(distribution: Distribution, file: File) -> bool:
    """Whether the first session of this file is left alone after its first part. The same in every run."""
    return zlib.crc32(f"{distribution.release}/{file.path}".encode()) % _ONE_LEFT_OF == 0
