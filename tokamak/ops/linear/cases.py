"""Weights and row counts for packed linear layers: the shapes of real layers and those nothing divides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokamak.core.weight import GROUP_COLUMNS, DenseWeight, GroupedWeight, Weight
from tokamak.ops.case import seeded

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 13, 40)
"""Each path of the kernels: straight from the codes, tiles of 6, and what is left over."""


@dataclass(frozen=True, slots=True)
class WeightCase:
    """A weight of a shape and number format."""

    features: int
    columns: int
    kind: str
    """`q4`, `q5`, `q8`, `float32`, `bfloat16` or `float16`; `-wide` scales do not fit float16."""

    def __str__(self) -> str:
        return f"{self.features}x{self.columns} {self.kind}"

    def weight(self) -> Weight:
        """The weight, the same numbers every time."""
        generator = seeded(str(self))
        shape = (self.features, self.columns)
        if not self.kind.startswith("q"):
            values = torch.randn(shape, generator=generator) * self.columns**-0.5
            return DenseWeight(values.to(getattr(torch, self.kind)))
        bits = int(self.kind[1])
        codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=generator)
        groups = (self.features, self.columns // GROUP_COLUMNS)
        scales = torch.rand(groups, generator=generator) * self.columns**-0.5 * 2.0 ** (2 - bits)
        if not self.kind.endswith("-wide"):
            scales = scales.half().float()
        return GroupedWeight(codes, scales, -(2.0 ** (bits - 1)) * scales, bits)

    def rows(self, count: int, dtype: torch.dtype) -> Tensor:
        """Rows to multiply."""
        return torch.randn((count, self.columns), generator=seeded(f"{self}{count}")).to(dtype)


weight_cases = [
    WeightCase(features, columns, kind)
    for features, columns in ((96, 64), (576, 288), (100, 320), (1, 32))
    for kind in ("q4", "q4-wide", "q5", "q8", "float32", "bfloat16", "float16")
] + [WeightCase(40, 33, "float32"), WeightCase(33, 300, "bfloat16")]
