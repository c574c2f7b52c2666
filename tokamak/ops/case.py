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
FP8 = torch.float8_e4m3fn

CACHED_IN = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, FP8),
    (torch.bfloat16, FP8),
)
"""Formats of rows and of the caches beside them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs; `make` gives fresh tensors with the same numbers every time."""

    name: str
    make: Callable[[], tuple[object, ...]]
    tolerance: float
    """Largest difference, relative to the larger of 1 and the expected number."""
    changed: tuple[int, ...] = ()
    """Places of arguments the op changes in place."""
    cache_dtype: str | None = None
    """The format of caches where it is not that of the rows; not every backend takes any."""

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


def cached_in(dtype: torch.dtype, cache_dtype: torch.dtype) -> str:
    """What a case's name says of formats: `float32`, or `float32 cached in fp8`."""
    name, other = str(dtype).removeprefix("torch."), other_cache(dtype, cache_dtype)
    return name if other is None else f"{name} cached in {other}"


def other_cache(dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """The name of a format of caches that rows have not; None where it is theirs."""
    if dtype == cache_dtype:
        return None
    return "fp8" if cache_dtype == FP8 else str(cache_dtype).removeprefix("torch.")


def coarser(dtype: torch.dtype, cache_dtype: torch.dtype) -> torch.dtype:
    """What differences are measured in: bfloat16 where anything is computed in or rounded to it."""
    return torch.bfloat16 if torch.bfloat16 in (dtype, cache_dtype) else torch.float32


def random_sinks(heads: int, generator: torch.Generator) -> Tensor:
    """Sinks of heads, [heads] float32: the first takes no share, the last takes all."""
    sinks = torch.randn(heads, generator=generator) * 3
    sinks[0], sinks[-1] = -1e9, 1e4
    return sinks


def quarter_turns(angles: Tensor) -> Tensor:
    """The angles, each at the nearest quarter turn below, as cosines and then sines: [..., 2 * angles].

    Turning by them rounds nothing, so that all backends store the very same numbers: one that is the least bit
    nearer to the next number in fp8 would be far off.
    """
    quarters = (angles / (torch.pi / 2)).floor().long() % 4
    cosines = torch.tensor([1.0, 0.0, -1.0, 0.0])
    sines = torch.tensor([0.0, 1.0, 0.0, -1.0])
    return torch.cat([cosines[quarters], sines[quarters]], dim=-1)
