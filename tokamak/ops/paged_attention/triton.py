"""Paged attention in Triton: rows of one width by a split kernel, ragged chunks by a kernel over tiles of queries.

Neither reads a number to the host, and no grid depends on numbers of the device, so any call can be recorded.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tokamak.ops.paged_attention import triton_decode, triton_prefill
from tokamak.ops.paged_attention.reference import paged_attention
from tokamak.ops.rope.triton_stored import takes
from tokamak.ops.triton_facts import fits

MOST_DECODE_ROWS = 64
"""Query rows per key head (queries of a request times heads) up to which one tile holds them all."""


class TritonAttention:
    """Paged attention on these kernels, started as a chip can: `launch` as of `paged_decode`."""

    def __init__(self, launch: Mapping[str, object] = triton_decode.IN_ORDER) -> None:
        self._launch = launch

    def paged_attention(
        self,
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
        if not q.shape[0]:
            return
        strides = (
            q.stride(2),
            k_cache.stride(3),
            v_cache.stride(3),
            out.stride(2),
            block_table.stride(1),
        )
        assert strides == (1, 1, 1, 1, 1), f"heads and tables lie in steps of {strides}, not of 1"
        kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
        groups, requests = q.shape[1] // kv_heads, lengths.shape[0]
        if q_width and q_width * groups <= MOST_DECODE_ROWS:
            row_bytes = head_dim * max(k_cache.element_size(), q.element_size())
            form = triton_decode.choose_form(requests, kv_heads, row_bytes, q.device)
            triton_decode.paged_decode(
                q, k_cache, v_cache, block_table, lengths, q_width, scale, window, out, form,
                self._launch, sinks,
            )  # fmt: skip
        else:
            form = triton_prefill.choose_form(
                groups, head_dim, q.element_size(), q.shape[0] // requests
            )
            triton_prefill.paged_prefill(
                q, k_cache, v_cache, block_table, lengths, query_starts, scale, window, out, form, sinks
            )  # fmt: skip


triton_paged_attention = paged_attention.backend("triton", fits=fits, takes=takes)(
    TritonAttention().paged_attention
)
