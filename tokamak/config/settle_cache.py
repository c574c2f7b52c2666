"""How large is the cache, and how long may a request be? Each bounds the other, so they are decided together.

Bytes here are an estimate from the checkpoint's config: a token's keys and values in every layer. The runner knows the
rows exactly and checks again with `settle.check_pool`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tokamak.config.engine import CacheConfig, CacheDType, DType, ModelFacts, SchedulerConfig
from tokamak.config.options import EngineOptions
from tokamak.config.reasons import AUTO, Reasons, size
from tokamak.config.settle_device import defaults_of, step_bytes
from tokamak.config.settle_tables import Tables, settle_tables
from tokamak.device.facts import DeviceFacts
from tokamak.errors import OptionError

DTYPE_BYTES: dict[CacheDType, int] = {"float32": 4, "bfloat16": 2, "fp8": 1}

SCALED_SHARE = 128
"""8-bit numbers of a weight that take at most one byte more with their scales."""

PACKED_SHARE = 32
"""4-bit numbers of a weight that share a byte of scale."""

NULL_BLOCKS = 1
"""Blocks no request can hold: padding rows point at them."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """What requests need, in bytes; 0 where the checkpoint does not tell."""

    longest_tokens: int
    weight_bytes: int
    step_bytes: int
    """What a step computes with; 0 where memory_fraction does not cover it."""
    block_bytes: int
    request_bytes: int
    """The cache of one longest request."""
    all_bytes: int
    """The cache of as many longest requests as run at once."""
    room_bytes: int
    """What memory_fraction leaves for the cache and recordings."""
    fraction: float


def cache_block_bytes(model: ModelFacts, dtype: CacheDType, block_tokens: int) -> int:
    """Bytes of one block of all layers; 0 where the checkpoint does not tell."""
    return block_tokens * model.cache_token_numbers * DTYPE_BYTES[dtype]


def held_weight_bytes(model: ModelFacts, dtype: DType, *, keeps_8_bits: bool) -> int:
    """What the weights without tables of n-grams take at most, in the model's arithmetic or as stored.

    keeps_8_bits: whether the device multiplies weights of 8-bit floating-point numbers as they are; those of 4 bits
    then stay, too.
    """
    parameters = model.parameters - model.table_parameters
    if keeps_8_bits:
        scaled, packed = model.scaled_parameters, model.packed_parameters
        whole = scaled - packed
        in_8_bits = whole + whole // SCALED_SHARE
        in_4_bits = packed // 2 + packed // PACKED_SHARE
        return (parameters - scaled) * DTYPE_BYTES[dtype] + in_8_bits + in_4_bits
    return max(parameters * DTYPE_BYTES[dtype], model.weight_bytes - model.table_bytes)


def settle_cache(
    options: EngineOptions,
    facts: DeviceFacts,
    model: ModelFacts,
    dtype: DType,
    *,
    weight_bytes: int,
    scheduler: SchedulerConfig,
    reasons: Reasons,
) -> tuple[CacheConfig, int, Tables]:
    """The cache, max_model_len, and where tables of n-grams lie. weight_bytes: without these tables.

    Raises:
        OptionError: the size is set twice, blocks are no multiple of a row, memory_fraction leaves no room, or there
            is no place for tables.
    """
    defaults = defaults_of(facts)
    multiple = model.block_multiple
    block_tokens = reasons.pick(
        "block_size",
        options.block_size,
        math.lcm(defaults.block_tokens, multiple),
        "short prefixes can be shared"
        if defaults.block_tokens % multiple == 0
        else f"some cached rows stand for {multiple} tokens",
    )
    if block_tokens % multiple:
        raise OptionError(
            f"block_size is {block_tokens}, and some cached rows of this model stand for up to {multiple} "
            "tokens, which must lie in one block",
            hint=f"use block_size={math.ceil(block_tokens / multiple) * multiple}",
        )
    fraction = reasons.pick(
        "memory_fraction", options.memory_fraction, defaults.memory_fraction, defaults.memory_why
    )
    cache_dtype, why = _cache_dtype(options.kv_cache_dtype, dtype)
    reasons.note("kv_cache_dtype", cache_dtype, why)
    block_bytes = cache_block_bytes(model, cache_dtype, block_tokens)
    longest = model.max_position_tokens if options.max_model_len == AUTO else options.max_model_len
    request_blocks = math.ceil(longest / block_tokens)
    of_steps = 0
    if defaults.holds_steps:
        of_steps = step_bytes(
            model,
            number_bytes=DTYPE_BYTES[dtype],
            step_tokens=scheduler.max_num_batched_tokens,
            max_num_seqs=scheduler.max_num_seqs,
        )
    room_bytes = int(facts.memory_bytes * fraction) - weight_bytes - of_steps
    tables = settle_tables(options, facts, model, room_bytes=room_bytes, reasons=reasons)
    demand = _Demand(
        longest_tokens=longest,
        weight_bytes=weight_bytes + tables.weight_bytes,
        step_bytes=of_steps,
        block_bytes=block_bytes,
        request_bytes=(request_blocks + NULL_BLOCKS) * block_bytes,
        all_bytes=(scheduler.max_num_seqs * request_blocks + NULL_BLOCKS) * block_bytes,
        room_bytes=room_bytes - tables.weight_bytes,
        fraction=fraction,
    )
    asked = options.num_blocks_override is not None or options.kv_cache_memory_bytes != AUTO
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
        dtype=cache_dtype,
        arena_bytes=arena_bytes,
        blocks=options.num_blocks_override,
        room_bytes=None if asked else demand.room_bytes,
        prefix_caching=options.enable_prefix_caching,
    )
    return cache, max_model_len, tables


def _cache_dtype(asked: CacheDType | Literal["auto"], dtype: DType) -> tuple[CacheDType, str]:
    """The number format of keys and values, and why."""
    return (dtype, "as dtype") if asked == AUTO else (asked, "asked for")


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
    room = demand.room_bytes
    least = (
        (1 + NULL_BLOCKS) * demand.block_bytes
        if options.max_model_len == AUTO
        else demand.request_bytes
    )
    if room < max(least, 1):
        raise _too_small(facts, demand, least)
    cap = defaults_of(facts).arena_bytes
    arena_bytes = min(room, demand.all_bytes or room, room if cap is None else max(cap, least))
    if arena_bytes == demand.all_bytes:
        why = "enough for max_num_seqs requests of max_model_len"
    elif arena_bytes == room:
        taken = "the weights and a step" if demand.step_bytes else "the weights"
        why = f"memory_fraction of the device's {size(facts.memory_bytes)}, less {taken}"
    else:
        why = "the most that is taken without being asked"
    reasons.note("kv_cache_memory_bytes", size(arena_bytes), why)
    return arena_bytes


def _too_small(facts: DeviceFacts, demand: _Demand, least: int) -> OptionError:
    share = size(int(facts.memory_bytes * demand.fraction))
    needed = demand.weight_bytes + demand.step_bytes + max(least, 1)
    works = math.ceil(needed / facts.memory_bytes * 100) / 100
    of_steps = f", a step takes {size(demand.step_bytes)}" if demand.step_bytes else ""
    return OptionError(
        f"memory_fraction is {demand.fraction}, which is {share} of this device's memory; "
        f"the weights take {size(demand.weight_bytes)}{of_steps} and the cache of one request of max_model_len "
        f"{demand.longest_tokens} takes {size(demand.request_bytes)}",
        hint=f"use memory_fraction={works} or more"
        if works <= 1.0
        else "use a smaller model, a smaller max_model_len, dtype=bfloat16, or kv_cache_dtype=fp8",
    )
