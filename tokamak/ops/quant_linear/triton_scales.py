# pyright: reportArgumentType=false, reportCallIssue=false
"""Where do the scales of 8-bit weights lie, in Triton?"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_rows(
    scales_ptr,
    features,
    COLUMNS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Where the scales of features begin: one follows the other, for BLOCK_COLUMNS of the weight's columns each."""
    SCALE_COLUMNS: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    return scales_ptr + features // BLOCK_ROWS * SCALE_COLUMNS
