# pyright: reportArgumentType=false, reportCallIssue=false
"""Products of two bfloat16 numbers in one instruction, where Triton would widen each (NVIDIA, sm_80 and later)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def times_pair(a, b):
    """Both halves of words a times those of words b, int32; -0 is added, which changes nothing."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 none; mov.b32 none, 0x80008000; fma.rn.bf16x2 $0, $1, $2, none; }",
        "=r,r,r",
        [a, b],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
