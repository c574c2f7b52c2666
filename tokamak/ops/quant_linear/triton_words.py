# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Rows times 8-bit weights whose scales are powers of two, on matrix units for bfloat16.

A number of E4M3 and its factor are exact in bfloat16, and so are rows that are rounded to E4M3 and a power of two: their
products are those of 8-bit arithmetic, but need no scaling of sums by groups of 32 columns. Codes come as words of four and
become pairs of numbers in registers, from where they are multiplied: as first operand, which wants 64 rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.quant_linear.reference import ScaleBlocks
from tokamak.ops.quant_linear.triton_few import add_parts, parts_of
from tokamak.ops.quant_linear.triton_scales import scale_rows
from tokamak.ops.quantize.triton import fake_fp8_in_order
from tokamak.ops.triton_order import asking_on
from tokamak.ops.triton_widen import PAIRED_UNIT, SIGNS, low_high, multiplies_pairs

A_WORD = 4
"""Numbers of 8 bits in a word."""
MOST_PROGRAMS, MOST_SPLITS, LEAST_STEPS = 640, 8, 5
"""Programs of few rows, about five for every multiprocessor of an H200; how many share columns, and steps of each."""
TOGETHER = 8
"""Tiles of rows that follow each other under one tile of features, whose weights then come from the second cache."""
MOST_AHEAD = tl.constexpr(512)
"""Bytes of a feature that a program asks for before rows are there; programs of a chip must not need more than its second
cache holds."""
SIZES = tl.constexpr(0x07F007F0)
"""Where E4M3's exponent and mantissa lie in bfloat16's."""
SMALLER = tl.constexpr(2.0**120)
"""What the numbers so made are too small by."""
GROUP = tl.constexpr(32)
"""Columns whose numbers get one factor."""


@dataclass(frozen=True, slots=True)
class WordsTile:
    """What a program takes: rows by features, so many columns at a time, and how."""

    rows: int
    features: int
    inputs: int
    warps: int
    stages: int
    splits: int = 1
    """Programs that share out the columns of a tile."""


@triton.jit
def _half(word, SHIFT: tl.constexpr):
    """Codes at bits SHIFT and SHIFT + 16 of words as two numbers of bfloat16 in the same halves, SMALLER times too small."""
    sign = (word << (8 - SHIFT)) & SIGNS
    size = word << (4 - SHIFT) if SHIFT < 4 else word >> (SHIFT - 4)
    return sign | (size & SIZES)


@triton.jit
def _load_words(words_ptr, scale_ptrs, features, start, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PAIRED: tl.constexpr):  # fmt: skip
    """Numbers [features, INPUTS] of a weight from column `start` on, columns as `column_at` says.

    They are exact in bfloat16. PAIRED: they are bfloat16, PAIRED_UNIT times too small, and exact where scales are from
    2^-53 to 2^71; smaller ones lose bits, larger ones and no numbers are infinite.
    """
    WORDS: tl.constexpr = INPUTS // 4
    GROUPS: tl.constexpr = INPUTS // GROUP
    words, groups = start // 4 + tl.arange(0, WORDS), start // GROUP + tl.arange(0, GROUPS)
    word_ptrs = words_ptr + features.to(tl.int64)[:, None] * (COLUMNS // 4) + words[None, :]
    factor_ptrs = scale_ptrs[:, None] + (groups * GROUP // BLOCK_COLUMNS)[None, :]
    if COLUMNS % INPUTS == 0:
        codes, scales = tl.load(word_ptrs), tl.load(factor_ptrs)
    else:
        codes = tl.load(word_ptrs, mask=(words < COLUMNS // 4)[None, :], other=0)
        scales = tl.load(factor_ptrs, mask=(groups < COLUMNS // GROUP)[None, :], other=1.0)
    factors = scales
    if PAIRED:
        bits = tl.minimum(scales.to(tl.int32, bitcast=True), 199 << 23)
        factors = ((bits >> 16) + (56 << 7)) * 0x10001
    factors = tl.broadcast_to(factors[:, :, None], [features.shape[0], GROUPS, 8])
    factors = tl.reshape(factors, [features.shape[0], WORDS])
    low0, high0 = low_high(_half(codes, 0), factors, SMALLER, PAIRED)
    low1, high1 = low_high(_half(codes, 8), factors, SMALLER, PAIRED)
    both = tl.join(tl.join(low0, low1), tl.join(high0, high1))
    numbers = tl.reshape(both, [features.shape[0], WORDS // 4, 4, 2, 2])
    return tl.reshape(tl.permute(numbers, [0, 1, 3, 2, 4]), [features.shape[0], INPUTS])


@triton.jit
def _words_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    out_ptr,
    rows,
    features,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
    PAIRED: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
    ASK: tl.constexpr,
):
    START()
    STEPS: tl.constexpr = (COLUMNS + INPUTS - 1) // INPUTS
    EACH: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    row_tiles, feature_tiles = tl.cdiv(rows, ROWS), tl.cdiv(features, FEATURES)
    place = tl.program_id(0)
    before = place // (TOGETHER * feature_tiles) * TOGETHER
    high = tl.minimum(row_tiles - before, TOGETHER)
    within = place % (TOGETHER * feature_tiles)
    row = (before + within % high) * ROWS + tl.arange(0, ROWS)
    feature = within // high * FEATURES + tl.arange(0, FEATURES)
    # Beyond the last row and feature the last is taken once more, and not stored.
    known_row = tl.minimum(row, rows - 1).to(tl.int64)
    known = tl.minimum(feature, features - 1)
    scale_ptrs = scale_rows(scales_ptr, known, COLUMNS, BLOCK_ROWS, BLOCK_COLUMNS)
    first = tl.program_id(1) * EACH
    AHEAD: tl.constexpr = min(EACH * INPUTS, MOST_AHEAD, COLUMNS)
    asked = tl.minimum(first * INPUTS, COLUMNS - AHEAD)
    ASK(words_ptr + (known.to(tl.int64) * COLUMNS + asked) // 4, AHEAD)
    READY()
    cols = tl.arange(0, INPUTS)
    x_ptrs = x_ptr + known_row[:, None] * COLUMNS + cols[None, :]
    total = tl.zeros([FEATURES, ROWS], tl.float32)
    for at in range(first, tl.minimum(first + EACH, STEPS)):
        start = at * INPUTS
        if COLUMNS % INPUTS == 0:
            x = tl.load(x_ptrs + start)
        else:
            x = tl.load(x_ptrs + start, mask=(start + cols < COLUMNS)[None, :], other=0.0)
        weight = _load_words(
            words_ptr, scale_ptrs, known, start, COLUMNS, INPUTS, BLOCK_COLUMNS, PAIRED
        )
        total = tl.dot(weight.to(tl.bfloat16), tl.trans(x), total)
    if PAIRED:
        total *= PAIRED_UNIT
    out = tl.trans(total)
    part = tl.program_id(1).to(tl.int64) * rows
    out_ptrs = out_ptr + (part + row)[:, None] * features + feature[None, :]
    stored = (row < rows)[:, None] & (feature < features)[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=stored)


def takes(columns: int, blocks: ScaleBlocks, group: int) -> bool:
    """Whether the kernel multiplies a weight: scales are powers of two, and groups of columns are whole."""
    return blocks.power_of_two and columns % group == 0 and blocks.columns % GROUP.value == 0


def tile_for(rows: int, features: int, columns: int) -> WordsTile:
    """The tile of a weight, by rows: measured on an H200 with 4 and with 8192 of DeepSeek V4.1's.

    `benchmarks/ops/gpu_quant_linear.py --model v41 --tune` measures others beside it.
    """
    if rows > 64:
        return WordsTile(128 if rows <= 128 else 256, 64, 64, 4, 3)
    tiles, steps = triton.cdiv(features, 64), triton.cdiv(columns, 128)
    splits = max(min(MOST_PROGRAMS // tiles, steps // LEAST_STEPS, MOST_SPLITS), 1)
    return WordsTile(max(triton.next_power_of_2(rows), 16), 64, 128, 4, 4, splits)


def multiply_words(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    blocks: ScaleBlocks,
    group: int,
    out: Tensor,
    tile: WordsTile | None = None,
) -> None:
    """Write products of rows, rounded by `group` columns, to `out`; arguments as of `scaled_linear`, at least one row."""
    rows, columns = x.shape
    features = codes.shape[0]
    # What E4M3 and a power of two hold is exact in bfloat16, but not always in float16.
    wide = x.float() if x.dtype == torch.float16 else x
    rounded = fake_fp8_in_order(wide, group, A_WORD).to(torch.bfloat16)
    tile = tile or tile_for(rows, features, columns)
    found = parts_of(out, tile.splits)
    grid = (triton.cdiv(rows, tile.rows) * triton.cdiv(features, tile.features), tile.splits)
    _words_kernel[grid](
        rounded, codes.view(torch.int32), scales, found, rows, features,
        COLUMNS=columns, BLOCK_ROWS=blocks.rows, BLOCK_COLUMNS=min(blocks.columns, columns),
        ROWS=tile.rows, FEATURES=tile.features, INPUTS=tile.inputs, SPLITS=tile.splits, TOGETHER=TOGETHER,
        PAIRED=multiplies_pairs(rounded), num_warps=tile.warps, num_stages=tile.stages,
        **asking_on(rounded.device.type),
    )  # fmt: skip
    if tile.splits > 1:
        add_parts(found, out)
