"""A weight on its way from a checkpoint to a layer, in the number format it was stored in.

Readers make these, layers receive them, linear backends pack them. Shapes are [rows, columns] with one
row per output feature; a vector is [rows].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokamak.core.minifloat import UE8M0, factors_of, float_of_e2m1, unpack_nibbles

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

    A block is 128 x 128 or 32 x 32 numbers, 32 of a row, or one row. Both codes and scales are numbers of float32, so
    a product of theirs is rounded once; scales that are powers of two make it exact in bfloat16 too.
    """

    codes: Tensor  # [rows, columns]                                float8_e4m3fn
    scales: Tensor  # [rows / block rows, columns / block columns]  float32 or float8_e8m0fnu; both rounded up
    block: tuple[int, int]  # rows and columns that share a scale

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, columns]."""
        return tuple(self.codes.shape)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as a plain tensor."""
        return widened(self.codes, self.scales, self.block).to(dtype)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """4-bit floating-point numbers (E2M1), two to a byte, with a scale per group of columns: w = code * scale.

    Scales that are powers of two make the numbers exact in bfloat16; other products are rounded once, in float32.
    """

    codes: Tensor  # [rows, columns / 2]       uint8, the even column in the low half
    scales: Tensor  # [rows, columns / group]  float8_e8m0fnu or float32; a group has 32 columns in MXFP4

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, columns]."""
        rows, pairs = self.codes.shape
        return rows, 2 * pairs

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as a plain tensor."""
        rows, columns = self.shape
        numbers = float_of_e2m1(unpack_nibbles(self.codes))
        groups = numbers.view(rows, self.scales.shape[1], columns // self.scales.shape[1])
        return (groups * factors_of(self.scales).unsqueeze(-1)).view(rows, columns).to(dtype)


Weight = DenseWeight | GroupedWeight | ScaledWeight | PackedWeight


def widened(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """The float32 numbers that 8-bit codes stand for.

    codes: [..., rows, columns]; scales: [..., rows / block rows, columns / block columns], rounded up, of any dtype.
    """
    rows, columns = codes.shape[-2:]
    wide = factors_of(scales).repeat_interleave(block[0], -2)[..., :rows, :]
    if block[1] < columns:
        wide = wide.repeat_interleave(block[1], -1)[..., :columns]
    return codes.float() * wide


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
    packed = [part for part in parts if isinstance(part, PackedWeight)]
    if len(packed) == len(parts) and len({_group(part) for part in packed}) == 1:
        codes = torch.cat([part.codes for part in packed])
        return PackedWeight(codes, _stacked([part.scales for part in packed]))
    dtypes = {part.values.dtype if isinstance(part, DenseWeight) else None for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    dtype = dtype or torch.float32
    return DenseWeight(torch.cat([part.dense(dtype) for part in parts]))


def _concatenate_scaled(parts: list[ScaledWeight]) -> Weight:
    """Stack 8-bit weights whose blocks end where each part does; parts of other blocks get a scale a row."""
    rows, columns = parts[0].block
    whole = all(part.shape[0] % rows == 0 for part in parts[:-1])
    if len({part.block for part in parts}) == 1 and whole:
        codes = torch.cat([part.codes for part in parts])
        return ScaledWeight(codes, _stacked([part.scales for part in parts]), (rows, columns))
    if any(part.scales.shape[1] > 1 for part in parts):
        return DenseWeight(torch.cat([part.dense(torch.float32) for part in parts]))
    return ScaledWeight(
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat(
            [
                factors_of(part.scales).repeat_interleave(part.block[0], 0)[: part.shape[0]]
                for part in parts
            ]
        ),
        block=(1, parts[0].shape[1]),
    )


def _group(weight: PackedWeight) -> int:
    """Columns that share a scale."""
    return weight.shape[1] // weight.scales.shape[1]


def _stacked(parts: list[Tensor]) -> Tensor:
    """Scales end to end: powers of two as their bytes where all parts are such, else float32."""
    if all(part.dtype == UE8M0 for part in parts):
        return torch.cat([part.view(torch.uint8) for part in parts]).view(UE8M0)
    return torch.cat([factors_of(part) for part in parts])
