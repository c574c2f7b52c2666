"""How long does every op of a decode step take, and how far is it from what memory allows?

    python benchmarks/ops/kernels.py [--threads 2] [--rows 1 8 32] [--backend llvm reference]

Shapes are SmolLM2-135M's (30 layers; 9 query and 3 key heads of 64; 576 and 1,536 wide). Each op runs over
as many copies of its weights or caches as a model has layers, so that they come from memory. Prints the
best of some passes per call, the bytes a call must read and the bandwidth that makes.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.record import write_record
from tokamak.core.weight import GROUP_COLUMNS, GroupedWeight
from tokamak.device.facts import cpu_facts
from tokamak.ops.activation import silu_mul
from tokamak.ops.linear import pack_linear
from tokamak.ops.load import load_backends
from tokamak.ops.norm import add_rms_norm
from tokamak.ops.paged_attention import paged_attention
from tokamak.ops.registry import Op
from tokamak.ops.rope import rotate_and_cache

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM = 30, 576, 1536, 9, 3, 64
VOCAB = 49152
CONTEXT, BLOCK_TOKENS = 176, 16
LINEARS = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH, 4),
    "out": (WIDTH, WIDTH, 4),
    "gate_up": (2 * INNER, WIDTH, 4),
    "down": (WIDTH, INNER, 4),
    "head": (VOCAB, WIDTH, 8),
}

Calls = list[Callable[[], object]]


def codes(features: int, columns: int, bits: int) -> GroupedWeight:
    """A random weight in groups."""
    scales = torch.rand((features, columns // GROUP_COLUMNS)).half().float() * 0.0078125
    values = torch.randint(0, 1 << bits, (features, columns), dtype=torch.uint8)
    return GroupedWeight(values, scales, -(2.0 ** (bits - 1)) * scales, bits)


def linear_calls(name: str, rows: int, form: str | None) -> tuple[Calls, int]:
    """Products with as many weights as there are layers, and the bytes of one."""
    features, columns, bits = LINEARS[name]
    copies = 1 if name == "head" else LAYERS
    x = torch.randn(rows, columns)
    packed = [
        pack_linear(
            codes(features, columns, bits),
            dtype=torch.float32,
            exact=False,
            facts=cpu_facts(),
            prefer=form,
        )
        for _ in range(copies)
    ]
    return [lambda each=each: each(x) for each in packed], features * columns * (bits + 1) // 8


def caches(rows: int) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Keys and values of every layer, and a block table with a stretch of blocks per request."""
    blocks = -(-CONTEXT // BLOCK_TOKENS)
    shape = (rows * blocks + 1, KV_HEADS, BLOCK_TOKENS, HEAD_DIM)
    table = (torch.arange(rows * blocks, dtype=torch.int32) + 1).view(rows, blocks)
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(LAYERS)], table


def op_calls(rows: int, backend: str | None) -> dict[str, tuple[Calls, int]]:
    """Calls of every other op, and the bytes one must read."""

    def bound(op: Op) -> Callable[..., object]:
        return op.bind(cpu_facts(), backend)[0]

    x, residual, weight = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH), torch.ones(WIDTH)
    gate_up = torch.randn(rows, 2 * INNER)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    q = torch.randn(rows, HEADS, HEAD_DIM)
    mixed = torch.empty_like(q)
    kept, table = caches(rows)
    lengths = torch.full((rows,), CONTEXT, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    positions = lengths - 1
    slots = table[:, -1].long() * BLOCK_TOKENS + (CONTEXT - 1) % BLOCK_TOKENS
    cos_sin = torch.randn(CONTEXT, HEAD_DIM)
    add_norm, silu, rotate, attend = (
        bound(op) for op in (add_rms_norm, silu_mul, rotate_and_cache, paged_attention)
    )
    return {
        "add_rms_norm": ([lambda: add_norm(x, residual, weight, 1e-5)] * LAYERS, 12 * x.numel()),
        "silu_mul": ([lambda: silu(gate_up)] * LAYERS, 6 * gate_up.numel()),
        "rotate_and_cache": (
            [
                lambda k=k, v=v: rotate(qkv, positions, cos_sin, k, v, slots, None, None, 0.0)
                for k, v in kept
            ],
            8 * qkv.numel(),
        ),
        "paged_attention": (
            [
                lambda k=k, v=v: attend(q, k, v, table, lengths, starts, 1, 0.125, 0, mixed)
                for k, v in kept
            ],
            rows * CONTEXT * KV_HEADS * HEAD_DIM * 8,
        ),
    }


def best_us(calls: Calls, passes: int) -> float:
    """Microseconds of a call in the best pass over all of them."""
    best = float("inf")
    for _ in range(passes):
        begun = time.perf_counter()
        for call in calls:
            call()
        best = min(best, (time.perf_counter() - begun) / len(calls))
    return best * 1e6


def main() -> None:
    """Print a line per op and row count, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--passes", type=int, default=20)
    parser.add_argument("--backend", help="force one for the ops, such as reference")
    parser.add_argument("--form", help="force one for the linear layers, such as onednn")
    parser.add_argument("--record", default="ops-cpu")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    load_backends()
    figures: dict[str, dict[str, float]] = {}
    for rows in asked.rows:
        work = {name: linear_calls(name, rows, asked.form) for name in LINEARS}
        work |= op_calls(rows, asked.backend)
        for name, (calls, size) in work.items():
            us = best_us(calls, asked.passes)
            figures[f"{name} {rows}"] = {"us": round(us, 1), "gb_s": round(size / us / 1e3, 2)}
            print(f"{name:18s} {rows:4d} rows {us:9.1f} us {size / us / 1e3:7.2f} GB/s", flush=True)
    print(write_record(asked.record, {"threads": asked.threads, "figures": figures}))


if __name__ == "__main__":
    main()
