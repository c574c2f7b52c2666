"""How do rows with one query attend, in LLVM?

A work item is one request and one key head, or all of them where there are many requests, so that memory is read from
front to back; query heads share each cached row that is read. Scores of all positions first, then one softmax, then
the sum of the values by their shares.
"""

from __future__ import annotations

from collections.abc import Callable

from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.objects import host
from tokamak.ops.jit.values import Num, Pointer
from tokamak.ops.paged_attention.llvm_rows import (
    BLOCK_TOKENS,
    FIRST,
    K_CACHE,
    KV_HEADS,
    LENGTHS,
    NEVER,
    OUT,
    REQUESTS,
    SCALE,
    SCORES,
    SCORES_STRIDE,
    STARTS,
    TILES,
    V_CACHE,
    WINDOW,
    Q,
    Rows,
    Shape,
    sink_of,
)  # fmt: skip


def decode(shape: Shape) -> Callable[[Kernel], None]:
    """The kernel of rows with one query."""

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
                    sink = sink_of(kernel, head * groups + row) if shape.sinks else None
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


def _in_chunks(count: int, size: int) -> list[range]:
    """[0, count) in ranges of at most `size`."""
    return [range(at, min(at + size, count)) for at in range(0, count, size)]
