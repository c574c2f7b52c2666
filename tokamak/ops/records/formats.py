"""How many bytes does a cached row take in each number format, and which bytes are they?

A record is one row's bytes: codes first, then numbers that are kept plain, then scales. A cache that keeps records
gives back exactly what one gives back that keeps the rows after a round trip (`tokamak/ops/quantize`).

| format | width | bytes | where DeepSeek V4 and V4.1 use it |
|---|---|---|---|
| FP8 | 512 | 528 | rows of the window |
| NVFP4 | 512 | 288 | compressed rows |
| MXFP4 | 128 | 68 | index keys |
| FP8_WIDE | 128 | 132 | index keys, in 8 bits |
| FP8_PLAIN_TAIL | 512 | 584 | V4's rows: the 64 numbers that carry the position stay bfloat16 |
| BF16 | 512 | 1024 | any of them, not packed |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from tokamak.core.minifloat import UE8M0, factors_of
from tokamak.ops.quantize.blocks import (
    FP8_BLOCK,
    MXFP4_BLOCK,
    NVFP4_BLOCK,
    decode_fp4,
    decode_fp8,
    encode_fp8,
    encode_mxfp4,
    encode_nvfp4,
)

Encode = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows [..., n] to codes [..., bytes] and scales [..., blocks]."""

Decode = Callable[[Tensor, Tensor], Tensor]
"""The way back, to float32 [..., n]."""


@dataclass(frozen=True, slots=True)
class Coding:
    """How numbers become codes and scales."""

    encode: Encode
    decode: Decode
    block: int
    """Numbers that share a scale."""
    code_bits: int
    code_dtype: torch.dtype
    scale_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A number format of cached rows."""

    name: str
    coding: Coding | None
    """None where all numbers are bfloat16."""
    plain_tail: int = 0
    """Numbers at the end of a row that stay bfloat16."""
    scale_alignment: int = 1
    """Bytes that the scales of a row are filled up to a multiple of, with zeros."""

    def bytes_per_row(self, width: int) -> int:
        """Bytes of a record of a row of `width` numbers, those of its codes a whole number of blocks."""
        return sum(self._sizes(width))

    def pack(self, rows: Tensor) -> Tensor:
        """rows: [..., width] of any float dtype; returns records, [..., bytes_per_row(width)] uint8."""
        width = rows.shape[-1]
        _, plain_bytes, scale_bytes = self._sizes(width)
        plain = rows[..., width - plain_bytes // 2 :].to(torch.bfloat16).contiguous()
        if self.coding is None:
            return plain.view(torch.uint8)
        codes, scales = self.coding.encode(rows[..., : width - self.plain_tail])
        scales = _stored(scales, self.coding).view(torch.uint8)
        filled = functional.pad(scales, (0, scale_bytes - scales.shape[-1]))
        return torch.cat([codes.view(torch.uint8), plain.view(torch.uint8), filled], dim=-1)

    def unpack(self, records: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """records: [..., bytes_per_row(width)] uint8; returns the rows, [..., width]."""
        code_bytes, plain_bytes, scale_bytes = sizes = self._sizes(width)
        assert records.shape[-1] == sum(sizes), (
            f"records of {records.shape[-1]} bytes; {self.name} rows of {width} take {sum(sizes)}"
        )
        codes, plain, scales = records.split([code_bytes, plain_bytes, scale_bytes], -1)
        if self.coding is None:
            return _viewed(plain, torch.bfloat16).to(dtype)
        blocks = (width - self.plain_tail) // self.coding.block
        used = blocks * self.coding.scale_dtype.itemsize
        factors = _viewed(scales[..., :used], self.coding.scale_dtype)
        numbers = self.coding.decode(codes.view(self.coding.code_dtype), factors)
        if not self.plain_tail:
            return numbers.to(dtype)
        return torch.cat((numbers.to(dtype), _viewed(plain, torch.bfloat16).to(dtype)), dim=-1)

    def _sizes(self, width: int) -> tuple[int, int, int]:
        """Bytes of a record's codes, of its plain numbers and of its scales."""
        if self.coding is None:
            return 0, 2 * width, 0
        coded = width - self.plain_tail
        assert coded > 0, f"rows of {width} numbers; {self.name} keeps {self.plain_tail} plain"
        assert coded % self.coding.block == 0, f"{coded} numbers in blocks of {self.coding.block}"
        scale_bytes = coded // self.coding.block * self.coding.scale_dtype.itemsize
        filled = -(-scale_bytes // self.scale_alignment) * self.scale_alignment
        return coded * self.coding.code_bits // 8, 2 * self.plain_tail, filled


def numbers_of(rows: Tensor, form: KVFormat | None, width: int) -> Tensor:
    """Rows read from a cache as numbers, float32 [..., width]. form: of their records; None where they are numbers."""
    return rows.float() if form is None else form.unpack(rows, width, torch.float32)


def _viewed(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of records as the numbers they are; a record may lie anywhere, so longer numbers are copied first."""
    if dtype.itemsize > 1:
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(dtype)


def _stored(scales: Tensor, coding: Coding) -> Tensor:
    """Scales in the dtype of the record."""
    return scales if scales.dtype == coding.scale_dtype else factors_of(scales)


def _fp8(block: int, scale_dtype: torch.dtype = UE8M0) -> Coding:
    encode = partial(encode_fp8, block=block)
    return Coding(encode, decode_fp8, block, 8, torch.float8_e4m3fn, scale_dtype)


BF16 = KVFormat("bf16", None)
FP8 = KVFormat("fp8", _fp8(FP8_BLOCK))
FP8_WIDE = KVFormat("fp8_wide", _fp8(128, torch.float32))
"""A scale for 128 numbers, a power of two that is stored as float32."""
FP8_PLAIN_TAIL = KVFormat("fp8_plain_tail", _fp8(64), plain_tail=64, scale_alignment=8)
MXFP4 = KVFormat("mxfp4", Coding(encode_mxfp4, decode_fp4, MXFP4_BLOCK, 4, torch.uint8, UE8M0))
NVFP4 = KVFormat(
    "nvfp4", Coding(encode_nvfp4, decode_fp4, NVFP4_BLOCK, 4, torch.uint8, torch.float8_e4m3fn)
)

KV_FORMATS = {form.name: form for form in (BF16, FP8, FP8_WIDE, FP8_PLAIN_TAIL, MXFP4, NVFP4)}
"""All formats by name."""
