"""Paged attention on Hopper: decode kernels begin while the kernel before them ends.

A program looks up where its cached rows lie, and asks for those of earlier steps, before it waits for the
kernel before it, which wrote the queries and the newest rows. What is read before the wait (lengths, block
tables, older rows) must not come from that kernel, nor from one that may still run beside it: steps fill
their tables, and then look up embeddings in a kernel that no other overtakes.
"""

from __future__ import annotations

import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tokamak.device.facts import DeviceFacts
from tokamak.ops.paged_attention.reference import paged_attention
from tokamak.ops.paged_attention.triton import TritonAttention
from tokamak.ops.rope.triton_stored import takes


@triton.jit
def _start():
    gdc_launch_dependents()


@triton.jit
def _ready():
    gdc_wait()


OVERLAPPED = {"START": _start, "READY": _ready, "launch_pdl": True}


def fits(facts: DeviceFacts) -> bool:
    """Hopper with Triton."""
    return facts.vendor == "nvidia" and facts.arch == "sm90" and facts.has("triton")


sm90_paged_attention = paged_attention.backend(
    "triton_sm90", fits=fits, takes=takes, before="triton"
)(TritonAttention(OVERLAPPED).paged_attention)
