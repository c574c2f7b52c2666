"""How does a kernel on Hopper begin while the one before it ends?

It lets the next one begin at once, and waits before it reads what another wrote. Every kernel launched so must
wait in every program: the one behind it relies on all before it to be done when it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokamak.device.facts import DeviceFacts


@triton.jit
def start() -> None:
    """Let the next kernel begin."""
    gdc_launch_dependents()


@triton.jit
def ready() -> None:
    """Wait for the kernel before."""
    gdc_wait()


@triton.jit
def ask(row_ptrs, BYTES: tl.constexpr):
    """Ask the second cache for BYTES, a multiple of 16, behind each of some pointers, which are multiples of 16 too."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
        "=r,l,r",
        [row_ptrs.to(tl.int64), tl.full(row_ptrs.shape, BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


OVERLAPPED: Mapping[str, object] = {"START": start, "READY": ready, "launch_pdl": True}


def fits(facts: DeviceFacts) -> bool:
    """Hopper with Triton."""
    return facts.vendor == "nvidia" and facts.arch == "sm90" and facts.has("triton")
