"""Several matrices side by side, one for each group of a row's numbers: a block-diagonal product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, Weight
from tokamak.layers.build import Build
from tokamak.layers.linear import random_matrix
from tokamak.ops.linear import PackedLinear


class GroupedLinear:
    """y_g = x_g W_g^T. The checkpoint has one [groups * rows, width] tensor, group by group."""

    def __init__(self, build: Build, groups: int, width: int, rows: int) -> None:
        self._build = build
        self._groups, self._rows, self._width = groups, rows, width
        self._packed: tuple[PackedLinear, ...] = ()

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[groups * rows, width], once."""
        return ((self._groups * self._rows, self._width),)

    def load(self, parts: Sequence[Weight]) -> None:
        """Pack each group's rows."""
        (weight,) = parts
        assert (weight.shape,) == self.part_shapes, f"a weight of {weight.shape} for grouped rows"
        dense = weight.dense(self._build.dtype)
        self._packed = tuple(
            self._build.pack(DenseWeight(rows)) for rows in dense.split(self._rows)
        )

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """A random part that keeps the size of what passes through."""
        return [random_matrix(shape, generator) for shape in self.part_shapes]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, groups, width]; returns [tokens, groups * rows] in the dtype of x."""
        assert self._packed, "a grouped linear layer was called before its weight was loaded"
        parts = [packed(x[:, at].contiguous()) for at, packed in enumerate(self._packed)]
        return torch.cat(parts, dim=-1)
