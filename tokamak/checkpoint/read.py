"""How a stored tensor becomes a weight, in the number format it was stored in.

Files are mapped and plain tensors are views of the mapping, so nothing is copied before a layer packs
it. Block formats of 32 columns keep their integers; other block formats are dequantised to float32.
"""

from __future__ import annotations

import importlib
import mmap
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokamak.checkpoint.entry import (
    DEQUANTISED_FORMATS,
    GROUPED_FORMATS,
    PACKED_FORMAT,
    PLAIN_FORMATS,
    TABLE_FORMATS,
    Scales,
    TensorEntry,
    check_range,
)
from tokamak.core.minifloat import UE8M0
from tokamak.core.weight import DenseWeight, GroupedWeight, PackedWeight, ScaledWeight, Weight
from tokamak.errors import CheckpointError

MAP_NORESERVE = 0x4000
"""Of Linux on x86 and ARM; Python names it from 3.13 on."""

PLAIN_DTYPES: dict[str, torch.dtype] = dict(
    zip(
        (*PLAIN_FORMATS, *TABLE_FORMATS),
        (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32),
        strict=True,
    )
)


def can_read(form: str) -> bool:
    """Whether weights in a number format can be read."""
    return form in PLAIN_DTYPES or form in GROUPED_FORMATS or form in DEQUANTISED_FORMATS


class Reader:
    """Reads tensors of a checkpoint's files, each mapped once."""

    def __init__(self) -> None:
        self._files: dict[Path, Tensor] = {}

    def read(self, entry: TensorEntry) -> Weight:
        """The weight at `entry`, rows in the model's own order; `can_read` its format.

        Raises:
            CheckpointError: the file is shorter than when it was opened, or rows do not divide by heads.
        """
        rows = _in_order(self._stored_rows(entry), entry)
        form, shape = entry.format.name, entry.shape
        if form in PLAIN_DTYPES:
            return DenseWeight(rows.view(PLAIN_DTYPES[form]).view(shape))
        if form in GROUPED_FORMATS and len(shape) == 2:
            return _grouped(rows, form)
        if entry.scales is not None and entry.format == PACKED_FORMAT:
            return PackedWeight(rows, self._scales(entry.scales))
        if entry.scales is not None:
            codes = rows.view(torch.float8_e4m3fn).view(shape)
            return ScaledWeight(codes, self._scales(entry.scales), entry.scales.block)
        return DenseWeight(_dequantised(rows, entry).view(shape))

    def _scales(self, scales: Scales) -> Tensor:
        stored, form = self.stored_bytes(scales.entry), scales.entry.format.name
        numbers = (
            stored.view(PLAIN_DTYPES[form]).float() if form in PLAIN_DTYPES else stored.view(UE8M0)
        )
        return numbers.view(scales.shape)

    def stored_bytes(self, entry: TensorEntry) -> Tensor:
        """The bytes of a tensor as they are in the file: [bytes] uint8."""
        check_range(entry, entry.file.stat().st_size)
        found = self._file(entry.file)[entry.offset : entry.offset + entry.nbytes]
        # Other programs may write plain numbers at odd places, where only bytes can be viewed.
        viewed = entry.format.block_bytes == 1 or found.data_ptr() % 8 == 0
        return found if viewed else found.clone()

    def _stored_rows(self, entry: TensorEntry) -> Tensor:
        rows = entry.shape[0] if entry.shape else 1
        return self.stored_bytes(entry).view(rows, -1 if entry.nbytes else 0)

    def _file(self, path: Path) -> Tensor:
        if path not in self._files:
            with path.open("rb") as file:
                mapped = _mapped(file.fileno())
            self._files[path] = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._files[path]


def _mapped(file: int) -> mmap.mmap:
    """A file copy-on-write, as torch wants memory it may write; pages nobody writes stay shared.

    Linux is told to set nothing aside for copies: it would refuse a file that is larger than its memory.
    """
    if sys.platform == "linux":
        return mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    return mmap.mmap(file, 0, access=mmap.ACCESS_COPY)


def _in_order(rows: Tensor, entry: TensorEntry) -> Tensor:
    """Rows of each head as [first halves, second halves] of the rotary pairs. rows: [rows, bytes]."""
    heads = entry.interleaved_heads
    if not heads:
        return rows
    if rows.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{entry.where} has {rows.shape[0]} rows; expected an even number for each of {heads} heads"
        )
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _grouped(rows: Tensor, form: str) -> GroupedWeight:
    """Blocks of 32 columns as codes, scales and minimums. rows: [rows, bytes] uint8.

    Blocks are taken apart in words of two or four bytes, several codes at a time. The formats Q4_0, Q5_0
    and Q8_0 count from the middle: their minimum is minus half the range of codes, times the scale.
    """
    bits, has_minimum = GROUPED_FORMATS[form], form.endswith("_1")
    word = torch.int32 if has_minimum else torch.int16
    words = rows.view(word).view(rows.shape[0], -1, _BLOCK_BYTES[form] // word.itemsize)
    factors = words[..., :1].contiguous().view(torch.float16).float()
    scales = factors[..., 0].contiguous()
    minimums = factors[..., 1].contiguous() if has_minimum else scales * -float(1 << (bits - 1))
    codes = _CODES_OF[bits](words[..., 1:])
    return GroupedWeight(
        codes=codes.view(rows.shape[0], -1), scales=scales, minimums=minimums, bits=bits
    )


def _codes4(packed: Tensor) -> Tensor:
    """Low nibbles are the first half of a block. [rows, groups, words] to [rows, groups, 32] uint8."""
    low_nibbles = 0x0F0F0F0F if packed.dtype == torch.int32 else 0x0F0F
    half = packed.shape[-1]
    codes = packed.new_empty(*packed.shape[:-1], 2 * half)
    torch.bitwise_and(packed, low_nibbles, out=codes[..., :half])
    torch.bitwise_and(packed >> 4, low_nibbles, out=codes[..., half:])
    return codes.view(torch.uint8)


def _codes5(packed: Tensor) -> Tensor:
    """Four bytes of fifth bits, one bit per column, then nibbles. To [rows, groups, 32] uint8."""
    high_words = 4 // packed.itemsize
    high = packed[..., :high_words].contiguous().view(torch.uint8).unsqueeze(-1)
    fifth = (high >> torch.arange(8, dtype=torch.uint8)) & 1
    return _codes4(packed[..., high_words:]) | (fifth.flatten(-2) << 4)


def _codes8(packed: Tensor) -> Tensor:
    """Signed bytes, counted from -128. To [rows, groups, 32] uint8."""
    return torch.bitwise_xor(packed, _BOTH_SIGNS).view(torch.uint8)


_BOTH_SIGNS = 0x8080 - 0x10000
"""The sign bits of two bytes, as an int16."""

_CODES_OF: dict[int, Callable[[Tensor], Tensor]] = {4: _codes4, 5: _codes5, 8: _codes8}
"""By bits of a code."""

_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q5_0": 22, "Q5_1": 24, "Q8_0": 34}


def _dequantised(rows: Tensor, entry: TensorEntry) -> Tensor:
    """Blocks of any format the `gguf` package knows, as float32.

    The package is imported here, and not before, because most files never need it and it costs a tenth
    of a second.
    """
    constants: Any = importlib.import_module("gguf.constants")
    quants: Any = importlib.import_module("gguf.quants")
    kind = constants.GGMLQuantizationType[entry.format.name]
    return torch.from_numpy(quants.dequantize(rows.numpy(), kind))
