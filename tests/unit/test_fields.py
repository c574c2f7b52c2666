"""No value of a step carries a field that nobody reads: what is computed for nobody is only in the way."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterable
from pathlib import Path

import pytest

from tokamak.cache.launch import LaunchStorage
from tokamak.cache.view import PagedBuffers
from tokamak.core.context import StepContext
from tokamak.core.inputs import AttnHalf, AttnStep, StepInputs
from tokamak.core.plan import Admission, Grants, StepPlan, StepShape
from tokamak.layers.attention.scorer import IndexRows
from tokamak.layers.attention.sparse import Picked
from tokamak.layers.attention.tail import TailRows
from tokamak.runner.status import PrevStatus

PACKAGE = Path(__file__).resolve().parents[2] / "tokamak"

VALUES = (
    StepPlan, StepShape, StepInputs, AttnStep, AttnHalf, StepContext, PrevStatus, Admission, Grants,
)  # fmt: skip

TABLES = (PagedBuffers, LaunchStorage, IndexRows, Picked, TailRows)
"""What is read at home too."""

WAITING = {
    ("StepShape", "cut"): "two-batch overlap",
    ("StepShape", "uniform_rows"): "the all-to-all of expert parallel",
    ("StepContext", "running_table"): "the all-to-all of expert parallel",
    ("PrevStatus", "accepted"): "drafts",
    ("PrevStatus", "next_token"): "drafts",
}
"""Fields the requirements fix whose reader is not built yet, and what will read them; nothing may join them."""


def attributes_read(sources: Iterable[str]) -> set[str]:
    """Names of attributes that some code reads; assigning one is not reading it."""
    return {
        node.attr
        for source in sources
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def unread(value: type, sources: dict[Path, str]) -> list[str]:
    """Fields of a dataclass that no module but its own reads, itself or through a property it reads."""
    own = Path(inspect.getfile(value)).resolve()
    read = attributes_read(text for path, text in sources.items() if path != own)
    for node in ast.walk(ast.parse(sources[own])):
        if isinstance(node, ast.FunctionDef) and node.name in read:
            read |= attributes_read([ast.unparse(node)])
    return [field.name for field in dataclasses.fields(value) if field.name not in read]


def package_sources() -> dict[Path, str]:
    return {path.resolve(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value.__name__)
def test_every_field_of_a_step_is_read_outside_the_module_that_defines_it(value):
    found = unread(value, package_sources())

    waiting = [field for name, field in WAITING if name == value.__name__]
    assert found == waiting


@pytest.mark.parametrize("value", TABLES, ids=lambda value: value.__name__)
def test_every_field_of_what_a_step_s_tables_are_made_in_is_read(value):
    read = attributes_read(package_sources().values())

    assert [field.name for field in dataclasses.fields(value) if field.name not in read] == []


def test_a_field_that_is_only_written_or_read_at_home_is_found():
    @dataclasses.dataclass
    class Plan:
        compress_offsets: int
        query_lens: int
        scheduled: int

    home = Path(inspect.getfile(Plan)).resolve()
    sources = {
        home: "def rows(plan):\n    return plan.scheduled\nplan.query_lens",
        Path("builder.py"): "plan.compress_offsets = copy()\nuse(plan.rows)",
    }

    found = unread(Plan, sources)

    assert found == ["compress_offsets", "query_lens"]
