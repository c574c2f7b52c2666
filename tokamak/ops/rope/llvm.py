"""Rotary positions and the cache write in LLVM: one token per work item, heads one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from tokamak.ops.jit.available import fits
from tokamak.ops.jit.compiler import KernelSource, Library, float_bits, threads_for
from tokamak.ops.jit.language import Kernel
from tokamak.ops.jit.torch_kinds import KINDS, fresh, rows_of
from tokamak.ops.jit.values import Num, Pointer
from tokamak.ops.norm import llvm as norm_kernels
from tokamak.ops.registry import takes_own
from tokamak.ops.rope.reference import rotate_and_cache

(
    QKV, STRIDE, POSITIONS, COS_SIN, HALF, K_CACHE, K_BLOCK, K_HEAD, K_ROW, V_CACHE, V_BLOCK, V_HEAD, V_ROW,
    SLOTS, Q_NORM, K_NORM, EPS, OUT, TOKENS, HEADS, KV_HEADS, BLOCK_TOKENS, HEAD_DIM,
) = range(23)  # fmt: skip
PARAMETERS = 23
MOST_HEAD_NUMBERS = 1024
"""Widest head; a normed head waits in a scratch row of this size."""
GRAIN_NUMBERS = 8192


def _kernel(kind: str) -> Callable[[Kernel], None]:
    def write(kernel: Kernel) -> None:
        width, half, eps = kernel.integer(HEAD_DIM), kernel.integer(HALF), kernel.real(EPS)
        heads, kv_heads = kernel.integer(HEADS), kernel.integer(KV_HEADS)
        normed = kernel.scratch(MOST_HEAD_NUMBERS)

        def turn(source: Pointer, angles: Pointer, target: Pointer) -> None:
            def rotate(at: Num, lanes: int) -> None:
                cos, sin = angles[at].load(lanes), angles[half + at].load(lanes)
                first, second = source[at].load(lanes), source[half + at].load(lanes)
                target[at].store(first * cos - second * sin)
                target[half + at].store(second * cos + first * sin)

            kernel.sweep(half, rotate)
            copy(source[half * 2], target[half * 2], width - half * 2)

        def copy(source: Pointer, target: Pointer, count: Num) -> None:
            kernel.sweep(count, lambda at, lanes: target[at].store(source[at].load(lanes)))

        def norm_and_turn(source: Pointer, weight: int, angles: Pointer, target: Pointer) -> None:
            is_normed = kernel.integer(weight) > 0
            with kernel.when(is_normed):
                scale = norm_kernels.root_scale(kernel, source, width, eps)
                factors = kernel.pointer(weight, kind)

                def norm(at: Num, lanes: int) -> None:
                    factor = scale if lanes == 1 else kernel.spread(scale)
                    unit = kernel.as_kind(source[at].load(lanes) * factor, kind)
                    normed[at].store(kernel.as_kind(unit * factors[at].load(lanes), kind))

                kernel.sweep(width, norm)
                turn(normed, angles, target)
            with kernel.when(kernel.integer(weight).equals(0)):
                turn(source, angles, target)

        with kernel.items(kernel.integer(TOKENS)) as token:
            row = kernel.pointer(QKV, kind)[token * kernel.integer(STRIDE)]
            position = kernel.pointer(POSITIONS, "i32")[token].load().to_int()
            angles = kernel.pointer(COS_SIN, "f32")[position * half * 2]
            queries = kernel.pointer(OUT, kind)[token * heads * width]
            with kernel.loop(0, heads) as head:
                norm_and_turn(row[head * width], Q_NORM, angles, queries[head * width])
            slot = kernel.pointer(SLOTS, "i64")[token].load()
            with kernel.when(slot >= 0):
                block_tokens = kernel.integer(BLOCK_TOKENS)
                block, offset = slot / block_tokens, slot % block_tokens
                places = []
                for cache in (K_CACHE, V_CACHE):
                    start = block * kernel.integer(cache + 1) + offset * kernel.integer(cache + 3)
                    places.append(kernel.pointer(cache, kind)[start])
                keys, values = places
                with kernel.loop(0, kv_heads) as head:
                    source = row[(heads + head) * width]
                    norm_and_turn(source, K_NORM, angles, keys[head * kernel.integer(K_HEAD)])
                    copy(source[kv_heads * width], values[head * kernel.integer(V_HEAD)], width)

    return write


@lru_cache
def kernel_for(dtype: torch.dtype) -> Callable[..., None]:
    """The compiled call for a dtype."""
    name = f"rotate_{KINDS[dtype]}"
    source = KernelSource(name, PARAMETERS, _kernel(KINDS[dtype]))
    return Library(name, [Path(__file__), Path(norm_kernels.__file__)], [source]).function(name)


@rotate_and_cache.backend("llvm", fits=fits, takes=takes_own)
def llvm_rotate_and_cache(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    write_slots: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """Norm (where weights are given) and rotate queries and keys; write keys and values to the cache."""
    _, kv_heads, block_tokens, width = k_cache.shape
    if not _takes(qkv, cos_sin, k_cache, v_cache, q_norm, k_norm):
        return rotate_and_cache.reference(
            qkv, positions, cos_sin, k_cache, v_cache, write_slots, q_norm, k_norm, eps
        )
    qkv = rows_of(qkv)
    tokens = qkv.shape[0]
    heads = qkv.shape[1] // width - 2 * kv_heads
    out = fresh((tokens, heads, width), qkv.dtype)
    kernel_for(qkv.dtype)(
        threads_for(tokens * qkv.shape[1], GRAIN_NUMBERS),
        qkv.data_ptr(), qkv.stride(0), positions.data_ptr(), cos_sin.data_ptr(), cos_sin.shape[1] // 2,
        k_cache.data_ptr(), *k_cache.stride()[:3], v_cache.data_ptr(), *v_cache.stride()[:3],
        write_slots.data_ptr(),
        0 if q_norm is None else q_norm.data_ptr(), 0 if k_norm is None else k_norm.data_ptr(),
        float_bits(eps), out.data_ptr(), tokens, heads, kv_heads, block_tokens, width,
    )  # fmt: skip
    return out


def _takes(
    qkv: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
) -> bool:
    """Whether the kernel is compiled for these formats and layouts."""
    same = all(
        tensor is None or tensor.dtype == qkv.dtype for tensor in (k_cache, v_cache, q_norm, k_norm)
    )
    return (
        same
        and qkv.dtype in KINDS
        and k_cache.stride(3) == v_cache.stride(3) == 1
        and k_cache.shape[3] <= MOST_HEAD_NUMBERS
        and cos_sin.is_contiguous()
    )
