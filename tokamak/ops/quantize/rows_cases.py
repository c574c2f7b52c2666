"""Rows to round: groups of usual sizes, one that is not whole, numbers far apart, zeros, tiny and huge ones."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import Case, seeded

SHAPES = ((1, 128, 128), (3, 256, 64), (7, 96, 32), (2, 200, 128), (0, 128, 128), (5, 40, 64))
"""Rows, columns, columns of a group."""


def _make(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, power_of_two: bool
) -> tuple[object, ...]:
    rows, columns, group = shape
    generator = seeded(name)
    x = torch.randn((rows, columns), generator=generator)
    x *= torch.randn((rows, columns), generator=generator).mul(3).exp()
    if rows > 1:
        x[0] = 0.0
        x[1] *= 1e-7
    return x.to(dtype), group, power_of_two


quantize_rows_cases = [
    Case(name, partial(_make, name, shape, dtype, power_of_two), 0.0)
    for dtype in (torch.float32, torch.bfloat16)
    for power_of_two in (False, True)
    for shape in SHAPES
    for name in [
        f"{shape[0]}x{shape[1]} by {shape[2]}{' to powers of two' if power_of_two else ''}, {str(dtype)[6:]}"
    ]
]
