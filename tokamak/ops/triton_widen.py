# pyright: reportArgumentType=false, reportCallIssue=false
"""How do codes of few bits become bfloat16 in Triton? Two in a word at a time, by their bits and a factor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.triton_pair_sm90 import times_pair

SIGNS = tl.constexpr(-0x7FFF8000)
"""Bit 15 of both halves of a word."""
PAIRED_UNIT = tl.constexpr(2.0**64)
"""What numbers of pairs are kept too small by, so that neither they nor their factors leave bfloat16."""


def multiplies_pairs(rows: Tensor) -> bool:
    """Whether pairs of numbers are multiplied in one instruction, as NVIDIA's chips do it for rows of bfloat16."""
    known = rows.device.type != "cpu" and torch.version.hip is None
    return known and rows.dtype == torch.bfloat16


@triton.jit
def low_high(pairs, factors, SMALLER: tl.constexpr, PAIRED: tl.constexpr):
    """Both numbers of words of two bfloat16 by their factors.

    PAIRED: factors are such words too, and so are the results. Else factors and results are float32, and numbers are
    made SMALLER times larger first.
    """
    if PAIRED:
        pairs = times_pair(pairs, factors)
        low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        low = (pairs << 16).to(tl.float32, bitcast=True) * SMALLER * factors
        high = (pairs & -0x10000).to(tl.float32, bitcast=True) * SMALLER * factors
    return low, high
