"""Heads that turn as a whole or at their end, forwards and backwards, at positions in no order, alone and in groups."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import Case, seeded, tolerance_of

SIZES = ((1, 4, 64, 16), (7, 1, 32, 32), (33, 8, 40, 6), (0, 2, 16, 8))
"""Tokens, heads, numbers of a head, those that turn."""
RATIOS = (1, 1, 4, 1)
"""Of each size: positions that turn alike."""


def _make(
    name: str, sizes: tuple[int, int, int, int], ratio: int, backwards: bool, dtype: torch.dtype
) -> tuple[object, ...]:
    tokens, heads, dim, turning = sizes
    generator = seeded(name)
    x = torch.randn((tokens, heads, dim), generator=generator).to(dtype)
    angles = torch.rand((50, turning // 2), generator=generator) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(0, 50, (tokens,), generator=generator, dtype=torch.int32)
    return x, positions, table, backwards, ratio


rotate_pairs_cases = [
    Case(name, partial(_make, name, sizes, ratio, backwards, dtype), tolerance_of(dtype))
    for dtype in (torch.float32, torch.bfloat16)
    for backwards in (False, True)
    for sizes, ratio in zip(SIZES, RATIOS, strict=True)
    for name in [
        f"{sizes[3]} of {sizes[2]} in {sizes[1]} heads, {sizes[0]} rows"
        f"{' backwards' if backwards else ''} {str(dtype).removeprefix('torch.')}"
    ]
]
