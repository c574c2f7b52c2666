"""How many bytes a rank needs, by purpose; the same functions for a real start and for a plan of one.

`plan_start` is what `assemble.py` follows and `simulate.py` prints: neither works out a size on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokamak.cache.groups import CacheGroup, grows_by_chunk, window_blocks
from tokamak.cache.layout import bytes_per_block
from tokamak.config.engine import EngineConfig, GraphConfig
from tokamak.config.reasons import size
from tokamak.config.settle import check_pool
from tokamak.config.settle_cache import NULL_BLOCKS
from tokamak.errors import OptionError
from tokamak.graphs.ladder import Ladder
from tokamak.layers.attention.tail import tail_bytes
from tokamak.layers.stages import Stages
from tokamak.runner.graph_cost import GraphCost, graph_pool_estimate, reserve_bytes

SCORE_BYTES = 4
"""Of one token's score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes by purpose, and the blocks they make."""

    block_bytes: int
    """Of a block of all groups that keep every token, or of all groups if none does."""
    total_blocks: int
    """Blocks of each of these, the null block included."""
    group_blocks: tuple[int, ...]
    """Blocks of each group."""
    cache_bytes: int
    """Of all groups."""
    input_bytes: int
    tail_bytes: int
    """Of what crosses between early and late layers; 0 for a model that always runs whole."""
    logit_bytes: int
    graph_estimate_bytes: int
    """What recordings are expected to take; 0 when graphs are off."""
    graph_bytes: int
    """What is set aside for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """Every size of a start, before a weight is read."""

    config: EngineConfig
    """As given, but with the max_model_len that fits beside the recordings."""
    groups: tuple[CacheGroup, ...]
    request_ladder: Ladder
    token_ladder: Ladder
    late_ladder: Ladder
    """Tail rows of late layers; no size for a model that always runs whole."""
    cost: GraphCost
    memory: MemoryPlan
    weight_bytes: int
    """At most, from the checkpoint's facts."""

    @property
    def longest_requests(self) -> int:
        """How many requests of max_model_len the cache holds at once."""
        tokens = self.config.cache.block_tokens
        blocks = -(-self.config.model.max_model_len // tokens)
        return (self.memory.total_blocks - NULL_BLOCKS) // blocks


def plan_start(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    cost: GraphCost,
    *,
    stages: Stages | None = None,
    q_width: int = 1,
) -> StartPlan:
    """The sizes of a start.

    Args:
        config: the settled config.
        groups: the cache groups of the model, built but not loaded.
        cost: what recordings take, measured, saved or the default.
        stages: of a model in two stages.
        q_width: token rows of a decode request: 1 and the drafted tokens.

    Raises:
        OptionError: the cache cannot hold one request of max_model_len.
    """
    requests, tokens = ladders(config, q_width=q_width)
    memory = plan_memory(config, groups, cost, stages=stages, q_width=q_width)
    config = _shortened(config, memory)
    check_pool(config, memory.total_blocks - NULL_BLOCKS)
    return StartPlan(
        config=config,
        groups=tuple(groups),
        request_ladder=requests,
        token_ladder=tokens,
        late_ladder=late_ladder(config, tokens, stages),
        cost=cost,
        memory=memory,
        weight_bytes=config.model.weight_bytes,
    )


def records_choice(graphs: GraphConfig) -> bool:
    """Whether the choice of the likeliest tokens is recorded behind the forward of decode steps.

    On a CPU it is no faster recorded; a start that records everything does it there for its tests' sake.
    """
    return graphs.backend == "cuda" or graphs.records_all


def ladders(config: EngineConfig, *, q_width: int = 1) -> tuple[Ladder, Ladder]:
    """The request and the token buckets of a config; both empty when graphs are off."""
    graphs, limits = config.graphs, config.scheduler
    if graphs.when == "off":
        return Ladder(()), Ladder(())
    requests = Ladder.requests(
        graphs.request_sizes,
        max_num_seqs=limits.max_num_seqs,
        q_width=q_width,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    tokens = Ladder.tokens(
        graphs.token_sizes,
        token_max=graphs.token_max,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )
    return requests, tokens


def late_ladder(config: EngineConfig, tokens: Ladder, stages: Stages | None) -> Ladder:
    """Buckets of tail rows: those of token rows, up to as many as the tails of all requests have."""
    if stages is None:
        return Ladder(())
    limits = config.scheduler
    return tokens.up_to(
        min(limits.max_num_batched_tokens, limits.max_num_seqs * stages.late_tokens)
    )


def plan_memory(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    cost: GraphCost,
    *,
    stages: Stages | None = None,
    q_width: int = 1,
) -> MemoryPlan:
    """The memory plan of a config for a model with these cache groups.

    A cache whose size was our choice makes room for recordings; one that was asked for keeps its size.

    Raises:
        OptionError: recordings leave no room for the cache.
    """
    requests, tokens = ladders(config, q_width=q_width)
    late = late_ladder(config, tokens, stages)
    crossing = _tail_bytes(config, groups, stages, tokens=tokens, late=late)
    estimate = graph_pool_estimate(
        request_buckets=requests.buckets,
        token_buckets=tokens.buckets,
        late_buckets=late.buckets,
        q_width=q_width,
        pools=config.graphs.pools,
        cost=cost,
        choice_row_bytes=SCORE_BYTES * config.model.facts.vocab_tokens
        if records_choice(config.graphs)
        else 0,
    )
    graph_bytes = reserve_bytes(estimate, config.graphs.backend)
    by_chunk = grows_by_chunk(groups)
    sizing = [group for group, later in zip(groups, by_chunk, strict=True) if not later]
    block_bytes = bytes_per_block(sizing, config.cache.block_tokens)
    windows = [_window_blocks(config, group) for group in groups]
    window_bytes = sum(
        count * bytes_per_block([group], config.cache.block_tokens)
        for group, count, later in zip(groups, windows, by_chunk, strict=True)
        if later
    )
    blocks = config.cache.blocks
    if blocks is None:
        left = _arena_bytes(config, graph_bytes + crossing) - window_bytes
        blocks = max(NULL_BLOCKS, left // block_bytes)
    slots = config.scheduler.max_num_seqs + 1
    max_blocks = -(-config.model.max_model_len // config.cache.block_tokens)
    history_bytes = 4 * slots * (config.model.max_model_len + 1)
    table_bytes = 4 * len(groups) * slots * max_blocks
    return MemoryPlan(
        block_bytes=block_bytes,
        total_blocks=blocks,
        group_blocks=tuple(
            window if later else blocks for window, later in zip(windows, by_chunk, strict=True)
        ),
        cache_bytes=blocks * block_bytes + window_bytes,
        input_bytes=history_bytes + table_bytes,
        tail_bytes=crossing,
        logit_bytes=SCORE_BYTES * config.scheduler.max_num_seqs * config.model.facts.vocab_tokens,
        graph_estimate_bytes=estimate,
        graph_bytes=graph_bytes,
    )


def _window_blocks(config: EngineConfig, group: CacheGroup) -> int:
    """Blocks of a group that keeps the newest tokens beside others that keep all."""
    return window_blocks(
        group.keep_tokens,
        block_tokens=config.cache.block_tokens,
        longest_tokens=config.model.max_model_len,
        requests=config.scheduler.max_num_seqs,
        step_tokens=config.scheduler.max_num_batched_tokens,
    )


def _tail_bytes(
    config: EngineConfig,
    groups: Sequence[CacheGroup],
    stages: Stages | None,
    *,
    tokens: Ladder,
    late: Ladder,
) -> int:
    """Bytes of the late inputs, of the rows recordings hand over, and of the outlet these come from."""
    if stages is None:
        return 0
    outlet_bytes = max(tokens.buckets, default=0) * stages.carried_bytes
    return outlet_bytes + tail_bytes(
        config.scheduler.max_num_batched_tokens,
        groups=len(groups),
        carried_rows=max(late.buckets, default=0),
        carried_bytes=stages.carried_bytes,
    )


def _arena_bytes(config: EngineConfig, graph_bytes: int) -> int:
    """Bytes for all blocks beside recordings and what they need."""
    room = config.cache.room_bytes
    if room is None:
        return config.cache.arena_bytes
    if graph_bytes >= room:
        raise OptionError(
            f"recordings take {size(graph_bytes)}, but memory_fraction leaves {size(room)} for them and "
            "the cache beside the weights",
            hint="use a larger memory_fraction, fewer graph sizes, or graphs=off",
        )
    return min(config.cache.arena_bytes, room - graph_bytes)


def _shortened(config: EngineConfig, memory: MemoryPlan) -> EngineConfig:
    """A max_model_len nobody asked for gives way to recordings."""
    held = (memory.total_blocks - NULL_BLOCKS) * config.cache.block_tokens
    if not config.model.shortens or not 1 <= held < config.model.max_model_len:
        return config
    return replace(config, model=replace(config.model, max_model_len=held))
