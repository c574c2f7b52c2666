"""Weights of tokens in LLVM: one pass over the scores, blocks shared between threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tokamak.ops.jit.available import fits
from tokamak.ops.jit.compiler import KernelSource, Library, threads_for
from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.torch_kinds import rows_of
from tokamak.ops.jit.values import Num
from tokamak.ops.sample.reference import BLOCK_TOKENS, token_weights

SCORES, STRIDE, PEAKS, INVERSES, WEIGHTS, SUMS, ROWS, VOCAB, BLOCKS = range(9)
PARAMETERS = 9
GRAIN_TOKENS = 65536
"""Tokens a thread should have to itself before another one is woken."""


def _write(kernel: Kernel) -> None:
    vocab, blocks = kernel.integer(VOCAB), kernel.integer(BLOCKS)
    scores, weights = kernel.pointer(SCORES, "f32"), kernel.pointer(WEIGHTS, "f32")
    with kernel.items(kernel.integer(ROWS) * blocks) as item:
        row, begin = item / blocks, item % blocks * BLOCK_TOKENS
        peak = kernel.pointer(PEAKS, "f32")[row].load()
        inverse = kernel.pointer(INVERSES, "f32")[row].load()
        source = scores[row * kernel.integer(STRIDE) + begin]
        target = weights[item * BLOCK_TOKENS]
        count = (vocab - begin).least(BLOCK_TOKENS)
        vector, single = kernel.var(kernel.zeros()), kernel.var(kernel.float(0.0))

        def weigh(at: Num, lanes: int) -> None:
            top, scale = (n if lanes == 1 else kernel.spread(n) for n in (peak, inverse))
            weight = kernel.exp((source[at].load(lanes) - top) * scale)
            target[at].store(weight)
            total = vector if lanes > 1 else single
            total.set(total.now + weight)

        kernel.sweep(count, weigh)
        with kernel.loop(count, BLOCK_TOKENS) as at:
            target[at].store(kernel.float(0.0))
        total = kernel.sum_lanes(vector.now) + single.now
        kernel.pointer(SUMS, "f32")[item].store(total)


@lru_cache(maxsize=1)
def kernel() -> Callable[..., None]:
    """The compiled call."""
    source = KernelSource("token_weights", PARAMETERS, _write)
    return Library("sample", [Path(__file__)], [source]).function("token_weights")


@token_weights.backend("llvm", fits=fits)
def llvm_token_weights(
    scores: Tensor, peaks: Tensor, inverse_temperatures: Tensor
) -> tuple[Tensor, Tensor]:
    """Weigh each token by exp((score - peak) / temperature), and sum blocks of weights."""
    scores = rows_of(scores)
    rows, vocab = scores.shape
    blocks = -(-vocab // BLOCK_TOKENS)
    weights = torch.empty((rows, blocks, BLOCK_TOKENS), dtype=torch.float32)
    sums = torch.empty((rows, blocks), dtype=torch.float32)
    peaks, inverses = peaks.contiguous(), inverse_temperatures.contiguous()
    kernel()(
        threads_for(rows * vocab, GRAIN_TOKENS),
        scores.data_ptr(),
        scores.stride(0),
        peaks.data_ptr(),
        inverses.data_ptr(),
        weights.data_ptr(),
        sums.data_ptr(),
        rows,
        vocab,
        blocks,
    )
    return weights, sums
