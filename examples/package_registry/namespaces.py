"""The objects of the registry, as the client addresses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors import Namespace
from examples.package_registry.app import Author, Release, Upload
from examples.package_registry.services import Audit, Index, Indexer

__all__ = ["Namespaces"]


@dataclass(frozen=True)
class Namespaces:
    """One namespace for each class."""

    releases: Namespace
    uploads: Namespace
    authors: Namespace
    audits: Namespace
    indexes: Namespace
    indexers: Namespace

    @classmethod
    def of(cls, namespace: Callable[[Any], Namespace]) -> Namespaces:
        """All of them, from `runtime.namespace`."""
        return cls(*(namespace(each) for each in (Release, Upload, Author, Audit, Index, Indexer)))
