# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Draws in Triton: programs per part of a row read its scores once, then one program per row searches what they note.

The first launch notes, per block, the highest score and the sum of weights beside it, and the highest score of every
group of neighbours. The second finds which tokens a row keeps and which one it draws (`triton_search.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.sample.reference import BLOCK_TOKENS, draw_rows
from tokamak.ops.sample.triton import _order
from tokamak.ops.sample.triton_search import LOWEST, MANY, NEVER, draw_kept, value_of
from tokamak.ops.sample.uniform import FIRST, GOLDEN, SECOND
from tokamak.ops.triton_facts import fits, rows_of

GROUP_TOKENS = 32
"""Neighbours whose maximum stands for them."""
LISTED = 4096
"""Tokens of a row that are listed at most; rows that need more are read as a whole."""
PARTS_IN_ALL = 4096
"""Programs that keep a large device busy; beyond them a program reads several blocks."""
PART_WARPS, ROW_WARPS = 4, 8
ROW_TILE, LIST_TILE = 1024, 256

_GOLDEN, _FIRST, _SECOND = tl.constexpr(GOLDEN), tl.constexpr(FIRST), tl.constexpr(SECOND)


@triton.jit(do_not_specialize=["part_blocks"], do_not_specialize_on_alignment=["slots_ptr"])
def _draw_parts_kernel(
    scores_ptr,
    table_ptr,
    slots_ptr,
    tops_ptr,
    sums_ptr,
    maxima_ptr,
    vocab,
    blocks,
    groups,
    stride_scores_row,
    stride_table_row,
    part_blocks,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(table_ptr + slot * stride_table_row).to(tl.float64, bitcast=True)
    inverse = tl.where(temperature > 0.0, 1.0 / temperature, 0.0).to(tl.float32)
    places = tl.arange(0, BLOCK // GROUP)
    lanes = places[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    scores_ptr += row * stride_scores_row
    first = tl.program_id(0) * part_blocks
    for block in range(first, tl.minimum(first + part_blocks, blocks)):
        ids = block * BLOCK + lanes
        score = tl.load(scores_ptr + ids, mask=ids < vocab, other=float("-inf"))
        maxima = tl.max(_order(score), axis=1)
        top = tl.max(maxima, axis=0)
        weight = tl.where(score > float("-inf"), tl.exp((score - value_of(top)) * inverse), 0.0)
        tl.store(tops_ptr + row * blocks + block, top)
        tl.store(sums_ptr + row * blocks + block, tl.sum(tl.sum(weight, axis=1), axis=0))
        group = block * (BLOCK // GROUP) + places
        tl.store(maxima_ptr + row * groups + group, maxima, mask=group < groups)


@triton.jit
def _uniform(key, position):
    """The number in [0, 1) of `uniforms_of`."""
    bits = key.to(tl.uint64, bitcast=True) + (position.to(tl.uint64) + 1) * _GOLDEN
    bits = (bits ^ (bits >> 30)) * _FIRST
    bits = (bits ^ (bits >> 27)) * _SECOND
    bits ^= bits >> 31
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _first_above(weight, target, lanes):
    """The first place whose running sum exceeds the target, else the last that has weight; and the sum before it."""
    ends = tl.cumsum(weight, axis=0)
    above = tl.min(tl.where((ends > target) & (weight > 0.0), lanes, MANY), axis=0)
    last = tl.max(tl.where(weight > 0.0, lanes, 0), axis=0)
    place = tl.minimum(above, last)
    return place, tl.sum(tl.where(lanes < place, weight, 0.0), axis=0)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "alive_ptr"])
def _draw_rows_kernel(
    scores_ptr, table_ptr, slots_ptr, positions_ptr, tops_ptr, sums_ptr, maxima_ptr,
    alive_ptr, orders_ptr, ids_ptr, weights_ptr, token_ids_ptr, peaks_ptr,
    vocab, blocks, groups, stride_scores_row, stride_table_row,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, GROUP: tl.constexpr, LISTED: tl.constexpr,
    TILE: tl.constexpr, LIST_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * stride_scores_row
    table_ptr += tl.load(slots_ptr + row).to(tl.int64) * stride_table_row
    temperature = tl.load(table_ptr).to(tl.float64, bitcast=True)
    top_p = tl.load(table_ptr + 1).to(tl.float64, bitcast=True)
    min_p = tl.load(table_ptr + 2).to(tl.float64, bitcast=True)
    top_k = tl.load(table_ptr + 3).to(tl.int32)
    uniform = _uniform(tl.load(table_ptr + 4), tl.load(positions_ptr + row))

    places = tl.arange(0, BLOCKS)
    tops = tl.load(tops_ptr + row * blocks + places, mask=places < blocks, other=NEVER)
    top = tl.max(tops, axis=0)
    peak = value_of(top)
    tl.store(peaks_ptr + row, peak)
    lanes = tl.arange(0, BLOCK)
    token = tl.full((), 0, tl.int32)
    # Rows without a finite peak get the first id.
    if (top >= LOWEST) & (top < 0x7F800000):
        if temperature > 0.0:
            sums = tl.load(sums_ptr + row * blocks + places, mask=places < blocks, other=0.0)
            apart = tl.where(
                tops < LOWEST, 0.0, value_of(tops).to(tl.float64) - peak.to(tl.float64)
            )
            masses = tl.where(tops < LOWEST, 0.0, sums.to(tl.float64) * tl.exp(apart / temperature))
            total = tl.sum(masses, axis=0)
            if (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0):
                token = draw_kept(
                    scores_ptr, maxima_ptr + row * groups, alive_ptr + row * groups,
                    orders_ptr + row * LISTED, ids_ptr + row * LISTED, weights_ptr + row * LISTED, vocab, groups,
                    top, peak, total, temperature, top_k, top_p, min_p, uniform,
                    GROUP, LISTED, TILE, LIST_TILE,
                )  # fmt: skip
            else:
                block, before = _first_above(masses, uniform * total, places)
                ids = block * BLOCK + lanes
                score = tl.load(scores_ptr + ids, mask=ids < vocab, other=float("-inf"))
                weight = tl.exp((score - peak) * (1.0 / temperature).to(tl.float32)).to(tl.float64)
                place, _ = _first_above(weight, uniform * total - before, lanes)
                token = block * BLOCK + place
        else:
            block = tl.min(tl.where(tops == top, places, BLOCKS), axis=0)
            ids = block * BLOCK + lanes
            score = tl.load(scores_ptr + ids, mask=ids < vocab, other=float("-inf"))
            token = tl.min(tl.where(_order(score) == top, ids, MANY), axis=0)
    tl.store(token_ids_ptr + row, token.to(tl.int64))


@draw_rows.backend("triton", fits=fits)
def triton_draw_rows(
    scores: Tensor, table: Tensor, slots: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw a token per row from its slot's numbers, and find the rows' peaks."""
    scores = rows_of(scores)
    rows, vocab = scores.shape
    blocks, groups = triton.cdiv(vocab, BLOCK_TOKENS), triton.cdiv(vocab, GROUP_TOKENS)
    ints = {"dtype": torch.int32, "device": scores.device}
    tops = torch.empty((rows, blocks), **ints)
    maxima, alive = torch.empty((2, rows, groups), **ints)
    orders, ids = torch.empty((2, rows, LISTED), **ints)
    sums = scores.new_empty((rows, blocks))
    weights = torch.empty((rows, LISTED), dtype=torch.float64, device=scores.device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=scores.device)
    peaks = scores.new_empty(rows)
    part_blocks = triton.cdiv(blocks * max(rows, 1), PARTS_IN_ALL)
    _draw_parts_kernel[(triton.cdiv(blocks, part_blocks), rows)](
        scores, table, slots, tops, sums, maxima, vocab, blocks, groups,
        scores.stride(0), table.stride(0), part_blocks,
        BLOCK=BLOCK_TOKENS, GROUP=GROUP_TOKENS, num_warps=PART_WARPS,
    )  # fmt: skip
    _draw_rows_kernel[(rows,)](
        scores, table, slots, positions, tops, sums, maxima, alive, orders, ids, weights, token_ids, peaks,
        vocab, blocks, groups, scores.stride(0), table.stride(0),
        BLOCK=BLOCK_TOKENS, BLOCKS=triton.next_power_of_2(blocks), GROUP=GROUP_TOKENS, LISTED=LISTED,
        TILE=ROW_TILE, LIST_TILE=LIST_TILE, num_warps=ROW_WARPS,
    )  # fmt: skip
    return token_ids, peaks
