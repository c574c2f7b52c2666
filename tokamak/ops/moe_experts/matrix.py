"""One matrix of every expert as the kernels take it: plain numbers, or 8-bit numbers with their scales."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokamak.ops.quant_linear.reference import GROUP, ScaleBlocks, group_of
from tokamak.ops.quantize.triton_rows import triton_quantize_rows


class ExpertMatrix(NamedTuple):
    """[experts, features, columns]; `scales` and `blocks` as of `scaled_experts`, None for plain numbers."""

    values: Tensor
    scales: Tensor | None = None
    blocks: ScaleBlocks | None = None

    @property
    def group(self) -> int:
        """Columns of a row that share a scale before they are multiplied with this matrix."""
        if self.blocks is None:
            return GROUP
        columns = self.values.shape[2]
        group = group_of(self.blocks, columns)
        assert group is not None, f"no kernel takes {columns} columns in blocks of {self.blocks}"
        return group

    @property
    def pointer(self) -> Tensor:
        """What a kernel gets as its scales; of plain numbers it reads none."""
        return self.values if self.scales is None else self.scales

    def constants(self) -> dict[str, int | bool]:
        """What a kernel must know of the scales when it is compiled."""
        blocks = self.blocks or ScaleBlocks(1, 1)
        columns = self.values.shape[2]
        return {
            "SCALED": self.scales is not None,
            "BLOCK_ROWS": blocks.rows,
            "BLOCK_COLUMNS": min(blocks.columns, columns),
            "GROUP": self.group,
            "EXPERT_SCALES": 0 if self.scales is None else self.scales[0].numel(),
        }


def as_multiplied(rows: Tensor, matrix: ExpertMatrix) -> tuple[Tensor, Tensor]:
    """Rows as a matrix takes them: rounded to 8 bits with their scales, or as they are with anything."""
    if matrix.blocks is None:
        return rows, rows
    return triton_quantize_rows(rows, matrix.group, matrix.blocks.power_of_two)
