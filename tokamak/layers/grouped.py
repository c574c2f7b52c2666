"""Several matrices side by side, one for each group of a row's numbers: a block-diagonal product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, Weight
from tokamak.layers.build import Build
from tokamak.layers.linear import random_matrix
from tokamak.ops.grouped_linear import grouped_linear
from tokamak.ops.linear import PackedLinear
from tokamak.ops.registry import REFERENCE


class GroupedLinear:
    """y_g = x_g W_g^T. The checkpoint has one [groups * rows, width] tensor, group by group.

    One product for all groups where a kernel of the device does that, else each group's own, in the form that its
    products run fastest in.
    """

    def __init__(self, build: Build, groups: int, width: int, rows: int) -> None:
        self._build = build
        self._groups, self._rows, self._width = groups, rows, width
        self._packed: tuple[PackedLinear, ...] = ()
        self._values: Tensor | None = None
        self._product = build.bind(grouped_linear)
        self._is_joined = build.choices[grouped_linear.name].backend != REFERENCE

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[groups * rows, width], once."""
        return ((self._groups * self._rows, self._width),)

    def load(self, parts: Sequence[Weight]) -> None:
        """Keep the matrices in one tensor, or pack each group's rows."""
        (weight,) = parts
        assert (weight.shape,) == self.part_shapes, f"a weight of {weight.shape} for grouped rows"
        dense = weight.dense(self._build.dtype)
        if self._is_joined:
            shape = (self._groups, self._rows, self._width)
            self._values = dense.to(self._build.device).view(shape)
            return
        self._packed = tuple(
            self._build.pack(DenseWeight(rows)) for rows in dense.split(self._rows)
        )

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """A random part that keeps the size of what passes through."""
        return [random_matrix(shape, generator) for shape in self.part_shapes]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, groups, width]; returns [tokens, groups * rows] in the dtype of x."""
        if self._values is not None:
            return self._product(x, self._values)
        assert self._packed, "a grouped linear layer was called before its weight was loaded"
        parts = [packed(x[:, at].contiguous()) for at, packed in enumerate(self._packed)]
        return torch.cat(parts, dim=-1)
