"""How do prompt chunks attend, in LLVM?

A work item is one request, one key head and a tile of query rows (token and query head folded), one row per vector
lane, so that softmax needs no sum across lanes. Positions come in chunks of 128 counted from 0 with a running
softmax, so that a query's result does not depend on how its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.values import I32, Num, Pointer, Var
from tokamak.ops.paged_attention.llvm_rows import (
    BLOCK_TOKENS,
    K_CACHE,
    KV_HEADS,
    LENGTHS,
    NEVER,
    OUT,
    REQUESTS,
    SCALE,
    STARTS,
    TILES,
    V_CACHE,
    WINDOW,
    Q,
    Rows,
    Shape,
    sink_of,
)  # fmt: skip

CHUNK_TOKENS = 128
TILE_KEYS = 4
VECTORS = 2
"""Vectors of query rows in a tile."""


def prefill(shape: Shape) -> Callable[[Kernel], None]:
    """The kernel of prompt chunks."""
    return lambda kernel: _Prefill(kernel, shape).write()


@dataclass(frozen=True, slots=True)
class _Tile:
    """Query rows of one request and one key head: their places among the folded rows, and in the request."""

    first_row: Num
    last_row: Num
    positions: list[Num]
    """Of the rows, by vector."""
    largest: list[Var]
    """The largest score so far, by vector."""
    totals: list[Var]
    """The sum of the shares so far, by vector."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions that share a turn of the running softmax."""

    begin: Num
    end: Num
    blocks: tuple[Num, Num]
    """The request's blocks they lie in: the first, and one past the last."""


class _Prefill:
    """The kernel while it is written."""

    def __init__(self, kernel: Kernel, shape: Shape) -> None:
        self._kernel, self._shape = kernel, shape
        self._width = width = VECTORS * kernel.lanes
        self._kv_heads, self._block_tokens = kernel.integer(KV_HEADS), kernel.integer(BLOCK_TOKENS)
        self._scale, self._window = kernel.real(SCALE), kernel.integer(WINDOW)
        self._tiles = kernel.integer(TILES)
        self._queries = kernel.scratch(shape.head_dim * width)
        self._mixed = kernel.scratch(shape.head_dim * width)
        self._scores = kernel.scratch(CHUNK_TOKENS * width)
        self._places = kernel.scratch(width, "i64")
        self._sinks = kernel.scratch(width) if shape.sinks else None
        self._starts, self._lengths = kernel.pointer(STARTS, "i32"), kernel.pointer(LENGTHS, "i32")
        self._source, self._target = kernel.pointer(Q, shape.kind), kernel.pointer(OUT, shape.kind)

    def write(self) -> None:
        """Take tiles one after the other."""
        kernel, kv_heads, tiles, starts = self._kernel, self._kv_heads, self._tiles, self._starts
        with kernel.items(kernel.integer(REQUESTS) * kv_heads * tiles) as item:
            tile = tiles - 1 - item / kv_heads % tiles
            head, request = item % kv_heads, item / (kv_heads * tiles)
            start = starts[request].load().to_int()
            rows = (starts[request + 1].load().to_int() - start) * self._shape.groups
            first_row = tile * self._width
            with kernel.when(first_row < rows):
                self._attend(request, head, start, rows, first_row)

    def _attend(self, request: Num, head: Num, start: Num, rows: Num, first_row: Num) -> None:
        """One tile, over all keys that its rows see."""
        kernel, groups, lanes = self._kernel, self._shape.groups, self._kernel.lanes
        length = self._lengths[request].load().to_int()
        past = length - rows / groups
        last_row = (first_row + self._width).least(rows) - 1
        self._bring_queries(head, start, first_row, last_row)
        with kernel.loop(0, self._shape.head_dim * self._width, lanes) as at:
            self._mixed[at].store(kernel.zeros())
        seats = [
            (kernel.spread((first_row + v * lanes).to_int(I32)) + kernel.lane_numbers()).least(
                kernel.spread(last_row.to_int(I32))
            )
            for v in range(VECTORS)
        ]
        positions = [seat / groups + kernel.spread(past.to_int(I32)) for seat in seats]
        end = past + last_row / groups + 1
        oldest = past + first_row / groups + 1 - self._window
        begin = (self._window > 0).where(oldest.most(0), kernel.int(0))
        keys = Rows(kernel, self._shape.kind, K_CACHE, request, head)
        values = Rows(kernel, self._shape.kind, V_CACHE, request, head)
        tile = _Tile(first_row, last_row, positions, *self._begin_softmax())
        with kernel.loop(begin / CHUNK_TOKENS * CHUNK_TOKENS, end, CHUNK_TOKENS) as chunk_begin:
            chunk_end = (chunk_begin + CHUNK_TOKENS).least(end)
            blocks = chunk_begin / self._block_tokens, (chunk_end - 1) / self._block_tokens + 1
            chunk = _Chunk(chunk_begin, chunk_end, blocks)
            self._score_chunk(tile, chunk, keys)
            self._mix_chunk(chunk, values, self._take_softmax_on(tile, chunk))
        self._leave_rows(tile)

    def _bring_queries(self, head: Num, start: Num, first_row: Num, last_row: Num) -> None:
        """Scaled queries side by side, one row per lane; lanes beyond the last row repeat it."""
        kernel, width = self._kernel, self._width
        groups, head_dim = self._shape.groups, self._shape.head_dim
        with kernel.loop(0, width) as lane:
            row = (first_row + lane).least(last_row)
            place = ((start + row / groups) * self._kv_heads + head) * groups + row % groups
            self._places[lane].store(place * head_dim)
            if self._sinks is not None:
                self._sinks[lane].store(sink_of(kernel, head * groups + row % groups))
            with kernel.loop(0, head_dim) as at:
                self._queries[at * width + lane].store(
                    self._source[place * head_dim + at].load() * self._scale
                )

    def _begin_softmax(self) -> tuple[list[Var], list[Var]]:
        """The largest scores and the totals before any key: those of sinks alone."""
        kernel, lanes = self._kernel, self._kernel.lanes
        if self._sinks is None:
            largest = [kernel.var(kernel.zeros() + NEVER) for _ in range(VECTORS)]
            return largest, [kernel.var(kernel.zeros()) for _ in range(VECTORS)]
        largest = [kernel.var(self._sinks[v * lanes].load(lanes)) for v in range(VECTORS)]
        return largest, [kernel.var(kernel.zeros() + 1.0) for _ in range(VECTORS)]

    def _score_chunk(self, tile: _Tile, chunk: _Chunk, keys: Rows) -> None:
        """Scores of a chunk's keys, TILE_KEYS of them at a time."""
        kernel, block_tokens = self._kernel, self._block_tokens
        with kernel.loop(*chunk.blocks) as block:
            base = block * block_tokens
            high = (base + block_tokens).least(chunk.end)
            low = base.most(chunk.begin)
            whole = low + (high - low) / TILE_KEYS * TILE_KEYS
            place = keys.block(block)
            with kernel.loop(low, whole, TILE_KEYS) as position:
                first = place[(position - base) * keys.row]
                self._score(tile, chunk, first, keys.row, position, TILE_KEYS)
            with kernel.loop(whole, high) as position:
                first = place[(position - base) * keys.row]
                self._score(tile, chunk, first, keys.row, position, 1)

    def _score(
        self, tile: _Tile, chunk: _Chunk, first: Pointer, row: Num, position: Num, count: int
    ) -> None:
        """Scores of a few keys with every row of the tile; those a row does not see are never the largest."""
        kernel, width, lanes = self._kernel, self._width, self._kernel.lanes
        sums = [[kernel.var(kernel.zeros()) for _ in range(VECTORS)] for _ in range(count)]
        key_rows = [first[row * at] for at in range(count)]
        with kernel.loop(0, self._shape.head_dim) as at:
            query = [self._queries[at * width + v * lanes].load(lanes) for v in range(VECTORS)]
            for key, of_key in zip(key_rows, sums, strict=True):
                number = kernel.spread(key[at].load())
                for v in range(VECTORS):
                    of_key[v].set(kernel.fma(number, query[v], of_key[v].now))
        for at, of_key in enumerate(sums):
            seat = (position + at).to_int(I32)
            for v in range(VECTORS):
                hidden = self._hidden(kernel.spread(seat), tile.positions[v])
                shown = hidden.where(kernel.zeros() + 2 * NEVER, of_key[v].now)
                self._scores[(position + at - chunk.begin) * width + v * lanes].store(shown)

    def _hidden(self, key_at: Num, positions: Num) -> Num:
        """Which rows do not see a key: it comes after them, or has left their window."""
        kernel, window = self._kernel, self._window
        hidden = key_at > positions
        old = key_at <= positions - kernel.spread(window.to_int(I32))
        windowed = (window > 0).where(kernel.int(1), kernel.int(0)).to_int(I32)
        far = kernel.spread(windowed) > 0
        return hidden | (old & far)

    def _take_softmax_on(self, tile: _Tile, chunk: _Chunk) -> list[Num]:
        """Turn a chunk's scores into shares; returns by how much what is mixed already shrinks."""
        kernel, width, lanes = self._kernel, self._width, self._kernel.lanes
        count = chunk.end - chunk.begin
        shrinks: list[Num] = []
        for v in range(VECTORS):
            top = kernel.var(tile.largest[v].now)
            with kernel.loop(0, count) as at:
                top.set(top.now.most(self._scores[at * width + v * lanes].load(lanes)))
            shrink = kernel.exp(tile.largest[v].now - top.now)
            total = kernel.var(tile.totals[v].now * shrink)
            with kernel.loop(0, count) as at:
                place = self._scores[at * width + v * lanes]
                power = kernel.exp(place.load(lanes) - top.now)
                place.store(power)
                total.set(total.now + power)
            tile.largest[v].set(top.now)
            tile.totals[v].set(total.now)
            shrinks.append(shrink)
        return shrinks

    def _mix_chunk(self, chunk: _Chunk, values: Rows, shrinks: list[Num]) -> None:
        """Add a chunk's values by their shares, TILE_KEYS columns at a time."""
        kernel, width, lanes = self._kernel, self._width, self._kernel.lanes
        block_tokens = self._block_tokens
        with kernel.loop(0, self._shape.head_dim, TILE_KEYS) as column:
            outs = [
                [self._mixed[(column + at) * width + v * lanes] for v in range(VECTORS)]
                for at in range(TILE_KEYS)
            ]
            sums = [
                [kernel.var(place.load(lanes) * shrinks[v]) for v, place in enumerate(of)]
                for of in outs
            ]
            with kernel.loop(*chunk.blocks) as block:
                base = block * block_tokens
                place = values.block(block)[column]
                low, high = base.most(chunk.begin), (base + block_tokens).least(chunk.end)
                with kernel.loop(low, high) as position:
                    weights = [
                        self._scores[(position - chunk.begin) * width + v * lanes].load(lanes)
                        for v in range(VECTORS)
                    ]
                    value = place[(position - base) * values.row]
                    for at in range(TILE_KEYS):
                        number = kernel.spread(value[at].load())
                        for v in range(VECTORS):
                            sums[at][v].set(kernel.fma(number, weights[v], sums[at][v].now))
            for of, to in zip(sums, outs, strict=True):
                for total, place in zip(of, to, strict=True):
                    place.store(total.now)

    def _leave_rows(self, tile: _Tile) -> None:
        """Divide what is mixed by the totals, and write the tile's rows."""
        kernel, width, lanes = self._kernel, self._width, self._kernel.lanes
        head_dim = self._shape.head_dim
        for v in range(VECTORS):
            share = kernel.zeros() + 1.0
            share = share / tile.totals[v].now
            with kernel.loop(0, head_dim) as at:
                place = self._mixed[at * width + v * lanes]
                place.store(place.load(lanes) * share)
        with kernel.loop(0, (tile.last_row - tile.first_row) + 1) as lane:
            place = self._places[lane].load()
            with kernel.loop(0, head_dim) as at:
                self._target[place + at].store(self._mixed[at * width + lane].load())
