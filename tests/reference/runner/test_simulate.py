"""A simulated start and a real one have the same bytes in every graph mode, as both call the same functions (F17)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny import qwen3_moe_config, write_checkpoint
from tests.support.tiny_v4 import SMALL, v4_1_config
from tokamak.checkpoint import load
from tokamak.config.engine import EngineConfig
from tokamak.config.options import EngineOptions
from tokamak.config.places import CACHE_VARIABLE
from tokamak.engine.configure import configure
from tokamak.runner import memory
from tokamak.runner.assemble import assemble, plan_rank
from tokamak.runner.graph_cost import graph_pool_estimate, reserve_bytes
from tokamak.runner.memory import SCORE_BYTES, records_choice
from tokamak.runner.simulate import simulate_start

MODES: dict[str, dict[str, object]] = {
    "off": {"graphs": "off"},
    "on-demand": {"graphs": "on-demand"},
    "startup": {"graphs": "startup"},
    "startup with token sizes": {"graphs": "startup", "token_graph_sizes": "16,32"},
    "startup, a pool a bucket": {"graphs": "startup", "graph_pools": "per_bucket"},
    "token sizes alone": {
        "graphs": "startup",
        "req_graph_sizes": "",
        "token_graph_sizes": "16,32",
    },
}

LARGER_TABLE = {"engram_vocab_size": 997, "engram_num_embeddings": [6090]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def _costs_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))


def a_config(folder: Path, **options: object) -> EngineConfig:
    asked = {"dtype": "fp32", "threads": 1, "max_num_seqs": 3, "max_model_len": 64, **options}
    return configure(EngineOptions(model=str(folder), **asked))


@pytest.mark.parametrize("mode", MODES)
def test_simulated_and_real_bytes_are_equal(folder: Path, mode: str) -> None:
    config = a_config(folder, **MODES[mode])

    real = assemble(config).start
    simulated = simulate_start(config).start

    assert simulated.memory == real.memory
    assert simulated.request_ladder == real.request_ladder
    assert simulated.token_ladder == real.token_ladder
    assert simulated.longest_requests == real.longest_requests == 3
    assert (real.memory.graph_bytes > 0) == (mode != "off")


@pytest.mark.parametrize("mode", MODES)
def test_a_simulated_start_of_a_model_nobody_started_marks_its_default(
    folder: Path, mode: str
) -> None:
    start = simulate_start(a_config(folder, **MODES[mode])).start

    assert start.cost.source == "default"
    assert start.memory.graph_estimate_bytes == graph_pool_estimate(
        request_buckets=start.request_ladder.buckets,
        token_buckets=start.token_ladder.buckets,
        late_buckets=(),
        q_width=1,
        pools=start.config.graphs.pools,
        cost=start.cost,
        choice_row_bytes=SCORE_BYTES * start.config.model.facts.vocab_tokens
        if records_choice(start.config.graphs)
        else 0,
    )


def test_a_start_that_records_everything_measures_and_keeps_what_it_takes(folder: Path) -> None:
    config = a_config(folder, graphs="startup")

    first, second = assemble(config), assemble(config)

    assert first.start.cost.source == "measured"
    assert second.start.cost.source == "saved"
    assert first.start.memory == second.start.memory
    held = sum(report.pool_bytes for report in first.runner.recorder.reports())
    assert 0 < held <= reserve_bytes(first.start.memory.graph_estimate_bytes, "sim")


def test_a_change_of_the_estimate_reaches_both_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = a_config(folder, graphs="on-demand")
    before = simulate_start(config).start.memory.graph_estimate_bytes
    monkeypatch.setattr(
        memory, "graph_pool_estimate", lambda **asked: 2 * graph_pool_estimate(**asked)
    )

    simulated, real = simulate_start(config).start, assemble(config).start

    assert simulated.memory.graph_estimate_bytes == 2 * before
    assert real.memory.graph_estimate_bytes == 2 * before


def test_a_simulated_start_reads_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_config(folder)

    def refuse(*given: object) -> None:
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(load, "Reader", refuse)

    simulated = simulate_start(config)

    assert simulated.start.memory.total_blocks > 1
    assert simulated.off == {"prefill": "no size is asked for"}
    with pytest.raises(AssertionError, match="a tensor was read"):
        assemble(config)


def test_a_default_cost_counts_the_experts_a_row_goes_through_and_no_other(tmp_path: Path) -> None:
    costs = []
    for experts in (6, 600):
        config = qwen3_moe_config(num_experts=experts)
        folder = write_checkpoint(tmp_path / str(experts), config, weights={})
        started = plan_rank(a_config(folder, load_format="random", graphs="startup")).start
        costs.append(started.cost)

    few, many = (cost.bytes_per_row for cost in costs)
    assert costs[0].source == "default"
    # The scores of the router alone, twice, in each of two layers.
    assert many - few == 2 * 2 * (600 - 6) * 4


def test_a_default_cost_counts_no_table_of_n_grams(tmp_path: Path) -> None:
    costs = []
    for table in ({"engram_vocab_size": 100, "engram_num_embeddings": [660]}, LARGER_TABLE):
        config = v4_1_config(**SMALL | table)
        folder = write_checkpoint(tmp_path / str(len(costs)), config, weights={})
        started = plan_rank(a_config(folder, load_format="random", graphs="startup")).start
        costs.append(started.cost)

    assert costs[0].source == "default"
    assert costs[0] == costs[1]
