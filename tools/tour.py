"""Is docs/tour.md true? Every `file.py` it names exists, and every `function` beside one is in that file.

A stop of the tour is written as `server/routes/chat.py` `create_chat_completion`, or with a class,
`engine/core.py` `EngineCore.step`; files are relative to the package.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOUR = ROOT / "docs" / "tour.md"

STOP = re.compile(r"`((?:tokamak/)?[\w/]+\.py)`(?:[ \n]+`([A-Za-z_][\w.]*)`)?")


def main() -> int:
    """Print what is missing; the exit status is 0 when nothing is."""
    wrong, stops = problems(TOUR.read_text(encoding="utf-8"), ROOT / "tokamak")
    for line in wrong:
        print(f"docs/tour.md: {line}", file=sys.stderr)
    if not wrong:
        print(f"the tour is true: {stops} functions are where it says")
    return 1 if wrong or not stops else 0


def problems(tour: str, package: Path) -> tuple[list[str], int]:
    """What a tour names and the package does not have, and how many functions were looked for."""
    wrong: list[str] = []
    stops = 0
    for file, name in STOP.findall(tour):
        path = package / str(file).removeprefix("tokamak/")
        if not path.is_file():
            wrong.append(f"there is no {file}")
            continue
        if name:
            stops += 1
            if name not in names(path):
                wrong.append(f"{file} has no {name}")
    return wrong, stops


def names(path: Path) -> set[str]:
    """Functions and classes of a file, and methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{inner.name}")
    return found


if __name__ == "__main__":
    sys.exit(main())
