# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
"""Which tokens does a row keep, and which of them is drawn, in Triton? A search for bounds instead of a sort.

A few bounds at a time are asked how many scores, and how much weight, reach each of them. First the maxima of groups
of neighbours are asked: where they show that a few tokens settle the row, those are listed, and nothing else is read
again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokamak.ops.sample.triton import _order

LOWEST = tl.constexpr(-0x7F800000)
"""The order of the lowest finite score."""
NEVER = tl.constexpr(-0x80000000)
"""An order below that of every score."""
MANY = tl.constexpr(0x7FFFFFFF)
_CHUNK = tl.constexpr(32)
"""Groups whose tokens are listed at a time."""
_GROUPS_APART = tl.constexpr(64)
"""Groups between the bounds at which the search of their maxima ends."""
_INFINITE = tl.constexpr(float("inf"))


@triton.jit
def value_of(order):
    """The float32 that `_order` made this int32 of."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


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
                order = tl.load(source_ptr + at + lanes, mask=inside, other=NEVER)
            if KIND == 2:
                weight = tl.load(weights_ptr + at + lanes, mask=inside, other=0.0)
            else:
                weight = tl.exp((value_of(order) - peak) * inverse)
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
        count_lo = tl.minimum(count_lo, tl.min(tl.where(enough, reaching, MANY), axis=0))
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
        order = tl.load(maxima_ptr + at + lanes, mask=at + lanes < groups, other=NEVER)
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
            order = tl.load(source_ptr + at + lanes, mask=inside, other=NEVER)
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
def draw_kept(
    scores_ptr, maxima_ptr, alive_ptr, orders_ptr, ids_ptr, weights_ptr, vocab, groups,
    top, peak, total, temperature, top_k, top_p, min_p, uniform,
    GROUP: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr, LIST_TILE: tl.constexpr,
):  # fmt: skip
    """Draw among the tokens that a row keeps, most likely first, then lowest id."""
    # By top-k alone first where top-p then counts in what it leaves.
    in_turn = ((top_k < vocab) & (top_p < 1.0)).to(tl.int32)
    count_asked = tl.where(top_k < vocab, top_k, MANY)
    mass_asked = tl.where(top_p < 1.0, top_p * total, _INFINITE)
    mass_asked = tl.where(in_turn > 0, _INFINITE, mass_asked)
    # The lowest float32 that is as likely as min-p asks.
    reach = peak.to(tl.float64) + temperature * tl.log(tl.where(min_p > 0.0, min_p, 1.0))
    narrow = reach.to(tl.float32)
    low_enough = _order(narrow) + (narrow.to(tl.float64) < reach).to(tl.int32)
    low_enough = tl.where(min_p > 0.0, tl.minimum(low_enough, top), NEVER).to(tl.int64)

    end = top.to(tl.int64) + 1
    cut = tl.full((), LOWEST, tl.int64)
    cut = tl.where(in_turn > 0, cut, tl.maximum(cut, low_enough))
    # Min-p alone needs no search.
    apart = tl.where((top_k < vocab) | (top_p < 1.0), _GROUPS_APART, MANY)
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
    ties_kept = tl.full((), MANY, tl.int32)
    kept_mass = total
    which = tl.full((), 1, tl.int32)
    lo, hi = cut, end
    for stage in range(1 - in_turn, 3):
        if stage > 0:
            count_asked = tl.where(in_turn > 0, MANY, count_asked)
            mass_asked = tl.where(in_turn > 0, top_p * kept_mass, mass_asked)
        if stage > 1:
            count_asked = count_asked * 0 + MANY
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
        ties_kept = tl.where(which < ties, which, MANY)
        cut = lo
    if listed <= LISTED:
        place = _pick(orders_ptr, listed, lo, hi, which, IS_SCORES=False, TILE=LIST_TILE)
        token = tl.load(ids_ptr + place)
    else:
        token = _pick(scores_ptr, vocab, lo, hi, which, IS_SCORES=True, TILE=TILE)
    return token
