"""Does every part of the engine call ops through the backend that its machine chose?

An op that is called itself runs its reference, on a GPU in a dozen small launches, and no list of choices tells.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import tokamak
from tokamak.ops.registry import Op

ROOT = Path(tokamak.__file__).parent
BINDERS = {"bind", "bind_joined"}
FILES = [path for part in ("layers", "models", "runner") for path in (ROOT / part).rglob("*.py")]


def ops_of(tree: ast.Module) -> set[str]:
    """The names a module gives to ops."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tokamak.ops")
        for alias in node.names
        if isinstance(getattr(importlib.import_module(node.module or ""), alias.name, None), Op)
    }


def unbound(tree: ast.Module) -> list[str]:
    """Where ops are used other than to bind them or, by a parameter `..._op` or `op.name`, to say which one is meant."""
    ops = ops_of(tree)
    fine: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            fine.add(node.value)
        if isinstance(node, ast.keyword) and (node.arg or "").endswith("_op"):
            fine.update(ast.walk(node.value))
        if isinstance(node, ast.arguments):
            named = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            fine.update(default for each, default in named if default and each.arg.endswith("_op"))
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if called in BINDERS:
                fine.update(each for argument in node.args for each in ast.walk(argument))
    return [
        f"{node.id} in line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id in ops and node not in fine
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_ops_are_bound_before_they_are_called(path):
    assert unbound(ast.parse(path.read_text())) == []


def test_an_op_that_is_handed_on_is_found():
    tree = ast.parse(
        "from tokamak.ops.norm import rms_norm\nnorm = build.bind(rms_norm)\nround_trip = partial(rms_norm, eps=0)"
    )

    assert unbound(tree) == ["rms_norm in line 3"]
