# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
"""The highest scores of rows in Triton, in order of their numbers: one program per row and chunk of its scores.

A program finds the least score it takes, byte by byte: it counts how many scores have which next byte, four times.
Then it walks through the scores once more and lists what is above, and of equals the first. Long rows of few take
several rounds: each leaves the best of every chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.triton_order import order_on

BINS: tl.constexpr = tl.constexpr(256)
UNORDERED: tl.constexpr = tl.constexpr(0xFFFFFFFF)
"""The key of what is no number: above all others, and not listed."""
VARYING = ("ratio", "per", "listed", "chunk", "most")
"""Arguments whose numbers make no kernel of their own; of the next, whose alignment makes none."""
SLICED = ("list_ptr", "positions_ptr", "out_ptr")


@dataclass(frozen=True, slots=True)
class Source:
    """Where scores are, and what numbers they belong to.

    scores: float32 [rows, columns]. lists: None where a column is a number, else int32 [rows, lists] of numbers of
    blocks of `block` numbers in order, -1 none; their scores lie one after the other, or with `by_number` each in the
    column of its number. Rows see the first cdiv((position + 1) // ratio, per) numbers; of a row that takes all it sees no
    score is read.
    """

    scores: Tensor
    lists: Tensor | None
    positions: Tensor
    ratio: int
    per: int
    block: int = 1
    by_number: bool = False

    @property
    def slots(self) -> int:
        """Scores of a row, at most."""
        if self.lists is None:
            return self.scores.shape[1]
        return self.lists.shape[1] * self.block


@dataclass(frozen=True, slots=True)
class SelectForm:
    """How a row is cut: into chunks of so many scores while it has twice as many, a tile at a time."""

    chunk: int | None
    tile: int
    warps: int = 4


@triton.jit
def _at(
    slots, scores_ptr, list_ptr, visible, end, scored, BLOCK: tl.constexpr, BY_NUMBER: tl.constexpr
):
    """Keys that sort like the scores (uint32), the scores, their numbers, and which there are."""
    numbers = slots
    seen = slots < end
    if list_ptr is not None:
        blocks = tl.load(list_ptr + slots // BLOCK, mask=seen, other=-1)
        numbers = blocks * BLOCK + slots % BLOCK
        seen = (blocks >= 0) & (numbers < visible)
    columns = numbers if BY_NUMBER else slots
    scores = tl.load(scores_ptr + columns, mask=seen & scored, other=0.0)
    # The two zeros are equal.
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) | -0x80000000)
    unordered = scores != scores
    keys = tl.where(unordered, -1, ordered).to(tl.uint32, bitcast=True)
    return keys, scores, numbers, seen & (unordered | (scores > float("-inf")))


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=SLICED)
def _select_kernel(
    scores_ptr,
    list_ptr,
    positions_ptr,
    out_ptr,
    out_scores_ptr,
    ratio,
    per,
    listed,
    chunk,
    most,
    stride_scores_row,
    stride_list_row,
    stride_out_row,
    BLOCK: tl.constexpr,
    BY_NUMBER: tl.constexpr,
    TILE: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    in_tile, bins = tl.arange(0, TILE), tl.arange(0, BINS)
    visible = tl.cdiv((tl.load(positions_ptr + row) + 1) // ratio, per)
    begin = part * chunk
    end = visible
    if list_ptr is not None:
        list_ptr += row * stride_list_row
        end = listed
    end = tl.minimum(end, begin + chunk)
    scored = visible > most
    scores_ptr += row * stride_scores_row
    out = out_ptr + row * stride_out_row + part.to(tl.int64) * most

    # Where not all are taken: the least that is, and how many of those that equal it.
    least = (begin * 0).to(tl.uint32)
    equals = begin * 0
    chooses = scored & (end - begin > most)
    if chooses:
        equals = most + 0
        for byte in tl.static_range(4):
            counts = tl.zeros([BINS], tl.int32)
            for first in range(begin, end, TILE):
                keys, _, _, seen = _at(
                    first + in_tile, scores_ptr, list_ptr, visible, end, scored, BLOCK, BY_NUMBER
                )
                alike = seen
                if byte > 0:
                    alike = seen & ((keys >> (32 - 8 * byte)) == least)
                digits = ((keys >> (24 - 8 * byte)) & 0xFF).to(tl.int32)
                counts += tl.histogram(digits, BINS, mask=alike)
            if byte == 0:
                equals = tl.minimum(equals, tl.sum(counts, axis=0))
            at_least = tl.cumsum(counts, axis=0, reverse=True)
            digit = tl.sum((at_least >= equals).to(tl.int32), axis=0) - 1
            equals -= tl.sum(tl.where(bins > digit, counts, 0), axis=0)
            least = (least << 8) | digit.to(tl.uint32)

    taken = begin * 0
    passed = begin * 0
    for first in range(begin, end, TILE):
        keys, scores, numbers, seen = _at(
            first + in_tile, scores_ptr, list_ptr, visible, end, scored, BLOCK, BY_NUMBER
        )
        equal = (seen & chooses & (keys == least)).to(tl.int32)
        early = (equal > 0) & (passed + tl.cumsum(equal, axis=0) <= equals)
        above = seen & ((keys > least) | (not chooses))
        take = (above | early) & (keys != UNORDERED)
        places = taken + tl.cumsum(take.to(tl.int32), axis=0) - 1
        tl.store(out + places, numbers, mask=take)
        if out_scores_ptr is not None:
            kept = out_scores_ptr + row * stride_out_row + part.to(tl.int64) * most
            tl.store(kept + places, scores, mask=take)
        taken += tl.sum(take.to(tl.int32), axis=0)
        passed += tl.sum(equal, axis=0)
    for first in range(0, most, TILE):
        places = first + in_tile
        tl.store(out + places, places * 0 - 1, mask=(places >= taken) & (places < most))


@triton.jit(do_not_specialize=("ratio",), do_not_specialize_on_alignment=("positions_ptr",))
def _best_of_blocks_kernel(
    scores_ptr,
    positions_ptr,
    best_ptr,
    ratio,
    stride_scores_row,
    stride_best_row,
    BLOCK_ENTRIES: tl.constexpr,
    WIDE_ENTRIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    START: tl.constexpr,
    READY: tl.constexpr,
):
    START()
    READY()
    row = tl.program_id(0).to(tl.int64)
    visible = (tl.load(positions_ptr + row) + 1) // ratio
    blocks, inside = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, WIDE_ENTRIES)
    entries = blocks[:, None] * BLOCK_ENTRIES + inside[None, :]
    seen = (inside < BLOCK_ENTRIES)[None, :] & (entries < visible)
    at = scores_ptr + row * stride_scores_row + entries
    best = tl.max(tl.load(at, mask=seen, other=float("-inf")), axis=1)
    # The newest may have few entries yet, and is always among the best.
    best = tl.where(blocks == (visible - 1) // BLOCK_ENTRIES, float("inf"), best)
    mask = blocks * BLOCK_ENTRIES < visible
    tl.store(best_ptr + row * stride_best_row + blocks, best, mask=mask)


BLOCKS_TILE = 128


def best_of_blocks(
    scores: Tensor, positions: Tensor, ratio: int, block_entries: int, best: Tensor
) -> None:
    """The highest score of each block a row sees any of, infinite for the newest: into `best` [rows, blocks].

    scores: float32 [rows, entries], of meaning where a row sees an entry. positions: int32 [rows].
    """
    _best_of_blocks_kernel[(len(positions), triton.cdiv(best.shape[1], BLOCKS_TILE))](
        scores, positions, best, ratio, scores.stride(0), best.stride(0),
        BLOCK_ENTRIES=block_entries, WIDE_ENTRIES=triton.next_power_of_2(block_entries),
        BLOCKS=BLOCKS_TILE, num_warps=4, **order_on(scores.device.type),
    )  # fmt: skip


def select(source: Source, form: SelectForm, out: Tensor) -> None:
    """List the numbers with the highest scores of every row in order, -1 behind the last.

    out: int32 [rows, most], written; its rows lie in one piece.
    """
    rows, most = out.shape
    while form.chunk is not None and source.slots > 2 * max(form.chunk, 2 * most):
        chunk = max(form.chunk, 2 * most)
        parts = triton.cdiv(source.slots, chunk)
        numbers = out.new_empty((rows, parts * most))
        scores = torch.empty((rows, parts * most), dtype=torch.float32, device=out.device)
        _launch(source, form, chunk, parts, most, numbers, scores)
        source = Source(scores, numbers, source.positions, source.ratio, source.per)
    _launch(source, form, source.slots, 1, most, out, None)


def _launch(
    source: Source,
    form: SelectForm,
    chunk: int,
    parts: int,
    most: int,
    out: Tensor,
    scores: Tensor | None,
) -> None:
    lists = source.lists
    _select_kernel[(out.shape[0], parts)](
        source.scores, lists, source.positions, out, scores, source.ratio, source.per, source.slots, chunk, most,
        source.scores.stride(0), 0 if lists is None else lists.stride(0), out.stride(0),
        BLOCK=source.block, BY_NUMBER=source.by_number, TILE=form.tile, num_warps=form.warps, **order_on(out.device.type),
    )  # fmt: skip
