"""Scores of routers with a bias that decides, equal scores, and experts that were chosen already."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import FLOAT32, Case, seeded

SIZES = ((1, 384, 6), (5, 256, 6), (33, 8, 2), (2, 4, 4), (0, 16, 2))
"""Rows, experts, chosen."""


def _route(name: str, sizes: tuple[int, int, int], spread: float) -> tuple[object, ...]:
    rows, experts, chosen = sizes
    generator = seeded(name)
    scores = torch.randn((rows, experts), generator=generator) * spread
    return scores, 0.5 * torch.randn(experts, generator=generator), chosen, 1.5


def _equal(name: str) -> tuple[object, ...]:
    """Three levels only, so that most choices are between equals."""
    scores = torch.randint(0, 3, (6, 40), generator=seeded(name)).float()
    return scores, torch.zeros(40), 8, 2.5


def _no_number(name: str) -> tuple[object, ...]:
    scores = torch.randn((3, 24), generator=seeded(name))
    scores[1] = float("nan")
    return scores, torch.zeros(24), 4, 1.5


def _weigh(name: str, sizes: tuple[int, int, int], spread: float) -> tuple[object, ...]:
    rows, experts, chosen = sizes
    generator = seeded(name)
    scores = torch.randn((rows, experts), generator=generator) * spread
    ids = torch.rand((rows, experts), generator=generator).argsort(dim=1)[:, :chosen]
    return scores, ids.int(), 1.5


moe_route_rooted_cases = [
    Case(name, partial(_route, name, sizes, spread), FLOAT32)
    for spread in (1.0, 30.0)
    for sizes in SIZES
    for name in [f"{sizes[2]} of {sizes[1]} for {sizes[0]} spread {spread:g}"]
] + [
    Case("equal scores", partial(_equal, "equal scores"), FLOAT32),
    Case("a row that is no number", partial(_no_number, "a row that is no number"), FLOAT32),
]
moe_weigh_rooted_cases = [
    Case(name, partial(_weigh, name, sizes, spread), FLOAT32)
    for spread in (1.0, 30.0)
    for sizes in SIZES
    for name in [f"{sizes[2]} of {sizes[1]} for {sizes[0]} spread {spread:g}"]
]
