"""The cases of experts without limits, with limits that numbers reach; 8- and 4-bit weights among them."""

from __future__ import annotations

from functools import partial

import torch

from tokamak.ops.case import Case
from tokamak.ops.moe_experts.cases import (
    SCALED_TOLERANCE,
    Sizes,
    expert_numbers,
    moe_experts_cases,
    scaled_experts_cases,
)
from tokamak.ops.moe_experts.cut_words import in_places
from tokamak.ops.quantize.blocks import encode_mxfp4

LIMIT = 1.0


def _make(case: Case) -> tuple[object, ...]:
    return *case.make(), LIMIT


def _make_packed(name: str, sizes: Sizes, rounded: int, dtype: torch.dtype) -> tuple[object, ...]:
    x, ids, weights, gate_up, down = expert_numbers(name, sizes, torch.float32)
    up, up_scales = encode_mxfp4(gate_up)
    back, back_scales = encode_mxfp4(down)
    return (
        x.to(dtype), ids, weights, in_places(up), up_scales, in_places(back), back_scales, rounded, LIMIT,
    )  # fmt: skip


PACKED_SIZES = (
    (Sizes(0, 4, 2, 64, 32), 32),
    (Sizes(1, 8, 2, 64, 96), 32),
    (Sizes(2, 4, 2, 128, 128), 128),
    (Sizes(21, 4, 2, 96, 64), 32),
    (Sizes(40, 6, 3, 64, 96), 32),
)
"""Sizes, and columns of a row that share a power of two."""

moe_experts_limited_cases = [
    Case(case.name, partial(_make, case), case.tolerance) for case in moe_experts_cases
]
scaled_experts_limited_cases = [
    Case(case.name, partial(_make, case), case.tolerance) for case in scaled_experts_cases
]
packed_experts_limited_cases = [
    Case(name, partial(_make_packed, name, sizes, rounded, dtype), SCALED_TOLERANCE)
    for dtype in (torch.float32, torch.bfloat16)
    for sizes, rounded in PACKED_SIZES
    for name in [f"{sizes} {str(dtype).removeprefix('torch.')} rounded by {rounded}"]
]
