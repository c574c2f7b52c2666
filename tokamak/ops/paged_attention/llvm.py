"""Paged attention in LLVM: one kernel for rows with one query, one for prompt chunks.

Decode: a work item is one request and one key head; all its query heads share each cached row that is
read. Scores of all positions first, then one softmax, then the weighted sum of the values.

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
from tokamak.ops.jit.compiler import KernelSource, Library, float_bits, host
from tokamak.ops.jit.language import I32, Kernel, Num, Pointer
from tokamak.ops.jit.torch_kinds import KINDS
from tokamak.ops.paged_attention.reference import paged_attention

(
    Q, K_CACHE, K_BLOCK, K_HEAD, K_ROW, V_CACHE, V_BLOCK, V_HEAD, V_ROW, TABLE, TABLE_STRIDE, LENGTHS, STARTS,
    OUT, SCALE, WINDOW, KV_HEADS, BLOCK_TOKENS, FIRST, REQUESTS, TILES, SCORES, SCORES_STRIDE,
) = range(23)  # fmt: skip
PARAMETERS = 23
CHUNK_TOKENS = 128
TILE_KEYS = 4
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

    @property
    def name(self) -> str:
        """Such as `d64_g3_f32`."""
        return f"d{self.head_dim}_g{self.groups}_{self.kind}"


class Rows:
    """The cached keys or values of one request and one key head, while a kernel is written."""

    def __init__(self, kernel: Kernel, kind: str, cache: int, request: Num, head: Num) -> None:
        self._kernel = kernel
        self._base = kernel.pointer(cache, kind)[head * kernel.integer(cache + 2)]
        self._block = kernel.integer(cache + 1)
        self.row = kernel.integer(cache + 3)
        self._table = kernel.pointer(TABLE, "i32")[request * kernel.integer(TABLE_STRIDE)]

    def block(self, index: Num) -> Pointer:
        """Where the rows of a request's block begin."""
        return self._base[self._table[index].load().to_int() * self._block]


def _decode(shape: Shape) -> Callable[[Kernel], None]:
    def write(kernel: Kernel) -> None:
        lanes = kernel.lanes
        parts = shape.head_dim // lanes
        kv_heads, block_tokens = kernel.integer(KV_HEADS), kernel.integer(BLOCK_TOKENS)
        scale, window = kernel.real(SCALE), kernel.integer(WINDOW)
        first = kernel.integer(FIRST)
        stride = kernel.integer(SCORES_STRIDE)
        scores = kernel.pointer(SCORES, "f32")[kernel.thread() * stride * shape.groups]
        queries = kernel.scratch(shape.groups * shape.head_dim)
        starts = kernel.pointer(STARTS, "i32")
        with kernel.items((kernel.integer(REQUESTS) - first) * kv_heads) as item:
            request, head = item / kv_heads + first, item % kv_heads
            query = starts[request].load().to_int()
            with kernel.when(query < starts[request + 1].load().to_int()):
                length = kernel.pointer(LENGTHS, "i32")[request].load().to_int()
                begin = (window > 0).where((length - window).most(0), kernel.int(0))
                row = (query * kv_heads + head) * (shape.groups * shape.head_dim)
                source, target = (
                    kernel.pointer(Q, shape.kind)[row],
                    kernel.pointer(OUT, shape.kind)[row],
                )
                with kernel.loop(0, shape.groups * shape.head_dim, lanes) as at:
                    queries[at].store(source[at].load(lanes) * kernel.spread(scale))
                keys = Rows(kernel, shape.kind, K_CACHE, request, head)
                values = Rows(kernel, shape.kind, V_CACHE, request, head)

                def each_row(rows: Rows, use: Callable[[Num, Pointer], None]) -> None:
                    with kernel.loop(
                        begin / block_tokens, (length - 1) / block_tokens + 1
                    ) as block:
                        base = block * block_tokens
                        place = rows.block(block)
                        low, high = base.most(begin), (base + block_tokens).least(length)
                        with kernel.loop(low, high) as position:
                            use(position, place[(position - base) * rows.row])

                for some in _in_chunks(shape.groups, 4):

                    def score(position: Num, place: Pointer, some: range = some) -> None:
                        sums = {group: kernel.zeros() for group in some}
                        for part in range(parts):
                            key = place[part * lanes].load(lanes)
                            for group in some:
                                query = queries[group * shape.head_dim + part * lanes].load(lanes)
                                sums[group] = kernel.fma(query, key, sums[group])
                        for group in some:
                            scores[stride * group + position].store(kernel.sum_lanes(sums[group]))

                    each_row(keys, score)
                shares = [
                    _softmax(kernel, scores[stride * group + begin], length - begin)
                    for group in range(shape.groups)
                ]
                width = 3 if host().registers == 16 else 6
                for some in _in_chunks(shape.groups, 4):
                    for some_parts in _in_chunks(parts, max(1, 4 * width // len(some))):
                        sums = {
                            (g, p): kernel.var(kernel.zeros()) for g in some for p in some_parts
                        }

                        def mix(
                            position: Num,
                            place: Pointer,
                            sums: dict = sums,
                            some: range = some,
                            some_parts: range = some_parts,
                        ) -> None:
                            weights = {
                                g: kernel.spread(scores[stride * g + position].load()) for g in some
                            }
                            for part in some_parts:
                                value = place[part * lanes].load(lanes)
                                for group in some:
                                    total = sums[group, part]
                                    total.set(kernel.fma(weights[group], value, total.now))

                        each_row(values, mix)
                        for (group, part), total in sums.items():
                            place = target[group * shape.head_dim + part * lanes]
                            place.store(total.now * kernel.spread(shares[group]))

    return write


def _softmax(kernel: Kernel, scores: Pointer, count: Num) -> Num:
    """Turn scores into exp(score - largest); returns 1 / their sum."""
    lanes = kernel.lanes
    whole = count / lanes * lanes
    many, single = kernel.var(kernel.zeros() + NEVER), kernel.var(kernel.float(NEVER))
    kernel.sweep(
        count,
        lambda at, n: (many if n > 1 else single).set(
            (many if n > 1 else single).now.most(scores[at].load(n))
        ),
    )
    largest = kernel.most_lane(many.now).most(single.now)
    total = kernel.var(kernel.zeros())
    with kernel.loop(0, whole, lanes) as at:
        power = kernel.exp(scores[at].load(lanes) - kernel.spread(largest))
        scores[at].store(power)
        total.set(total.now + power)
    rest = kernel.var(kernel.float(0.0))
    with kernel.loop(whole, count) as at:
        power = kernel.exp(scores[at].load() - largest)
        scores[at].store(power)
        rest.set(rest.now + power)
    return kernel.float(1.0) / (kernel.sum_lanes(total.now) + rest.now)


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
                largest = [kernel.var(kernel.zeros() + NEVER) for _ in range(vectors)]
                totals = [kernel.var(kernel.zeros()) for _ in range(vectors)]
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
    head_dim: int, groups: int, block_tokens: int, q: torch.dtype, k: torch.dtype, v: torch.dtype
) -> Kernels | None:
    """The kernels of these sizes and formats; None where none can be compiled."""
    if not q == k == v or q not in KINDS or head_dim % host().lanes or block_tokens % TILE_KEYS:
        return None
    return kernels(Shape(head_dim, groups, KINDS[q]))


@paged_attention.backend("llvm", fits=fits)
def llvm_paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    query_starts: Tensor,
    prefill_requests: int,
    scale: float,
    window: int,
) -> Tensor:
    """Attend from this step's queries to all cached rows of their own request, causally."""
    _, kv_heads, block_tokens, head_dim = k_cache.shape
    tokens, heads, _ = q.shape
    groups = heads // kv_heads
    *k_strides, k_last = k_cache.stride()
    *v_strides, v_last = v_cache.stride()
    calls = _kernels_for(head_dim, groups, block_tokens, q.dtype, k_cache.dtype, v_cache.dtype)
    if calls is None or k_last != 1 or v_last != 1 or block_table.stride(1) != 1:
        return paged_attention.reference(
            q, k_cache, v_cache, block_table, lengths, query_starts, prefill_requests, scale, window
        )
    q = q.contiguous()
    starts = query_starts.tolist()
    requests = len(starts) - 1
    out = torch.empty_like(q)
    if starts[-1] < tokens:
        out[starts[-1] :] = 0
    common = (
        q.data_ptr(), k_cache.data_ptr(), *k_strides, v_cache.data_ptr(), *v_strides,
        block_table.data_ptr(), block_table.stride(0), lengths.data_ptr(), query_starts.data_ptr(),
        out.data_ptr(), float_bits(scale), window, kv_heads, block_tokens,
    )  # fmt: skip
    threads = torch.get_num_threads()
    if prefill_requests:
        tiles = -(-starts[prefill_requests] * groups // (2 * host().lanes))
        calls.prefill(threads, *common, 0, prefill_requests, tiles, 0, 0)
    if prefill_requests < requests:
        most = block_table.shape[1] * block_tokens
        scores = torch.empty(threads * groups * most)
        calls.decode(threads, *common, prefill_requests, requests, 0, scores.data_ptr(), most)
    return out
