"""A table whose rows are looked up by number, each step a few of many."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, ScaledWeight, Weight
from tokamak.layers.build import Build
from tokamak.ops.engram import engram_values


class Table:
    """[rows, width] in the model's dtype; one that is stored in 8 bits, with scales of its rows, stays so."""

    def __init__(self, build: Build, rows: int, width: int) -> None:
        self._shape = (rows, width)
        self._dtype, self._device = build.dtype, build.device
        self._values: Tensor | None = None
        self._scaled: tuple[Tensor, Tensor] | None = None
        self._engram_values = build.bind(engram_values)

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[rows, width], once."""
        return (self._shape,)

    def load(self, parts: Sequence[Weight]) -> None:
        """Take the one part."""
        (part,) = parts
        assert part.shape == self._shape, f"a table of {part.shape} for {self._shape}"
        if isinstance(part, ScaledWeight) and _has_groups_of_rows(part):
            self._scaled = (
                part.codes.to(self._device).contiguous(),
                part.scales.to(self._device).contiguous(),
            )
        else:
            self._values = part.dense(self._dtype).to(self._device).contiguous()

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """Normal numbers."""
        return [DenseWeight(torch.randn(self._shape, generator=generator))]

    def __call__(self, rows: Tensor) -> Tensor:
        """The rows of these numbers, int64 [n]: [n, width] in the model's dtype."""
        if self._scaled is not None:
            return self._engram_values(*self._scaled, rows, self._dtype)
        assert self._values is not None, "a table was read before it was loaded"
        return self._values.index_select(0, rows)


def _has_groups_of_rows(weight: ScaledWeight) -> bool:
    """Whether scales hold for equally many neighbours of one row."""
    return weight.block[0] == 1 and weight.scales.shape[1] * weight.block[1] == weight.shape[1]
