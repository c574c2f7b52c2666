"""The cases of the activation without limits, with limits that few or most numbers reach."""

from __future__ import annotations

from functools import partial

from tokamak.ops.activation.cases import silu_mul_cases
from tokamak.ops.case import Case


def _make(case: Case, limit: float) -> tuple[object, ...]:
    return *case.make(), limit


silu_mul_limited_cases = [
    Case(f"{case.name} up to {limit:g}", partial(_make, case, limit), case.tolerance)
    for limit in (1.0, 10.0)
    for case in silu_mul_cases
]
