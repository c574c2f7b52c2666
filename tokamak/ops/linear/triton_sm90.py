# pyright: reportArgumentType=false, reportCallIssue=false
"""Products of few rows on Hopper: the kernels of `triton_few.py`, each begun while the one before it ends.

A program asks for weights, which nothing writes, before it waits for what the kernels before it wrote. So
the start of a kernel and its first reads hide behind the end of its predecessor.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from tokamak.ops import triton_overlap
from tokamak.ops.linear.few_rows import (
    few_rows_after_norm,
    few_rows_gated,
    few_rows_into,
    few_rows_linear,
)
from tokamak.ops.linear.triton_few import FewRows
from tokamak.ops.linear.triton_sm90_registers import multiply_in_registers
from tokamak.ops.triton_overlap import fits


@triton.jit
def _ask(tile_ptr, columns, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Ask the second cache for the first COLUMNS of each feature, in one piece per lane of the program."""
    LANES: tl.constexpr = 32 * WARPS // FEATURES
    PIECE: tl.constexpr = COLUMNS // LANES
    lane = tl.arange(0, 32 * WARPS)
    place = (tile_ptr + (lane // LANES) * columns + (lane % LANES) * PIECE).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [place, tl.full([32 * WARPS], PIECE * 2, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


OVERLAPPED: Mapping[str, object] = {**triton_overlap.OVERLAPPED, "AHEAD": _ask}
few_rows = FewRows(OVERLAPPED, multiply_in_registers)
few_rows_linear.backend("triton_sm90", fits=fits)(few_rows.linear)
few_rows_after_norm.backend("triton_sm90", fits=fits)(few_rows.after_norm)
few_rows_gated.backend("triton_sm90", fits=fits)(few_rows.gated)
few_rows_into.backend("triton_sm90", fits=fits)(few_rows.into)
