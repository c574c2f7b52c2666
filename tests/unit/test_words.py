"""Some words are decided once and for all: see docs/glossary.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "tokamak"

STEP_PACKAGES = ("runner", "engine", "graphs", "cache", "core")

AMBIGUOUS = {"num_tokens", "batch_size", "num_reqs", "num_requests", "bs"}
"""Neither scheduled nor running: a reader cannot tell whether padding is in it."""


def names(path: Path) -> set[str]:
    """Every name a file binds or takes: variables, arguments, attributes."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
    return found


def test_counts_of_a_step_say_scheduled_or_running() -> None:
    wrong = {
        str(path.relative_to(PACKAGE)): names(path) & AMBIGUOUS
        for package in STEP_PACKAGES
        for path in (PACKAGE / package).rglob("*.py")
        if names(path) & AMBIGUOUS
    }

    assert not wrong


def test_there_are_two_kinds_of_graph_and_no_third() -> None:
    kinds = {
        node.name
        for path in (PACKAGE / "graphs").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Graph")
    }

    shared_by_both = {"RegionGraph"}
    assert kinds - shared_by_both == {"TokenGraph", "ReqGraph", "DecoderGraph"}


def test_one_function_searches_buckets() -> None:
    users = [
        str(path.relative_to(PACKAGE))
        for package in ("runner", "graphs")
        for path in (PACKAGE / package).rglob("*.py")
        if re.search(r"\bbisect", path.read_text(encoding="utf-8"))
    ]

    assert users == ["graphs/ladder.py"]


def test_every_file_opens_with_what_it_answers() -> None:
    bare = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]

    assert not bare


def test_one_scorer_chooses_entries_for_every_model() -> None:
    users = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if "ops/indexer" not in str(path)
        and path.name != "load.py"  # which imports every backend there is
        and re.search(r"ops\.indexer", path.read_text(encoding="utf-8"))
    ]

    assert users == ["layers/attention/scorer.py"]
    loops = [
        str(path.relative_to(PACKAGE))
        for path in (PACKAGE / "models").rglob("*.py")
        if re.search(r"\b(bands|topk|argsort)\(", path.read_text(encoding="utf-8"))
    ]
    assert loops == []
