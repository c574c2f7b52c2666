"""What do decode rows do between two projections? Rotate, cache, attend: the two ops, one after the other."""

from __future__ import annotations

from torch import Tensor

from tokamak.ops.paged_attention.reference import paged_attention
from tokamak.ops.registry import op
from tokamak.ops.rope.reference import rotate_and_cache


@op(recordable=False)
def rotate_cache_attend(
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
    """Rotate and cache decode rows as `rotate_and_cache` does, then attend from them as `paged_attention` does.

    Every request has q_width >= 1 token rows, its newest. Their write slots lie where the block table says, or
    are all -1 for a request that is padding: what it sees there, and its rows of `out`, mean nothing.
    out: [tokens, heads, head_dim] in the dtype of qkv.
    """
    q = rotate_and_cache.reference(
        qkv, positions, cos_sin, k_cache, v_cache, write_slots, q_norm, k_norm, eps
    )
    paged_attention.reference(
        q, k_cache, v_cache, block_table, lengths, query_starts, q_width, scale, window, out, sinks
    )  # fmt: skip
