"""One count that must hold."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Check"]

#: How many single differences are shown under a count that is off.
_EXAMPLES = 5


@dataclass(frozen=True)
class Check:
    """One count. `differences` names single things that are off; a check with any is off too."""

    what: str
    expected: int
    found: int
    differences: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.expected == self.found and not self.differences

    def __str__(self) -> str:
        examples = "".join(f"\n    {each}" for each in self.differences[:_EXAMPLES])
        more = len(self.differences) - _EXAMPLES
        rest = f"\n    and {more} more" if more > 0 else ""
        return f"{self.what}: expected {self.expected:,}, found {self.found:,}{examples}{rest}"
