"""How many bytes a block takes, and where each layer's rows lie in the arena.

Together with `arena.py` the only file that knows bytes. Every (sub-cache, layer) gets one region of the
arena with all blocks after one another, so a layer's view is contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokamak.cache.groups import CacheGroup

REGION_ALIGNMENT_BYTES = 4096

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1, "uint8": 1}


@dataclass(frozen=True, slots=True)
class Region:
    """One layer of one sub-cache: `shape` is [blocks, heads, rows a block, width]."""

    sub_cache: str
    layer: int
    dtype: str
    start_bytes: int
    shape: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Every region, and the size of the whole."""

    regions: tuple[Region, ...]
    arena_bytes: int
    block_tokens: int


def bytes_per_block(groups: Sequence[CacheGroup], block_tokens: int) -> int:
    """Bytes that one block id stands for, over all layers of these groups."""
    return sum(
        len(sub_cache.layers) * _region_block_bytes(group, index, block_tokens)
        for group in groups
        for index, sub_cache in enumerate(group.sub_caches)
    )


def lay_out(
    groups: Sequence[CacheGroup], *, block_tokens: int, blocks: Sequence[int]
) -> ArenaLayout:
    """Give every (sub-cache, layer) its region. blocks: of each group, the null block included."""
    regions: list[Region] = []
    at = 0
    for group, total_blocks in zip(groups, blocks, strict=True):
        assert block_tokens % group.stride_tokens == 0, (
            f"blocks of {block_tokens} tokens for rows of {group.stride_tokens}, {group.name}"
        )
        for index, sub_cache in enumerate(group.sub_caches):
            rows = block_tokens // group.stride_tokens
            shape = (total_blocks, sub_cache.heads, rows, sub_cache.width)
            region_bytes = total_blocks * _region_block_bytes(group, index, block_tokens)
            for layer in sub_cache.layers:
                regions.append(Region(sub_cache.name, layer, sub_cache.dtype, at, shape))
                at += -(-region_bytes // REGION_ALIGNMENT_BYTES) * REGION_ALIGNMENT_BYTES
    return ArenaLayout(tuple(regions), at, block_tokens)


def _region_block_bytes(group: CacheGroup, index: int, block_tokens: int) -> int:
    sub_cache = group.sub_caches[index]
    rows = block_tokens // group.stride_tokens
    return rows * sub_cache.heads * sub_cache.width * _DTYPE_BYTES[sub_cache.dtype]
