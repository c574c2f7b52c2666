"""Do whole runners on several ranks run the same sizes, and does a rank without work leave its blocks alone?"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.distributed.serving import (
    STREAMS,
    WITHOUT_GRAPHS,
    DecidesAlone,
    ScratchForIdle,
    Told,
    serve,
    serve_with_a_failing_recording,
    serve_with_one_cost_saved,
    serve_with_other_sizes,
)
from tests.support.oracle import Oracle
from tests.support.ranks import Outcome, run_ranks
from tests.support.tiny import write_checkpoint
from tokamak.core.plan import Mode
from tokamak.errors import ConfigMismatch, GraphError
from tokamak.runner.exchange import COLUMNS

DEADLINE_S = 90.0

STARTUP: Mapping[str, object] = {"graphs": "startup", "graph_backend": "sim"}
GRAPHS: dict[str, Mapping[str, object]] = {
    "startup": STARTUP,
    "on-demand": {"graphs": "on-demand", "graph_backend": "sim"},
    "off": {"graphs": "off", **WITHOUT_GRAPHS},
}


REPLAYED = {"startup": {Mode.TOKEN_GRAPH, Mode.REQUEST_GRAPH}, "off": set()}
"""On demand it depends on whether replaying is faster here."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[dict[str, list[int]]]:
    """By rank, what every request gets when it is alone."""
    oracle = Oracle(model)
    return [
        {
            name: oracle.generate(list(arrival.prompt_ids), arrival.max_tokens).token_ids
            for name, arrival in stream.items()
        }
        for stream in STREAMS
    ]


def told_by(outcomes: list[Outcome]) -> list[Told]:
    for outcome in outcomes:
        assert outcome.returned, f"rank {outcome.rank}: {outcome.error!r}\n{outcome.dump}"
    return [outcome.value for outcome in outcomes]


def assert_agreed(told: list[Told], expected: list[dict[str, list[int]]]) -> None:
    """The same sizes in every step, and every request's own tokens."""
    first, second = told
    assert first.sizes == second.sizes
    assert [rank.tokens for rank in told] == expected


@pytest.mark.parametrize("graphs", GRAPHS)
def test_every_request_gets_its_tokens_beside_whatever_the_other_rank_does(
    model, expected, tmp_path, graphs
):
    outcomes = run_ranks(serve, 2, model, tmp_path, GRAPHS[graphs], deadline_s=DEADLINE_S)

    told = told_by(outcomes)
    assert_agreed(told, expected)
    assert [rank.touched for rank in told] == [[], []]
    pairs = set(zip(told[0].kinds, told[1].kinds, strict=True))
    assert {
        ("prefill", "idle"), ("decode", "idle"), ("idle", "prefill"), ("idle", "decode"),
        ("prefill", "decode"), ("decode", "prefill"), ("decode", "decode"), ("idle", "idle"),
    } <= pairs  # fmt: skip
    assert outcomes[0].ledger == outcomes[1].ledger
    exchange = f"dp allgather {[len(COLUMNS)] * 2}"
    beside_votes = [line for line in outcomes[0].ledger if line != "dp allreduce [1]"]
    assert beside_votes == [exchange] * told[0].exchanges
    replayed = {size[0] for size in told[0].sizes if size[1] == "bucket"}
    assert replayed == REPLAYED.get(graphs, replayed)


def test_an_idle_rank_that_publishes_into_a_copy_writes_into_blocks_of_requests(model, tmp_path):
    """SH-16."""
    outcomes = run_ranks(serve, 2, model, tmp_path, STARTUP, ScratchForIdle, deadline_s=DEADLINE_S)

    told = told_by(outcomes)
    assert told[0].sizes == told[1].sizes
    assert all(rank.touched for rank in told)


def test_a_bucket_that_one_rank_cannot_record_is_left_out_by_all_if_that_is_allowed(
    model, expected, tmp_path
):
    options = {**STARTUP, "graphs_allow_missing_bucket": True}

    outcomes = run_ranks(
        serve_with_a_failing_recording, 2, model, tmp_path, options, deadline_s=DEADLINE_S
    )

    told = told_by(outcomes)
    assert_agreed(told, expected)
    assert [rank.recorded["prefill"] for rank in told] == [(8,), (8,)]
    assert [rank.cost for rank in told] == ["default", "default"]
    assert "eager:not-recorded" in {size[1] for size in told[0].sizes}


def test_a_bucket_that_one_rank_cannot_record_ends_the_start_of_all(model, tmp_path):
    outcomes = run_ranks(
        serve_with_a_failing_recording, 2, model, tmp_path, STARTUP, deadline_s=DEADLINE_S
    )

    assert [type(outcome.error) for outcome in outcomes] == [GraphError, GraphError]
    assert "another rank could not record bucket 16" in str(outcomes[0].error)
    assert "bucket 16 fails on purpose" in str(outcomes[1].error)


def test_a_rank_that_knows_what_recordings_take_measures_beside_one_that_does_not(
    model, expected, tmp_path
):
    outcomes = run_ranks(
        serve_with_one_cost_saved, 2, model, tmp_path, STARTUP, deadline_s=DEADLINE_S
    )

    told = told_by(outcomes)
    assert_agreed(told, expected)
    assert [rank.cost for rank in told] == ["measured", "measured"]


def test_a_rank_that_decides_alone_whether_to_measure_parts_from_its_peer(model, tmp_path):
    outcomes = run_ranks(
        serve_with_one_cost_saved, 2, model, tmp_path, STARTUP, DecidesAlone, deadline_s=DEADLINE_S
    )

    assert outcomes[0].ledger != outcomes[1].ledger
    assert not any(outcome.returned for outcome in outcomes)


def test_ranks_of_other_sizes_are_told_before_anything_is_read_or_recorded(model, tmp_path):
    outcomes = run_ranks(serve_with_other_sizes, 2, model, tmp_path, deadline_s=DEADLINE_S)

    for outcome in outcomes:
        assert isinstance(outcome.error, ConfigMismatch), outcome
        assert "token_graph_sizes is [8, 16] on rank 0, [8] on rank 1" in str(outcome.error)
        assert len(outcome.ledger) == 1
