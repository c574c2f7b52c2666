"""How large is the cache, and how long may a request be? Each bounds the other, so they are decided together.

Bytes here are an estimate from the checkpoint's config: a token's keys and values in every layer. The runner knows the
rows exactly and checks again with `settle.check_pool`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokamak.config.engine import CacheConfig, DType, ModelFacts
from tokamak.config.options import EngineOptions
from tokamak.config.reasons import AUTO, Reasons, size
from tokamak.device.facts import DeviceFacts
from tokamak.errors import OptionError

DTYPE_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2}

CPU_BLOCK_TOKENS = 16

CPU_ARENA_BYTES = 4 * 1024**3
"""The most that is taken without being asked, unless one request needs more."""

NULL_BLOCKS = 1
"""Blocks no request can hold: padding rows point at them."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """What requests need, in bytes; 0 where the checkpoint does not tell."""

    longest_tokens: int
    weight_bytes: int
    block_bytes: int
    request_bytes: int
    """The cache of one longest request."""
    all_bytes: int
    """The cache of as many longest requests as run at once."""


def cache_block_bytes(model: ModelFacts, dtype: DType, block_tokens: int) -> int:
    """Bytes of one block of all layers; 0 where the checkpoint does not tell."""
    return block_tokens * model.cache_token_numbers * DTYPE_BYTES[dtype]


def held_weight_bytes(model: ModelFacts, dtype: DType) -> int:
    """What the weights take at most, in the model's arithmetic or as stored."""
    return max(model.parameters * DTYPE_BYTES[dtype], model.weight_bytes)


def settle_cache(
    options: EngineOptions,
    facts: DeviceFacts,
    model: ModelFacts,
    dtype: DType,
    *,
    max_num_seqs: int,
    reasons: Reasons,
) -> tuple[CacheConfig, int]:
    """The cache and max_model_len.

    Raises:
        OptionError: the size is set twice, or memory_fraction leaves no room.
    """
    block_tokens = reasons.pick(
        "block_size", options.block_size, CPU_BLOCK_TOKENS, "short prefixes can be shared"
    )
    block_bytes = cache_block_bytes(model, dtype, block_tokens)
    longest = model.max_position_tokens if options.max_model_len == AUTO else options.max_model_len
    request_blocks = math.ceil(longest / block_tokens)
    demand = _Demand(
        longest_tokens=longest,
        weight_bytes=held_weight_bytes(model, dtype),
        block_bytes=block_bytes,
        request_bytes=(request_blocks + NULL_BLOCKS) * block_bytes,
        all_bytes=(max_num_seqs * request_blocks + NULL_BLOCKS) * block_bytes,
    )
    asked = options.num_blocks_override is not None or options.kv_cache_memory_bytes != AUTO
    room_bytes = None if asked else _room_bytes(options, facts, demand)
    arena_bytes = _arena_bytes(options, facts, demand, reasons)
    blocks = options.num_blocks_override
    if blocks is None and block_bytes:
        blocks = arena_bytes // block_bytes
    fitting = model.max_position_tokens
    if blocks is not None:
        fitting = min(fitting, max(blocks - NULL_BLOCKS, 1) * block_tokens)
    max_model_len = reasons.pick(
        "max_model_len",
        options.max_model_len,
        fitting,
        "the model's own limit"
        if fitting == model.max_position_tokens
        else "the most the cache holds for one request",
    )
    cache = CacheConfig(
        block_tokens=block_tokens,
        arena_bytes=arena_bytes,
        blocks=options.num_blocks_override,
        room_bytes=room_bytes,
        prefix_caching=options.enable_prefix_caching,
    )
    return cache, max_model_len


def _room_bytes(options: EngineOptions, facts: DeviceFacts, demand: _Demand) -> int:
    """What memory_fraction leaves beside the weights."""
    return int(facts.memory_bytes * options.memory_fraction) - demand.weight_bytes


def _arena_bytes(
    options: EngineOptions, facts: DeviceFacts, demand: _Demand, reasons: Reasons
) -> int:
    """Bytes for all blocks: what was asked, or as much as is needed and there."""
    if options.num_blocks_override is not None:
        if options.kv_cache_memory_bytes != AUTO:
            raise OptionError(
                f"num_blocks_override is {options.num_blocks_override} and kv_cache_memory_bytes is "
                f"{options.kv_cache_memory_bytes}; each sets the size of the cache",
                hint="leave one of them out",
            )
        reasons.note("num_blocks_override", options.num_blocks_override, "asked for")
        return options.num_blocks_override * demand.block_bytes
    if options.kv_cache_memory_bytes != AUTO:
        return reasons.note("kv_cache_memory_bytes", options.kv_cache_memory_bytes, "asked for")
    room = _room_bytes(options, facts, demand)
    least = (
        (1 + NULL_BLOCKS) * demand.block_bytes
        if options.max_model_len == AUTO
        else demand.request_bytes
    )
    if room < max(least, 1):
        raise _too_small(options, facts, demand, least)
    arena_bytes = min(room, demand.all_bytes or room, max(CPU_ARENA_BYTES, least))
    if arena_bytes == demand.all_bytes:
        why = "enough for max_num_seqs requests of max_model_len"
    elif arena_bytes == room:
        why = f"memory_fraction of the machine's {size(facts.memory_bytes)}, less the weights"
    else:
        why = "the most that is taken without being asked"
    reasons.note("kv_cache_memory_bytes", size(arena_bytes), why)
    return arena_bytes


def _too_small(
    options: EngineOptions, facts: DeviceFacts, demand: _Demand, least: int
) -> OptionError:
    share = size(int(facts.memory_bytes * options.memory_fraction))
    works = math.ceil((demand.weight_bytes + max(least, 1)) / facts.memory_bytes * 100) / 100
    return OptionError(
        f"memory_fraction is {options.memory_fraction}, which is {share} of this machine's memory; "
        f"the weights take {size(demand.weight_bytes)} and the cache of one request of max_model_len "
        f"{demand.longest_tokens} takes {size(demand.request_bytes)}",
        hint=f"use memory_fraction={works} or more"
        if works <= 1.0
        else "use a smaller model, a smaller max_model_len, or dtype=bfloat16",
    )
