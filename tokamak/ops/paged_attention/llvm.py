"""Paged attention in LLVM: one kernel for rows with one query, one for prompt chunks; which runs, and over what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tokamak.ops.jit.available import fits
from tokamak.ops.jit.compiler import KernelSource, Library, float_bits
from tokamak.ops.jit.objects import host
from tokamak.ops.jit.torch_kinds import KINDS, fresh
from tokamak.ops.paged_attention import llvm_decode, llvm_prefill
from tokamak.ops.paged_attention.llvm_rows import PARAMETERS, Shape
from tokamak.ops.paged_attention.padded import padded_paged_attention
from tokamak.ops.paged_attention.reference import paged_attention
from tokamak.ops.registry import takes_own

WHOLE_REQUESTS = 4
"""Decode requests per thread from which a thread takes all key heads of one: they lie side by side."""
FILES = sorted(Path(__file__).parent.glob("llvm*.py"))
"""What the compiled code depends on."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled calls of one shape."""

    decode: Callable[..., None]
    prefill: Callable[..., None]


@lru_cache(maxsize=8)
def kernels(shape: Shape) -> Kernels:
    """Compile (or read from disk) the kernels of a shape."""
    sources = [
        KernelSource("decode", PARAMETERS, llvm_decode.decode(shape)),
        KernelSource("prefill", PARAMETERS, llvm_prefill.prefill(shape)),
    ]
    library = Library(f"attention-{shape.name}", FILES, sources)
    return Kernels(library.function("decode"), library.function("prefill"))


@lru_cache(maxsize=8)
def _kernels_for(
    head_dim: int,
    groups: int,
    block_tokens: int,
    q: torch.dtype,
    k: torch.dtype,
    v: torch.dtype,
    sinks: bool,
) -> Kernels | None:
    """The kernels of these sizes and formats; None where none can be compiled."""
    if not q == k == v or q not in KINDS or head_dim % host().lanes or block_tokens % host().lanes:
        return None
    return kernels(Shape(head_dim, groups, KINDS[q], sinks))


@paged_attention.backend("llvm", fits=fits, takes=takes_own)
def llvm_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    q_width: int,
    scale: float,
    window: int,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Attend from this step's queries to all cached rows of their own request, causally."""
    _, kv_heads, block_tokens, head_dim = k_cache.shape
    tokens, heads, _ = q.shape
    groups, requests = heads // kv_heads, lengths.shape[0]
    *k_strides, k_last = k_cache.stride()
    *v_strides, v_last = v_cache.stride()
    calls = _kernels_for(
        head_dim, groups, block_tokens, q.dtype, k_cache.dtype, v_cache.dtype, sinks is not None
    )
    if calls is None or not k_last == v_last == block_table.stride(1) == 1:
        padded_paged_attention(
            q, k_cache, v_cache, block_table, lengths, query_starts, q_width, scale, window, out, sinks
        )  # fmt: skip
        return
    if not requests:
        return
    assert out.is_contiguous(), "attention writes whole rows"
    q = q.contiguous()
    common = (
        q.data_ptr(), k_cache.data_ptr(), *k_strides, v_cache.data_ptr(), *v_strides,
        block_table.data_ptr(), block_table.stride(0), lengths.data_ptr(), query_starts.data_ptr(),
        out.data_ptr(), float_bits(scale), window, kv_heads, block_tokens,
    )  # fmt: skip
    of_sinks = 0 if sinks is None else sinks.data_ptr()
    threads = torch.get_num_threads()
    if q_width == 1:
        share = 1 if requests < WHOLE_REQUESTS * threads else kv_heads
        stride = block_table.shape[1] * block_tokens
        own = fresh((threads * groups * share * (stride + head_dim),))
        calls.decode(threads, *common, 0, requests, share, own.data_ptr(), stride, of_sinks)
    else:
        most_rows = (q_width or tokens) * groups
        tiles = -(-most_rows // (2 * host().lanes))
        calls.prefill(threads, *common, 0, requests, tiles, 0, 0, of_sinks)
