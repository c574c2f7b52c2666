"""Decode rows on Hopper: the kernel begins, and asks for cached rows, while the projection before it ends.

A head's rows of a block lie together, so one lane asks for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokamak.ops.paged_attention.triton_sm90 import OVERLAPPED, fits
from tokamak.ops.rope.triton_stored import takes
from tokamak.ops.rotate_cache_attend.reference import rotate_cache_attend
from tokamak.ops.rotate_cache_attend.triton import TritonDecode


@triton.jit
def fetch(place_ptr, size) -> None:
    """Ask the second cache for `size` bytes at each place, int32 and whole sixteens; 0 asks for nothing."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred %wanted;
        setp.ne.s32 %wanted, $2, 0;
        @%wanted cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [place_ptr.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


sm90_rotate_cache_attend = rotate_cache_attend.backend(
    "triton_sm90", fits=fits, takes=takes, before="triton"
)(TritonDecode(OVERLAPPED, fetch).rotate_cache_attend)
