# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Where the weights of a program's expert and features lie, and those of 4 bits in registers, for few rows and for many."""

from __future__ import annotations

import triton
import triton.language as tl

from tokamak.ops.quantize.triton_floats import float_of_ue8m0
from tokamak.ops.triton_widen import SIGNS, low_high

GROUP = tl.constexpr(32)
"""Columns of a 4-bit matrix that share a power of two."""


SIZES = tl.constexpr(0x01C001C0)
"""Where E2M1's exponent and mantissa lie in bfloat16's."""
INFINITIES = tl.constexpr(0x7F807F80)
"""Two of bfloat16."""
SMALLER = tl.constexpr(2.0**126)
"""What the numbers so made are too small by."""


@triton.jit
def _half(word, AT: tl.constexpr):
    """The number AT of both halves of words as bfloat16, 2^126 times too small, in the same halves; see `PLACES`."""
    BOTH: tl.constexpr = SIGNS | SIZES
    if AT == 0:
        half = word & BOTH
    elif AT == 1:
        half = (word << 3) & BOTH
    elif AT == 2:
        half = ((word << 1) & SIGNS) | ((word << 6) & SIZES)
    else:
        half = ((word << 2) & SIGNS) | ((word >> 3) & SIZES)
    return half


@triton.jit
def load_packed(
    codes_ptr,
    scales_ptr,
    rows,
    start,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """Numbers [rows, INPUTS] of a 4-bit matrix from column `start` on, zeros behind the last, columns as `column_at` says.

    codes_ptr: int32, eight codes a word, whose bits lie in `PLACES`. Numbers are float32 and exact in bfloat16. PAIRED:
    bfloat16, PAIRED_UNIT times too small and exact where scales are from 2^-68 to 2^65; smaller ones lose bits, larger ones
    and no numbers are infinite.
    """
    WORDS: tl.constexpr = INPUTS // 8
    GROUPS: tl.constexpr = INPUTS // GROUP
    words = start // 8 + tl.arange(0, WORDS)
    groups = start // GROUP + tl.arange(0, GROUPS)
    code_ptrs = codes_ptr + rows[:, None] * (COLUMNS // 8) + words[None, :]
    scale_ptrs = scales_ptr + rows[:, None] * (COLUMNS // GROUP) + groups[None, :]
    if COLUMNS % INPUTS == 0:
        codes, scales = tl.load(code_ptrs), tl.load(scale_ptrs)
    else:
        codes = tl.load(code_ptrs, mask=(words < COLUMNS // 8)[None, :], other=0)
        scales = tl.load(scale_ptrs, mask=(groups < COLUMNS // GROUP)[None, :], other=0)
    if PAIRED:
        factors = scales.to(tl.uint32) * 0x800080 + 62 * 0x800080
        factors = tl.minimum(factors, INFINITIES).to(tl.int32, bitcast=True)
    else:
        factors = float_of_ue8m0(scales)
    factors = tl.broadcast_to(factors[:, :, None], [rows.shape[0], GROUPS, 4])
    factors = tl.reshape(factors, [rows.shape[0], WORDS])
    low0, high0 = low_high(_half(codes, 0), factors, SMALLER, PAIRED)
    low1, high1 = low_high(_half(codes, 1), factors, SMALLER, PAIRED)
    low2, high2 = low_high(_half(codes, 2), factors, SMALLER, PAIRED)
    low3, high3 = low_high(_half(codes, 3), factors, SMALLER, PAIRED)
    low = tl.join(tl.join(low0, low2), tl.join(low1, low3))
    high = tl.join(tl.join(high0, high2), tl.join(high1, high3))
    numbers = tl.reshape(tl.join(low, high), [rows.shape[0], GROUPS, 4, 2, 2, 2])
    return tl.reshape(tl.permute(numbers, [0, 1, 3, 4, 2, 5]), [rows.shape[0], INPUTS])


@triton.jit
def expert_matrix(
    values_ptr,
    scales_ptr,
    expert,
    NUMBERS: tl.constexpr,
    PACKED: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
):
    """Where the matrix and the scales of an expert begin, of so many numbers each; PACKED: eight lie in a word."""
    TOGETHER: tl.constexpr = 1 + 7 * PACKED
    return values_ptr + expert * (NUMBERS // TOGETHER), scales_ptr + expert * EXPERT_SCALES


@triton.jit
def features_of_program(COUNT: tl.constexpr, FEATURES: tl.constexpr):
    """The features that a program computes, and those it reads: beyond the last the last once more, not to be stored."""
    features = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    return features, tl.minimum(features, COUNT - 1)
