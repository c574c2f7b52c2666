# pyright: reportArgumentType=false, reportCallIssue=false
"""Vocabulary rows in Triton: a program per block of tokens weighs; maxima take a program per part, then one per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.sample.reference import BLOCK_TOKENS, argmax_rows, token_weights
from tokamak.ops.triton_facts import fits, rows_of

WEIGHT_WARPS = 4
MAX_TILE = 2048
NUMBERS_PER_WARP = 512
PARTS_IN_ALL = 1024
"""Programs that keep a large device busy; a row has at most as many parts."""


@triton.jit
def _token_weights_kernel(
    scores_ptr,
    peaks_ptr,
    inverses_ptr,
    weights_ptr,
    sums_ptr,
    vocab,
    stride_scores_row,
    stride_peak,
    stride_inverse,
    BLOCK: tl.constexpr,
):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = block * BLOCK + lanes < vocab
    peak = tl.load(peaks_ptr + row * stride_peak)
    inverse = tl.load(inverses_ptr + row * stride_inverse)
    scores_ptr += row * stride_scores_row + block * BLOCK
    score = tl.load(scores_ptr + lanes, mask=inside, other=float("-inf"))
    weight = tl.where(inside, tl.exp((score - peak) * inverse), 0.0)
    place = row * blocks + block
    tl.store(weights_ptr + place * BLOCK + lanes, weight)
    tl.store(sums_ptr + place, tl.sum(weight, axis=0))


@triton.jit
def _order(value):
    """An int32 that orders as the float32 does: the two zeros alike, a NaN above all."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)


@triton.jit
def _argmax_parts_kernel(
    logits_ptr, found_ptr, vocab, stride_logits_row, part_tokens, TILE: tl.constexpr
):
    """Order of the highest logit above the distance of its id from the last: the larger is earlier."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    row = tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, TILE)
    logits_ptr += row * stride_logits_row
    first = part * part_tokens
    end = tl.minimum(first + part_tokens, vocab)
    best = tl.full((TILE,), -0x80000000, tl.int32)
    best_id = first + lanes
    for at in range(first, end, TILE):
        ids = at + lanes
        logit = tl.load(logits_ptr + ids, mask=ids < end, other=float("-inf"))
        order = _order(logit.to(tl.float32))
        higher = order > best
        best = tl.where(higher, order, best)
        best_id = tl.where(higher, ids, best_id)
    packed = (best.to(tl.int64) << 32) | (0x7FFFFFFF - best_id).to(tl.int64)
    tl.store(found_ptr + row * parts + part, tl.max(packed, axis=0))


@triton.jit(do_not_specialize=["parts"])
def _argmax_kernel(found_ptr, token_ids_ptr, peaks_ptr, parts, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, PARTS)
    inside = lanes < parts
    packed = tl.load(found_ptr + row * parts + lanes, mask=inside, other=-0x8000000000000000)
    packed = tl.max(packed, axis=0)
    order = (packed >> 32).to(tl.int32)
    peak = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    tl.store(token_ids_ptr + row, 0x7FFFFFFF - (packed & 0x7FFFFFFF))
    tl.store(peaks_ptr + row, peak)


@token_weights.backend("triton", fits=fits)
def triton_token_weights(
    scores: Tensor, peaks: Tensor, inverse_temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Weigh each token by exp((score - peak) / temperature), and sum blocks of weights."""
    scores = rows_of(scores)
    rows, vocab = scores.shape
    blocks = triton.cdiv(vocab, BLOCK_TOKENS)
    weights = scores.new_empty((rows, blocks, BLOCK_TOKENS))
    sums = scores.new_empty((rows, blocks))
    _token_weights_kernel[(blocks, rows)](
        scores, peaks, inverse_temperatures, weights, sums, vocab,
        scores.stride(0), peaks.stride(0), inverse_temperatures.stride(0),
        BLOCK=BLOCK_TOKENS, num_warps=WEIGHT_WARPS,
    )  # fmt: skip
    return weights, sums


@argmax_rows.backend("triton", fits=fits)
def triton_argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest id of each row's highest logit, and that logit."""
    logits = rows_of(logits)
    rows, vocab = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
    tile = min(triton.next_power_of_2(vocab), MAX_TILE)
    tiles = triton.cdiv(vocab, tile)
    part_tiles = triton.cdiv(tiles, min(tiles, max(PARTS_IN_ALL // max(rows, 1), 1)))
    parts = triton.cdiv(tiles, part_tiles)
    found = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    _argmax_parts_kernel[(parts, rows)](
        logits, found, vocab, logits.stride(0), part_tiles * tile,
        TILE=tile, num_warps=max(tile // NUMBERS_PER_WARP, 1),
    )  # fmt: skip
    _argmax_kernel[(rows,)](
        found, token_ids, peaks, parts, PARTS=triton.next_power_of_2(parts), num_warps=1
    )
    return token_ids, peaks
