"""A parameter that stays a plain tensor of any shape: tables, biases, and what must be multiplied in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, Weight
from tokamak.layers.build import Build

Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


class Plain:
    """One checkpoint tensor as it is, in a dtype of its own; float32 unless told.

    draw: makes random values of a trained model's scale; 0.1 times normal numbers by default.
    """

    row_shapes: tuple[tuple[int, ...], ...] = ()
    """Matrices a token row goes through: none, as rows are looked up in it or it is small."""

    def __init__(
        self,
        build: Build,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        draw: Draw | None = None,
    ) -> None:
        self._shape = tuple(shape)
        self._dtype, self._device = dtype, build.device
        self._draw = draw or _small
        self._values: Tensor | None = None

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Its shape, once."""
        return (self._shape,)

    @property
    def values(self) -> Tensor:
        """The numbers, in the dtype it was made with."""
        assert self._values is not None, "a parameter was read before it was loaded"
        return self._values

    def load(self, parts: Sequence[Weight]) -> None:
        """Take the one part."""
        (part,) = parts
        assert part.shape == self._shape, f"a parameter of {part.shape} for {self._shape}"
        self._values = part.dense(self._dtype).to(self._device).contiguous()

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """A random part of the scale it was made with."""
        return [DenseWeight(self._draw(self._shape, generator))]


class Product(Plain):
    """Two checkpoint tensors of one shape, kept as their product number by number: nothing reads one alone."""

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Its shape, twice."""
        return (self._shape, self._shape)

    def load(self, parts: Sequence[Weight]) -> None:
        """Take both parts; they are multiplied in the dtype it was made with."""
        shapes = tuple(part.shape for part in parts)
        assert shapes == self.part_shapes, f"parameters of {shapes} for {self.part_shapes}"
        first, second = (part.dense(self._dtype) for part in parts)
        self._values = (first * second).to(self._device).contiguous()

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """Two random parts of the scale it was made with."""
        return [DenseWeight(self._draw(shape, generator)) for shape in self.part_shapes]


def around_one(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers near 1."""
    return 1 + 0.1 * torch.randn(shape, generator=generator)


def fan_in(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Numbers whose products with rows of unit scale have unit scale."""
    return torch.randn(shape, generator=generator) * shape[-1] ** -0.5


def _small(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 0.1 * torch.randn(shape, generator=generator)
