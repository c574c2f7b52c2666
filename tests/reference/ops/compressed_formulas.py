"""The ops of DeepSeek V4 and V4.1 once more, in float64 NumPy with plain loops over rows: another reading."""

from __future__ import annotations

import numpy as np
import torch

from tests.reference.ops.formulas import wide


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def _products(streams, fn, eps):
    rows = []
    for row in wide(streams).reshape(streams.shape[0], streams.shape[1] * streams.shape[2]):
        rows.append(wide(fn) @ row / np.sqrt((row**2).mean() + eps))
    return np.array(rows).reshape(-1, fn.shape[0])


def mix_coefficients(streams, fn, base, scale, norm_eps, mix_eps, iterations):
    count = streams.shape[1]
    reads, writes, mixes = [], [], []
    for row in _products(streams, fn, norm_eps):
        shift = wide(base)
        by = wide(scale)
        reads.append(sigmoid(row[:count] * by[0] + shift[:count]) + mix_eps)
        at = slice(count, 2 * count)
        writes.append(2 * sigmoid(row[at] * by[1] + shift[at]))
        square = (row[2 * count :] * by[2] + shift[2 * count :]).reshape(count, count)
        square = np.exp(square - square.max(axis=1, keepdims=True))
        square = square / square.sum(axis=1, keepdims=True) + mix_eps
        for turn in range(iterations):
            if turn:
                square = square / (square.sum(axis=1, keepdims=True) + mix_eps)
            square = square / (square.sum(axis=0, keepdims=True) + mix_eps)
        mixes.append(square)
    shape = (len(reads), count)
    return (
        np.array(reads).reshape(shape),
        np.array(writes).reshape(shape),
        np.array(mixes).reshape(*shape, count),
    )


def head_coefficients(streams, fn, base, scale, norm_eps, mix_eps):
    return sigmoid(_products(streams, fn, norm_eps) * wide(scale) + wide(base)) + mix_eps


def collapse_streams(streams, read):
    return np.einsum("tsw,ts->tw", wide(streams), wide(read))


def expand_streams(y, streams, write, mix, also=None):
    said = wide(y) if also is None else wide(y + also)
    written = np.einsum("tw,ts->tsw", said, wide(write))
    return written + np.einsum("trw,trs->tsw", wide(streams), wide(mix))


def silu_mul_limited(gate_up, limit):
    numbers = wide(gate_up)
    width = numbers.shape[1] // 2
    gate = np.minimum(numbers[:, :width], limit)
    return gate * sigmoid(gate) * np.clip(numbers[:, width:], -limit, limit)


def moe_experts_limited(x, ids, weights, gate_up, down, limit):
    out = np.zeros(x.shape)
    for row, vector in enumerate(wide(x)):
        for expert, weight in zip(ids[row].tolist(), wide(weights)[row], strict=True):
            both = wide(gate_up)[expert] @ vector
            gate, up = np.minimum(both[: len(both) // 2], limit), both[len(both) // 2 :]
            inner = gate * sigmoid(gate) * np.clip(up, -limit, limit) * weight
            out[row] += wide(down)[expert] @ inner
    return out


def moe_weigh_rooted(scores, ids, scale):
    rows = []
    for row, chosen in zip(np.sqrt(softplus(wide(scores))), ids.tolist(), strict=True):
        rows.append(row[chosen] / (row[chosen].sum() + 1e-20) * scale)
    return np.array(rows).reshape(ids.shape)


def moe_route_rooted(scores, bias, chosen, scale):
    """Ids and weights; the ranks are those of float32, as what is equal there is equal to the op."""
    ids = []
    rooted = np.sqrt(softplus(wide(scores)))
    for row in rooted + wide(bias):
        ids.append(sorted(range(len(row)), key=lambda at: (-np.float32(row[at]), at))[:chosen])
    found = np.array(ids, dtype=np.int64).reshape(-1, chosen)
    weights = np.take_along_axis(rooted, found, axis=1) if len(found) else np.zeros(found.shape)
    return found, weights / (weights.sum(axis=1, keepdims=True) + 1e-20) * scale


def rotate_pairs(x, positions, cos_sin, backwards, ratio=1):
    out = wide(x).copy()
    half = cos_sin.shape[1] // 2
    for token, heads in enumerate(out):
        angles = wide(cos_sin)[int(positions[token]) // ratio * ratio]
        for head in heads:
            for pair in range(half):
                at = len(head) - 2 * half + 2 * pair
                cos, sin = angles[pair], angles[half + pair] * (-1 if backwards else 1)
                a, b = head[at : at + 2]
                head[at], head[at + 1] = a * cos - b * sin, a * sin + b * cos
    return out


def _row_requests(query_starts):
    starts = query_starts.tolist()
    return [
        request
        for request in range(len(starts) - 1)
        for _ in range(starts[request], starts[request + 1])
    ]


def _entry(cache, table, request, number):
    """Row `number` of a request in a paged cache."""
    rows = cache.shape[2]
    return cache[int(table[request, number // rows]), 0, number % rows]


def write_rows(cache, rows, slots, positions, ratio):
    held = wide(cache).copy()
    for row, slot in _ends_of_groups(wide(rows.to(cache.dtype)), slots, positions, ratio):
        held[slot // cache.shape[2], 0, slot % cache.shape[2]] = row
    return held


def write_records(cache, rows, slots, positions, ratio, form):
    held = cache.clone()
    for row, slot in _ends_of_groups(rows, slots, positions, ratio):
        held[slot // cache.shape[2], 0, slot % cache.shape[2]] = form.pack(row)
    return held.numpy()


def _ends_of_groups(rows, slots, positions, ratio):
    for row, slot, position in zip(rows, slots.tolist(), positions.tolist(), strict=True):
        if slot >= 0 and position % ratio == ratio - 1:
            yield row, slot // ratio


def _numbers(cache, form, q):
    return cache if form is None else form.unpack(cache, q.shape[-1], torch.float64)


def fold_groups(state, table, positions, starts, q_width, ratio, overlapped, bias, out):
    del q_width
    held, folded = wide(state), np.zeros(out.shape)
    width, columns = out.shape[1], state.shape[3] // 2
    for row, request in enumerate(_row_requests(starts)):
        last = int(positions[row])
        if (last + 1) % ratio:
            continue
        values, gates = [], []
        for back in range((2 if overlapped else 1) * ratio - 1, -1, -1):
            if last - back < 0:
                continue
            numbers = _entry(held, table, request, last - back)
            half = slice(width, 2 * width) if overlapped and back < ratio else slice(0, width)
            values.append(numbers[:columns][half])
            gates.append(numbers[columns:][half])
            if bias is not None:
                gates[-1] = gates[-1] + wide(bias)[(last - back) % ratio, half]
        shares = np.exp(np.array(gates) - np.max(gates, axis=0))
        folded[row] = (shares / shares.sum(axis=0) * np.array(values)).sum(axis=0)
    return folded


def select_entries(
    q,
    weights,
    keys,
    table,
    positions,
    starts,
    q_width,
    ratio,
    within,
    block_entries,
    chosen,
    blocks,
    form,
    plans,
):
    del q_width, plans
    keys = _numbers(keys, form, q)
    listed = np.full(chosen.shape, -1)
    best = None if blocks is None else np.full(blocks.shape, -1)
    for row, request in enumerate(_row_requests(starts)):
        visible = (int(positions[row]) + 1) // ratio
        scores = {}
        for number in range(visible):
            products = wide(q)[row] @ _entry(wide(keys), table, request, number)
            scores[number] = np.float32((wide(weights)[row] * np.maximum(products, 0)).sum())
        by_block = {}
        for number, score in scores.items():
            block = number // block_entries
            newest = block == (visible - 1) // block_entries
            by_block[block] = np.inf if newest else max(score, by_block.get(block, -np.inf))
        if within is not None:
            allowed = set(within[row].tolist())
            scores = {at: score for at, score in scores.items() if at // block_entries in allowed}
        for out, ranked in ((listed, scores), (best, by_block)):
            if out is not None:
                order = sorted(ranked, key=lambda at: (-ranked[at], at))[: out.shape[1]]
                out[row, : len(order)] = sorted(order)
    return (listed,) if best is None else (listed, best)


def sparse_attention(
    q,
    rows,
    table,
    entries,
    entry_table,
    chosen,
    positions,
    starts,
    q_width,
    window,
    window_starts,
    scale,
    sink,
    out,
    window_form=None,
    entry_form=None,
    cos_sin=None,
):
    del q_width
    rows, entries = _numbers(rows, window_form, q), _numbers(entries, entry_form, q)
    mixed = np.zeros(out.shape)
    for row, request in enumerate(_row_requests(starts)):
        at = int(positions[row])
        first = 0 if window_starts is None else int(window_starts[request])
        keys = [
            _entry(wide(rows), table, request, number)
            for number in range(max(first, at - window + 1), at + 1)
        ]
        if chosen is not None:
            keys += [
                _entry(wide(entries), entry_table, request, number)
                for number in chosen[row].tolist()
                if number >= 0
            ]
        for head, vector in enumerate(wide(q)[row]):
            if not keys:
                continue
            scores = np.exp(np.array([vector @ key for key in keys]) * scale)
            total = scores.sum() + np.exp(float(sink[head]))
            mixed[row, head] = (scores[:, None] * np.array(keys)).sum(axis=0) / total
    if cos_sin is None:
        return mixed
    return rotate_pairs(torch.from_numpy(mixed), positions, cos_sin, True)


def engram_rows(history, slots, positions, starts, q_width, ids, pad_id, multipliers, primes, out):
    del q_width
    found = np.zeros(out.shape, dtype=np.int64)
    for row, request in enumerate(_row_requests(starts)):
        at = int(positions[row])
        mixed, column, before = 0, 0, 0
        for back, multiplier in enumerate(multipliers.tolist()):
            token = pad_id
            if at - back >= 0:
                token = int(ids[int(history[int(slots[request]), at - back])])
            mixed ^= token * multiplier
            if back:
                for prime in primes[back - 1].tolist():
                    found[row, column] = mixed % prime + before
                    column, before = column + 1, before + prime
    return found


def engram_gate(streams, keys, values, weight, eps):
    out = wide(streams).copy()
    for row, heads in enumerate(wide(keys).reshape(out.shape)):
        for stream, key in enumerate(heads):
            vector = out[row, stream].copy()
            dot = (vector * wide(weight)[stream] * key).sum() / np.sqrt(len(key))
            dot /= np.sqrt((vector**2).mean() + eps) * np.sqrt((key**2).mean() + eps)
            root = np.copysign(np.sqrt(max(abs(dot), 1e-6)), dot)
            out[row, stream] = vector + sigmoid(root) * wide(values)[row]
    return out
