"""Decode rows on Hopper: the kernel begins, and asks for cached rows, while the projection before it ends."""

from __future__ import annotations

from tokamak.ops.paged_attention.triton_sm90 import OVERLAPPED, fits
from tokamak.ops.rotate_cache_attend.reference import rotate_cache_attend
from tokamak.ops.rotate_cache_attend.triton import TritonDecode

sm90_rotate_cache_attend = rotate_cache_attend.backend("triton_sm90", fits=fits)(
    TritonDecode(OVERLAPPED).rotate_cache_attend
)
