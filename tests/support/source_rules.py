"""What a Python source imports and names, read with `ast`, for the tests that hold the layering."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """A dotted name that a source imports or refers to through an import, and where."""

    name: str
    line: int


def imports(source: str, package: str = "") -> Iterator[Use]:
    """Everything imported, at any depth, as full dotted names; relative imports are resolved against `package`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Use(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Use(f"{_module(node, package)}.{alias.name}", node.lineno)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            # importlib.import_module("x") and __import__("x")
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield Use(node.args[0].value, node.lineno)


def references(source: str, package: str = "") -> Iterator[Use]:
    """Every name reached through an import, as a full dotted name: `dt.now` is `datetime.datetime.now`."""
    tree = ast.parse(source)
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                known[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{_module(node, package)}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)):
            name = _dotted(node, known)
            if name is not None:
                yield Use(name, node.lineno)


def is_within(name: str, roots: frozenset[str]) -> bool:
    """True when the dotted name is one of `roots` or below one of them."""
    return any(name == root or name.startswith(root + ".") for root in roots)


def _module(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


def _dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, known)
        return None if base is None else f"{base}.{node.attr}"
    return None
