"""What only pickle carries, and an object that takes and gives it: in a module that worker processes import."""

from __future__ import annotations

import os
from typing import Any

from actors.durable_object import DurableObject


class Matrix:
    """Nothing that the codec knows."""

    def __init__(self, *cells: int) -> None:
        self.cells = cells

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Matrix) and other.cells == self.cells

    def __hash__(self) -> int:
        return hash(self.cells)


class MatrixStore(DurableObject):
    """Adds matrices up, and keeps a log of what it was called with."""

    def add(self, matrix: Matrix) -> Matrix:
        total = [a + b for a, b in zip(self.storage.get("cells", [0] * len(matrix.cells)), matrix.cells, strict=True)]
        self.storage.put("cells", total)
        return Matrix(*total)

    def cells(self) -> list[int]:
        found: list[int] = self.storage.get("cells", [])
        return found

    def matrix(self) -> Matrix:
        return Matrix(*self.cells())

    def write(self, item: Any) -> None:
        self.storage.put("log", [*self.storage.get("log", []), item if isinstance(item, int) else type(item).__name__])

    def log(self) -> list[Any]:
        found: list[Any] = self.storage.get("log", [])
        return found

    def times(self, array: Any, factor: int) -> Any:
        return array * factor

    async def add_elsewhere(self, key: str, matrix: Matrix) -> list[int]:
        added = await self.namespace(MatrixStore).get(key).add(matrix)
        self.storage.put("elsewhere", True)
        return list(added.cells)

    def pid(self) -> int:
        return os.getpid()
