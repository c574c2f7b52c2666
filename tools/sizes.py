"""Which files and functions are the longest? `make sizes` prints them, so that growth is seen where it happens.

`--check` fails where one is longer than a person reads in one sitting. Kernels may be long: what a program of a device
does is read from top to bottom, and a call in it may cost speed.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHOWN = 15

MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 120

Function = ast.FunctionDef | ast.AsyncFunctionDef


def main(arguments: Sequence[str]) -> int:
    """Print the longest files and functions of the package, or what is too long."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="fail if a file or function is too long"
    )
    if not parser.parse_args(arguments).check:
        show(ROOT / "tokamak")
        return 0
    found = problems(ROOT / "tokamak")
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        print(f"no file is above {MOST_FILE_LINES} lines, no function above {MOST_FUNCTION_LINES}")
    return 1 if found else 0


def show(package: Path) -> None:
    """Print the longest files and functions, and the lines in all."""
    files = {path: line_count(path) for path in package.rglob("*.py")}
    print(f"{sum(files.values())} lines in {len(files)} files")
    print("\nlongest files")
    for path in sorted(files, key=lambda path: (-files[path], path))[:SHOWN]:
        print(f"  {files[path]:5}  {path.relative_to(package.parent)}")
    print("\nlongest functions")
    functions = [
        (length_of(node), f"{path.relative_to(package.parent)}:{node.lineno} {node.name}")
        for path in files
        for node in functions_of(path)
    ]
    for length, place in sorted(functions, reverse=True)[:SHOWN]:
        print(f"  {length:5}  {place}")


def problems(package: Path) -> list[str]:
    """What is too long in a package: where it is, how long, and what to do."""
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        name, lines = path.relative_to(package.parent), line_count(path)
        if lines > MOST_FILE_LINES:
            found.append(
                f"{name} has {lines} lines; a file has at most {MOST_FILE_LINES}: "
                "move what answers another question to a file of its own"
            )
        found += [
            f"{name}:{node.lineno} {node.name} has {length_of(node)} lines; a function has at most "
            f"{MOST_FUNCTION_LINES}: give its steps names, as functions"
            for node in functions_of(path)
            if length_of(node) > MOST_FUNCTION_LINES and not is_kernel(node)
        ]
    return found


def line_count(path: Path) -> int:
    """Lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def functions_of(path: Path) -> Iterator[Function]:
    """Every function of a file, also those inside of others."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Function):
            yield node


def length_of(node: Function) -> int:
    """Lines of a function, from `def` on."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def is_kernel(node: Function) -> bool:
    """Whether a function is compiled for a device: `@triton.jit`, with or without arguments."""
    decorators = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return any(ast.unparse(each) in ("triton.jit", "gluon.jit") for each in decorators)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
