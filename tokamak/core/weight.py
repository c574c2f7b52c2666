"""A weight on its way from a checkpoint to a layer, in the number format it was stored in.

Readers make these, layers receive them, linear backends pack them. Shapes are [rows, columns] with one
row per output feature; a vector is [rows].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP_COLUMNS = 32
"""Columns that share a scale in the 4- and 8-bit block formats of GGUF."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """Plain numbers: float32, bfloat16 or float16, [rows, columns] or [rows]."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, columns] or [rows]."""
        return tuple(self.values.shape)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as a plain tensor."""
        return self.values.to(dtype)


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Integers with a scale and a minimum per 32 columns: w = code * scale + minimum.

    Q4_0, Q4_1 (4 bits, codes 0 to 15), Q5_0, Q5_1 (5 bits) and Q8_0 (8 bits, codes 0 to 255 with
    minimum -128 * scale) map onto it without loss. K-quants do not; they are read as DenseWeight.

    Scales come from float16 and codes have at most 8 bits, so code * scale is exact in float32 and the
    sum is rounded once: fused or not, and in either order, the result is the same. Where the minimum is
    a multiple of the scale (Q4_0, Q5_0, Q8_0) the sum is exact too.
    """

    codes: Tensor  # [rows, columns]           uint8
    scales: Tensor  # [rows, columns / 32]     float32
    minimums: Tensor  # [rows, columns / 32]   float32
    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, columns]."""
        return tuple(self.codes.shape)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as a plain tensor; in float32 equal to dequantising the file's blocks.

        Zeros are +0 where a dequantiser that multiplies by a signed code may give -0.
        """
        rows, columns = self.codes.shape
        groups = self.codes.view(rows, columns // GROUP_COLUMNS, GROUP_COLUMNS).float()
        wide = groups * self.scales.unsqueeze(-1) + self.minimums.unsqueeze(-1)
        return wide.view(rows, columns).to(dtype)


Weight = DenseWeight | GroupedWeight


def concatenate(parts: list[Weight] | tuple[Weight, ...]) -> Weight:
    """Stack weights by rows, keeping the number format when all parts share it."""
    if len(parts) == 1:
        return parts[0]
    grouped = [part for part in parts if isinstance(part, GroupedWeight)]
    if len(grouped) == len(parts) and len({part.bits for part in grouped}) == 1:
        return GroupedWeight(
            codes=torch.cat([part.codes for part in grouped]),
            scales=torch.cat([part.scales for part in grouped]),
            minimums=torch.cat([part.minimums for part in grouped]),
            bits=grouped[0].bits,
        )
    dtypes = {part.values.dtype for part in parts if isinstance(part, DenseWeight)}
    same = len(dtypes) == 1 and not grouped
    dtype = dtypes.pop() if same else torch.float32
    return DenseWeight(torch.cat([part.dense(dtype) for part in parts]))
