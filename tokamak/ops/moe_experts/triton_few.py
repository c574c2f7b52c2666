# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
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

from tokamak.ops.activation.triton_gated import gated
from tokamak.ops.moe_experts.matrix import ExpertMatrix, as_multiplied
from tokamak.ops.moe_experts.triton_weights import expert_matrix, features_of_program, load_packed


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
def _products(
    weight,
    x,
    x_scales_ptr,
    scales_ptr,
    features,
    start,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Weights [FEATURES, INPUTS] that begin at column `start` times x [INPUTS], by the scales of their blocks."""
    products = weight.to(tl.float32) * x[None, :]
    if SCALED:
        SCALE_COLUMNS: tl.constexpr = (COLUMNS + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
        of_group = (start + tl.arange(0, INPUTS // GROUP) * GROUP) // BLOCK_COLUMNS
        of_group = tl.minimum(of_group, SCALE_COLUMNS - 1)
        places = (features // BLOCK_ROWS)[:, None] * SCALE_COLUMNS + of_group[None, :]
        GROUPS: tl.constexpr = (COLUMNS + GROUP - 1) // GROUP
        group = start // GROUP + tl.arange(0, INPUTS // GROUP)
        x_scale = tl.load(x_scales_ptr + group, mask=group < GROUPS, other=0.0)
        factor = tl.load(scales_ptr + places) * x_scale[None, :]
        groups = tl.reshape(products, [FEATURES, INPUTS // GROUP, GROUP])
        products = tl.reshape(groups * factor[:, :, None], [FEATURES, INPUTS])
    return products


@triton.jit
def _few_gate_up_kernel(
    x_ptr,
    x_scales_ptr,
    ids_ptr,
    weights_ptr,
    gate_up_ptr,
    scales_ptr,
    hidden_ptr,
    stride_x_row,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
):
    pair = tl.program_id(1).to(tl.int64)
    expert = tl.load(ids_ptr + pair).to(tl.int64)
    features, read = features_of_program(INNER, FEATURES)
    kept = features < INNER
    gate_ptr, expert_scales_ptr = expert_matrix(
        gate_up_ptr, scales_ptr, expert, 2 * INNER * WIDTH, PACKED, EXPERT_SCALES
    )
    row_scales_ptr = x_scales_ptr + pair // CHOSEN * ((WIDTH + GROUP - 1) // GROUP)
    row_ptr = x_ptr + pair // CHOSEN * stride_x_row
    gates = tl.zeros([FEATURES, INPUTS], tl.float32)
    ups = tl.zeros([FEATURES, INPUTS], tl.float32)
    for start in tl.static_range(0, WIDTH, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        at = features[:, None] * WIDTH + inputs[None, :]
        inside = kept[:, None] & (inputs < WIDTH)[None, :]
        x = tl.load(row_ptr + inputs, mask=inputs < WIDTH, other=0.0).to(tl.float32)
        if PACKED:
            gate = load_packed(gate_ptr, expert_scales_ptr, read, start, WIDTH, INPUTS, False)
            up = load_packed(gate_ptr, expert_scales_ptr, INNER + read, start, WIDTH, INPUTS, False)
        else:
            gate = tl.load(gate_ptr + at, mask=inside, other=0.0)
            up = tl.load(gate_ptr + INNER * WIDTH + at, mask=inside, other=0.0)
        gates += _products(
            gate, x, row_scales_ptr, expert_scales_ptr, read, start, WIDTH, FEATURES, INPUTS,
            SCALED, BLOCK_ROWS, BLOCK_COLUMNS, GROUP,
        )  # fmt: skip
        ups += _products(
            up, x, row_scales_ptr, expert_scales_ptr, INNER + read, start, WIDTH, FEATURES, INPUTS,
            SCALED, BLOCK_ROWS, BLOCK_COLUMNS, GROUP,
        )  # fmt: skip
    gate, up = tl.sum(gates, axis=1), tl.sum(ups, axis=1)
    hidden = gated(gate, up, LIMIT)
    if LIMIT > 0.0:
        hidden *= tl.load(weights_ptr + pair)
    tl.store(hidden_ptr + pair * INNER + features, hidden, mask=kept)


@triton.jit
def _few_down_kernel(
    hidden_ptr,
    hidden_scales_ptr,
    ids_ptr,
    weights_ptr,
    down_ptr,
    scales_ptr,
    out_ptr,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    features, read = features_of_program(WIDTH, FEATURES)
    kept = features < WIDTH
    GROUPS: tl.constexpr = (INNER + GROUP - 1) // GROUP
    total = tl.zeros([FEATURES, INPUTS], tl.float32)
    for slot in tl.static_range(CHOSEN):
        pair = row * CHOSEN + slot
        expert = tl.load(ids_ptr + pair).to(tl.int64)
        share = tl.load(weights_ptr + pair) if LIMIT == 0.0 else 1.0
        matrix_ptr, expert_scales_ptr = expert_matrix(
            down_ptr, scales_ptr, expert, WIDTH * INNER, PACKED, EXPERT_SCALES
        )
        for start in tl.static_range(0, INNER, INPUTS):
            inputs = start + tl.arange(0, INPUTS)
            at = features[:, None] * INNER + inputs[None, :]
            inside = kept[:, None] & (inputs < INNER)[None, :]
            if PACKED:
                weight = load_packed(
                    matrix_ptr, expert_scales_ptr, read, start, INNER, INPUTS, False
                )
            else:
                weight = tl.load(matrix_ptr + at, mask=inside, other=0.0)
            hidden_ptrs = hidden_ptr + pair * INNER + inputs
            hidden = tl.load(hidden_ptrs, mask=inputs < INNER, other=0.0).to(tl.float32)
            total += _products(
                weight, hidden * share, hidden_scales_ptr + pair * GROUPS, expert_scales_ptr,
                read, start, INNER, FEATURES, INPUTS, SCALED, BLOCK_ROWS, BLOCK_COLUMNS, GROUP,
            )  # fmt: skip
    tl.store(out_ptr + row * WIDTH + features, tl.sum(total, axis=1), mask=kept)


DEFAULT_TILES = FewTiles()


def experts_of_few(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    tiles: FewTiles = DEFAULT_TILES,
    *,
    limit: float = 0.0,
) -> Tensor:
    """The weighted sum over experts; arguments are those of the ops, with at least one row. limit: 0 for none."""
    hidden = pass_few_gate_up(x, ids, gate_up, tiles, weights, limit)
    return pass_few_down(hidden, ids, weights, down, tiles, x.dtype, limit)


def pass_few_gate_up(
    x: Tensor,
    ids: Tensor,
    gate_up: ExpertMatrix,
    tiles: FewTiles,
    weights: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """silu(gate(x)) * up(x) of every pair, [pairs, inner] in float32, or in the dtype of x if it is to be rounded.

    With a limit it is multiplied with the pair's weight.
    """
    pairs, chosen = ids.numel(), ids.shape[1]
    width, inner = gate_up.columns, gate_up.values.shape[1] // 2
    kind = torch.float32 if gate_up.scales is None else x.dtype
    hidden = torch.empty((pairs, inner), dtype=kind, device=x.device)
    rows, row_scales = as_multiplied(x, gate_up)
    _few_gate_up_kernel[(triton.cdiv(inner, tiles.gate_up_features), pairs)](
        rows, row_scales, ids, rows if weights is None else weights, gate_up.words, gate_up.pointer,
        hidden, rows.stride(0),
        CHOSEN=chosen, WIDTH=width, INNER=inner, FEATURES=tiles.gate_up_features,
        INPUTS=_inputs(tiles.gate_up_inputs, gate_up), LIMIT=limit, num_warps=tiles.gate_up_warps,
        **gate_up.constants(),
    )  # fmt: skip
    return hidden


def pass_few_down(
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    down: ExpertMatrix,
    tiles: FewTiles,
    dtype: torch.dtype,
    limit: float = 0.0,
) -> Tensor:
    """down(hidden), by weight unless it has one already, added over each row's experts: [rows, width] in a dtype."""
    rows, chosen = ids.shape
    width, inner = down.values.shape[1], down.columns
    out = torch.empty((rows, width), dtype=dtype, device=hidden.device)
    mixed, mixed_scales = as_multiplied(hidden, down)
    _few_down_kernel[(triton.cdiv(width, tiles.down_features), rows)](
        mixed, mixed_scales, ids, weights, down.words, down.pointer, out,
        CHOSEN=chosen, WIDTH=width, INNER=inner, FEATURES=tiles.down_features,
        INPUTS=_inputs(tiles.down_inputs, down), LIMIT=limit, num_warps=tiles.down_warps,
        **down.constants(),
    )  # fmt: skip
    return out


def _inputs(most: int, matrix: ExpertMatrix) -> int:
    """Columns a program has on their way: whole groups, no more than there are."""
    at_most = int(min(most, triton.next_power_of_2(matrix.columns)))
    return at_most if matrix.scales is None else max(at_most, 32 if matrix.packed else matrix.group)
