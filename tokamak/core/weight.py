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


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """8-bit floating-point numbers with a scale per block of rows and columns: w = code * scale.

    A block is 128 x 128 numbers, or one row. Both codes and scales are numbers of float32, so a product of
    theirs is rounded once.
    """

    codes: Tensor  # [rows, columns]                                    float8_e4m3fn
    scales: Tensor  # [rows / block rows, columns / block columns]      float32; both rounded up
    block: tuple[int, int]  # rows and columns that share a scale

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, columns]."""
        return tuple(self.codes.shape)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as a plain tensor."""
        rows, columns = self.codes.shape
        wide = self.scales.repeat_interleave(self.block[0], 0)[:rows]
        if self.block[1] < columns:
            wide = wide.repeat_interleave(self.block[1], 1)[:, :columns]
        return (self.codes.float() * wide).to(dtype)


Weight = DenseWeight | GroupedWeight | ScaledWeight


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
    scaled = [part for part in parts if isinstance(part, ScaledWeight)]
    if len(scaled) == len(parts):
        return _concatenate_scaled(scaled)
    dtypes = {part.values.dtype for part in parts if isinstance(part, DenseWeight)}
    same = len(dtypes) == 1 and not grouped and not scaled
    dtype = dtypes.pop() if same else torch.float32
    return DenseWeight(torch.cat([part.dense(dtype) for part in parts]))


def _concatenate_scaled(parts: list[ScaledWeight]) -> Weight:
    """Stack 8-bit weights whose blocks end where each part does; parts of other blocks get a scale a row."""
    rows, columns = parts[0].block
    whole = all(part.shape[0] % rows == 0 for part in parts[:-1])
    if len({part.block for part in parts}) == 1 and whole:
        codes = torch.cat([part.codes for part in parts])
        return ScaledWeight(codes, torch.cat([part.scales for part in parts]), (rows, columns))
    if any(part.scales.shape[1] > 1 for part in parts):
        return DenseWeight(torch.cat([part.dense(torch.float32) for part in parts]))
    return ScaledWeight(
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat(
            [part.scales.repeat_interleave(part.block[0], 0)[: part.shape[0]] for part in parts]
        ),
        block=(1, parts[0].shape[1]),
    )
