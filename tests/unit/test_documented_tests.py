"""Every test that a page of `docs/` names exists, in a file that the page names."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
COMPLAINTS = ROOT / "docs" / "field-complaints.md"
#: The numbers of the collection.
NUMBERS = [
    *(1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32, 34, 35, 37, 38, 40, 41, 43, 44),
    *(46, 47, 49, 50, 52, 53, 55, 56, 58, 59, 61, 62),
]
#: `file`, `file::test` or `test`. A name that ends in "…" stands for all that begin so, "*" in a file for any text.
NAMED = re.compile(r"`(?:(?P<file>[\w/*]*test_[\w*]+\.py))?(?:::)?(?P<test>test_\w+…?)?`")


@cache
def _tests_by_file() -> dict[str, frozenset[str]]:
    """The test functions of each test file, by its path below the repository."""
    return {
        path.relative_to(ROOT).as_posix(): frozenset(
            node.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        )
        for path in (ROOT / "tests").rglob("test_*.py")
    }


def files_of(name: str) -> list[str]:
    """The files that a page means: by path, by the path below `tests/`, or by the name alone."""
    pattern = re.compile(r"(?:tests/)?(?:\w+/)*" + re.escape(name.removeprefix("tests/")).replace(r"\*", r"\w*"))
    return [path for path in _tests_by_file() if pattern.fullmatch(path)]


def missing(page: str) -> list[str]:
    """What the page names and there is not."""
    named = list(NAMED.finditer(page))
    known = {path for found in named if found["file"] for path in files_of(found["file"])}
    wrong: list[str] = []
    for found in named:
        files = files_of(found["file"]) if found["file"] else sorted(known)
        if found["file"] and not files:
            wrong.append(f"no file {found['file']}")
        elif found["test"] and not any(has(path, found["test"]) for path in files):
            wrong.append(f"no {found['test']} in {', '.join(files)}")
    return wrong


def has(path: str, test: str) -> bool:
    names = _tests_by_file()[path]
    return any(name.startswith(test[:-1]) for name in names) if test.endswith("…") else test in names


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_exists(page: str) -> None:
    assert missing((ROOT / page).read_text()) == []


def test_every_complaint_has_a_row_with_a_test_or_a_reason() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", COMPLAINTS.read_text(), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == NUMBERS
    for number, _, shown in rows:
        assert "::test_" in shown or "Not covered" in shown, f"{number} shows neither a test nor a reason"


def test_the_check_finds_what_is_not_there() -> None:
    here = "tests/unit/test_documented_tests.py"
    assert missing(f"`{here}`, `test_the_check_finds_what_is_not_there`, `test_every_…`") == []
    assert missing("`unit/test_documented_tests.py::test_the_check_finds_what_is_not_there`") == []
    assert missing(f"`test_documented_*.py`, `{here}::test_every_…`") == []
    assert missing(f"`{here}::test_nothing`") == [f"no test_nothing in {here}"]
    assert missing("`tests/crash/test_documented_tests.py`") == ["no file tests/crash/test_documented_tests.py"]
    assert missing(f"`{here}` `test_nothing_…`") == [f"no test_nothing_… in {here}"]
    assert missing("`test_every_test_that_a_page_names_exists`") != []
