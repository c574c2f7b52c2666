"""The cases of experts without limits, with limits that numbers reach."""

from __future__ import annotations

from functools import partial

from tokamak.ops.case import Case
from tokamak.ops.moe_experts.cases import moe_experts_cases

LIMIT = 1.0


def _make(case: Case) -> tuple[object, ...]:
    return *case.make(), LIMIT


moe_experts_limited_cases = [
    Case(case.name, partial(_make, case), case.tolerance) for case in moe_experts_cases
]
