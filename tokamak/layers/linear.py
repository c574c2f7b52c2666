"""A matrix product whose weight is made of one or several checkpoint tensors stacked by rows.

Queries, keys and values are one matrix, gate and up another: one call where a checkpoint has three or
two tensors. The weight's form (dense, packed to few bits) is `ops/linear`'s choice, made at loading.

Layers are plain objects, not torch modules: a module call costs many times a plain one in Python, and
a decode step of a small model makes hundreds of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, Weight, concatenate
from tokamak.layers.build import Build
from tokamak.layers.norm import RMSNorm
from tokamak.layers.vector import Vector
from tokamak.ops.linear import PackedLinear
from tokamak.ops.linear.device import FusedLinear


class Linear:
    """y = x W^T (+ bias). `part_rows` are the output features each checkpoint tensor brings."""

    bias: Vector | None
    """A parameter of its own, made of as many parts; None without bias."""

    def __init__(
        self, build: Build, width: int, part_rows: Sequence[int], *, bias: bool = False
    ) -> None:
        self._build = build
        self._part_shapes = tuple((rows, width) for rows in part_rows)
        self._packed: PackedLinear = _unloaded
        self.bias = Vector(build, part_rows) if bias else None

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[rows, width] of each checkpoint tensor."""
        return self._part_shapes

    @property
    def form(self) -> str:
        """The form its weight was packed in."""
        return self._packed.form

    def load(self, parts: Sequence[Weight]) -> None:
        """Stack the parts by rows and pack them."""
        shapes = tuple(part.shape for part in parts)
        assert shapes == self._part_shapes, f"parts {shapes} for a linear of {self._part_shapes}"
        self._packed = self._build.pack(concatenate(tuple(parts)))

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """Random parts that keep the size of what passes through."""
        return [random_matrix(shape, generator) for shape in self._part_shapes]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, width]; returns [rows, sum of part rows] in the dtype of x."""
        y = self._packed(x)
        if self.bias is not None:
            y += self.bias.values
        return y

    def wide(self, x: Tensor) -> Tensor:
        """The same in float32 of rows of any dtype, for a layer that was built widened."""
        fused = self.fused
        return self(x.float()) if fused is None else fused(x)

    @property
    def fused(self) -> FusedLinear | None:
        """The form that takes norms, activations and sums along; None where they are calls of their own."""
        return self._packed if self.bias is None and isinstance(self._packed, FusedLinear) else None

    def after_norm(self, x: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Add what is pending to the residual stream in place, norm the stream and multiply it.

        x: [rows, width] pending, or None; residual: [rows, width]. Returns [rows, sum of part rows].
        """
        fused = self.fused
        if fused is None:
            return self(norm.add(x, residual))
        return fused.after_norm(x, residual, norm.weight.values, norm.eps)

    def into(self, x: Tensor, residual: Tensor) -> Tensor | None:
        """Multiply x and add it to the residual stream in place, or return it pending, for the next norm to add.

        x: [rows, width]; residual: [rows, part rows]. Returns None, or [rows, part rows].
        """
        fused = self.fused
        return self(x) if fused is None else fused.into(x, residual)


class _Unloaded:
    """Stands where a weight will be."""

    form = "unloaded"

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("a linear layer was called before its weight was loaded")


_unloaded = _Unloaded()


def random_matrix(shape: tuple[int, ...], generator: torch.Generator) -> Weight:
    """A [rows, width] weight whose products with rows of unit scale have unit scale."""
    return DenseWeight(torch.randn(shape, generator=generator) * shape[-1] ** -0.5)
