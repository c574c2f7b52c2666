"""A weight with one number per feature: a bias, or the scale of a norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, Weight
from tokamak.layers.build import Build


class Vector:
    """One or several [rows] checkpoint tensors end to end, as a plain tensor in the model's dtype, or in `dtype`."""

    values: Tensor
    """[sum of rows]."""

    def __init__(
        self,
        build: Build,
        part_rows: Sequence[int],
        *,
        around: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._part_shapes = tuple((rows,) for rows in part_rows)
        self._around = around
        self.values = torch.full(
            (sum(part_rows),), float("nan"), dtype=dtype or build.dtype, device=build.device
        )

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[rows] of each checkpoint tensor."""
        return self._part_shapes

    def load(self, parts: Sequence[Weight]) -> None:
        """Put the parts end to end."""
        shapes = tuple(part.shape for part in parts)
        assert shapes == self._part_shapes, f"parts {shapes} for a vector of {self._part_shapes}"
        self.values.copy_(torch.cat([part.dense(torch.float32) for part in parts]))

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """Small random numbers around what changes nothing (0 for a bias, 1 for a scale)."""
        return [
            DenseWeight(self._around + 0.1 * torch.randn(shape, generator=generator))
            for shape in self._part_shapes
        ]
