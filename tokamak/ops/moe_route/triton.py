# pyright: reportArgumentType=false, reportCallIssue=false
"""Routing in Triton: one program of one warp or few per row, one reduction for each expert it chooses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.moe_route.reference import moe_route
from tokamak.ops.triton_facts import fits, rows_of

EXPERTS_PER_WARP = 256
MAX_WARPS = 8
CHOSEN_KEY = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
"""Less than the key of any score."""


@triton.jit
def keys_of(scores, cols):
    """Integers ordered like float32 scores: the score above, the place below it, so that of equals the first is largest."""
    # One zero and one NaN, as their bits are compared. A NaN is larger than all numbers.
    scores = tl.where(scores == 0.0, 0.0, scores)
    scores = tl.where(scores != scores, float("nan"), scores)
    bits = scores.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - cols).to(tl.int64)


@triton.jit
def expert_of(key):
    """The place in a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


def warps_for(tile: int) -> int:
    """Warps of a program that holds the scores of `tile` experts, a power of two."""
    return min(max(tile // EXPERTS_PER_WARP, 1), MAX_WARPS)


@triton.jit
def _moe_route_kernel(
    scores_ptr,
    ids_ptr,
    weights_ptr,
    stride_scores_row,
    experts,
    CHOSEN: tl.constexpr,
    CHOSEN_TILE: tl.constexpr,
    EXPERTS_TILE: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, EXPERTS_TILE)
    score_ptrs = scores_ptr + row * stride_scores_row + cols
    scores = tl.load(score_ptrs, mask=cols < experts, other=float("-inf")).to(tl.float32)
    keys = keys_of(scores, cols)

    slots = tl.arange(0, CHOSEN_TILE)
    ids = tl.zeros([CHOSEN_TILE], tl.int32)
    best = tl.full([CHOSEN_TILE], float("-inf"), tl.float32)
    for slot in tl.static_range(CHOSEN):
        key = tl.max(keys, axis=0)
        expert = expert_of(key)
        high = (key >> 32).to(tl.int32)
        score = tl.where(high < 0, high ^ 0x7FFFFFFF, high).to(tl.float32, bitcast=True)
        if slot == 0:
            peak = score
        ids = tl.where(slots == slot, expert, ids)
        best = tl.where(slots == slot, score, best)
        keys = tl.where(cols == expert, CHOSEN_KEY, keys)

    shares = tl.exp(best - peak)
    total = tl.sum(shares if RENORMALISE else tl.exp(scores - peak), axis=0)
    places = row * CHOSEN + slots
    tl.store(ids_ptr + places, ids, mask=slots < CHOSEN)
    tl.store(weights_ptr + places, shares / total, mask=slots < CHOSEN)


@moe_route.backend("triton", fits=fits)
def triton_moe_route(scores: Tensor, chosen: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Choose the likeliest experts of each row, and weigh them."""
    scores = rows_of(scores)
    rows, experts = scores.shape
    ids = torch.empty((rows, chosen), dtype=torch.int32, device=scores.device)
    weights = torch.empty((rows, chosen), dtype=torch.float32, device=scores.device)
    if rows:
        tile = triton.next_power_of_2(experts)
        _moe_route_kernel[(rows,)](
            scores, ids, weights, scores.stride(0), experts,
            CHOSEN=chosen, CHOSEN_TILE=triton.next_power_of_2(chosen), EXPERTS_TILE=tile,
            RENORMALISE=renormalise, num_warps=warps_for(tile),
        )  # fmt: skip
    return ids, weights
