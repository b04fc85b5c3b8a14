"""Which of the distributions that are here each of them requires, without going round in circles."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Mapping, Sequence

from packaging.requirements import InvalidRequirement, Requirement

__all__ = ["needs_of"]


def needs_of(requires: Mapping[str, Sequence[str]]) -> tuple[dict[str, list[str]], int]:
    """For each name the names that it needs, and how many needs were dropped because they close a circle.

    `requires` has the lines of Requires-Dist by normalised name. Optional requirements and those of other platforms do
    not count, nor does what is not here. Two distributions that need each other would wait for ever.
    """
    needs = {name: sorted(_needed(lines, set(requires)) - {name}) for name, lines in requires.items()}
    dropped = 0
    while (circle := _circle(needs)) is not None:
        # as reported, each element is needed by the next one
        needs[circle[1]].remove(circle[0])
        dropped += 1
    return needs, dropped


def _needed(lines: Sequence[str], here: set[str]) -> set[str]:
    found: set[str] = set()
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:  # of a very old distribution
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name in here and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
    return found


def _circle(needs: Mapping[str, Sequence[str]]) -> list[str] | None:
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return None
