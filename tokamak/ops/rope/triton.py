# pyright: reportArgumentType=false, reportCallIssue=false
"""Rotary positions in Triton: one program per token and tile of heads of one kind, one pass, float32 inside."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamak.ops.rope.reference import rotate_and_cache
from tokamak.ops.rope.triton_stored import stored, takes
from tokamak.ops.triton_facts import fits, rows_of

MAX_TILE_HEADS = 8
NUMBERS_PER_WARP = 512
MAX_WARPS = 8


@triton.jit
def _store_turned(
    source_ptr,
    target_ptr,
    inside,
    norm_ptr,
    cos_sin_ptr,
    eps,
    NORMS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
):
    """Norm and rotate a tile of heads; source_ptr and target_ptr [heads, 1] are where each head begins."""
    kind: tl.constexpr = source_ptr.dtype.element_ty
    cache_kind: tl.constexpr = target_ptr.dtype.element_ty
    # Every thread loads the cosines of its own numbers: sharing them would take barriers.
    cols = tl.broadcast_to(tl.arange(0, HALF_TILE)[None, :], source_ptr.shape[0], HALF_TILE)
    turns = cols < HALF
    cos = tl.load(cos_sin_ptr + cols, mask=turns, other=0.0)
    sin = tl.load(cos_sin_ptr + HALF + cols, mask=turns, other=0.0)
    here = inside & turns
    first = tl.load(source_ptr + cols, mask=here, other=0.0).to(tl.float32)
    second = tl.load(source_ptr + HALF + cols, mask=here, other=0.0).to(tl.float32)
    scale = 1.0
    if NORMS:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST_TILE > 0:
            rest_cols = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
            rest_here = inside & (rest_cols < HEAD_DIM)
            rest = tl.load(source_ptr + rest_cols, mask=rest_here, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weight = tl.load(norm_ptr + cols, mask=turns, other=0.0).to(tl.float32)
        first = ((first * scale).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
        weight = tl.load(norm_ptr + HALF + cols, mask=turns, other=0.0).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * weight).to(kind).to(tl.float32)
    turned = stored((first * cos - second * sin).to(kind), cache_kind)
    tl.store(target_ptr + cols, turned, mask=here)
    turned = stored((second * cos + first * sin).to(kind), cache_kind)
    tl.store(target_ptr + HALF + cols, turned, mask=here)
    if REST_TILE > 0:
        cols = 2 * HALF + tl.arange(0, REST_TILE)[None, :]
        here = inside & (cols < HEAD_DIM)
        x = tl.load(source_ptr + cols, mask=here, other=0.0)
        if NORMS:
            weight = tl.load(norm_ptr + cols, mask=cols < HEAD_DIM, other=0.0).to(tl.float32)
            unit = (x.to(tl.float32) * scale).to(kind).to(tl.float32)
            x = (unit * weight).to(kind)
        tl.store(target_ptr + cols, stored(x, cache_kind), mask=here)


@triton.jit
def _rotate_and_cache_kernel(
    qkv_ptr,
    positions_ptr,
    cos_sin_ptr,
    k_cache_ptr,
    v_cache_ptr,
    write_slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    stride_qkv_token,
    stride_cos_sin_position,
    stride_k_block,
    stride_k_head,
    stride_k_token,
    stride_v_block,
    stride_v_head,
    stride_v_token,
    eps,
    NORMS_Q: tl.constexpr,
    NORMS_K: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_TILE: tl.constexpr,
    REST_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    Q_TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    KV_TILES: tl.constexpr = (KV_HEADS + TILE_HEADS - 1) // TILE_HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos_sin_ptr += position * stride_cos_sin_position
    qkv_ptr += token * stride_qkv_token
    heads = tl.arange(0, TILE_HEADS)[:, None]
    if tile < Q_TILES:
        head = tile * TILE_HEADS + heads
        _store_turned(
            qkv_ptr + head * HEAD_DIM,
            q_ptr + token * HEADS * HEAD_DIM + head * HEAD_DIM,
            head < HEADS,
            q_norm_ptr,
            cos_sin_ptr,
            eps,
            NORMS_Q,
            HEAD_DIM,
            HALF,
            HALF_TILE,
            REST_TILE,
        )
    else:
        slot = tl.load(write_slots_ptr + token)
        block, offset = slot // BLOCK_TOKENS, slot % BLOCK_TOKENS
        if tile < Q_TILES + KV_TILES:
            head = (tile - Q_TILES) * TILE_HEADS + heads
            _store_turned(
                qkv_ptr + (HEADS + head) * HEAD_DIM,
                k_cache_ptr
                + (block * stride_k_block + offset * stride_k_token)
                + head.to(tl.int64) * stride_k_head,
                (head < KV_HEADS) & (slot >= 0),
                k_norm_ptr,
                cos_sin_ptr,
                eps,
                NORMS_K,
                HEAD_DIM,
                HALF,
                HALF_TILE,
                REST_TILE,
            )
        else:
            head = (tile - Q_TILES - KV_TILES) * TILE_HEADS + heads
            cols = tl.arange(0, HEAD_TILE)[None, :]
            here = (head < KV_HEADS) & (slot >= 0) & (cols < HEAD_DIM)
            value = tl.load(qkv_ptr + (HEADS + KV_HEADS + head) * HEAD_DIM + cols, mask=here)
            v_cache_ptr += block * stride_v_block + offset * stride_v_token
            target_ptr = v_cache_ptr + head.to(tl.int64) * stride_v_head + cols
            tl.store(target_ptr, stored(value, v_cache_ptr.dtype.element_ty), mask=here)


@rotate_and_cache.backend("triton", fits=fits, takes=takes)
def triton_rotate_and_cache(
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
    """Norm, rotate and cache in one launch; a head's vector lies in one piece in the caches."""
    qkv = rows_of(qkv)
    tokens = qkv.shape[0]
    _, kv_heads, block_tokens, head_dim = k_cache.shape
    assert k_cache.stride(3) == v_cache.stride(3) == 1, "a cached head has gaps"
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    half = cos_sin.shape[1] // 2
    head_tile = triton.next_power_of_2(head_dim)
    tile_heads = min(MAX_TILE_HEADS, triton.next_power_of_2(max(heads, kv_heads)))
    rest = head_dim - 2 * half
    _rotate_and_cache_kernel[
        (tokens, triton.cdiv(heads, tile_heads) + 2 * triton.cdiv(kv_heads, tile_heads))
    ](
        qkv,
        positions,
        cos_sin,
        k_cache,
        v_cache,
        write_slots,
        qkv if q_norm is None else q_norm,
        qkv if k_norm is None else k_norm,
        q,
        qkv.stride(0),
        cos_sin.stride(0),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        eps,
        NORMS_Q=q_norm is not None,
        NORMS_K=k_norm is not None,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_TOKENS=block_tokens,
        HALF=half,
        HALF_TILE=triton.next_power_of_2(half),
        REST_TILE=triton.next_power_of_2(rest) if rest else 0,
        HEAD_TILE=head_tile,
        TILE_HEADS=tile_heads,
        num_warps=min(max(tile_heads * head_tile // NUMBERS_PER_WARP, 1), MAX_WARPS),
    )
    return q
