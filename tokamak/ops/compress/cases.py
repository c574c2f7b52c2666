"""Groups that end in a step or do not, begun before it or in it, and rows nobody wants."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import Case, seeded, tolerance_of
from tokamak.ops.paged_cases import LONG_STEPS, STEPS, Requests

KINDS = ((2, False), (4, True), (8, False))
"""Ratio, and whether groups overlap."""


def _fold(
    name: str, step: Requests, ratio: int, overlapped: bool, dtype: torch.dtype
) -> tuple[object, ...]:
    generator, width = seeded(name), 24
    table = step.table(generator)
    columns = 2 * width if overlapped else width
    state = step.cache(table, 2 * columns, generator)
    positions = step.positions()
    bias = torch.randn((ratio, columns), generator=generator) if overlapped else None
    out = torch.full((len(positions), width), float("nan"), dtype=dtype)
    return state, table, positions, step.starts(), step.width, ratio, overlapped, bias, out


def places_of_tokens(rows: int, ratio: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions in no order, and slots of as many tokens in a cache of 6 blocks of 8 groups; a third is nobody's."""
    slots = torch.randperm(40 * ratio, generator=generator)[:rows] + 8 * ratio
    # The last of a group lies where its place in the block says so.
    positions = (slots + ratio * torch.arange(rows)).int()
    slots[1::3] = -1
    return positions, slots


def _write(name: str, rows: int, dtype: torch.dtype, ratio: int) -> tuple[object, ...]:
    generator = seeded(name)
    cache = torch.randn((6, 1, 8, 24), generator=generator).to(dtype)
    # The last row of the null block is nobody's.
    cache[0, 0, -1] = 0.0
    positions, slots = places_of_tokens(rows, ratio, generator)
    return cache, torch.randn((rows, 24), generator=generator), slots, positions, ratio


fold_groups_cases = [
    Case(
        title,
        partial(_fold, title, step, ratio, overlapped, dtype),
        tolerance_of(dtype),
        changed=(8,),
    )
    for dtype in (torch.float32, torch.bfloat16)
    for name, step in STEPS.items()
    for ratio, overlapped in KINDS
    for title in [
        f"{name} by {ratio}{' overlapped' if overlapped else ''} {str(dtype).removeprefix('torch.')}"
    ]
]
fold_groups_cases += [
    Case(title, partial(_fold, title, step, ratio, overlapped, dtype), tolerance_of(dtype), (8,))
    for name, step in LONG_STEPS.items()
    for ratio, overlapped, dtype in (
        (1, False, torch.float32),
        (3, True, torch.float32),
        (4, True, torch.bfloat16),
        (128, False, torch.bfloat16),
    )
    for title in [f"{name} by {ratio}{' overlapped' if overlapped else ''}"]
]
write_rows_cases = [
    Case(title, partial(_write, title, rows, dtype, ratio), 0.0, changed=(0,))
    for dtype in (torch.float32, torch.bfloat16)
    for rows, ratio in ((0, 1), (1, 1), (2, 1), (17, 1), (17, 4))
    for title in [f"{rows} rows by {ratio} {str(dtype).removeprefix('torch.')}"]
]
