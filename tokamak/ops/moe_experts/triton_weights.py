# pyright: reportArgumentType=false, reportCallIssue=false
"""Where the weights of a program's expert and features lie, and those of 4 bits in registers, for few rows and for many."""

from __future__ import annotations

import triton
import triton.language as tl

from tokamak.ops.quantize.triton_floats import float_of_e2m1, float_of_ue8m0

GROUP = tl.constexpr(32)
"""Columns of a 4-bit matrix that share a power of two."""


@triton.jit
def load_packed(
    codes_ptr, scales_ptr, rows, start, COLUMNS: tl.constexpr, INPUTS: tl.constexpr
):  # fmt: skip
    """Numbers [rows, INPUTS] of a 4-bit matrix from column `start` on, float32, exact in bfloat16; zeros behind the last."""
    pairs = start // 2 + tl.arange(0, INPUTS // 2)
    groups = start // GROUP + tl.arange(0, INPUTS // GROUP)
    code_ptrs = codes_ptr + rows[:, None] * (COLUMNS // 2) + pairs[None, :]
    scale_ptrs = scales_ptr + rows[:, None] * (COLUMNS // GROUP) + groups[None, :]
    if COLUMNS % INPUTS == 0:
        codes, scales = tl.load(code_ptrs), tl.load(scale_ptrs)
    else:
        codes = tl.load(code_ptrs, mask=(pairs < COLUMNS // 2)[None, :], other=0)
        scales = tl.load(scale_ptrs, mask=(groups < COLUMNS // GROUP)[None, :], other=0)
    numbers = tl.interleave(float_of_e2m1(codes & 15), float_of_e2m1(codes >> 4))
    grouped = tl.reshape(numbers, [rows.shape[0], INPUTS // GROUP, GROUP])
    factors = float_of_ue8m0(scales)
    return tl.reshape(grouped * factors[:, :, None], [rows.shape[0], INPUTS])


@triton.jit
def expert_matrix(
    values_ptr,
    scales_ptr,
    expert,
    NUMBERS: tl.constexpr,
    PACKED: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
):
    """Where the matrix and the scales of an expert begin, of so many numbers each; PACKED: two lie in a byte."""
    BYTE_NUMBERS: tl.constexpr = 1 + PACKED
    return values_ptr + expert * (NUMBERS // BYTE_NUMBERS), scales_ptr + expert * EXPERT_SCALES


@triton.jit
def features_of_program(COUNT: tl.constexpr, FEATURES: tl.constexpr):
    """The features that a program computes, and those it reads: beyond the last the last once more, not to be stored."""
    features = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    return features, tl.minimum(features, COUNT - 1)
