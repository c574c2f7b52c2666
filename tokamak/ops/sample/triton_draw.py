# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Draws in Triton: programs per part of a row read its scores once, then one program per row searches what they note.

The first launch notes, per block, the highest score and the sum of weights beside it, and the highest score of every
group of neighbours. The second finds which tokens a row keeps and which one it draws: not by sorting, but by asking
for a few bounds at a time how many scores, and how much weight, reach each of them. First the groups' maxima are
asked: where they show that a few tokens settle the row, those are listed, and nothing else is read again.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.sample.reference import BLOCK_TOKENS, draw_rows
from tokamak.ops.sample.triton import _order
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

_LOWEST = tl.constexpr(-0x7F800000)
"""The order of the lowest finite score."""
_NEVER = tl.constexpr(-0x80000000)
"""An order below that of every score."""
_MANY = tl.constexpr(0x7FFFFFFF)
_GOLDEN, _FIRST, _SECOND = tl.constexpr(GOLDEN), tl.constexpr(FIRST), tl.constexpr(SECOND)
_CHUNK = tl.constexpr(32)
"""Groups whose tokens are listed at a time."""
_GROUPS_APART = tl.constexpr(64)
"""Groups between the bounds at which the search of their maxima ends."""
_INFINITE = tl.constexpr(float("inf"))


@triton.jit
def _value(order):
    """The float32 that `_order` made this int32 of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


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
        weight = tl.where(score > float("-inf"), tl.exp((score - _value(top)) * inverse), 0.0)
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
    above = tl.min(tl.where((ends > target) & (weight > 0.0), lanes, _MANY), axis=0)
    last = tl.max(tl.where(weight > 0.0, lanes, 0), axis=0)
    place = tl.minimum(above, last)
    return place, tl.sum(tl.where(lanes < place, weight, 0.0), axis=0)


@triton.jit
def _narrow(
    source_ptr, weights_ptr, count, lo, hi, base_count, base_mass, least_count, least_mass, apart, peak, temperature,
    KIND: tl.constexpr, ALL_IS_ENOUGH: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Bounds around the highest order that enough tokens reach, or enough weight.

    It lies in [lo, hi), or lo is taken. `base_count` tokens that weigh `base_mass` lie above hi and outside of
    the source. Ends where at most `apart` tokens lie between the bounds. KIND: 0 for scores, 1 for orders, 2 for
    orders beside their weights. Returns the bounds, how many tokens reach each, and what those weigh.
    """
    ways = tl.arange(0, WAYS)
    lanes = tl.arange(0, TILE)
    inverse = (1.0 / temperature).to(tl.float32)
    # First lo itself, and bounds ever nearer to the peak, in temperatures; later equal steps.
    distance = tl.exp2((WAYS - 1 - ways).to(tl.float32) * (0.6 if WAYS > 4 else 2.0) - 1.0)
    bounds = _order(peak - (temperature * distance).to(tl.float32)).to(tl.int64)
    bounds = tl.where(ways == 0, lo, tl.minimum(tl.maximum(bounds, lo), hi - 1))
    count_lo = base_count + count
    count_hi, mass_lo, mass_hi = base_count, base_mass, base_mass
    begins = True
    while begins | ((hi - lo > 1) & (count_lo - count_hi > apart)):
        least = bounds.to(tl.int32)[:, None]
        counts = tl.zeros((WAYS, TILE), tl.int32)
        masses = tl.zeros((WAYS, TILE), tl.float64 if KIND == 2 else tl.float32)
        for at in range(0, count, TILE):
            inside = at + lanes < count
            if KIND == 0:
                score = tl.load(source_ptr + at + lanes, mask=inside, other=float("-inf"))
                order = _order(score)
            else:
                order = tl.load(source_ptr + at + lanes, mask=inside, other=_NEVER)
            if KIND == 2:
                weight = tl.load(weights_ptr + at + lanes, mask=inside, other=0.0)
            else:
                weight = tl.exp((_value(order) - peak) * inverse)
            reaches = order[None, :] >= least
            counts += reaches.to(tl.int32)
            masses += tl.where(reaches, weight[None, :], 0.0)
        reaching = base_count + tl.sum(counts, axis=1)
        mass = base_mass + tl.sum(masses.to(tl.float64), axis=1)
        if begins:
            count_lo = tl.max(reaching, axis=0)
            mass_lo = tl.max(mass, axis=0)
            if ALL_IS_ENOUGH:
                least_count = tl.minimum(least_count, count_lo)
                least_mass = tl.minimum(least_mass, mass_lo)
        enough = (reaching >= least_count) | (mass >= least_mass)
        lo = tl.maximum(lo, tl.max(tl.where(enough, bounds, lo), axis=0))
        hi = tl.minimum(hi, tl.min(tl.where(enough, hi, bounds), axis=0))
        count_lo = tl.minimum(count_lo, tl.min(tl.where(enough, reaching, _MANY), axis=0))
        mass_lo = tl.minimum(mass_lo, tl.min(tl.where(enough, mass, _INFINITE), axis=0))
        count_hi = tl.maximum(count_hi, tl.max(tl.where(enough, 0, reaching), axis=0))
        mass_hi = tl.maximum(mass_hi, tl.max(tl.where(enough, 0.0, mass), axis=0))
        # An upper bound that is the lower one was refused: nothing reaches it that counts.
        hi = tl.maximum(hi, lo + 1)
        step = tl.maximum((hi - lo) // (WAYS + 1), 1)
        bounds = tl.minimum(lo + step * (ways + 1), hi - 1)
        begins = False
    return lo, hi, count_lo, count_hi, mass_lo, mass_hi


@triton.jit
def _list(
    scores_ptr, maxima_ptr, alive_ptr, orders_ptr, ids_ptr, weights_ptr, vocab, groups, lo, hi, peak, temperature,
    GROUP: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List the tokens with orders in [lo, hi) by id: orders, ids and weights. More than fit are counted in part."""
    lanes = tl.arange(0, TILE)
    least, under = lo.to(tl.int32), hi.to(tl.int32)
    alive = 0
    for at in range(0, groups, TILE):
        order = tl.load(maxima_ptr + at + lanes, mask=at + lanes < groups, other=_NEVER)
        lives = (order >= least).to(tl.int32)
        place = alive + tl.cumsum(lives, axis=0) - 1
        tl.store(alive_ptr + place, at + lanes, mask=lives > 0)
        alive += tl.sum(lives, axis=0)
    tl.debug_barrier()
    inside_group = tl.arange(0, GROUP)[None, :]
    chunk = tl.arange(0, _CHUNK)
    listed = 0
    at = 0
    while (at < alive) & (listed <= LISTED):
        group = tl.load(alive_ptr + at + chunk, mask=at + chunk < alive, other=groups)
        ids = group[:, None] * GROUP + inside_group
        score = tl.load(scores_ptr + ids, mask=ids < vocab, other=float("-inf"))
        order = _order(score)
        wanted = ((ids < vocab) & (order >= least) & (order < under)).to(tl.int32)
        flat = tl.reshape(wanted, (_CHUNK * GROUP,))
        place = tl.reshape(listed + tl.cumsum(flat, axis=0) - 1, (_CHUNK, GROUP))
        fits = (wanted > 0) & (place < LISTED)
        weight = tl.exp((score.to(tl.float64) - peak.to(tl.float64)) / temperature)
        tl.store(orders_ptr + place, order, mask=fits)
        tl.store(ids_ptr + place, ids, mask=fits)
        tl.store(weights_ptr + place, weight, mask=fits)
        listed += tl.sum(flat, axis=0)
        at += _CHUNK
    tl.debug_barrier()
    return listed


@triton.jit
def _pick(source_ptr, count, lo, hi, which, IS_SCORES: tl.constexpr, TILE: tl.constexpr):
    """The place of the which-th number of the source, from 1, whose order lies in [lo, hi)."""
    lanes = tl.arange(0, TILE)
    least, under = lo.to(tl.int32), hi.to(tl.int32)
    found, seen, at = 0, 0, 0
    while (at < count) & (seen < which):
        inside = at + lanes < count
        if IS_SCORES:
            order = _order(tl.load(source_ptr + at + lanes, mask=inside, other=float("-inf")))
        else:
            order = tl.load(source_ptr + at + lanes, mask=inside, other=_NEVER)
        hits = (inside & (order >= least) & (order < under)).to(tl.int32)
        rank = seen + tl.cumsum(hits, axis=0)
        found = tl.maximum(
            found, tl.max(tl.where((hits > 0) & (rank == which), at + lanes, 0), axis=0)
        )
        seen += tl.sum(hits, axis=0)
        at += TILE
    return found


@triton.jit
def _next_above(number):
    """The next float64 above one that is not negative."""
    return (number.to(tl.int64, bitcast=True) + 1).to(tl.float64, bitcast=True)


@triton.jit
def _draw_kept(
    scores_ptr, maxima_ptr, alive_ptr, orders_ptr, ids_ptr, weights_ptr, vocab, groups,
    top, peak, total, temperature, top_k, top_p, min_p, uniform,
    GROUP: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr, LIST_TILE: tl.constexpr,
):  # fmt: skip
    """Draw among the tokens that a row keeps, most likely first, then lowest id."""
    # By top-k alone first where top-p then counts in what it leaves.
    in_turn = ((top_k < vocab) & (top_p < 1.0)).to(tl.int32)
    count_asked = tl.where(top_k < vocab, top_k, _MANY)
    mass_asked = tl.where(top_p < 1.0, top_p * total, _INFINITE)
    mass_asked = tl.where(in_turn > 0, _INFINITE, mass_asked)
    # The lowest float32 that is as likely as min-p asks.
    reach = peak.to(tl.float64) + temperature * tl.log(tl.where(min_p > 0.0, min_p, 1.0))
    narrow = reach.to(tl.float32)
    low_enough = _order(narrow) + (narrow.to(tl.float64) < reach).to(tl.int32)
    low_enough = tl.where(min_p > 0.0, tl.minimum(low_enough, top), _NEVER).to(tl.int64)

    end = top.to(tl.int64) + 1
    cut = tl.full((), _LOWEST, tl.int64)
    cut = tl.where(in_turn > 0, cut, tl.maximum(cut, low_enough))
    # Min-p alone needs no search.
    apart = tl.where((top_k < vocab) | (top_p < 1.0), _GROUPS_APART, _MANY)
    floor, _, _, _, _, _ = _narrow(
        maxima_ptr, weights_ptr, groups, cut, end, 0, total * 0.0, count_asked, mass_asked, apart, peak, temperature,
        KIND=1, ALL_IS_ENOUGH=False, WAYS=4, TILE=TILE,
    )  # fmt: skip
    listed = _list(
        scores_ptr, maxima_ptr, alive_ptr, orders_ptr, ids_ptr, weights_ptr, vocab, groups, floor, end, peak,
        temperature, GROUP, LISTED, TILE,
    )  # fmt: skip
    few = listed <= LISTED
    cut = tl.where(few, floor, cut)
    ties_kept = tl.full((), _MANY, tl.int32)
    kept_mass = total
    which = tl.full((), 1, tl.int32)
    lo, hi = cut, end
    for stage in range(1 - in_turn, 3):
        if stage > 0:
            count_asked = tl.where(in_turn > 0, _MANY, count_asked)
            mass_asked = tl.where(in_turn > 0, top_p * kept_mass, mass_asked)
        if stage > 1:
            count_asked = count_asked * 0 + _MANY
            mass_asked = _next_above(uniform * kept_mass)
        lo, hi = tl.where(stage == 1, tl.maximum(cut, low_enough), cut), end
        base_count, base_mass = listed * 0, total * 0.0
        count_lo, count_hi, mass_lo, mass_hi = base_count, base_count, base_mass, base_mass
        if not few:
            lo, hi, count_lo, base_count, mass_lo, base_mass = _narrow(
                scores_ptr, weights_ptr, vocab, lo, hi, base_count, base_mass, count_asked, mass_asked,
                LISTED, peak, temperature, KIND=0, ALL_IS_ENOUGH=True, WAYS=4, TILE=TILE,
            )  # fmt: skip
            count_hi, mass_hi = base_count, base_mass
            listed = count_lo - count_hi
            if listed <= LISTED:
                listed = _list(
                    scores_ptr, maxima_ptr, alive_ptr, orders_ptr, ids_ptr, weights_ptr, vocab, groups, lo,
                    hi, peak, temperature, GROUP, LISTED, TILE,
                )  # fmt: skip
        if listed <= LISTED:
            lo, hi, count_lo, count_hi, mass_lo, mass_hi = _narrow(
                orders_ptr, weights_ptr, listed, lo, hi, base_count, base_mass, count_asked, mass_asked,
                1, peak, temperature, KIND=2, ALL_IS_ENOUGH=True, WAYS=16, TILE=LIST_TILE,
            )  # fmt: skip
        # Tokens between the bounds are one, or equal; the first of them by id are meant.
        ties = count_lo - count_hi
        each = (mass_lo - mass_hi) / tl.maximum(ties, 1)
        by_mass = tl.ceil((mass_asked - mass_hi) / tl.where(each > 0.0, each, 1.0))
        by_mass = tl.where((each > 0.0) & (by_mass < ties), tl.maximum(by_mass, 1.0), ties)
        which = tl.minimum(by_mass.to(tl.int32), tl.maximum(count_asked - count_hi, 1))
        which = tl.minimum(which, ties)
        which = tl.where(lo == cut, tl.minimum(which, ties_kept), which)
        kept_mass = tl.where(which < ties, mass_hi + which * each, mass_lo)
        ties_kept = tl.where(which < ties, which, _MANY)
        cut = lo
    if listed <= LISTED:
        place = _pick(orders_ptr, listed, lo, hi, which, IS_SCORES=False, TILE=LIST_TILE)
        token = tl.load(ids_ptr + place)
    else:
        token = _pick(scores_ptr, vocab, lo, hi, which, IS_SCORES=True, TILE=TILE)
    return token


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
    tops = tl.load(tops_ptr + row * blocks + places, mask=places < blocks, other=_NEVER)
    top = tl.max(tops, axis=0)
    peak = _value(top)
    tl.store(peaks_ptr + row, peak)
    lanes = tl.arange(0, BLOCK)
    token = tl.full((), 0, tl.int32)
    # Rows without a finite peak get the first id.
    if (top >= _LOWEST) & (top < 0x7F800000):
        if temperature > 0.0:
            sums = tl.load(sums_ptr + row * blocks + places, mask=places < blocks, other=0.0)
            apart = tl.where(tops < _LOWEST, 0.0, _value(tops).to(tl.float64) - peak.to(tl.float64))
            masses = tl.where(
                tops < _LOWEST, 0.0, sums.to(tl.float64) * tl.exp(apart / temperature)
            )
            total = tl.sum(masses, axis=0)
            if (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0):
                token = _draw_kept(
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
            token = tl.min(tl.where(_order(score) == top, ids, _MANY), axis=0)
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
