"""One group and several, rows of all kinds of counts, sizes that tiles divide and sizes that nothing divides."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import Case, seeded, tolerance_of

SIZES = ((1, 2, 64, 128), (4, 8, 64, 256), (5, 3, 10, 48), (16, 1, 32, 96), (33, 2, 16, 64), (0, 2, 8, 32))  # fmt: skip
"""Tokens, groups, rows of a group's matrix, its width."""


def _make(name: str, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[object, ...]:
    tokens, groups, rows, width = sizes
    generator = seeded(name)
    # A gap behind each row, as part of a wider matrix has.
    x = torch.randn((tokens, groups * width + 16), generator=generator).to(dtype)
    weight = torch.randn((groups, rows, width), generator=generator) * width**-0.5
    return x[:, : groups * width].unflatten(1, (groups, width)), weight.to(dtype)


grouped_linear_cases = [
    Case(name, partial(_make, name, sizes, dtype), tolerance_of(dtype))
    for dtype in (torch.float32, torch.bfloat16)
    for sizes in SIZES
    for name in [
        f"{sizes[0]} rows times {sizes[1]} of {sizes[2]}x{sizes[3]} {str(dtype).removeprefix('torch.')}"
    ]
]
