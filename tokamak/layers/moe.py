"""The feed-forward part of a decoder layer whose rows choose among experts: route, experts, weighted sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamak.core.weight import DenseWeight, Weight
from tokamak.layers.build import Build
from tokamak.layers.linear import Linear
from tokamak.layers.norm import RMSNorm
from tokamak.ops.moe_experts import moe_experts
from tokamak.ops.moe_route import moe_route


class StackedExperts:
    """One matrix of every expert as a tensor, made of `part_rows` checkpoint tensors an expert.

    Parts come expert by expert, those of one expert stacked by rows. A token row goes through `chosen` of the
    experts, through all by default.
    """

    def __init__(
        self,
        build: Build,
        experts: int,
        width: int,
        part_rows: Sequence[int],
        *,
        chosen: int | None = None,
    ) -> None:
        shapes = tuple((rows, width) for rows in part_rows)
        self._part_shapes = shapes * experts
        self.row_shapes: tuple[tuple[int, ...], ...] = shapes * (chosen or experts)
        """[rows, width] of each matrix a token row goes through."""
        self._shape = (experts, sum(part_rows), width)
        self._dtype, self._device = build.dtype, build.device
        self._values: Tensor | None = None

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[rows, width] of each checkpoint tensor."""
        return self._part_shapes

    @property
    def values(self) -> Tensor:
        """[experts, sum of part rows, width], in the model's dtype."""
        assert self._values is not None, "experts were called before their weights were loaded"
        return self._values

    def load(self, parts: Sequence[Weight]) -> None:
        """Put each part in its place."""
        shapes = tuple(part.shape for part in parts)
        assert shapes == self._part_shapes, (
            f"{len(shapes)} parts for experts of {len(self._part_shapes)}, or of other shapes: {set(shapes)}"
        )
        values = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        places = values.view(-1, self._shape[2]).split([rows for rows, _ in shapes])
        for place, part in zip(places, parts, strict=True):
            place.copy_(part.dense(self._dtype))
        self._values = values

    def load_random(self, generator: torch.Generator) -> None:
        """Fill with numbers that keep the size of what passes through.

        Each part is a stretch, begun anywhere, of numbers drawn for two of them: drawing anew for every expert
        of a large model would take minutes.
        """
        rows, width = max(self._part_shapes)
        stock = torch.randn(2 * rows * width, generator=generator) * width**-0.5
        stock = stock.to(self._dtype)
        starts = torch.randint(
            rows * width, (len(self._part_shapes),), generator=generator
        ).tolist()
        self.load(
            [
                DenseWeight(stock[start : start + shape[0] * width].view(shape))
                for start, shape in zip(starts, self._part_shapes, strict=True)
            ]
        )


class ExpertsMLP:
    """Each row through `chosen` of `experts` gated MLPs, by the scores of a router.

    With `renormalise` the weights of a row's experts add to 1; else they are shares among all experts.
    """

    def __init__(
        self,
        build: Build,
        *,
        width: int,
        inner_width: int,
        experts: int,
        chosen: int,
        renormalise: bool,
    ) -> None:
        self.router = Linear(build, width, (experts,))
        inner = (inner_width, inner_width)
        self.gate_up = StackedExperts(build, experts, width, inner, chosen=chosen)
        self.down = StackedExperts(build, experts, inner_width, (width,), chosen=chosen)
        self._chosen = chosen
        self._renormalise = renormalise
        self._moe_route = build.bind(moe_route)
        self._moe_experts = build.bind(moe_experts)

    def __call__(self, x: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Feed the normed residual stream through the experts; the result is pending.

        x: [rows, width] pending from the part before, or None; residual: [rows, width]. Returns [rows, width].
        """
        x = norm.add(x, residual)
        ids, weights = self._moe_route(self.router(x), self._chosen, self._renormalise)
        return self._moe_experts(x, ids, weights, self.gate_up.values, self.down.values)
