"""The ops once more, from their papers, in float64 NumPy with plain loops: another reading."""

import numpy as np
import torch


def wide(tensor):
    return tensor.detach().double().numpy()


def e4m3_numbers():
    """The 127 numbers of E4M3 that are not negative, in order of their codes: 4 bits of exponent, 3 of fraction."""
    return np.array(
        [
            fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
            for exponent in range(16)
            for fraction in range(8)
        ][:-1]
    )


def rounded(numbers, dtype):
    """The nearest numbers that a format has; of two as near, in fp8, the one with an even code. NaN stays NaN."""
    if dtype != torch.float8_e4m3fn:
        return torch.from_numpy(numbers).to(dtype).double().numpy()
    table = e4m3_numbers()
    gaps = np.abs(np.minimum(np.abs(numbers), table[-1])[..., None] - table)
    nearest = gaps == gaps.min(axis=-1, keepdims=True)
    return np.sign(numbers) * table[(nearest * (2 - np.arange(len(table)) % 2)).argmax(axis=-1)]


def rms_norm(x, weight, eps):
    rows = wide(x)
    return rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + eps) * wide(weight)


def add_residual(x, residual):
    total = wide(x) + wide(residual)
    return total, total


def embed(token_ids, table):
    rows = [wide(table)[at] for at in token_ids.tolist()]
    return np.array(rows).reshape(len(rows), table.shape[1])


def silu_mul(gate_up):
    numbers = wide(gate_up)
    width = numbers.shape[1] // 2
    gate, up = numbers[:, :width], numbers[:, width:]
    return gate / (1 + np.exp(-gate)) * up


def rotate_head(head, angles_row):
    """Turn pair (i, i + half) of one head by angle i."""
    half = len(angles_row) // 2
    turned = head.copy()
    for pair in range(half):
        cos, sin = angles_row[pair], angles_row[half + pair]
        a, b = head[pair], head[half + pair]
        turned[pair], turned[half + pair] = a * cos - b * sin, b * cos + a * sin
    return turned


def rotate_and_cache(qkv, positions, cos_sin, k_cache, v_cache, slots, q_norm, k_norm, eps):
    """Queries, and both caches as they are afterwards."""
    _, kv_heads, block_tokens, width = k_cache.shape
    rows, angles = wide(qkv), wide(cos_sin)
    keys, values = wide(k_cache).copy(), wide(v_cache).copy()
    heads = rows.shape[1] // width - 2 * kv_heads
    queries = np.zeros((len(rows), heads, width))
    for token, row in enumerate(rows):
        split = row.reshape(-1, width)
        at = angles[int(positions[token])]
        for head in range(heads + kv_heads):
            weight = q_norm if head < heads else k_norm
            vector = split[head]
            if weight is not None:
                unit = vector / np.sqrt((vector**2).mean() + eps)
                vector = rounded(rounded(unit, qkv.dtype) * wide(weight), qkv.dtype)
            vector = rounded(rotate_head(vector, at), qkv.dtype)
            slot = int(slots[token])
            if head < heads:
                queries[token, head] = vector
            elif slot >= 0:
                place = (slot // block_tokens, head - heads, slot % block_tokens)
                keys[place] = rounded(vector, k_cache.dtype)
                values[place] = rounded(split[head + kv_heads], v_cache.dtype)
    return queries, keys, values


def paged_attention(
    q, k_cache, v_cache, table, lengths, starts, q_width, scale, window, out, sinks
):
    del q_width
    queries, keys, values = wide(q), wide(k_cache), wide(v_cache)
    block_tokens = keys.shape[2]
    groups = queries.shape[1] // keys.shape[1]
    out = np.zeros_like(wide(out))
    for request, length in enumerate(lengths.tolist()):
        begin, end = starts[request].item(), starts[request + 1].item()
        for row in range(begin, end):
            position = length - (end - row)
            first = max(0, position - window + 1) if window else 0
            seen = range(first, position + 1)
            places = [(table[request, at // block_tokens].item(), at % block_tokens) for at in seen]
            for head in range(queries.shape[1]):
                k = np.array([keys[block, head // groups, at] for block, at in places])
                v = np.array([values[block, head // groups, at] for block, at in places])
                scores = k @ queries[row, head] * scale
                sink = -np.inf if sinks is None else float(sinks[head])
                top = max(scores.max(), sink)
                shares = np.exp(scores - top)
                out[row, head] = shares @ v / (shares.sum() + np.exp(sink - top))
    return out


def linear(x, weight):
    return wide(x) @ wide(weight.dense(torch.float32)).T


def moe_route(scores, chosen, renormalise):
    """The likeliest first; of equals the lower number."""
    ids, weights = [], []
    for row in wide(scores):
        shares = np.exp(row - row.max())
        shares /= shares.sum()
        best = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:chosen]
        ids.append(best)
        weights.append(shares[best] / (shares[best].sum() if renormalise else 1))
    shape = (len(ids), chosen)
    return np.array(ids, dtype=np.int32).reshape(shape), np.array(weights).reshape(shape)


def moe_experts(x, ids, weights, gate_up, down):
    rows, both, back = wide(x), wide(gate_up), wide(down)
    inner = back.shape[2]
    out = np.zeros_like(rows)
    for row, (chosen, shares) in enumerate(zip(ids.tolist(), wide(weights), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = both[expert][:inner] @ rows[row], both[expert][inner:] @ rows[row]
            out[row] += share * (back[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return out
