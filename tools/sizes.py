"""Which files and functions are the longest? `make sizes` prints them, so that growth is seen where it happens."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 15


def main() -> int:
    """Print the longest files and functions of the package, and the lines in all."""
    files = sorted((ROOT / "tokamak").rglob("*.py"))
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in files}
    total = sum(len(text) for text in lines.values())
    print(f"{total} lines in {len(files)} files")
    print("\nlongest files")
    for path in sorted(files, key=lambda path: -len(lines[path]))[:SHOWN]:
        print(f"  {len(lines[path]):5}  {path.relative_to(ROOT)}")
    print("\nlongest functions")
    for length, place in sorted(_functions(files), reverse=True)[:SHOWN]:
        print(f"  {length:5}  {place}")
    return 0


def _functions(files: list[Path]) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append((length, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return found


if __name__ == "__main__":
    sys.exit(main())
