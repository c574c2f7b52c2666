"""Rows that are normed or not, turned at their end or whole, alone and in groups, rounded to every format."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import Case, quarter_turns, seeded, tolerance_of
from tokamak.ops.compress.cases import places_of_tokens
from tokamak.ops.rotate_write.reference import Rounded

Shape = tuple[int, int, int, bool, int, Rounded]
SHAPES: tuple[Shape, ...] = (
    (0, 64, 16, True, 1, ""),
    (1, 24, 24, True, 1, ""),
    (17, 40, 6, False, 4, ""),
    (9, 96, 32, True, 1, "fp8"),
    (17, 128, 64, True, 2, "mxfp4"),
    (5, 512, 64, False, 4, "nvfp4"),
)
"""Rows, numbers of one, those that turn, whether there is a norm, positions of a group, and the format."""


def _make(name: str, shape: Shape, dtype: torch.dtype) -> tuple[object, ...]:
    rows, width, turning, normed, ratio, rounded = shape
    generator = seeded(name)
    cache = torch.randn((6, 1, 8, width), generator=generator).to(dtype)
    # The last row of the null block is nobody's.
    cache[0, 0, -1] = 0.0
    positions, slots = places_of_tokens(rows, ratio, generator)
    wide = torch.randn((rows, 2 * width), generator=generator).to(dtype)
    weight = torch.rand(width, generator=generator).to(dtype) + 0.5
    # Where numbers are rounded to few bits, the least bit of a turn must not decide.
    angles = torch.rand((500, turning // 2), generator=generator) * 6
    table = quarter_turns(angles) if rounded else torch.cat([angles.cos(), angles.sin()], dim=1)
    given = weight if normed else None
    return cache, wide[:, width // 2 : -(width // 2)], given, 1e-6, slots, positions, table, ratio, rounded  # fmt: skip


def _tolerance(shape: Shape, dtype: torch.dtype) -> float:
    """A norm's last bit may decide what a number is rounded to: a step is a sixteenth of it, or a half."""
    normed, rounded = shape[3], shape[5]
    if rounded and normed:
        return 0.07 if rounded == "fp8" else 0.51
    return tolerance_of(dtype)


rotate_write_cases = [
    Case(name, partial(_make, name, shape, dtype), _tolerance(shape, dtype), changed=(0,))
    for dtype in (torch.float32, torch.bfloat16)
    for shape in SHAPES
    for name in [
        f"{shape[0]} rows of {shape[1]}, {shape[2]} turned, by {shape[4]}"
        f"{' normed' if shape[3] else ''} {shape[5] or 'as they are'} {str(dtype).removeprefix('torch.')}"
    ]
]
