"""Scores of routers: counts of experts and choices of real models, equal scores, and scores far apart."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import Case, seeded, tolerance_of

SIZES = ((1, 128, 8), (5, 128, 8), (3, 60, 4), (33, 8, 2), (2, 4, 4), (7, 3, 1), (0, 16, 2))
"""Rows, experts, chosen."""


def _make(
    name: str, sizes: tuple[int, int, int], renormalise: bool, spread: float, dtype: torch.dtype
) -> tuple[object, ...]:
    rows, experts, chosen = sizes
    scores = torch.randn((rows, experts), generator=seeded(name)) * spread
    return scores.to(dtype), chosen, renormalise


def _equal(name: str) -> tuple[object, ...]:
    """Three levels only, so that most choices are between equals."""
    return torch.randint(0, 3, (6, 40), generator=seeded(name)).float(), 8, True


moe_route_cases = [
    # Scores are the same numbers for both: only float32 arithmetic differs, whatever their dtype.
    Case(
        name,
        partial(_make, name, sizes, renormalise, spread, dtype),
        tolerance_of(torch.float32),
    )
    for dtype in (torch.float32, torch.bfloat16)
    for renormalise in (False, True)
    for spread in (1.0, 30.0)
    for sizes in SIZES
    for name in [
        f"{sizes[2]} of {sizes[1]} for {sizes[0]} spread {spread:g}"
        f"{' renormalised' if renormalise else ''} {str(dtype).removeprefix('torch.')}"
    ]
] + [Case("equal scores", partial(_equal, "equal scores"), tolerance_of(torch.float32))]
