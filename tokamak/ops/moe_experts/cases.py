"""Rows, choices and experts: few and many rows, experts nobody chose, one that all chose, sizes nothing divides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import Case, seeded, tolerance_of
from tokamak.ops.quant_linear.cases import scaled_numbers
from tokamak.ops.quant_linear.reference import ScaleBlocks


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a case."""

    rows: int
    experts: int
    chosen: int
    width: int
    inner: int

    def __str__(self) -> str:
        return (
            f"{self.chosen} of {self.experts} for {self.rows}, {self.width} wide, {self.inner} in"
        )


SIZES = (
    Sizes(0, 4, 2, 32, 16),
    Sizes(1, 8, 2, 64, 48),
    Sizes(1, 3, 3, 33, 17),
    Sizes(3, 8, 4, 64, 32),
    Sizes(13, 4, 1, 96, 64),
    Sizes(21, 16, 4, 64, 48),
    Sizes(70, 5, 2, 40, 24),
)


def expert_numbers(name: str, sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
    """Rows, ids, weights, and both matrices of all experts, in a dtype."""
    generator = seeded(name)
    x = torch.randn((sizes.rows, sizes.width), generator=generator)
    gate_up = torch.randn((sizes.experts, 2 * sizes.inner, sizes.width), generator=generator)
    down = torch.randn((sizes.experts, sizes.width, sizes.inner), generator=generator)
    scores = torch.randn((sizes.rows, sizes.experts), generator=generator)
    best, ids = scores.topk(sizes.chosen, dim=-1)
    return [
        x.to(dtype),
        ids.int(),
        best.softmax(-1),
        (gate_up * sizes.width**-0.5).to(dtype),
        (down * sizes.inner**-0.5).to(dtype),
    ]


def _make(name: str, sizes: Sizes, dtype: torch.dtype) -> tuple[object, ...]:
    return tuple(expert_numbers(name, sizes, dtype))


def _one_expert_for_all(name: str) -> tuple[object, ...]:
    x, ids, weights, gate_up, down = expert_numbers(name, Sizes(40, 8, 2, 64, 32), torch.float32)
    ids[:, 0], ids[:, 1] = 5, 2
    return x, ids, weights, gate_up, down


def _name(sizes: Sizes, dtype: torch.dtype) -> str:
    return f"{sizes} {str(dtype).removeprefix('torch.')}"


moe_experts_cases = [
    Case(name, partial(_make, name, sizes, dtype), tolerance_of(dtype))
    for dtype in (torch.float32, torch.bfloat16)
    for sizes in SIZES
    for name in [_name(sizes, dtype)]
] + [
    Case(name, partial(_one_expert_for_all, name), tolerance_of(torch.float32))
    for name in ["one expert for all, the others for none"]
]

SCALED_SIZES = (
    (Sizes(0, 4, 2, 128, 128), (128, 128)),
    (Sizes(1, 8, 2, 256, 128), (128, 128)),
    (Sizes(3, 4, 2, 96, 64), (32, 32)),
    (Sizes(5, 4, 1, 200, 72), (1, 1 << 20)),
    (Sizes(21, 4, 2, 256, 256), (128, 128)),
    (Sizes(40, 6, 3, 64, 96), (32, 32)),
    (Sizes(30, 3, 2, 200, 72), (1, 1 << 20)),
)
"""Sizes, and rows and columns of a block."""
SCALED_TOLERANCE = 2.0**-4
"""What gate and up make may lie near the middle of two 8-bit numbers, and is then rounded either way."""


def _make_scaled(
    name: str, sizes: Sizes, block: tuple[int, int], dtype: torch.dtype
) -> tuple[object, ...]:
    x, ids, weights, gate_up, down = expert_numbers(name, sizes, dtype)
    blocks = ScaleBlocks(*block, block[0] == 32)
    generator = seeded(f"{name} scales")
    up_codes, up_scales = scaled_numbers(tuple(gate_up.shape), blocks, generator)
    down_codes, down_scales = scaled_numbers(tuple(down.shape), blocks, generator)
    return x, ids, weights, up_codes, up_scales, down_codes, down_scales, blocks


scaled_experts_cases = [
    Case(name, partial(_make_scaled, name, sizes, block, dtype), SCALED_TOLERANCE)
    for dtype in (torch.float32, torch.bfloat16)
    for sizes, block in SCALED_SIZES
    for name in [f"{_name(sizes, dtype)} in {block[0]}x{block[1]}"]
]
