"""Does every test that the list of requirements names exist?"""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "requirements.md"

NAMED = re.compile(r"`((?:unit|reference|distributed|gpu|server|e2e)/[\w/]+\.py)(?:::(\w+))?`")


def missing(page: str, root: Path) -> list[str]:
    """Named files that are not there, and names their files do not define."""
    found: list[str] = []
    for path, name in NAMED.findall(page):
        file = root / path
        if not file.is_file():
            found.append(path)
        elif name and name not in functions(file):
            found.append(f"{path}::{name}")
    return found


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_closes_a_row_exists():
    page = PAGE.read_text(encoding="utf-8")

    assert len(NAMED.findall(page)) > 50
    assert missing(page, TESTS) == []


def test_a_test_or_a_file_that_is_gone_is_found(tmp_path):
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "test_a.py").write_text("def test_one(): ...\n")
    page = (
        "`unit/test_a.py::test_one`, `unit/test_a.py::test_two`, `unit/test_b.py`, `unit/test_a.py`"
    )

    assert missing(page, tmp_path) == ["unit/test_a.py::test_two", "unit/test_b.py"]
