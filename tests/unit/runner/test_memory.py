"""Blocks, recordings and the longest request share the memory there is; a plan knows every size of a start."""

from __future__ import annotations

import dataclasses

import pytest

from tests.support.configs import CPU, SMALL_MODEL, a_config
from tests.support.factory import cache_groups
from tokamak.cache.groups import group_sub_caches
from tokamak.cache.layout import bytes_per_block
from tokamak.cache.sub_cache import SubCache
from tokamak.config.engine import ModelFacts
from tokamak.errors import OptionError
from tokamak.runner.graph_cost import GraphCost, graph_pool_estimate, reserve_bytes
from tokamak.runner.memory import SCORE_BYTES, ladders, plan_memory, plan_start

GROUPS = cache_groups()

BLOCK_BYTES = bytes_per_block(GROUPS, 16)

NUMBERS = BLOCK_BYTES // 16 // 4
"""What a token adds to the caches of GROUPS."""

MODEL = dataclasses.replace(
    SMALL_MODEL,
    parameters=1,
    weight_bytes=4,
    cache_token_numbers=NUMBERS,
    max_position_tokens=10**6,
)

COST = GraphCost(bytes_per_bucket=1000, bytes_per_row=10, source="saved")


def a_tight_config(*, blocks: int, model: ModelFacts = MODEL, **options: object):
    """A config whose machine has room for so many blocks beside the weights."""
    facts = dataclasses.replace(CPU, memory_bytes=4 + blocks * BLOCK_BYTES)
    return a_config(facts=facts, model=model, memory_fraction=1.0, **options)


@pytest.mark.parametrize(
    ("asked", "requests", "tokens"),
    [
        ({"graphs": "off"}, (), ()),
        ({"graphs": "startup", "max_num_seqs": 3}, (1, 2, 3), ()),
        ({"graphs": "on-demand", "req_graph_sizes": "2,4"}, (2, 4), ()),
        ({"token_graph_max": 128, "req_graph_sizes": ""}, (), (64, 128)),
        ({"token_graph_sizes": "32,512", "req_graph_sizes": "1"}, (1,), (32, 512)),
    ],
    ids=str,
)
def test_ladders_are_those_of_the_graph_options(
    asked: dict[str, object], requests: tuple[int, ...], tokens: tuple[int, ...]
) -> None:
    found = ladders(a_config(**asked))

    assert tuple(ladder.buckets for ladder in found) == (requests, tokens)


def test_a_gpu_records_the_default_ladders() -> None:
    limits = {"max_num_seqs": 32, "max_num_batched_tokens": 512}

    requests, tokens = ladders(a_config(facts=dataclasses.replace(CPU, vendor="nvidia"), **limits))

    assert requests.buckets == (1, 2, 4, 8, 16, 24, 32)
    assert tokens.buckets[0] == 64
    assert tokens.buckets[-1] == 512


@pytest.mark.parametrize("pools", ["per_graph", "per_bucket"])
def test_a_cache_of_our_choice_makes_room_for_recordings(pools: str) -> None:
    config = a_tight_config(blocks=5000, graphs="startup", req_graph_sizes="1,8", graph_pools=pools)

    memory = plan_memory(config, GROUPS, COST)

    expected = graph_pool_estimate(
        request_buckets=(1, 8),
        token_buckets=(),
        late_buckets=(),
        q_width=1,
        pools=pools,
        cost=COST,
        choice_row_bytes=SCORE_BYTES * config.model.facts.vocab_tokens,
    )
    assert memory.graph_estimate_bytes == expected > 0
    assert memory.graph_bytes == reserve_bytes(expected, config.graphs.backend)
    assert memory.cache_bytes <= 5000 * BLOCK_BYTES - memory.graph_bytes
    assert memory.cache_bytes > 5000 * BLOCK_BYTES - memory.graph_bytes - BLOCK_BYTES


def test_without_graphs_the_cache_takes_it_all() -> None:
    memory = plan_memory(a_tight_config(blocks=5000, graphs="off"), GROUPS, COST)

    assert (memory.total_blocks, memory.graph_bytes) == (5000, 0)


def test_a_cache_that_leaves_room_is_not_cut() -> None:
    config = a_config(model=MODEL, max_num_seqs=1, max_model_len=160)

    memory = plan_memory(config, GROUPS, COST)

    assert memory.total_blocks == 11
    assert memory.graph_bytes > 0


@pytest.mark.parametrize(
    "sized", [{"num_blocks_override": 20}, {"kv_cache_memory_bytes": 20 * BLOCK_BYTES}]
)
def test_a_cache_whose_size_was_asked_for_keeps_it(sized: dict[str, object]) -> None:
    config = a_tight_config(blocks=50, graphs="startup", **sized)

    assert plan_memory(config, GROUPS, COST).total_blocks == 20


def test_a_length_of_our_choice_gives_way_to_recordings() -> None:
    config = a_tight_config(blocks=5000, graphs="startup", req_graph_sizes="1")

    start = plan_start(config, GROUPS, COST)

    assert config.model.max_model_len == 4999 * 16
    assert start.config.model.max_model_len == (start.memory.total_blocks - 1) * 16 < 4999 * 16
    assert start.longest_requests == 1


def test_a_length_that_was_asked_for_is_refused_when_recordings_leave_less() -> None:
    config = a_tight_config(blocks=5000, graphs="startup", max_model_len=4999 * 16)

    with pytest.raises(OptionError, match="max_model_len is 79984"):
        plan_start(config, GROUPS, COST)


def test_recordings_larger_than_the_room_are_named() -> None:
    huge = GraphCost(bytes_per_bucket=10**9, bytes_per_row=0, source="measured")

    with pytest.raises(OptionError, match=r"recordings take .*memory_fraction leaves"):
        plan_memory(a_tight_config(blocks=5000, graphs="startup"), GROUPS, huge)


def test_a_plan_counts_how_many_longest_requests_fit() -> None:
    config = a_config(model=MODEL, num_blocks_override=41, max_model_len=160, graphs="off")

    start = plan_start(config, GROUPS, COST)

    assert start.longest_requests == 4
    assert start.weight_bytes == 4


def test_newest_rows_get_what_running_requests_need_and_the_rest_keeps_every_token() -> None:
    kept = SubCache("entries", (0, 1), 1, 32, "float32", stride_tokens=2)
    newest = SubCache("window", (0, 1, 2), 1, 32, "float32", keep_tokens=32)
    groups = group_sub_caches([kept, newest])
    kept_bytes, newest_bytes = (bytes_per_block([group], 16) for group in groups)
    config = a_config(
        model=MODEL,
        graphs="off",
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=4096,
        kv_cache_memory_bytes=1000 * kept_bytes,
    )

    memory = plan_memory(config, groups, COST)

    # Two requests hold 2 + 4 blocks each; beside that three steps of 4 blocks, and the null block.
    assert memory.group_blocks == (memory.total_blocks, 25)
    assert memory.block_bytes == kept_bytes
    assert memory.total_blocks == (1000 * kept_bytes - 25 * newest_bytes) // kept_bytes
    assert memory.cache_bytes == memory.total_blocks * kept_bytes + 25 * newest_bytes


class TwoStages:
    """What a plan of a start asks of a model in two stages."""

    late_tokens = 100
    carried_bytes = 4096


@pytest.mark.parametrize(
    ("asked", "buckets"),
    [
        ({"max_num_seqs": 1}, (64, 100)),
        ({"max_num_seqs": 4}, (64, 256)),
        ({"max_num_seqs": 4, "token_graph_sizes": ""}, ()),
        ({"graphs": "off"}, ()),
    ],
    ids=str,
)
def test_late_layers_record_up_to_the_tails_of_all_requests(
    asked: dict[str, object], buckets: tuple[int, ...]
) -> None:
    sizes = {} if asked.get("graphs") == "off" else {"token_graph_sizes": "64,256"}
    config = a_config(**{"max_num_batched_tokens": 512, **sizes, **asked})

    start = plan_start(config, GROUPS, COST, stages=TwoStages())

    assert start.late_ladder.buckets == buckets
    assert plan_start(config, GROUPS, COST).late_ladder.buckets == ()


def test_what_crosses_between_stages_is_counted_and_taken_from_the_cache() -> None:
    config = a_tight_config(
        blocks=5000,
        graphs="startup",
        token_graph_sizes="64,256",
        req_graph_sizes="",
        max_num_seqs=4,
        max_num_batched_tokens=512,
    )

    memory = plan_memory(config, GROUPS, COST, stages=TwoStages())

    # An outlet of 256 rows, what recordings read of these, and ids, positions and places of 512 rows.
    assert memory.tail_bytes == 2 * 256 * 4096 + 512 * (8 + 4 + 4 + 8)
    graphs = graph_pool_estimate(
        request_buckets=(),
        token_buckets=(64, 256),
        late_buckets=(64, 256),
        q_width=1,
        pools="per_graph",
        cost=COST,
        choice_row_bytes=0,
    )
    assert memory.graph_estimate_bytes == graphs
    assert memory.cache_bytes <= 5000 * BLOCK_BYTES - memory.graph_bytes - memory.tail_bytes
    assert plan_memory(config, GROUPS, COST).tail_bytes == 0
