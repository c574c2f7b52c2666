"""One matrix of every expert as the kernels take it: plain numbers, or numbers of 8 or 4 bits with their scales."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokamak.ops.quant_linear.reference import GROUP, ScaleBlocks, group_of
from tokamak.ops.quantize.triton import fake_fp8_in_order
from tokamak.ops.quantize.triton_rows import triton_quantize_rows
from tokamak.ops.triton_widen import multiplies_pairs

A_WORD = 8
"""Numbers of 4 bits in a word."""


class ExpertMatrix(NamedTuple):
    """[experts, features, columns]; `scales` and `blocks` as of `scaled_experts`, None for plain numbers.

    Numbers of 4 bits are bytes of two columns, with scales as bytes, both as of `packed_experts_limited`.
    """

    values: Tensor
    scales: Tensor | None = None
    blocks: ScaleBlocks | None = None
    rounded: int = 0
    """Of 4 bits: columns of a row that share a power of two when it is rounded before it is multiplied; else 0."""

    @property
    def packed(self) -> bool:
        """Whether a byte holds two columns."""
        return self.rounded > 0

    @property
    def columns(self) -> int:
        """Numbers of a row."""
        return self.values.shape[2] * (2 if self.packed else 1)

    @property
    def group(self) -> int:
        """Columns of a row that share a scale before they are multiplied with this matrix."""
        if self.blocks is None:
            return GROUP
        group = group_of(self.blocks, self.columns)
        assert group is not None, (
            f"no kernel takes {self.columns} columns in blocks of {self.blocks}"
        )
        return group

    @property
    def pointer(self) -> Tensor:
        """What a kernel gets as its scales; of plain numbers it reads none."""
        return self.values if self.scales is None else self.scales

    @property
    def words(self) -> Tensor:
        """What a kernel gets as its numbers: of 4 bits, words of eight columns."""
        return self.values.view(torch.int32) if self.packed else self.values

    def paired(self, rows: Tensor) -> bool:
        """Whether 4-bit numbers are widened to bfloat16 two at a time, as NVIDIA's chips can."""
        return self.packed and multiplies_pairs(rows)

    def constants(self) -> dict[str, int | bool]:
        """What a kernel must know of the scales when it is compiled."""
        blocks = self.blocks or ScaleBlocks(1, 1)
        return {
            "SCALED": self.blocks is not None,
            "PACKED": self.packed,
            "BLOCK_ROWS": blocks.rows,
            "BLOCK_COLUMNS": min(blocks.columns, self.columns),
            "GROUP": self.group,
            "EXPERT_SCALES": 0 if self.scales is None else self.scales[0].numel(),
        }


def as_multiplied(rows: Tensor, matrix: ExpertMatrix) -> tuple[Tensor, Tensor]:
    """Rows as a matrix takes them: rounded to 8 bits with their scales, or as numbers with anything.

    A matrix of 4 bits takes numbers that 8 bits and a power of two hold: products of these are exact in bfloat16, and their columns lie as its own
    do in registers.
    """
    if matrix.packed:
        rows = fake_fp8_in_order(rows, matrix.rounded, A_WORD)
    if matrix.blocks is None:
        return rows, rows
    return triton_quantize_rows(rows, matrix.group, matrix.blocks.power_of_two)
