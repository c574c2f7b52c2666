"""Rows, choices and experts: few and many rows, experts nobody chose, one that all chose, sizes nothing divides."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from tokamak.ops.case import Case, seeded, tolerance_of


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


def _numbers(name: str, sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
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
    return tuple(_numbers(name, sizes, dtype))


def _one_expert_for_all(name: str) -> tuple[object, ...]:
    x, ids, weights, gate_up, down = _numbers(name, Sizes(40, 8, 2, 64, 32), torch.float32)
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
