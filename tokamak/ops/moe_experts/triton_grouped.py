# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""Experts of many rows in Triton: pairs of row and expert in the order of their experts, then products by tiles of pairs.

Four launches: pairs are grouped (`triton_pairs.py`), gate and up with their activation, down (a program per tile of
pairs and tile of features), and the sum over a row's experts. Nothing is added up by several programs, so results repeat
bit by bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.activation.triton_gated import gated
from tokamak.ops.moe_experts.matrix import ExpertMatrix, as_multiplied
from tokamak.ops.moe_experts.tiles import GroupedTiles, Tile, tiles_for
from tokamak.ops.moe_experts.triton_pairs import group_pairs, sum_parts
from tokamak.ops.moe_experts.triton_weights import (
    expert_matrix,
    features_of_program,
    load_packed,
)
from tokamak.ops.quant_linear.triton_scales import scale_rows
from tokamak.ops.triton_order import order_on
from tokamak.ops.triton_widen import PAIRED_UNIT


@triton.jit
def _pairs_of(order_ptr, slot_ptr, PAIRS: tl.constexpr):
    """A slot's places in the order of pairs, one past its last, and the places and pairs it reads.

    Beyond the last pair the last is computed again, and not stored.
    """
    first, last = tl.load(slot_ptr + 1), tl.load(slot_ptr + 2)
    places = first + tl.arange(0, PAIRS)
    known = tl.minimum(places, last - 1)
    return places, last, known, tl.load(order_ptr + known)


@triton.jit
def _no_total(PAIRS: tl.constexpr, FEATURES: tl.constexpr, TURNED: tl.constexpr):
    """A total of no products: [PAIRS, FEATURES], or turned."""
    if TURNED:
        total = tl.zeros([FEATURES, PAIRS], tl.float32)
    else:
        total = tl.zeros([PAIRS, FEATURES], tl.float32)
    return total


@triton.jit
def _multiply(x, weight, total, TURNED: tl.constexpr):
    """Add x [pairs, inputs] times weight [features, inputs] to a total, which is [features, pairs] where turned."""
    if TURNED:
        total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    else:
        total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    return total


@triton.jit
def _multiply_scaled(x, weight, total, x_scale, weight_scale, TURNED: tl.constexpr):
    """The same of 8-bit numbers, by the scales of x [pairs] and weight [features]."""
    if TURNED:
        total += tl.dot(weight, tl.trans(x)) * (weight_scale[:, None] * x_scale[None, :])
    else:
        total += tl.dot(x, tl.trans(weight)) * (x_scale[:, None] * weight_scale[None, :])
    return total


@triton.jit
def _grouped_gate_up_kernel(
    x_ptr,
    x_scales_ptr,
    weights_ptr,
    gate_up_ptr,
    scales_ptr,
    hidden_ptr,
    order_ptr,
    table_ptr,
    stride_x_row,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    PAIRS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    TURNED: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    PACKED: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    slot_ptr = table_ptr + tl.program_id(1) * 3
    expert = tl.load(slot_ptr).to(tl.int64)
    if expert < 0:
        return
    places, last, _, pairs = _pairs_of(order_ptr, slot_ptr, PAIRS)
    features, read = features_of_program(INNER, FEATURES)
    inputs = tl.arange(0, INPUTS)
    x_ptrs = x_ptr + (pairs // CHOSEN).to(tl.int64)[:, None] * stride_x_row + inputs[None, :]
    gate_up_ptr, scales_ptr = expert_matrix(
        gate_up_ptr, scales_ptr, expert, 2 * INNER * WIDTH, PACKED, EXPERT_SCALES
    )
    gate_ptrs = gate_up_ptr + read[:, None] * WIDTH + inputs[None, :]
    up_ptrs = gate_ptrs + INNER * WIDTH
    gate, up = _no_total(PAIRS, FEATURES, TURNED), _no_total(PAIRS, FEATURES, TURNED)
    gate_scale_ptrs = scale_rows(scales_ptr, read, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS)
    up_scale_ptrs = scale_rows(scales_ptr, INNER + read, WIDTH, BLOCK_ROWS, BLOCK_COLUMNS)
    x_scale_ptrs = x_scales_ptr + (pairs // CHOSEN).to(tl.int64) * GROUPS
    for start in range(0, WIDTH, INPUTS):
        inside = (start + inputs < WIDTH)[None, :]
        x = tl.load(x_ptrs) if WIDTH % INPUTS == 0 else tl.load(x_ptrs, mask=inside, other=0.0)
        if PACKED:
            g = load_packed(gate_up_ptr, scales_ptr, read, start, WIDTH, INPUTS, PAIRED).to(x.dtype)
            u = load_packed(gate_up_ptr, scales_ptr, INNER + read, start, WIDTH, INPUTS, PAIRED).to(
                x.dtype
            )
        elif WIDTH % INPUTS == 0:
            g, u = tl.load(gate_ptrs), tl.load(up_ptrs)
        else:
            g = tl.load(gate_ptrs, mask=inside, other=0.0)
            u = tl.load(up_ptrs, mask=inside, other=0.0)
        if SCALED:
            x_scale = tl.load(x_scale_ptrs + start // GROUP)
            gate_scale = tl.load(gate_scale_ptrs + start // BLOCK_COLUMNS)
            up_scale = tl.load(up_scale_ptrs + start // BLOCK_COLUMNS)
            gate = _multiply_scaled(x, g, gate, x_scale, gate_scale, TURNED)
            up = _multiply_scaled(x, u, up, x_scale, up_scale, TURNED)
        else:
            gate = _multiply(x, g, gate, TURNED)
            up = _multiply(x, u, up, TURNED)
        x_ptrs += INPUTS
        gate_ptrs += INPUTS
        up_ptrs += INPUTS
    if PAIRED:
        gate, up = gate * PAIRED_UNIT, up * PAIRED_UNIT
    hidden = gated(gate, up, LIMIT)
    if TURNED:
        hidden = tl.trans(hidden)
    if LIMIT > 0.0:
        hidden *= tl.load(weights_ptr + pairs)[:, None]
    hidden_ptrs = hidden_ptr + places.to(tl.int64)[:, None] * INNER + features[None, :]
    tl.store(hidden_ptrs, hidden, mask=(places < last)[:, None] & (features < INNER)[None, :])


@triton.jit
def _grouped_down_kernel(
    hidden_ptr,
    hidden_scales_ptr,
    weights_ptr,
    down_ptr,
    scales_ptr,
    parts_ptr,
    order_ptr,
    table_ptr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    PAIRS: tl.constexpr,
    FEATURES: tl.constexpr,
    INPUTS: tl.constexpr,
    TURNED: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALED: tl.constexpr,
    PACKED: tl.constexpr,
    PAIRED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERT_SCALES: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    GROUPS: tl.constexpr = (INNER + GROUP - 1) // GROUP
    slot_ptr = table_ptr + tl.program_id(1) * 3
    expert = tl.load(slot_ptr).to(tl.int64)
    if expert < 0:
        return
    places, last, known, pairs = _pairs_of(order_ptr, slot_ptr, PAIRS)
    features, read = features_of_program(WIDTH, FEATURES)
    inputs = tl.arange(0, INPUTS)
    hidden_ptrs = hidden_ptr + known.to(tl.int64)[:, None] * INNER + inputs[None, :]
    down_ptr, scales_ptr = expert_matrix(
        down_ptr, scales_ptr, expert, WIDTH * INNER, PACKED, EXPERT_SCALES
    )
    down_ptrs = down_ptr + read[:, None] * INNER + inputs[None, :]
    mixed = _no_total(PAIRS, FEATURES, TURNED)
    scale_ptrs = scale_rows(scales_ptr, read, INNER, BLOCK_ROWS, BLOCK_COLUMNS)
    hidden_scale_ptrs = hidden_scales_ptr + known.to(tl.int64) * GROUPS
    for start in range(0, INNER, INPUTS):
        inside = (start + inputs < INNER)[None, :]
        whole: tl.constexpr = INNER % INPUTS == 0
        hidden = tl.load(hidden_ptrs) if whole else tl.load(hidden_ptrs, mask=inside, other=0.0)
        if PACKED:
            weight = load_packed(down_ptr, scales_ptr, read, start, INNER, INPUTS, PAIRED).to(
                hidden.dtype
            )
        elif whole:
            weight = tl.load(down_ptrs)
        else:
            weight = tl.load(down_ptrs, mask=inside, other=0.0)
        if SCALED:
            hidden_scale = tl.load(hidden_scale_ptrs + start // GROUP)
            weight_scale = tl.load(scale_ptrs + start // BLOCK_COLUMNS)
            mixed = _multiply_scaled(hidden, weight, mixed, hidden_scale, weight_scale, TURNED)
        else:
            mixed = _multiply(hidden, weight, mixed, TURNED)
        hidden_ptrs += INPUTS
        down_ptrs += INPUTS
    if PAIRED:
        mixed *= PAIRED_UNIT
    if TURNED:
        mixed = tl.trans(mixed)
    parts_ptrs = parts_ptr + pairs.to(tl.int64)[:, None] * WIDTH + features[None, :]
    stored = (places < last)[:, None] & (features < WIDTH)[None, :]
    if LIMIT == 0.0:
        mixed *= tl.load(weights_ptr + pairs)[:, None]
    tl.store(parts_ptrs, mixed, mask=stored)


def grouped_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    tiles: GroupedTiles | None = None,
    *,
    limit: float = 0.0,
) -> Tensor:
    """The weighted sum over experts; arguments are those of the ops, with at least one row. limit: 0 for none."""
    experts = gate_up.values.shape[0]
    if tiles is None:
        multiplied = x.dtype if gate_up.blocks is None else gate_up.values.dtype
        tiles = tiles_for(ids.numel(), experts, multiplied, packed=gate_up.packed)
    order, table = group_pairs(ids, experts, tiles.pairs)
    hidden = pass_gate_up(
        x, ids.shape[1], gate_up, order, table, tiles.pairs, tiles.gate_up, weights, limit
    )
    parts = pass_down(hidden, weights, down, order, table, tiles.pairs, tiles.down, limit)
    return sum_parts(parts, ids.shape[1])


def pass_gate_up(
    x: Tensor,
    chosen: int,
    gate_up: ExpertMatrix,
    order: Tensor,
    table: Tensor,
    tile_pairs: int,
    tile: Tile,
    weights: Tensor | None = None,
    limit: float = 0.0,
) -> Tensor:
    """silu(gate(x)) * up(x) of every pair, [pairs, inner] in the order of experts; with a limit, by weight."""
    width, inner = gate_up.columns, gate_up.values.shape[1] // 2
    rows, row_scales = as_multiplied(x, gate_up)
    hidden = torch.empty((order.shape[0], inner), dtype=x.dtype, device=x.device)
    _grouped_gate_up_kernel[(triton.cdiv(inner, tile.features), table.shape[0])](
        rows, row_scales, rows if weights is None else weights, gate_up.words, gate_up.pointer,
        hidden, order, table, rows.stride(0),
        CHOSEN=chosen, WIDTH=width, INNER=inner, PAIRS=tile_pairs, FEATURES=tile.features,
        INPUTS=_inputs(tile, gate_up), TURNED=tile.turned, LIMIT=limit, num_warps=tile.warps,
        num_stages=tile.stages, PAIRED=gate_up.paired(x), **gate_up.constants(), **order_on(x.device.type),
    )  # fmt: skip
    return hidden


def pass_down(
    hidden: Tensor,
    weights: Tensor,
    down: ExpertMatrix,
    order: Tensor,
    table: Tensor,
    tile_pairs: int,
    tile: Tile,
    limit: float = 0.0,
) -> Tensor:
    """down(hidden), by weight unless a limit says that it has one, [pairs, width] in the order of pairs."""
    width, inner = down.values.shape[1], down.columns
    rows, row_scales = as_multiplied(hidden, down)
    parts = torch.empty((hidden.shape[0], width), dtype=hidden.dtype, device=hidden.device)
    _grouped_down_kernel[(triton.cdiv(width, tile.features), table.shape[0])](
        rows, row_scales, weights, down.words, down.pointer, parts, order, table,
        WIDTH=width, INNER=inner, PAIRS=tile_pairs, FEATURES=tile.features,
        INPUTS=_inputs(tile, down), TURNED=tile.turned, LIMIT=limit, num_warps=tile.warps,
        num_stages=tile.stages, PAIRED=down.paired(hidden), **down.constants(), **order_on(hidden.device.type),
    )  # fmt: skip
    return parts


def _inputs(tile: Tile, matrix: ExpertMatrix) -> int:
    """Columns a program multiplies at a time: of 8-bit numbers no more than share a scale."""
    return tile.inputs if matrix.blocks is None else min(tile.inputs, matrix.group)
