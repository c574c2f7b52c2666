# pyright: reportArgumentType=false, reportCallIssue=false
"""Routing by sqrt(softplus) in Triton: one program per row, as `triton.py` chooses, with a bias that only chooses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.moe_route.rooted import SMALLEST_SUM, moe_route_rooted, moe_weigh_rooted
from tokamak.ops.moe_route.triton import CHOSEN_KEY, expert_of, keys_of, warps_for
from tokamak.ops.triton_facts import fits, rows_of
from tokamak.ops.triton_order import order_on

_SMALLEST_SUM = tl.constexpr(SMALLEST_SUM)


@triton.jit
def _root(scores):
    """sqrt(log(1 + exp(score))), exact where exp(score) is far below 1 too."""
    small = tl.exp(tl.minimum(scores, 20.0))
    whole = 1.0 + small
    # What rounding 1 + small lost is put back by the ratio of what was meant and what is there (Goldberg 1991).
    soft = tl.where(whole == 1.0, small, tl.log(whole) * tl.div_rn(small, whole - 1.0))
    return tl.sqrt(tl.where(scores < 20.0, soft, scores))


@triton.jit
def _route_rooted_kernel(
    scores_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    stride_scores_row,
    experts,
    scale,
    CHOSEN: tl.constexpr,
    CHOSEN_TILE: tl.constexpr,
    EXPERTS_TILE: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, EXPERTS_TILE)
    known = cols < experts
    scores = tl.load(scores_ptr + row * stride_scores_row + cols, mask=known, other=0.0)
    roots = _root(scores.to(tl.float32))
    bias = tl.load(bias_ptr + cols, mask=known, other=0.0)
    keys = keys_of(tl.where(known, roots + bias, float("-inf")), cols)

    slots = tl.arange(0, CHOSEN_TILE)
    ids = tl.zeros([CHOSEN_TILE], tl.int32)
    found = tl.zeros([CHOSEN_TILE], tl.float32)
    for slot in tl.static_range(CHOSEN):
        expert = expert_of(tl.max(keys, axis=0))
        root = tl.sum(tl.where(cols == expert, roots, 0.0), axis=0)
        ids = tl.where(slots == slot, expert, ids)
        found = tl.where(slots == slot, root, found)
        keys = tl.where(cols == expert, CHOSEN_KEY, keys)

    weights = found / (tl.sum(found, axis=0) + _SMALLEST_SUM) * scale
    places = row * CHOSEN + slots
    tl.store(ids_ptr + places, ids, mask=slots < CHOSEN)
    tl.store(weights_ptr + places, weights, mask=slots < CHOSEN)


@triton.jit
def _weigh_rooted_kernel(
    scores_ptr,
    ids_ptr,
    weights_ptr,
    stride_scores_row,
    scale,
    CHOSEN: tl.constexpr,
    CHOSEN_TILE: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, CHOSEN_TILE)
    inside = slots < CHOSEN
    places = row * CHOSEN + slots
    ids = tl.load(ids_ptr + places, mask=inside, other=0)
    scores = tl.load(scores_ptr + row * stride_scores_row + ids, mask=inside, other=0.0)
    found = tl.where(inside, _root(scores.to(tl.float32)), 0.0)
    weights = found / (tl.sum(found, axis=0) + _SMALLEST_SUM) * scale
    tl.store(weights_ptr + places, weights, mask=inside)


@moe_route_rooted.backend("triton", fits=fits)
def triton_moe_route_rooted(
    scores: Tensor, bias: Tensor, chosen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row that root and bias rank highest, and weigh them by their roots."""
    scores = rows_of(scores)
    rows, experts = scores.shape
    ids = torch.empty((rows, chosen), dtype=torch.int32, device=scores.device)
    weights = torch.empty((rows, chosen), dtype=torch.float32, device=scores.device)
    if rows:
        tile = triton.next_power_of_2(experts)
        _route_rooted_kernel[(rows,)](
            scores, bias, ids, weights, scores.stride(0), experts, scale,
            CHOSEN=chosen, CHOSEN_TILE=triton.next_power_of_2(chosen), EXPERTS_TILE=tile,
            num_warps=warps_for(tile), **order_on(scores.device.type),
        )  # fmt: skip
    return ids, weights


@moe_weigh_rooted.backend("triton", fits=fits)
def triton_moe_weigh_rooted(scores: Tensor, ids: Tensor, scale: float) -> Tensor:
    """Weigh the experts of each row by their roots."""
    scores, ids = rows_of(scores), ids.contiguous()
    rows, chosen = ids.shape
    weights = torch.empty((rows, chosen), dtype=torch.float32, device=scores.device)
    if rows:
        _weigh_rooted_kernel[(rows,)](
            scores, ids, weights, scores.stride(0), scale,
            CHOSEN=chosen, CHOSEN_TILE=triton.next_power_of_2(chosen), num_warps=1, **order_on(scores.device.type),
        )  # fmt: skip
    return weights
