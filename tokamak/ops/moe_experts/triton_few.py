# pyright: reportArgumentType=false, reportCallIssue=false
"""Experts of few rows in Triton: a program per pair of row and expert and tile of features, products without tensor cores.

Two launches: gate and up with their activation, then down with the weighted sum over a row's experts in order.
Every weight of a pair is read once, so pairs that share an expert read it as often as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FewTiles:
    """Features and inputs that a program has on their way at a time, and its warps, for both launches."""

    gate_up_features: int = 2
    gate_up_inputs: int = 2048
    gate_up_warps: int = 8
    down_features: int = 8
    down_inputs: int = 512
    down_warps: int = 4


@triton.jit
def _few_gate_up_kernel(
    x_ptr,
    ids_ptr,
    gate_up_ptr,
    hidden_ptr,
    stride_x_row,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
):
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    features = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    kept = features < INNER
    gate_ptr = gate_up_ptr + expert * (2 * INNER * WIDTH)
    row_ptr = x_ptr + pair // CHOSEN * stride_x_row
    gates = tl.zeros([FEATURES, INPUTS], tl.float32)
    ups = tl.zeros([FEATURES, INPUTS], tl.float32)
    for start in tl.static_range(0, WIDTH, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        at = features[:, None] * WIDTH + inputs[None, :]
        inside = kept[:, None] & (inputs < WIDTH)[None, :]
        x = tl.load(row_ptr + inputs, mask=inputs < WIDTH, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + at, mask=inside, other=0.0)
        up = tl.load(gate_ptr + INNER * WIDTH + at, mask=inside, other=0.0)
        gates += gate.to(tl.float32) * x[None, :]
        ups += up.to(tl.float32) * x[None, :]
    gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(hidden_ptr + pair * INNER + features, hidden, mask=kept)


@triton.jit
def _few_down_kernel(
    hidden_ptr,
    ids_ptr,
    weights_ptr,
    down_ptr,
    out_ptr,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    features = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    kept = features < WIDTH
    total = tl.zeros([FEATURES, INPUTS], tl.float32)
    for slot in tl.static_range(CHOSEN):
        pair = row * CHOSEN + slot
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        share = tl.load(weights_ptr + pair)
        for start in tl.static_range(0, INNER, INPUTS):
            inputs = start + tl.arange(0, INPUTS)
            at = features[:, None] * INNER + inputs[None, :]
            inside = kept[:, None] & (inputs < INNER)[None, :]
            weight = tl.load(down_ptr + expert * (WIDTH * INNER) + at, mask=inside, other=0.0)
            hidden_ptrs = hidden_ptr + pair * INNER + inputs
            hidden = tl.load(hidden_ptrs, mask=inputs < INNER, other=0.0)
            total += weight.to(tl.float32) * (hidden * share)[None, :]
    tl.store(out_ptr + row * WIDTH + features, tl.sum(total, axis=1), mask=kept)


DEFAULT_TILES = FewTiles()


def experts_of_few(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    tiles: FewTiles = DEFAULT_TILES,
) -> Tensor:
    """The weighted sum over experts; arguments are those of `moe_experts`, with at least one row."""
    hidden = pass_few_gate_up(x, ids, gate_up, tiles)
    return pass_few_down(hidden, ids, weights, down, tiles, x.dtype)


def pass_few_gate_up(x: Tensor, ids: Tensor, gate_up: Tensor, tiles: FewTiles) -> Tensor:
    """silu(gate(x)) * up(x) of every pair, float32 [pairs, inner]."""
    pairs, chosen = ids.numel(), ids.shape[1]
    _, both, width = gate_up.shape
    inner = both // 2
    hidden = torch.empty((pairs, inner), dtype=torch.float32, device=x.device)
    _few_gate_up_kernel[(triton.cdiv(inner, tiles.gate_up_features), pairs)](
        x, ids, gate_up, hidden, x.stride(0),
        CHOSEN=chosen, WIDTH=width, INNER=inner, FEATURES=tiles.gate_up_features,
        INPUTS=min(tiles.gate_up_inputs, triton.next_power_of_2(width)),
        num_warps=tiles.gate_up_warps,
    )  # fmt: skip
    return hidden


def pass_few_down(
    hidden: Tensor, ids: Tensor, weights: Tensor, down: Tensor, tiles: FewTiles, dtype: torch.dtype
) -> Tensor:
    """down(hidden) by weight, added over each row's experts: [rows, width] in a dtype."""
    rows, chosen = ids.shape
    _, width, inner = down.shape
    out = torch.empty((rows, width), dtype=dtype, device=hidden.device)
    _few_down_kernel[(triton.cdiv(width, tiles.down_features), rows)](
        hidden, ids, weights, down, out,
        CHOSEN=chosen, WIDTH=width, INNER=inner, FEATURES=tiles.down_features,
        INPUTS=min(tiles.down_inputs, triton.next_power_of_2(inner)), num_warps=tiles.down_warps,
    )  # fmt: skip
    return out
