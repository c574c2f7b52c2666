# pyright: reportArgumentType=false, reportCallIssue=false
"""How do Triton kernels put numbers into a cache? Rounded to its format, and clamped where that has no infinity."""

from __future__ import annotations

import triton
import triton.language as tl

from tokamak.device.facts import DeviceFacts
from tokamak.ops.registry import takes_numbers
from tokamak.ops.rope.reference import FP8_LARGEST

LARGEST: tl.constexpr = tl.constexpr(FP8_LARGEST)
FIRST_NVIDIA = 89
"""Compute capability from which NVIDIA's chips convert E4M3, and Triton compiles it for them."""


@triton.jit
def stored(x, kind: tl.constexpr) -> tl.tensor:
    """Numbers in the format of a cache, as the reference of `rotate_and_cache` stores them."""
    if kind == tl.float8e4nv:
        wide = x.to(tl.float32)
        # No number is below or above NaN, so NaN stays what it is.
        wide = tl.where(wide > LARGEST, LARGEST, wide)
        x = tl.where(wide < -LARGEST, -LARGEST, wide)
    return x.to(kind)


def takes(facts: DeviceFacts, cache_dtype: str) -> bool:
    """Caches of numbers, not of records; in fp8 not on older chips of NVIDIA.

    For AMD's, Triton converts in software where the chip has no such numbers, or others of that name (gfx942).
    """
    if not takes_numbers(facts, cache_dtype):
        return False
    if cache_dtype != "fp8" or facts.vendor != "nvidia":
        return True
    return int(facts.arch.removeprefix("sm")) >= FIRST_NVIDIA
