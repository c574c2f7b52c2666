"""A case of an op: realistic inputs, what changes in place, and how close backends must come.

Tests, benchmarks and `tokamak doctor` share the cases of `ops/<op>/cases.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FLOAT32 = 2e-5
BFLOAT16 = 2.0**-6
"""Two units in the last place: a backend may round at another point than the reference."""


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs; `make` gives fresh tensors with the same numbers every time."""

    name: str
    make: Callable[[], tuple[object, ...]]
    tolerance: float
    """Largest difference, relative to the larger of 1 and the expected number."""
    changed: tuple[int, ...] = ()
    """Places of arguments the op changes in place."""

    def __str__(self) -> str:
        return self.name

    def outcome(self, call: Callable[..., object]) -> tuple[Tensor, ...]:
        """What a call returns and what it leaves in the arguments it changes."""
        inputs = self.make()
        result = call(*inputs)
        results: tuple[object, ...] = result if isinstance(result, tuple) else (result,)
        changed = [inputs[at] for at in self.changed]
        return tuple(each for each in (*results, *changed) if isinstance(each, Tensor))


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference between two outcomes, relative to the larger of 1 and the expected."""
    worst = 0.0
    for left, right in zip(found, expected, strict=True):
        assert left.shape == right.shape, f"shape {tuple(left.shape)}, not {tuple(right.shape)}"
        if not right.numel():
            continue
        wide = right.double()
        gap = (left.double() - wide).abs() / wide.abs().clamp(min=1.0)
        worst = max(worst, float("inf") if gap.isnan().any() else gap.max().item())
    return worst


def seeded(name: str) -> torch.Generator:
    """A generator whose numbers depend on the case's name alone."""
    return torch.Generator().manual_seed(sum(name.encode()) * 7919)


def tolerance_of(dtype: torch.dtype) -> float:
    """The tolerance for a number format."""
    return FLOAT32 if dtype == torch.float32 else BFLOAT16
