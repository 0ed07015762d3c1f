"""The page of verification names tests that are there."""

import ast
import re
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "design" / "verification.md"
_NAMED: Final = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def functions_of(path: Path) -> set[str]:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {one.name for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, functions)}


def lost(page: str) -> list[str]:
    """The tests that a page names and that are not there."""
    named = [(ROOT / path, name) for path, name in _NAMED.findall(page)]
    return [
        f"{path.name}::{name}" for path, name in named if not path.exists() or (name and name not in functions_of(path))
    ]


def rows(heading: str) -> list[list[str]]:
    """The cells of a section's table."""
    section = PAGE.read_text().split(f"# {heading}\n")[1].split("\n#")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("| ")][
        1:
    ]


def test_every_test_that_the_page_names_is_there() -> None:
    assert not lost(PAGE.read_text())


def test_a_test_that_is_gone_is_noticed() -> None:
    here = "tests/unit/test_verification_page.py"
    assert lost(f"`{here}`, `{here}::test_a_test_that_is_gone_is_noticed`") == []
    assert lost(f"`{here}::test_of_yesterday` and `tests/test_gone.py`") == [
        "test_verification_page.py::test_of_yesterday",
        "test_gone.py::",
    ]


@pytest.mark.parametrize("heading", ["Which test holds which promise", "Planted bugs"])
def test_every_row_names_a_test(heading: str) -> None:
    found = rows(heading)
    assert found
    assert not [row for row in found if not _NAMED.search(row[-1])]
