# pyright: reportArgumentType=false, reportCallIssue=false
"""Decode rows in Triton: when rotation, cache and attention are one launch, and what a chip is asked for in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
from torch import Tensor

from tokamak.ops.paged_attention.triton import MOST_DECODE_ROWS, TritonAttention
from tokamak.ops.paged_attention.triton_decode import (
    COUNTERS,
    IN_ORDER,
    DecodeForm,
    arrivals,
    choose_form,
    merge_splits,
    rows_to_merge,
)
from tokamak.ops.rope.triton import triton_rotate_and_cache
from tokamak.ops.rope.triton_stored import takes
from tokamak.ops.rotate_cache_attend.reference import rotate_cache_attend
from tokamak.ops.rotate_cache_attend.triton_kernel import _rotate_cache_attend_kernel, fetch_nothing
from tokamak.ops.triton_facts import fits, rows_of

BYTES_AHEAD = 24 << 20
"""Bytes that all programs together may ask for ahead: about half of a second cache."""
FETCHED_BYTES = 16
"""What is asked for ahead comes in whole pieces of it."""
LANES_PER_WARP = 32
LEAST_ROWS = 1 if torch.version.hip is None else 16
"""Rows of a product that matrix units take; AMD's take no fewer."""
MOST_PAIRS = 600
"""Requests times key heads up to which one launch wins; with more, two lighter kernels fill the chip better:
128 requests of 8 key heads took 151 us in one launch and 132 us in two (an H200, 1,100 tokens of context)."""


class TritonDecode:
    """Decode rows on these kernels, started as a chip can: `launch` as of `paged_decode`.

    fetch: asks the second cache for some bytes at every place, 0 for none; takes pointers and int32 sizes.
    """

    def __init__(
        self,
        launch: Mapping[str, object] = IN_ORDER,
        fetch: object | None = None,
        form: DecodeForm | None = None,
    ) -> None:
        self._launch = launch
        self._fetch = fetch
        self._form = form
        self._attention = TritonAttention(launch)

    def rotate_cache_attend(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        write_slots: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        block_table: Tensor,
        lengths: Tensor,
        query_starts: Tensor,
        q_width: int,
        scale: float,
        window: int,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """Rotate and cache decode rows, and attend from them."""
        if not qkv.shape[0]:
            return
        _, kv_heads, block_tokens, head_dim = k_cache.shape
        requests, groups = lengths.shape[0], out.shape[1] // kv_heads
        rows, pairs = groups * q_width, requests * kv_heads
        if rows > MOST_DECODE_ROWS or pairs > MOST_PAIRS:
            q = triton_rotate_and_cache(
                qkv, positions, cos_sin, k_cache, v_cache, write_slots, q_norm, k_norm, eps
            )
            self._attention.paged_attention(
                q, k_cache, v_cache, block_table, lengths, query_starts, q_width, scale, window, out,
                sinks,
            )  # fmt: skip
            return
        qkv = rows_of(qkv)
        strides = (
            k_cache.stride(3),
            v_cache.stride(3),
            out.stride(2),
            cos_sin.stride(1),
            block_table.stride(1),
        )
        assert strides == (1, 1, 1, 1, 1), f"heads and tables lie in steps of {strides}, not of 1"
        row_bytes = head_dim * max(k_cache.element_size(), qkv.element_size())
        form = self._form or choose_form(requests, kv_heads, row_bytes, qkv.device)
        splits, wide_dim = form.splits, max(triton.next_power_of_2(head_dim), 16)
        arrived = arrivals(qkv.device) if form.merge == "here" and pairs <= COUNTERS else None
        asked_blocks = self._asked_blocks(k_cache, v_cache, form, pairs)
        partial = out
        if splits > 1:
            room = pairs * splits * rows * (head_dim + 2)
            partial = torch.empty(room, dtype=torch.float32, device=qkv.device)
        _rotate_cache_attend_kernel[(pairs, splits)](
            qkv, positions, cos_sin, k_cache, v_cache, write_slots,
            qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            block_table, lengths, sinks, out, partial, lengths if arrived is None else arrived,
            eps, scale, window, kv_heads, block_table.shape[1], asked_blocks,
            qkv.stride(0), cos_sin.stride(0),
            k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            v_cache.stride(0), v_cache.stride(1), v_cache.stride(2),
            block_table.stride(0), out.stride(0), out.stride(1),
            NORMS_Q=q_norm is not None, NORMS_K=k_norm is not None,
            DIM=head_dim, WIDE_DIM=wide_dim, HALF=cos_sin.shape[1] // 2, GROUPS=groups, Q_WIDTH=q_width,
            ROWS=max(triton.next_power_of_2(rows), LEAST_ROWS), BLOCK_TOKENS=block_tokens, TILE=form.tile,
            SPLITS=splits, WIDE_SPLITS=triton.next_power_of_2(splits),
            MERGE_ROWS=rows_to_merge(splits, rows, wide_dim), WINDOWED=window > 0,
            MERGE_HERE=arrived is not None and splits > 1, AHEAD=form.ahead,
            ASKS=asked_blocks > 0, LANES=LANES_PER_WARP * form.warps, FETCH=self._fetch or fetch_nothing,
            num_warps=form.warps, num_stages=form.stages, **self._launch,
        )  # fmt: skip
        if splits > 1 and arrived is None:
            merge_splits(
                partial, lengths, out, kv_heads, q_width, q_width, window, form, self._launch
            )

    def _asked_blocks(self, k_cache: Tensor, v_cache: Tensor, form: DecodeForm, pairs: int) -> int:
        """How many blocks a program asks for ahead; 0 where a chip cannot, or a head's rows do not lie together."""
        _, _, block_tokens, head_dim = k_cache.shape
        together = k_cache.stride(2) == v_cache.stride(2) == head_dim
        if self._fetch is None or not together or form.tile % block_tokens:
            return 0
        size = block_tokens * head_dim * k_cache.element_size()
        if size % FETCHED_BYTES:
            return 0
        room = BYTES_AHEAD // (pairs * form.splits * 2 * size)
        return min(room, LANES_PER_WARP * form.warps)


triton_rotate_cache_attend = rotate_cache_attend.backend("triton", fits=fits, takes=takes)(
    TritonDecode().rotate_cache_attend
)
