"""Paged attention in LLVM: one kernel for rows with one query, one for prompt chunks.

Decode: a work item is one request and one key head, or all of them where there are many requests, so that
memory is read from front to back; query heads share each cached row that is read. Scores of all positions
first, then one softmax, then the sum of the values by their shares.

Prefill: a work item is one request, one key head and a tile of query rows (token and query head folded),
one row per vector lane, so that softmax needs no sum across lanes. Positions come in chunks of 128
counted from 0 with a running softmax, so that a query's result does not depend on how its prompt was cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tokamak.ops.jit.available import fits
from tokamak.ops.jit.compiler import KernelSource, Library, float_bits
from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.objects import host
from tokamak.ops.jit.torch_kinds import KINDS, fresh
from tokamak.ops.jit.values import I32, Num, Pointer
from tokamak.ops.paged_attention.padded import padded_paged_attention
from tokamak.ops.paged_attention.reference import paged_attention
from tokamak.ops.registry import takes_own

(
    Q, K_CACHE, K_BLOCK, K_HEAD, K_ROW, V_CACHE, V_BLOCK, V_HEAD, V_ROW, TABLE, TABLE_STRIDE, LENGTHS, STARTS,
    OUT, SCALE, WINDOW, KV_HEADS, BLOCK_TOKENS, FIRST, REQUESTS, TILES, SCORES, SCORES_STRIDE, SINKS,
) = range(24)  # fmt: skip
PARAMETERS = 24
CHUNK_TOKENS = 128
TILE_KEYS = 4
WHOLE_REQUESTS = 4
"""Decode requests per thread from which a thread takes all key heads of one: they lie side by side."""
NEVER = -1e30
"""A score no key reaches; finite, so that differences of two are not NaN."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kernels are compiled for."""

    head_dim: int
    groups: int
    """Query heads per key head."""
    kind: str
    """Format of queries, cache and output."""
    sinks: bool
    """Whether heads have a score beside those of their keys."""

    @property
    def name(self) -> str:
        """Such as `d64_g3_f32`."""
        return f"d{self.head_dim}_g{self.groups}_{self.kind}{'_sinks' if self.sinks else ''}"


class Rows:
    """The cached keys or values of one request and one key head, while a kernel is written."""

    def __init__(self, kernel: Kernel, kind: str, cache: int, request: Num, head: Num) -> None:
        self._kernel = kernel
        self.head = kernel.integer(cache + 2)
        self._base = kernel.pointer(cache, kind)[head * self.head]
        self._block = kernel.integer(cache + 1)
        self.row = kernel.integer(cache + 3)
        self._table = kernel.pointer(TABLE, "i32")[request * kernel.integer(TABLE_STRIDE)]

    def block(self, index: Num) -> Pointer:
        """Where the rows of a request's block begin."""
        return self._base[self._table[index].load().to_int() * self._block]


def _decode(shape: Shape) -> Callable[[Kernel], None]:
    def write(kernel: Kernel) -> None:
        lanes, groups, head_dim = kernel.lanes, shape.groups, shape.head_dim
        kv_heads, block_tokens = kernel.integer(KV_HEADS), kernel.integer(BLOCK_TOKENS)
        scale, window = kernel.real(SCALE), kernel.integer(WINDOW)
        first, share = kernel.integer(FIRST), kernel.integer(TILES)
        stride = kernel.integer(SCORES_STRIDE)
        of_thread = (stride + head_dim) * groups * share
        own = kernel.pointer(SCORES, "f32")[kernel.thread() * of_thread]
        width = groups * head_dim
        starts = kernel.pointer(STARTS, "i32")
        parts_of_request = (kv_heads + share - 1) / share
        with kernel.items((kernel.integer(REQUESTS) - first) * parts_of_request) as item:
            request = item / parts_of_request + first
            head = item % parts_of_request * share
            heads = share.least(kv_heads - head)
            query = starts[request].load().to_int()
            with kernel.when(query < starts[request + 1].load().to_int()):
                length = kernel.pointer(LENGTHS, "i32")[request].load().to_int()
                begin = (window > 0).where((length - window).most(0), kernel.int(0))
                blocks = (begin / block_tokens, (length - 1) / block_tokens + 1)
                at_query = (query * kv_heads + head) * width
                source = kernel.pointer(Q, shape.kind)[at_query]
                target = kernel.pointer(OUT, shape.kind)[at_query]
                queries, scores = own, own[heads * width]
                with kernel.loop(0, heads * width, lanes) as at:
                    queries[at].store(source[at].load(lanes) * kernel.spread(scale))
                keys = Rows(kernel, shape.kind, K_CACHE, request, head)
                values = Rows(kernel, shape.kind, V_CACHE, request, head)
                with kernel.loop(*blocks) as block, kernel.loop(0, heads) as of:
                    _score_block(
                        kernel,
                        shape,
                        keys.block(block)[of * keys.head],
                        keys.row,
                        queries[of * width],
                        scores[stride * groups * of + block * block_tokens],
                    )
                mixed = own
                with kernel.loop(0, heads * width, lanes) as at:
                    mixed[at].store(kernel.zeros())
                with kernel.loop(0, heads * groups) as row:
                    sink = _sink(kernel, head * groups + row) if shape.sinks else None
                    _softmax(kernel, scores[stride * row + begin], length - begin, sink)
                with kernel.loop(*blocks) as block, kernel.loop(0, heads) as of:
                    base = block * block_tokens
                    low, high = base.most(begin), (base + block_tokens).least(length)
                    _mix_block(
                        kernel,
                        shape,
                        values.block(block)[of * values.head + (low - base) * values.row],
                        values.row,
                        scores[stride * groups * of + low],
                        high - low,
                        mixed[of * width],
                    )
                with kernel.loop(0, heads * width, lanes) as at:
                    target[at].store(mixed[at].load(lanes))

    return write


def _score_block(
    kernel: Kernel, shape: Shape, place: Pointer, row: Num, queries: Pointer, scores: Pointer
) -> None:
    """Scores of a whole block of keys with the query heads that share them."""
    lanes = kernel.lanes
    stride = kernel.integer(SCORES_STRIDE)
    with kernel.loop(0, kernel.integer(BLOCK_TOKENS), lanes) as first:
        keys = [place[row * (first + at)] for at in range(lanes)]
        for group in range(shape.groups):
            sums = [kernel.zeros() for _ in keys]
            for part in range(0, shape.head_dim, lanes):
                number = queries[group * shape.head_dim + part].load(lanes)
                for at, key in enumerate(keys):
                    sums[at] = kernel.fma(key[part].load(lanes), number, sums[at])
            scores[stride * group + first].store(kernel.sum_each(sums))


def _mix_block(
    kernel: Kernel,
    shape: Shape,
    place: Pointer,
    row: Num,
    shares: Pointer,
    count: Num,
    mixed: Pointer,
) -> None:
    """Add a block's values, each times its share, to the sums of the query heads that share them."""
    lanes = kernel.lanes
    stride = kernel.integer(SCORES_STRIDE)
    sums_in_registers = 12 if host().registers == 16 else 24
    for some in _in_chunks(shape.groups, 4):
        for parts in _in_chunks(shape.head_dim // lanes, sums_in_registers // len(some)):
            places = {
                (group, part): mixed[group * shape.head_dim + part * lanes]
                for group in some
                for part in parts
            }
            sums = {which: kernel.var(to.load(lanes)) for which, to in places.items()}
            with kernel.loop(0, count) as at:
                weights = {g: kernel.spread(shares[stride * g + at].load()) for g in some}
                for part in parts:
                    value = place[row * at + part * lanes].load(lanes)
                    for group in some:
                        total = sums[group, part]
                        total.set(kernel.fma(weights[group], value, total.now))
            for which, total in sums.items():
                places[which].store(total.now)


def _sink(kernel: Kernel, head: Num) -> Num:
    """The score beside those of a query head's keys."""
    return kernel.pointer(SINKS, "f32")[head].load().most(kernel.float(NEVER))


def _softmax(kernel: Kernel, scores: Pointer, count: Num, sink: Num | None) -> None:
    """Turn scores into shares that sum to 1, with that of the sink if there is one."""
    many = kernel.var(kernel.zeros() + NEVER)
    single = kernel.var(kernel.float(NEVER) if sink is None else sink)

    def find_largest(at: Num, lanes: int) -> None:
        largest = many if lanes > 1 else single
        largest.set(largest.now.most(scores[at].load(lanes)))

    kernel.sweep(count, find_largest)
    largest = kernel.most_lane(many.now).most(single.now)
    beside = kernel.float(0.0) if sink is None else kernel.exp(sink - largest)
    totals, total = kernel.var(kernel.zeros()), kernel.var(beside)

    def raise_to_power(at: Num, lanes: int) -> None:
        top = largest if lanes == 1 else kernel.spread(largest)
        power = kernel.exp(scores[at].load(lanes) - top)
        scores[at].store(power)
        so_far = totals if lanes > 1 else total
        so_far.set(so_far.now + power)

    kernel.sweep(count, raise_to_power)
    inverse = kernel.float(1.0) / (kernel.sum_lanes(totals.now) + total.now)

    def divide(at: Num, lanes: int) -> None:
        factor = inverse if lanes == 1 else kernel.spread(inverse)
        scores[at].store(scores[at].load(lanes) * factor)

    kernel.sweep(count, divide)


def _prefill(shape: Shape) -> Callable[[Kernel], None]:
    def write(kernel: Kernel) -> None:
        lanes, head_dim, groups = kernel.lanes, shape.head_dim, shape.groups
        vectors = 2
        width = vectors * lanes
        kv_heads, block_tokens = kernel.integer(KV_HEADS), kernel.integer(BLOCK_TOKENS)
        scale, window = kernel.real(SCALE), kernel.integer(WINDOW)
        tiles = kernel.integer(TILES)
        queries = kernel.scratch(head_dim * width)
        mixed = kernel.scratch(head_dim * width)
        scores = kernel.scratch(CHUNK_TOKENS * width)
        places = kernel.scratch(width, "i64")
        sinks = kernel.scratch(width) if shape.sinks else None
        starts, lengths = kernel.pointer(STARTS, "i32"), kernel.pointer(LENGTHS, "i32")
        source, target = kernel.pointer(Q, shape.kind), kernel.pointer(OUT, shape.kind)
        lane_numbers = kernel.lane_numbers()

        with kernel.items(kernel.integer(REQUESTS) * kv_heads * tiles) as item:
            tile = tiles - 1 - item / kv_heads % tiles
            head, request = item % kv_heads, item / (kv_heads * tiles)
            start = starts[request].load().to_int()
            rows = (starts[request + 1].load().to_int() - start) * groups
            first_row = tile * width
            with kernel.when(first_row < rows):
                length = lengths[request].load().to_int()
                past = length - rows / groups
                last_row = (first_row + width).least(rows) - 1
                with kernel.loop(0, width) as lane:
                    row = (first_row + lane).least(last_row)
                    place = ((start + row / groups) * kv_heads + head) * groups + row % groups
                    places[lane].store(place * head_dim)
                    if sinks is not None:
                        sinks[lane].store(_sink(kernel, head * groups + row % groups))
                    with kernel.loop(0, head_dim) as at:
                        queries[at * width + lane].store(
                            source[place * head_dim + at].load() * scale
                        )
                with kernel.loop(0, head_dim * width, lanes) as at:
                    mixed[at].store(kernel.zeros())
                seats = [
                    (kernel.spread((first_row + v * lanes).to_int(I32)) + lane_numbers).least(
                        kernel.spread(last_row.to_int(I32))
                    )
                    for v in range(vectors)
                ]
                positions = [seat / groups + kernel.spread(past.to_int(I32)) for seat in seats]
                end = past + last_row / groups + 1
                oldest = past + first_row / groups + 1 - window
                begin = (window > 0).where(oldest.most(0), kernel.int(0))
                keys = Rows(kernel, shape.kind, K_CACHE, request, head)
                values = Rows(kernel, shape.kind, V_CACHE, request, head)
                if sinks is None:
                    largest = [kernel.var(kernel.zeros() + NEVER) for _ in range(vectors)]
                    totals = [kernel.var(kernel.zeros()) for _ in range(vectors)]
                else:
                    largest = [kernel.var(sinks[v * lanes].load(lanes)) for v in range(vectors)]
                    totals = [kernel.var(kernel.zeros() + 1.0) for _ in range(vectors)]
                with kernel.loop(begin / CHUNK_TOKENS * CHUNK_TOKENS, end, CHUNK_TOKENS) as chunk:
                    chunk_end = (chunk + CHUNK_TOKENS).least(end)
                    blocks = (chunk / block_tokens, (chunk_end - 1) / block_tokens + 1)

                    def score(place: Pointer, position: Num, count: int) -> None:
                        sums = [
                            [kernel.var(kernel.zeros()) for _ in range(vectors)]
                            for _ in range(count)
                        ]
                        key_rows = [place[keys.row * at] for at in range(count)]
                        with kernel.loop(0, head_dim) as at:
                            query = [
                                queries[at * width + v * lanes].load(lanes) for v in range(vectors)
                            ]
                            for key, of_key in zip(key_rows, sums, strict=True):
                                number = kernel.spread(key[at].load())
                                for v in range(vectors):
                                    of_key[v].set(kernel.fma(number, query[v], of_key[v].now))
                        for at, of_key in enumerate(sums):
                            seat = (position + at).to_int(I32)
                            for v in range(vectors):
                                key_at = kernel.spread(seat)
                                hidden = key_at > positions[v]
                                old = key_at <= positions[v] - kernel.spread(window.to_int(I32))
                                far = (
                                    kernel.spread(
                                        (window > 0).where(kernel.int(1), kernel.int(0)).to_int(I32)
                                    )
                                    > 0
                                )
                                hidden = hidden | (old & far)
                                shown = hidden.where(kernel.zeros() + 2 * NEVER, of_key[v].now)
                                scores[(position + at - chunk) * width + v * lanes].store(shown)

                    with kernel.loop(*blocks) as block:
                        base = block * block_tokens
                        high = (base + block_tokens).least(chunk_end)
                        low = base.most(chunk)
                        whole = low + (high - low) / TILE_KEYS * TILE_KEYS
                        place = keys.block(block)
                        with kernel.loop(low, whole, TILE_KEYS) as position:
                            score(place[(position - base) * keys.row], position, TILE_KEYS)
                        with kernel.loop(whole, high) as position:
                            score(place[(position - base) * keys.row], position, 1)
                    count = chunk_end - chunk
                    shrinks = []
                    for v in range(vectors):
                        top = kernel.var(largest[v].now)
                        with kernel.loop(0, count) as at:
                            top.set(top.now.most(scores[at * width + v * lanes].load(lanes)))
                        shrink = kernel.exp(largest[v].now - top.now)
                        total = kernel.var(totals[v].now * shrink)
                        with kernel.loop(0, count) as at:
                            place = scores[at * width + v * lanes]
                            power = kernel.exp(place.load(lanes) - top.now)
                            place.store(power)
                            total.set(total.now + power)
                        largest[v].set(top.now)
                        totals[v].set(total.now)
                        shrinks.append(shrink)
                    with kernel.loop(0, head_dim, TILE_KEYS) as column:
                        outs = [
                            [mixed[(column + at) * width + v * lanes] for v in range(vectors)]
                            for at in range(TILE_KEYS)
                        ]
                        sums = [
                            [
                                kernel.var(place.load(lanes) * shrinks[v])
                                for v, place in enumerate(of)
                            ]
                            for of in outs
                        ]
                        with kernel.loop(*blocks) as block:
                            base = block * block_tokens
                            place = values.block(block)[column]
                            with kernel.loop(
                                base.most(chunk), (base + block_tokens).least(chunk_end)
                            ) as position:
                                weights = [
                                    scores[(position - chunk) * width + v * lanes].load(lanes)
                                    for v in range(vectors)
                                ]
                                value = place[(position - base) * values.row]
                                for at in range(TILE_KEYS):
                                    number = kernel.spread(value[at].load())
                                    for v in range(vectors):
                                        sums[at][v].set(
                                            kernel.fma(number, weights[v], sums[at][v].now)
                                        )
                        for of, to in zip(sums, outs, strict=True):
                            for total, place in zip(of, to, strict=True):
                                place.store(total.now)
                for v in range(vectors):
                    share = kernel.zeros() + 1.0
                    share = share / totals[v].now
                    with kernel.loop(0, head_dim) as at:
                        place = mixed[at * width + v * lanes]
                        place.store(place.load(lanes) * share)
                with kernel.loop(0, (last_row - first_row) + 1) as lane:
                    place = places[lane].load()
                    with kernel.loop(0, head_dim) as at:
                        target[place + at].store(mixed[at * width + lane].load())

    return write


def _in_chunks(count: int, size: int) -> list[range]:
    """[0, count) in ranges of at most `size`."""
    return [range(at, min(at + size, count)) for at in range(0, count, size)]


@dataclass(frozen=True, slots=True)
class Kernels:
    """The compiled calls of one shape."""

    decode: Callable[..., None]
    prefill: Callable[..., None]


@lru_cache(maxsize=8)
def kernels(shape: Shape) -> Kernels:
    """Compile (or read from disk) the kernels of a shape."""
    sources = [
        KernelSource("decode", PARAMETERS, _decode(shape)),
        KernelSource("prefill", PARAMETERS, _prefill(shape)),
    ]
    library = Library(f"attention-{shape.name}", [Path(__file__)], sources)
    return Kernels(library.function("decode"), library.function("prefill"))


@lru_cache(maxsize=8)
def _kernels_for(
    head_dim: int,
    groups: int,
    block_tokens: int,
    q: torch.dtype,
    k: torch.dtype,
    v: torch.dtype,
    sinks: bool,
) -> Kernels | None:
    """The kernels of these sizes and formats; None where none can be compiled."""
    if not q == k == v or q not in KINDS or head_dim % host().lanes or block_tokens % host().lanes:
        return None
    return kernels(Shape(head_dim, groups, KINDS[q], sinks))


@paged_attention.backend("llvm", fits=fits, takes=takes_own)
def llvm_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    q_width: int,
    scale: float,
    window: int,
    out: Tensor,
    sinks: Tensor | None = None,
) -> None:
    """Attend from this step's queries to all cached rows of their own request, causally."""
    _, kv_heads, block_tokens, head_dim = k_cache.shape
    tokens, heads, _ = q.shape
    groups, requests = heads // kv_heads, lengths.shape[0]
    *k_strides, k_last = k_cache.stride()
    *v_strides, v_last = v_cache.stride()
    calls = _kernels_for(
        head_dim, groups, block_tokens, q.dtype, k_cache.dtype, v_cache.dtype, sinks is not None
    )
    if calls is None or not k_last == v_last == block_table.stride(1) == 1:
        padded_paged_attention(
            q, k_cache, v_cache, block_table, lengths, query_starts, q_width, scale, window, out, sinks
        )  # fmt: skip
        return
    if not requests:
        return
    assert out.is_contiguous(), "attention writes whole rows"
    q = q.contiguous()
    common = (
        q.data_ptr(), k_cache.data_ptr(), *k_strides, v_cache.data_ptr(), *v_strides,
        block_table.data_ptr(), block_table.stride(0), lengths.data_ptr(), query_starts.data_ptr(),
        out.data_ptr(), float_bits(scale), window, kv_heads, block_tokens,
    )  # fmt: skip
    of_sinks = 0 if sinks is None else sinks.data_ptr()
    threads = torch.get_num_threads()
    if q_width == 1:
        share = 1 if requests < WHOLE_REQUESTS * threads else kv_heads
        stride = block_table.shape[1] * block_tokens
        own = fresh((threads * groups * share * (stride + head_dim),))
        calls.decode(threads, *common, 0, requests, share, own.data_ptr(), stride, of_sinks)
    else:
        most_rows = (q_width or tokens) * groups
        tiles = -(-most_rows // (2 * host().lanes))
        calls.prefill(threads, *common, 0, requests, tiles, 0, 0, of_sinks)
