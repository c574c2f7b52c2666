"""The feed-forward part of a decoder layer whose rows choose among experts: route, experts, weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokamak.core.minifloat import UE8M0, factors_of
from tokamak.core.weight import (
    GROUP_COLUMNS,
    DenseWeight,
    PackedWeight,
    ScaledWeight,
    Weight,
    widened,
)
from tokamak.layers.build import Build
from tokamak.layers.linear import Linear
from tokamak.layers.norm import RMSNorm
from tokamak.ops.moe_experts import moe_experts, scaled_experts
from tokamak.ops.moe_experts.cut_words import in_columns, in_places
from tokamak.ops.moe_route import moe_route
from tokamak.ops.quant_linear import ScaleBlocks, group_of
from tokamak.ops.quantize.blocks import decode_fp4
from tokamak.ops.registry import REFERENCE, Op

WHOLE_ROW = 1 << 30
"""Columns of a block that no row is wider than."""


class StackedExperts:
    """One matrix of every expert as a tensor, made of `part_rows` checkpoint tensors an expert.

    Parts come expert by expert, those of one expert stacked by rows. A token row goes through `chosen` of the
    experts, through all by default. Weights of 8 and 4 bits stay so where the device multiplies them: those that
    `scaled_op` takes, and those that `packed_op` takes, if the layer has one.
    """

    def __init__(
        self,
        build: Build,
        experts: int,
        width: int,
        part_rows: Sequence[int],
        *,
        chosen: int | None = None,
        scaled_op: Op[..., Any] = scaled_experts,
        packed_op: Op[..., Any] | None = None,
    ) -> None:
        shapes = tuple((rows, width) for rows in part_rows)
        self._part_shapes = shapes * experts
        self.row_shapes: tuple[tuple[int, ...], ...] = shapes * (chosen or experts)
        """[rows, width] of each matrix a token row goes through."""
        self._shape = (experts, sum(part_rows), width)
        self._dtype, self._device = build.dtype, build.device
        self._keeps_8_bits = _multiplies(build, scaled_op)
        self._keeps_4_bits = packed_op is not None and _multiplies(build, packed_op)
        self._values: Tensor | None = None
        self._scaled: ScaledExperts | None = None
        self._packed: PackedExperts | None = None

    @property
    def part_shapes(self) -> tuple[tuple[int, ...], ...]:
        """[rows, width] of each checkpoint tensor."""
        return self._part_shapes

    @property
    def values(self) -> Tensor:
        """[experts, sum of part rows, width], in the model's dtype."""
        assert self._values is not None, "experts were called before their weights were loaded"
        return self._values

    @property
    def scaled(self) -> ScaledExperts | None:
        """The same in 8 bits, where the checkpoint has them so and the device multiplies them; else None."""
        return self._scaled

    @property
    def packed(self) -> PackedExperts | None:
        """The same in 4 bits, where the checkpoint has them so and the device multiplies them; else None."""
        return self._packed

    def load(self, parts: Sequence[Weight]) -> None:
        """Put each part in its place."""
        shapes = tuple(part.shape for part in parts)
        assert shapes == self._part_shapes, (
            f"{len(shapes)} parts for experts of {len(self._part_shapes)}, or of other shapes: {set(shapes)}"
        )
        scaled = [part for part in parts if isinstance(part, ScaledWeight)]
        if self._keeps_8_bits and len(scaled) == len(parts) and _fit(scaled, self._shape[0]):
            self._scaled = _stacked(scaled, self._shape, self._device)
            return
        packed = [part for part in parts if isinstance(part, PackedWeight) and _is_mxfp4(part)]
        if self._keeps_4_bits and len(packed) == len(parts):
            self._packed = _stacked_packed(packed, self._shape, self._device)
            return
        values = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        places = values.view(-1, self._shape[2]).split([rows for rows, _ in shapes])
        for place, part in zip(places, parts, strict=True):
            place.copy_(part.dense(self._dtype))
        self._values = values

    def widen(self) -> None:
        """Hold the numbers in the model's dtype instead of 8 or 4 bits."""
        if self._scaled is not None:
            codes, scales, blocks = self._scaled
            self._values = widened(codes, scales, blocks[:2]).to(self._dtype)
            self._scaled = None
        if self._packed is not None:
            codes, scales = self._packed
            self._values = decode_fp4(in_columns(codes), scales).to(self._dtype)
            self._packed = None

    def draw(self, generator: torch.Generator) -> list[Weight]:
        """Random parts that keep the size of what passes through.

        Each is a stretch, begun anywhere, of numbers drawn for two of them: drawing anew for every expert
        of a large model would take minutes.
        """
        rows, width = max(self._part_shapes)
        stock = torch.randn(2 * rows * width, generator=generator) * width**-0.5
        stock = stock.to(self._dtype)
        starts = torch.randint(
            rows * width, (len(self._part_shapes),), generator=generator
        ).tolist()
        return [
            DenseWeight(stock[start : start + shape[0] * width].view(shape))
            for start, shape in zip(starts, self._part_shapes, strict=True)
        ]


def _multiplies(build: Build, op: Op[..., Any]) -> bool:
    """Whether experts are multiplied by an op as they are stored: the device does it fast, or it was asked for by name."""
    if op.name in build.prefer:
        return True
    return build.dtype.itemsize == 2 and op.bind(build.facts)[1].backend != REFERENCE


def _fit(parts: Sequence[ScaledWeight], experts: int) -> bool:
    """Whether parts are of one kind, with blocks that suit groups of columns, and no block holds rows of two of them."""
    blocks = ScaleBlocks(*parts[0].block)
    each = len(parts) // experts
    return (
        len({part.block for part in parts}) == 1
        and all(
            part.shape[0] % blocks.rows == 0 for at, part in enumerate(parts) if (at + 1) % each
        )
        and group_of(blocks, parts[0].shape[1]) is not None
    )


def _stacked(
    parts: Sequence[ScaledWeight], shape: tuple[int, int, int], device: torch.device
) -> ScaledExperts:
    """Parts of 8 bits stacked as experts; shape: [experts, rows, width]."""
    experts, rows, width = shape
    block_rows, block_columns = parts[0].block
    # Blocks of whole rows are as wide as any row, so that those of both matrices of an expert are alike.
    blocks = ScaleBlocks(
        block_rows,
        block_columns if block_columns < width else WHOLE_ROW,
        all(part.scales.dtype == UE8M0 for part in parts),
    )
    codes = torch.empty((experts * rows, width), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.cat([factors_of(part.scales).to(device) for part in parts])
    for place, part in zip(codes.split([part.shape[0] for part in parts]), parts, strict=True):
        place.copy_(part.codes)
    return ScaledExperts(codes.view(shape), scales.view(experts, -1, scales.shape[1]), blocks)


def _is_mxfp4(part: PackedWeight) -> bool:
    """Whether 32 columns share a power of two."""
    return part.scales.dtype == UE8M0 and part.shape[1] == part.scales.shape[1] * GROUP_COLUMNS


def _stacked_packed(
    parts: Sequence[PackedWeight], shape: tuple[int, int, int], device: torch.device
) -> PackedExperts:
    """Parts of 4 bits stacked as experts; shape: [experts, rows, width]."""
    experts, rows, width = shape
    codes = torch.empty((experts * rows, width // 2), dtype=torch.uint8, device=device)
    scales = torch.empty((experts * rows, width // GROUP_COLUMNS), dtype=torch.uint8, device=device)
    of_parts = [part.shape[0] for part in parts]
    for part, place, scale in zip(
        parts, codes.split(of_parts), scales.split(of_parts), strict=True
    ):
        place.copy_(in_places(part.codes.to(device)))
        scale.copy_(part.scales.view(torch.uint8))
    return PackedExperts(codes.view(experts, rows, -1), scales.view(UE8M0).view(experts, rows, -1))


class PackedExperts(NamedTuple):
    """One matrix of every expert in 4 bits, as `packed_experts_limited` takes it."""

    codes: Tensor
    scales: Tensor


class ScaledExperts(NamedTuple):
    """One matrix of every expert in 8 bits, as `scaled_experts` takes it."""

    codes: Tensor
    scales: Tensor
    blocks: ScaleBlocks


def in_8_bits(
    gate_up: StackedExperts, down: StackedExperts
) -> tuple[Tensor, Tensor, Tensor, Tensor, ScaleBlocks] | None:
    """Codes and scales of both matrices, and their blocks, as one op takes them; None where their formats differ."""
    up, back = gate_up.scaled, down.scaled
    if up is None or back is None or up.blocks.rows != back.blocks.rows:
        return None
    return up.codes, up.scales, back.codes, back.scales, min(up.blocks, back.blocks)


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
        self._scaled_experts = build.bind(scaled_experts)

    def __call__(self, x: Tensor | None, residual: Tensor, norm: RMSNorm) -> Tensor:
        """Feed the normed residual stream through the experts; the result is pending.

        x: [rows, width] pending from the part before, or None; residual: [rows, width]. Returns [rows, width].
        """
        x = norm.add(x, residual)
        ids, weights = self._moe_route(self.router(x), self._chosen, self._renormalise)
        stored = in_8_bits(self.gate_up, self.down)
        if stored is not None:
            return self._scaled_experts(x, ids, weights, *stored)
        # One op multiplies both matrices: where their formats differ, as plain numbers.
        self.gate_up.widen()
        self.down.widen()
        return self._moe_experts(x, ids, weights, self.gate_up.values, self.down.values)
