"""Inputs of the gated activation: widths of real models, odd widths, and numbers far from zero."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import Case, seeded, tolerance_of

SIZES = ((1, 1536, 3.0), (7, 33, 3.0), (32, 1536, 3.0), (2, 64, 60.0), (0, 16, 1.0))


def _make(
    name: str, rows: int, width: int, spread: float, dtype: torch.dtype
) -> tuple[object, ...]:
    numbers = torch.randn((rows, 2 * width), generator=seeded(name)) * spread
    return (numbers.to(dtype),)


silu_mul_cases = [
    Case(name, partial(_make, name, rows, width, spread, dtype), tolerance_of(dtype))
    for dtype in (torch.float32, torch.bfloat16)
    for rows, width, spread in SIZES
    for name in [f"{rows}x{width} spread {spread} {str(dtype).removeprefix('torch.')}"]
]
