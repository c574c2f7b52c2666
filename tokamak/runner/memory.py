"""How many bytes a rank needs, by purpose; the same function for a real start and for a plan of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokamak.cache.groups import CacheGroup
from tokamak.cache.layout import bytes_per_block
from tokamak.config.engine import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, and the blocks they make."""

    block_bytes: int
    total_blocks: int
    """Blocks of every group, the null block included."""
    cache_bytes: int
    input_bytes: int
    logit_bytes: int


def plan_memory(config: EngineConfig, groups: Sequence[CacheGroup]) -> MemoryPlan:
    """The memory plan of a config for a model with these cache groups."""
    block_bytes = bytes_per_block(groups, config.cache.block_tokens)
    blocks = config.cache.blocks
    if blocks is None:
        blocks = config.cache.arena_bytes // block_bytes
    slots = config.scheduler.max_num_seqs + 1
    max_blocks = -(-config.model.max_model_len // config.cache.block_tokens)
    history_bytes = 4 * slots * (config.model.max_model_len + 1)
    table_bytes = 4 * len(groups) * slots * max_blocks
    return MemoryPlan(
        block_bytes=block_bytes,
        total_blocks=blocks,
        cache_bytes=blocks * block_bytes,
        input_bytes=history_bytes + table_bytes,
        logit_bytes=4 * config.scheduler.max_num_seqs * config.model.facts.vocab_tokens,
    )
