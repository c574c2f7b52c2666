# pyright: reportArgumentType=false, reportCallIssue=false
"""How do pairs of row and expert come into the order of their experts, and back into rows, in Triton?

A program per expert finds its pairs and their places. Grids of what follows hold for any choice of experts: a slot of
the table without a tile is left at once. Sums over a row's experts are taken in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.triton_order import order_on

FEW_GROUP_PAIRS, MANY_GROUP_PAIRS = 1024, 4096
"""Pairs a grouping program looks at a time: all of a decode step's, or a piece of a prefill's."""
TABLE_FIELDS = 3
"""Of a slot: the expert or -1, and its tile's first and the expert's last place, one past, in the order of pairs."""
SLOTS_AT_ONCE = 32
SUM_FEATURES = 1024
SUM_WARPS = 4


@triton.jit(do_not_specialize=["pairs"])
def _group_kernel(
    ids_ptr,
    order_ptr,
    table_ptr,
    pairs,
    PAIRS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
    SLOTS: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    expert = tl.program_id(0)
    before, count, start = expert * 0, expert * 0, expert * 0
    while start < pairs:
        at = start + tl.arange(0, PAIRS)
        ids = tl.load(ids_ptr + at, mask=at < pairs, other=0x7FFFFFFF)
        before += tl.sum((ids < expert).to(tl.int32), axis=0)
        count += tl.sum((ids == expert).to(tl.int32), axis=0)
        start += PAIRS

    place, start = before, expert * 0
    while start < pairs:
        at = start + tl.arange(0, PAIRS)
        ids = tl.load(ids_ptr + at, mask=at < pairs, other=0x7FFFFFFF)
        mine = (ids == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(mine, axis=0) - mine, at, mask=mine > 0)
        place += tl.sum(mine, axis=0)
        start += PAIRS

    # Every expert has as many slots as its pairs fill from wherever they begin, plus one: never fewer than its
    # tiles, and known without the tiles of others.
    first_slot = before // TILE_PAIRS + expert
    last_slot = (before + count) // TILE_PAIRS + expert + 1
    last, start = before + count, first_slot
    while start < last_slot:
        slots = start + tl.arange(0, SLOTS)
        first = before + (slots - first_slot) * TILE_PAIRS
        fields_ptr = table_ptr + slots * 3
        tl.store(fields_ptr, tl.where(first < last, expert, -1), mask=slots < last_slot)
        tl.store(fields_ptr + 1, first, mask=slots < last_slot)
        tl.store(fields_ptr + 2, tl.zeros([SLOTS], tl.int32) + last, mask=slots < last_slot)
        start += SLOTS


@triton.jit
def _sum_kernel(
    parts_ptr,
    out_ptr,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    inside = features < WIDTH
    total = tl.zeros([FEATURES], tl.float32)
    for slot in tl.static_range(CHOSEN):
        part_ptrs = parts_ptr + (row * CHOSEN + slot) * WIDTH + features
        total += tl.load(part_ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + features, total, mask=inside)


def group_pairs(ids: Tensor, experts: int, tile_pairs: int) -> tuple[Tensor, Tensor]:
    """Bring pairs into the order of their experts, and cut that into tiles of one expert.

    ids: int32 [rows, chosen]. Returns the pairs in order, int32 [pairs], and a table of tiles, int32
    [slots, TABLE_FIELDS].
    """
    pairs = ids.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=ids.device)
    slots = pairs // tile_pairs + experts
    table = torch.empty((slots, TABLE_FIELDS), dtype=torch.int32, device=ids.device)
    few = pairs <= FEW_GROUP_PAIRS
    _group_kernel[(experts,)](
        ids, order, table, pairs,
        PAIRS=FEW_GROUP_PAIRS if few else MANY_GROUP_PAIRS, TILE_PAIRS=tile_pairs,
        SLOTS=SLOTS_AT_ONCE, num_warps=4 if few else 8, **order_on(ids.device.type),
    )  # fmt: skip
    return order, table


def sum_parts(parts: Tensor, chosen: int) -> Tensor:
    """The sum over each row's experts, in float32: [pairs, width] to [rows, width]."""
    pairs, width = parts.shape
    rows = pairs // chosen
    out = torch.empty((rows, width), dtype=parts.dtype, device=parts.device)
    features = min(SUM_FEATURES, triton.next_power_of_2(width))
    _sum_kernel[(rows, triton.cdiv(width, features))](
        parts,
        out,
        CHOSEN=chosen,
        WIDTH=width,
        FEATURES=features,
        num_warps=SUM_WARPS,
        **order_on(out.device.type),
    )
    return out
